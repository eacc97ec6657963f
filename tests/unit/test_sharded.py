"""ShardedExperts on live ranks: equal to one process to the last gradient, whatever goes where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import live  # noqa: F401
import rank_work as work
from moe_lib import KIMI_K2, MoEBlock
from moe_lib.experts.sharded import rank_experts
from moe_lib.ranks import RankError, Ranks

CONFIG = KIMI_K2.replace(hidden_size=32, moe_intermediate_size=16, n_routed_experts=16, num_experts_per_tok=3)
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8) as eight:
        yield eight


def one_process(block: MoEBlock, x: torch.Tensor, x_needs_grad: bool, autocast: bool = False):
    """What block_step computes, with all tokens and all experts in this process."""
    x = x.clone().requires_grad_(x_needs_grad)
    with torch.autocast("cpu", enabled=autocast):
        y = block(x)
    (y.double().square().sum() + y.double().sum()).backward()
    own = block.to_hf()
    for parameter in block.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    grads = {key: tensor for key, tensor in block.to_hf().items() if key in own and not key.endswith("bias")}
    return y.detach(), x.grad, grads


def steer(block: MoEBlock, load: str) -> None:
    """Bend the gate's choice: skewed towards low experts, only experts of the first rank of two, or none of the odd ones."""
    bias = block.gate.e_score_correction_bias
    numbers = torch.arange(len(bias))
    bias.copy_({"uniform": 0 * numbers, "skewed": -0.1 * numbers, "one rank": 10.0 * (numbers < 2) + 5.0 * (numbers < 4),
                "empty": -10.0 * (numbers % 2)}[load])  # fmt: skip


def split(x: torch.Tensor, size: int, how: str) -> list[torch.Tensor]:
    tokens = len(x)
    if how == "even":
        ends = [tokens * (r + 1) // size for r in range(size)]
    elif how == "growing":
        ends = [tokens * (r + 1) * (r + 2) // (size * (size + 1)) for r in range(size)]
    else:  # everything on the last rank, the others send nothing
        ends = [0] * (size - 1) + [tokens]
    return [x[a:b] for a, b in zip([0, *ends], ends)]


def compare(ranks, kind, size, load, how, dtype=torch.float32, x_needs_grad=True, autocast=False, config=CONFIG, tokens=37):
    block = MoEBlock(config, kind, dtype=dtype)
    steer(block, load)
    tensors = {key: tensor.clone() for key, tensor in block.to_hf().items()}
    x = torch.randn(tokens, config.hidden_size, dtype=dtype)
    answers = ranks.run(work.block_step, config, kind, tensors, split(x, size, how), x_needs_grad, autocast, ranks=size)
    y, x_grad, grads = one_process(block, x, x_needs_grad, autocast)
    exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 and not autocast else {"rtol": 2e-2, "atol": 2e-2}
    sharded_grads = {key: grad for answer in answers for key, grad in answer["grads"].items()}
    assert sharded_grads.keys() == grads.keys()
    pairs = {"y": (torch.cat([a["y"] for a in answers]), y)} | {key: (sharded_grads[key], grads[key]) for key in grads}
    if x_needs_grad:
        pairs["x.grad"] = (torch.cat([a["x.grad"] for a in answers]), x_grad)
    for name, (got, want) in pairs.items():
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got / scale, want / scale, **exact, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("load", ["uniform", "skewed", "empty", "one rank"])
def test_outputs_and_all_gradients_equal_one_process(ranks, size, load):
    for kind, how in (("loop", "growing"), ("grouped", "last only"), ("grouped", "even")):
        compare(ranks, kind, size, load, how)


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_equals_one_process_within_rounding(ranks, size):
    compare(ranks, "grouped", size, "skewed", "growing", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_autocast_equals_one_process_also_where_a_rank_gets_no_rows(ranks, kind):
    compare(ranks, kind, 4, "one rank", "growing", autocast=True)


@pytest.mark.parametrize("load", ["uniform", "one rank"])
def test_input_without_gradient_leaves_no_rank_waiting(ranks, load):
    """A rank without rows has nothing to differentiate, but must join the others' backward."""
    compare(ranks, "loop", 4, load, "last only", x_needs_grad=False)
    compare(ranks, "grouped", 4, load, "last only", x_needs_grad=False)


def test_no_tokens_anywhere(ranks):
    compare(ranks, "loop", 4, "uniform", "even", tokens=0)


def test_zero_routed_output_leaves_the_shared_expert_once(ranks):
    """Four ranks, expert weights of zero: y is shared(x), not four times it."""
    block = MoEBlock(CONFIG, "loop")
    tensors = {k: torch.zeros_like(t) if k.startswith("experts.") else t for k, t in block.to_hf().items()}
    x = torch.randn(8, CONFIG.hidden_size)
    answers = ranks.run(work.block_step, CONFIG, "loop", tensors, split(x, 4, "even"), True, False, ranks=4)
    torch.testing.assert_close(torch.cat([a["y"] for a in answers]), block.shared_experts(x).detach(), rtol=1e-6, atol=1e-6)


def oracle(counts: list[list[int]]):
    """Where labelled rows go and what comes back, by plain loops over ranks and experts in one process."""
    size, share = len(counts), len(counts[0]) // len(counts)
    rows = [[(e, 100 * r + sum(c[:e]) + i) for e in range(len(c)) for i in range(c[e])] for r, c in enumerate(counts)]
    got = [
        [label for e in range(d * share, (d + 1) * share) for source in rows for expert, label in source if expert == e]
        for d in range(size)
    ]
    return got, [[label * 1000 + expert for expert, label in source] for source in rows]


@st.composite
def loads(draw):
    size, share = draw(st.sampled_from([1, 2, 3, 4, 5, 8])), draw(st.integers(1, 4))
    one = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 9))
    return draw(st.lists(st.lists(one, min_size=size * share, max_size=size * share), min_size=size, max_size=size))


@given(loads())
def test_every_row_reaches_its_expert_and_comes_back_in_place(ranks, counts):
    size, share = len(counts), len(counts[0]) // len(counts)
    got, out = oracle(counts)
    answers = ranks.run(work.stamp, counts, ranks=size)
    for d, answer in enumerate(answers):
        assert answer["got"].tolist() == got[d]  # sorted by expert, by source rank within one
        assert answer["out"].tolist() == out[d]
        assert answer["arriving"].tolist() == [c[d * share : (d + 1) * share] for c in counts]
        assert answer["receive"] == answer["arriving"].sum(1).tolist()
    assert sum(sum(a["receive"]) for a in answers) == sum(map(sum, counts))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64])
