"""The block against the dense oracle, and every fault under "Dispatch and combine" that other implementations really shipped."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2, MoEBlock, MoEConfig, Routing, combine, dispatch
from moe_lib.experts import GroupedExperts, LoopExperts
from oracle import dense, gradients, stacked

KINDS = ("loop", "grouped")
SMALL = KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2)
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


def block_of(kind, config=SMALL, dtype=None, like=None) -> MoEBlock:
    block = MoEBlock(config, kind, dtype=dtype)
    if like is not None:
        block.load_hf(like.to_hf())
    return block


def everyone_to(block: MoEBlock, experts: list[int]) -> MoEBlock:
    block.gate.e_score_correction_bias.zero_()[experts] = 100.0
    return block


def assert_near(got, want, tolerance, what):
    """Relative to the size of what is wanted, or to 0.1 where it cancels to nothing (a gate of k=1 has no gradient)."""
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(0.1)
    assert error <= tolerance, f"{what}: relative error {error:.2g}"


@st.composite
def cases(draw):
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kept = draw(st.integers(1, groups))
    k = draw(st.integers(1, kept * size))
    hidden, inter = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    config = MoEConfig(
        hidden, inter, groups * size, k, n_group=groups, topk_group=kept, n_shared_experts=draw(st.integers(0, 2)),
        norm_topk_prob=draw(st.booleans()), routed_scaling_factor=draw(st.sampled_from([1.0, 2.827])),
    )  # fmt: skip
    return (
        config,
        draw(st.integers(0, 40)),
        draw(st.sampled_from([0.0, 0.5, 100.0])),
        draw(st.sampled_from(list(TOLERANCE))),
        draw(st.sampled_from(list(LAYOUTS))),
        draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(cases())
def test_equals_the_dense_oracle_with_all_gradients(kind, case):
    config, tokens, skew, dtype, layout, seed = case
    torch.manual_seed(seed)
    block = block_of(kind, config, dtype)
    block.gate.e_score_correction_bias.copy_(torch.randn(config.n_routed_experts) * skew)
    source = torch.randn(tokens, config.hidden_size).to(dtype)
    x = LAYOUTS[layout](source).detach().requires_grad_()
    before = x.detach().clone()
    y, routing = block(x, return_routing=True)
    sent = torch.randn(tokens, config.hidden_size)
    y.backward(sent.to(dtype))

    weights, exact = stacked(block), x.detach().double().requires_grad_()
    dense(block, weights, exact, routing.indices).backward(sent.to(dtype).double())
    assert y.dtype == dtype and torch.equal(x.detach(), before)
    tolerance = TOLERANCE[dtype]
    assert_near(y.detach(), dense(block, weights, exact, routing.indices).detach(), tolerance, "y")
    assert_near(x.grad, exact.grad, tolerance, "x.grad")
    if dtype == torch.bfloat16:
        return  # gradients of weights sum many rounded rows; float32 and float64 hold them
    for name, mine in gradients(block).items():
        assert_near(mine, weights[name].grad, tolerance, f"{name}.grad")


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_are_a_batch(kind):
    block, x = block_of(kind), torch.empty(0, 16, requires_grad=True)
    y = block(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 16)
    assert all((g == 0).all() for g in gradients(block).values())
    assert block(torch.empty(2, 0, 16)).shape == (2, 0, 16)


@pytest.mark.parametrize("kind", [LoopExperts, GroupedExperts])
def test_experts_without_rows_leave_no_nan(kind):
    experts = kind(SMALL.replace(n_routed_experts=3))
    rows = torch.randn(6, 16, requires_grad=True)
    poison = [torch.full((64, 16), float("nan")) for _ in range(64)]  # memory that is handed out again is not clean
    del poison
    out = experts(rows, torch.tensor([3, 0, 3]))
    out.sum().backward()
    assert out.isfinite().all() and rows.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in experts.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_to_few_experts(kind):
    block = everyone_to(block_of(kind, dtype=torch.float64), [1, 4])
    x = torch.randn(9, 16, dtype=torch.float64)
    y, routing = block(x, return_routing=True)
    assert set(routing.indices.flatten().tolist()) == {1, 4}
    torch.testing.assert_close(y, dense(block, stacked(block), x, routing.indices))


@pytest.mark.parametrize("kind", KINDS)
def test_stride_0_gradient(kind):
    block, x = block_of(kind), torch.randn(7, 16, requires_grad=True)
    block(x).sum().backward()
    expected = block_of(kind, like=block)
    twin = x.detach().clone().requires_grad_()
    expected(twin).backward(torch.ones(7, 16))
    assert torch.equal(x.grad, twin.grad)
    rows = torch.randn(6, 16, requires_grad=True)
    block.experts(rows, torch.tensor([1] * 6)).sum().backward()
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[:1].expand(4, -1, -1)],
    ids=["transposed", "step 2", "expanded"],
)
def test_non_contiguous_input(kind, view):
    block, x = block_of(kind), view(torch.randn(4, 6, 16))
    assert not x.is_contiguous() and torch.equal(block(x), block(x.contiguous()))


def test_combine_sums_in_float32():
    rows = torch.tensor([256.0] + [0.5] * 7).bfloat16().reshape(8, 1)
    routing = Routing(torch.arange(8).reshape(1, 8), torch.ones(1, 8), torch.ones(1, 8))
    order = torch.arange(8)
    assert combine(rows, routing, order).item() == torch.tensor(259.5).bfloat16().item() == 260
    assert combine(rows.float(), routing, order).item() == 259.5


@pytest.mark.parametrize("kind", KINDS)
def test_many_experts_and_a_row_count_of_no_power_of_two(kind):
    block = block_of(kind, KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8), torch.float64)
    x = torch.randn(17, 16, dtype=torch.float64)
    y, routing = block(x, return_routing=True)
    torch.testing.assert_close(y, dense(block, stacked(block), x, routing.indices))


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_forty_times(kind):
    block, x = block_of(kind), torch.randn(33, 16)
    first = block(x)
    assert all(torch.equal(block(x), first) for _ in range(40))


@pytest.mark.parametrize("kind", [LoopExperts, GroupedExperts])
def test_counts_of_either_integer_type(kind):
    experts, rows, counts = kind(SMALL), torch.randn(6, 16), torch.tensor([3, 0, 1, 2, 0, 0])
    assert torch.equal(experts(rows, counts.int()), experts(rows, counts.long()))


@pytest.mark.parametrize("kind", [LoopExperts, GroupedExperts])
@pytest.mark.parametrize("counts", [[3, 0, 1, 2, 0, 1], [3, 0, 1, 1, 0, 0], [3, 3], [7, -1, 0, 0, 0, 0]])
def test_counts_that_do_not_fit_are_refused(kind, counts):
    with pytest.raises(ValueError, match="counts"):
        kind(SMALL)(torch.randn(6, 16), torch.tensor(counts))


@pytest.mark.parametrize("kind", KINDS)
def test_scale_is_applied_once(kind):
    # every expert the identity: silu(gate) is 1 at one constant feature, up carries x, down brings it back
    config = KIMI_K2.replace(hidden_size=4, moe_intermediate_size=4, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=0)
    block = block_of(kind, config, torch.float64)
    tensors = {key: t.clone() for key, t in block.to_hf().items()}
    one = 1.2784645427610738  # silu(one) = 1
    for e in range(6):
        tensors[f"experts.{e}.gate_proj.weight"] = torch.tensor([[0.0, 0, 0, one]] * 4).double()
        tensors[f"experts.{e}.up_proj.weight"] = torch.eye(4).double()
        tensors[f"experts.{e}.down_proj.weight"] = torch.eye(4).double()
    block.load_hf(tensors)
    x = torch.cat([torch.randn(5, 3), torch.ones(5, 1)], 1).double()
    torch.testing.assert_close(block(x), 2.827 * x)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_expert_once_and_unscaled(kind):
    block = block_of(kind)
    with torch.no_grad():
        for p in block.experts.parameters():
            p.zero_()
    x = torch.randn(5, 16)
    assert torch.equal(block(x), block.shared_experts(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_keep_their_places_on_load(kind):
    config = KIMI_K2.replace(hidden_size=4, moe_intermediate_size=3, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=0)
    block = block_of(kind, config)
    tensors = {key: t.clone() for key, t in block.to_hf().items()}
    for key in tensors:
        if key.startswith("experts"):
            tensors[key].fill_({"gate": 0.75, "up_p": -0.25, "down": 1 / 3}[key.split(".")[2][:4]])
    block.load_hf(tensors)
    silu_3 = 3 / (1 + torch.exp(torch.tensor(-3.0)))
    torch.testing.assert_close(block(torch.ones(2, 4)), torch.full((2, 4), -2.827 * silu_3.item()))


@pytest.mark.parametrize("kind", KINDS)
def test_dispatch_is_a_permutation_of_copies(kind):
    x = torch.randn(11, 16)
    _, routing = block_of(kind)(x, return_routing=True)
    rows, counts, order = dispatch(x, routing, 6)
    assert sorted(order.tolist()) == list(range(22)) and counts.sum() == 22
    expert_of_row = torch.repeat_interleave(torch.arange(6), counts)
    assert torch.equal(routing.indices.flatten()[order], expert_of_row)
    assert torch.equal(rows, x[order // 2])


@pytest.mark.parametrize("kind", KINDS)
def test_casts_copies_and_state_dicts(kind):
    block, x = block_of(kind), torch.randn(5, 16)
    y = block(x)
    assert torch.equal(copy.deepcopy(block)(x), y)
    twin = block_of(kind)
    twin.load_state_dict(block.state_dict())
    assert torch.equal(twin(x), y)
    with torch.inference_mode():
        assert torch.equal(block(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(block(x), y, 2e-2, "autocast")
    half = copy.deepcopy(block).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert_near(half(x.bfloat16()), y, 5e-2, "bfloat16")


def test_a_loop_blocks_keys_are_the_checkpoints():
    block = block_of("loop")
    assert block.state_dict().keys() == block.to_hf().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_grouped_product_of_gpus_equals_the_loop(dtype, autocast):
    # grouped_mm also runs on a CPU, so the path that a GPU takes is compared here too
    experts = GroupedExperts(SMALL, dtype=dtype)
    counts = torch.tensor([3, 0, 4, 1, 0, 2])
    results = []
    for path in (experts._each, experts._grouped):
        rows = torch.arange(160.0).sin().reshape(10, 16).to(dtype).requires_grad_()
        experts.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = path(rows, counts)
        out.sum().backward()
        results.append([out.detach(), rows.grad, *(p.grad for p in experts.parameters())])
    tolerance = 3e-2 if autocast or dtype == torch.bfloat16 else 1e-6
    for each, grouped in zip(*results):
        assert each.dtype == grouped.dtype
        assert_near(grouped, each, tolerance, "grouped")


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'dense'; expected one of grouped, loop"):
        MoEBlock(SMALL, "dense")


@pytest.mark.parametrize("local", [range(3, 9), range(0, 6, 2), range(2, 2)])
def test_experts_outside_the_config_are_refused(local):
    for kind in (LoopExperts, GroupedExperts):
        with pytest.raises(ValueError, match="local is"):
            kind(SMALL, local)


@pytest.mark.parametrize("kind", [LoopExperts, GroupedExperts])
def test_a_shard_keeps_global_numbers(kind):
    whole, shard = kind(SMALL), kind(SMALL, range(2, 5))
    shard.load_hf({key: whole.to_hf()[key] for key in shard.to_hf()})
    assert list(shard.to_hf())[0] == "2.gate_proj.weight" and len(shard.to_hf()) == 9
    rows = torch.randn(6, 16)
    assert torch.equal(shard(rows, torch.tensor([1, 3, 2])), whole(rows, torch.tensor([0, 0, 1, 3, 2, 0])))
    if kind is LoopExperts:
        assert [e is None for e in shard] == [True, True, False, False, False, True]
