"""The compiled experts: equal to float64 sums in every format, on both paths, and taken only where they serve."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2
from moe_lib.experts import Fp8Experts, GroupedExperts, Int4Experts, fp8, grouped, int4, native

pytestmark = pytest.mark.skipif(native.kernels()[0] is None, reason="no C compiler: nothing compiled to test")
SMALL = KIMI_K2.replace(hidden_size=96, moe_intermediate_size=64, n_routed_experts=6, num_experts_per_tok=2)
needs_wide = pytest.mark.skipif(not native.wide(96, 64), reason="no AVX-512 BF16: GroupedExperts stays with torch")
FEW = 16  # as in kernels.c: rows of an expert up to which int4 is multiplied as it lies

# a weight [out, in] as the format stores it, and what that stands for in float64
CLOSE = {"bf16": lambda w: (w.to(torch.bfloat16),), "int4": int4.quantise, "fp8": fp8.quantise}
OPEN = {
    "bf16": lambda w: w.double(),
    "int4": lambda *parts: int4.dequantise(*parts, torch.float64),
    "fp8": lambda *parts: fp8.dequantise(*parts, dtype=torch.float64),
}


def stacks(kind, hidden, inter, n):
    """Random gate, up and down of n experts in a format: stacked (weight, scale or None)."""
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    closed = [zip(*(CLOSE[kind](torch.randn(shape) / shape[1] ** 0.5) for _ in range(n))) for shape in shapes]
    return [(*(torch.stack(part) for part in parts), None)[:2] for parts in closed]


def exact(kind, projections, rows, ends):
    out = torch.empty(rows.shape, dtype=torch.float64)
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        gate, up, down = (OPEN[kind](*(part[e] for part in pair if part is not None)) for pair in projections)
        x = rows[start:end].double()
        out[start:end] = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return out


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", CLOSE)
@given(g=st.integers(1, 12), i=st.integers(1, 12), counts=st.lists(st.integers(0, 2 * FEW), min_size=1, max_size=5))
def test_all_experts_at_once_equal_float64(kind, wide, g, i, counts):
    projections = stacks(kind, 32 * g, 32 * i, len(counts))
    rows, ends = torch.randn(sum(counts), 32 * g).to(torch.bfloat16), torch.tensor(counts).cumsum(0).tolist()
    if not len(rows):
        return
    want = exact(kind, projections, rows, ends)
    y = native.experts(rows, ends, projections, wide)
    off = (y.double() - want).norm(dim=1) / want.norm(dim=1)  # row by row: one wrong expert cannot hide among the others
    assert off.max() < 0.03 and off.mean() < 0.01


@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("inter", [16, 48, 80])
def test_sizes_that_no_block_divides(kind, inter):
    if kind == "int4":
        inter = 2 * inter  # whole groups
    projections = stacks(kind, 4 * inter, inter, 2)
    rows = torch.randn(9, 4 * inter).to(torch.bfloat16)
    want = exact(kind, projections, rows, [8, 9])
    assert (native.experts(rows, [8, 9], projections).double() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", CLOSE)
def test_a_rows_output_does_not_depend_on_the_rows_beside_it(kind, wide):
    projections = stacks(kind, 256, 128, 1)
    rows = torch.randn(FEW, 256).to(torch.bfloat16)
    together = native.experts(rows, [FEW], projections, wide)
    assert all(torch.equal(native.experts(row[None], [1], projections, wide)[0], y) for row, y in zip(rows, together))


@pytest.mark.parametrize("wide", [True, False])
def test_every_nibble_of_every_place(wide):
    """One weight of gate at a time differs from zero, so a nibble read from the wrong place cannot hide in a sum."""
    one = torch.ones(1, 1, 16 // 4).to(torch.bfloat16)
    ups, downs = torch.ones(128, 128, dtype=torch.int8), torch.eye(128, dtype=torch.int8)
    for place in range(128):
        gates = torch.zeros(128, 128, dtype=torch.int8)
        gates[:, place] = torch.arange(128) % 16 - 8
        projections = [(int4.pack(numbers)[None], one.expand(1, 128, 4).contiguous()) for numbers in (gates, ups, downs)]
        y = native.experts(torch.eye(128).to(torch.bfloat16), [128], projections, wide)
        assert torch.equal(y[place], F.silu(gates[:, place].float()).to(torch.bfloat16)) and y.count_nonzero() == 120


@needs_wide
@pytest.mark.parametrize(("rows", "grad", "dtype", "taken"), [
    (1, False, torch.bfloat16, True), (300, False, torch.bfloat16, True), (1, True, torch.bfloat16, False),
    (1, False, torch.float32, False), (0, False, torch.bfloat16, False),
])  # fmt: skip
def test_when_it_is_taken(monkeypatch, rows, grad, dtype, taken):
    calls, real = [], native.experts
    monkeypatch.setattr(grouped, "SMALL", 0)  # small experts take a grouped product
    monkeypatch.setattr(native, "experts", lambda *args: calls.append(1) or real(*args))
    counts, x = torch.tensor([0, rows, 0, 0, 0, 0]), torch.randn(rows, 96, dtype=dtype)
    with torch.set_grad_enabled(grad):
        y = GroupedExperts(SMALL, dtype=dtype)(x, counts)
        assert bool(calls) == taken and y.requires_grad == grad
        for kind in (Int4Experts, Fp8Experts):  # their weights want no gradient; rows may
            calls.clear()
            kind(SMALL)(x.detach().requires_grad_(grad), counts)
            assert bool(calls) == taken