def test_rows_travel_with_every_bit_unchanged(ranks, dtype):
    every_byte = torch.arange(256, dtype=torch.uint8)
    parts = [[every_byte.roll(s)[: 32 * (d + s)].reshape(-1, 16).view(dtype) for d in range(4)] for s in range(4)]  # NaNs included
    answers = ranks.run(work.bytes_travel, parts, ranks=4)
    for d, rows in enumerate(answers):
        assert rows.dtype == dtype
        assert torch.equal(rows.view(torch.uint8), torch.cat([parts[s][d] for s in range(4)]).view(torch.uint8))


@pytest.mark.parametrize(("send", "receive", "rows"), [([1, 1], [1, 1], 3), ([2], [2], 2), ([3, -1], [1, 1], 2), ([1, 1], [1], 2)])
def test_wrong_splits_are_an_error_and_not_the_end_of_the_process(ranks, send, receive, rows):
    for answer in ranks.answers(work.wrong_splits, send, receive, rows, ranks=2):
        assert isinstance(answer, RankError) and answer.kind == "ValueError"
        assert f"{rows} rows, send={send}" in answer.said


E, H = CONFIG.n_routed_experts, CONFIG.hidden_size


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {1: (3, H, torch.float32, [1] * 2 + [0] * (E - 2))},
            f"rank 1: its counts do not fit 3 rows and {E} experts",
        ),
        ({2: (0, H, torch.float32, [1, -1] + [0] * (E - 2))}, "rank 2: its counts do not fit 0 rows"),
        ({0: (2, H, torch.float32, [1, 1])}, f"rank 0: its counts do not fit 2 rows and {E} experts; expected one count for each"),
        ({3: (0, H + 1, torch.float32, [0] * E)}, f"rank 2: {H} x torch.float32; rank 3: {H + 1} x torch.float32"),
        ({3: (0, H, torch.bfloat16, [0] * E)}, f"rank 3: {H} x torch.bfloat16"),
    ],
)
def test_a_rank_that_is_wrong_stops_all_ranks_at_once_and_is_named(ranks, wrong, words):
    """All raise together, before a row moves, and the group still works: nobody is left waiting for a time limit."""
    for said, shape in ranks.run(work.wrong_rows, CONFIG, wrong, ranks=4):
        assert said is not None and words in said
        assert shape == (E, H)


