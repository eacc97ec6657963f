"""The compiled experts in bfloat16: equal to float64 sums, taken for few rows only, and never where a gradient is wanted."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2
from moe_lib.experts import GroupedExperts, grouped, native
from moe_lib.experts.grouped import FEW

pytestmark = pytest.mark.skipif(native.kernels()[0] is None, reason="no C compiler: nothing compiled to test")
SMALL = KIMI_K2.replace(hidden_size=96, moe_intermediate_size=64, n_routed_experts=6, num_experts_per_tok=2)
needs_wide = pytest.mark.skipif(not native.wide(96, 64), reason="no AVX-512 BF16: GroupedExperts stays with torch")


@pytest.fixture(autouse=True, scope="module")
def no_size_is_small():
    """Small experts take a grouped product; these tests are of the others, without their size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "SMALL", 0)
        yield


@pytest.mark.parametrize("wide", [True, False])
@given(m=st.integers(1, 40), n=st.integers(1, 100), g=st.integers(1, 12))
def test_the_product_equals_float64(wide, m, n, g):
    x, w = torch.randn(m, 16 * g).to(torch.bfloat16), torch.randn(n, 16 * g).to(torch.bfloat16)
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    y = native.linear(x, w, allow_wide=wide)
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-17).all()  # one rounding, and float32 sums


def exact(experts, rows, counts):
    out = []
    for e, x in enumerate(rows.double().split(counts)):
        gate, up, down = (getattr(experts, p)[e].double() for p in ("gate_proj", "up_proj", "down_proj"))
        out.append((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return torch.cat(out)


@needs_wide
@given(st.lists(st.integers(0, 30), min_size=6, max_size=6))
def test_grouped_experts_equal_float64_whichever_way_they_go(counts):
    experts = GroupedExperts(SMALL, dtype=torch.bfloat16)
    rows = torch.randn(sum(counts), 96).to(torch.bfloat16)
    want = exact(experts, rows, counts)
    with torch.no_grad():
        y = experts(rows, torch.tensor(counts))
    assert y.shape == rows.shape and (y.double() - want).norm() <= 0.01 * want.norm()


@needs_wide
@pytest.mark.parametrize(("rows", "grad", "dtype", "taken"), [
    (FEW, False, torch.bfloat16, True), (FEW + 1, False, torch.bfloat16, False),
    (1, True, torch.bfloat16, False), (1, False, torch.float32, False), (0, False, torch.bfloat16, False),
])  # fmt: skip
def test_when_it_is_taken(monkeypatch, rows, grad, dtype, taken):
    calls, real = [], native.experts
    monkeypatch.setattr(native, "experts", lambda *args: calls.append(1) or real(*args))
    experts = GroupedExperts(SMALL, dtype=dtype)
    with torch.set_grad_enabled(grad):
        y = experts(torch.randn(rows, 96, dtype=dtype), torch.tensor([0, rows, 0, 0, 0, 0]))
    assert bool(calls) == taken and y.requires_grad == grad
