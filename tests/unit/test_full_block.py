"""The full block is planned from memory, built the same however it is shared, and right in float64."""

import pytest
import torch

from moe_lib import KIMI_K2, MoEBlock
from moe_lib.experts import GroupedExperts
from moe_lib.full_block import KINDS, STD, build, empty, exact, free_bytes, needed_bytes, plan

SMALL = KIMI_K2.replace(hidden_size=256, moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=4)
GB = 10**9


@pytest.mark.parametrize(
    ("free", "precision"), [(80 * GB, "bf16"), (45 * GB, "bf16"), (30 * GB, "fp8"), (20 * GB, "int4"), (14 * GB, "int4")]
)
def test_the_best_that_fits(free, precision):
    p = plan(KIMI_K2, free=free)
    assert p.precision == precision and p.needed <= free
    assert precision in str(p) and f"{free / GB:.1f} GB free" in str(p)


def test_too_little_memory_is_told_with_the_number_before_anything_is_allocated():
    with pytest.raises(MemoryError, match=r"384 experts in int4: 10\.7 GB needed, 8\.0 GB free.*share the experts"):
        plan(KIMI_K2, free=8 * GB)
    with pytest.raises(MemoryError, match=r"in bf16: 35\.0 GB needed"):
        plan(KIMI_K2, precision="bf16", free=20 * GB)


def test_ranks_share_what_is_needed():
    assert plan(KIMI_K2, ranks=8, free=8 * GB).precision == "bf16"
    assert "one 8th of them on each of 8 ranks" in str(plan(KIMI_K2, ranks=8, free=8 * GB))
    with pytest.raises(ValueError, match="384 experts cannot be shared equally among 7"):
        plan(KIMI_K2, ranks=7)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision is 'int8'; expected one of bf16, fp8, int4"):
        plan(KIMI_K2, precision="int8")


def test_int4_at_full_size_stays_under_eleven_gigabytes():
    assert needed_bytes(KIMI_K2, "int4") < 11e9


def test_free_memory_is_that_of_this_machine():
    assert 10**8 < free_bytes() < 10**13


@pytest.mark.parametrize("precision", KINDS)
def test_builds_what_was_planned(precision):
    seen = []

    def progress(experts):
        for expert in experts:
            seen.append(1)
            yield expert

    p = plan(SMALL, precision=precision)
    block = build(p, seed=3, progress=progress)
    assert len(seen) == 16 and isinstance(block.experts, KINDS[precision])
    held = sum(t.nbytes for t in block.experts.state_dict().values())
    assert held == 16 * SMALL.expert_bytes(precision)
    assert not any(t.requires_grad for t in block.parameters())
    x = torch.randn(3, 256).to(torch.bfloat16)
    again, other = build(p, seed=3), build(p, seed=4)
    assert torch.equal(block(x), again(x)) and not torch.equal(block(x), other(x))


@pytest.mark.parametrize("precision", KINDS)
def test_weights_look_like_quantised_gaussian_ones(precision):
    """The standard deviation asked for, no mean, and nearly the error-free histogram of what quantising really gives."""
    experts = empty(SMALL, precision)
    experts.random_(0, STD)
    if precision == "bf16":
        w = experts.gate_proj.detach().float()
    else:
        w = torch.stack([experts.weight(e, "gate_proj") for e in range(16)])
    assert abs(w.std() / STD - 1) < 0.02 and abs(w.mean()) < 0.01 * STD
    if precision != "bf16":
        plain = GroupedExperts(SMALL)
        plain.random_(1, STD)
        real = KINDS[precision].from_weights(SMALL, plain.to_hf())
        name = "gate_proj_weight_packed" if precision == "int4" else "gate_proj_weight"
        numbers = [getattr(e, name).view(torch.uint8).float() for e in (experts, real)]
        if precision == "int4":
            numbers = [((n % 16) - 8) for n in numbers]
        else:
            numbers = [getattr(e, name).float() for e in (experts, real)]
        assert abs(numbers[0].std() / numbers[1].std() - 1) < 0.15


@pytest.mark.parametrize("precision", KINDS)
def test_an_expert_is_the_same_wherever_it_lives(precision):
    whole, part = empty(SMALL, precision), empty(SMALL, precision, range(8, 12))
    whole.random_(5, STD)
    part.random_(5, STD)
    all_of_them = whole.to_hf()
    for key, tensor in part.to_hf().items():
        assert torch.equal(tensor.view(torch.uint8), all_of_them[key].view(torch.uint8)), key


@pytest.mark.parametrize("precision", KINDS)
def test_exact_is_the_block_in_float64(precision):
    block = build(plan(SMALL, precision=precision))
    x = torch.randn(40, 256).to(torch.bfloat16)
    judged = exact(block, x, [0, 17, 39])
    plain = MoEBlock(SMALL, dtype=torch.float64)
    plain.load_hf(block.to_hf())
    torch.testing.assert_close(judged, plain(x.double())[[0, 17, 39]], rtol=1e-6, atol=1e-8)  # opened in float32 on loading
    y, routing = block(x, return_routing=True)
    assert torch.equal(routing.indices, plain.gate(x.double()).indices)
    assert (y[[0, 17, 39]].double() - judged).norm() / judged.norm() < 0.01


def test_a_group_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the plan is for 2 ranks"):
        build(plan(SMALL, ranks=2))