def test_gradients_on_some_ranks_only_are_refused_before_backward_waits(ranks):
    for answer in ranks.answers(work.grad_modes, CONFIG, [1, 3], ranks=4):
        assert isinstance(answer, RankError) and "ranks [1, 3] run without gradients" in answer.said
    assert ranks.run(work.grad_modes, CONFIG, [0, 1], ranks=2) == [False, False]
    assert ranks.run(work.grad_modes, CONFIG, [], ranks=2) == [True, True]
    assert ranks.run(work.frozen, CONFIG, ranks=2) == [False, False]


@pytest.mark.parametrize("local", [[range(8), range(8)], [range(8, 16), range(8)], [range(4), range(4, 16)]])
def test_shares_that_do_not_fit_together_are_refused_on_every_rank(ranks, local):
    for answer in ranks.answers(work.shares_refused, CONFIG, local, ranks=2):
        assert isinstance(answer, RankError) and answer.kind == "ValueError"
        assert f"rank 1 holds {local[1].start}..{local[1].stop - 1}" in answer.said
    assert ranks.run(work.shares_refused, CONFIG, [range(8), range(8, 16)], ranks=2) == [16, 16]


@pytest.mark.parametrize(("ranks_asked", "near"), [(5, "4 and 6"), (7, "6 and 8"), (9, "8 and 12"), (0, "1"), (500, "384")])
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(ranks_asked, near):
    with pytest.raises(ValueError, match=rf"384 experts .* among {ranks_asked} ranks; the nearest numbers that work: {near}$"):
        rank_experts(KIMI_K2, ranks_asked, 0)


def test_shares_are_those_of_the_reference():
    """Lines 488-500: expert i is kept where i >= rank * experts_per_rank and i < (rank + 1) * experts_per_rank."""
    for size in KIMI_K2.ep_sizes:
        per_rank = KIMI_K2.n_routed_experts // size
        for rank in {0, size // 2, size - 1}:
            kept = [i for i in range(KIMI_K2.n_routed_experts) if i >= rank * per_rank and i < (rank + 1) * per_rank]
            assert list(rank_experts(KIMI_K2, size, rank)) == kept
    with pytest.raises(ValueError, match="rank is 4"):
        rank_experts(KIMI_K2, 4, 4)


@pytest.mark.parametrize("size", SIZES)
def test_shards_of_a_state_dict_add_up_to_the_whole_under_the_checkpoints_keys(ranks, size):
    whole = MoEBlock(CONFIG, "loop")
    tensors = {key: tensor.clone() for key, tensor in whole.to_hf().items()}
    for kind in ("loop", "grouped"):
        union = {}
        for rank, answer in enumerate(ranks.run(work.state, CONFIG, kind, tensors, ranks=size)):
            here = {int(key.split(".")[1]) for key in answer["hf"] if key.startswith("experts.")}
            assert here == set(rank_experts(CONFIG, size, rank))
            union |= answer["hf"]
            if kind == "loop":  # the reference's module list: global numbers, and nothing where an expert lives elsewhere
                assert answer["state"].keys() == answer["hf"].keys()
        assert union.keys() == tensors.keys()
        assert all(torch.equal(union[key], tensors[key]) for key in tensors)
        fresh = MoEBlock(CONFIG, "grouped")
        fresh.load_hf(union)
        x = torch.randn(3, CONFIG.hidden_size)
        torch.testing.assert_close(fresh(x), whole(x), rtol=1e-6, atol=1e-6)


def test_one_dimension_of_a_mesh_is_a_group():
    with Ranks(4) as four:
        for rank, answer in enumerate(four.run(work.mesh, CONFIG)):
            assert answer["shape"] == (3, CONFIG.hidden_size)
            assert answer["local"] == rank_experts(CONFIG, 2, rank % 2)
            assert 'mesh["ep"]' in answer["said"]
