"""Checkers of notebook 01: what an expert costs, an expert with its two first matrices fused, the product's backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lib.checks.base import Wrong, checker, given
from moe_lib.expert import swiglu


def _fresh() -> torch.Generator:
    """New random numbers at every call, and the notebook's own seed left alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-9)


def _tensor(answer: object, shape: torch.Size, what: str) -> Tensor:
    """The answer as a tensor of this shape. Raises Wrong naming what came instead."""
    if not isinstance(given(answer), Tensor):
        raise Wrong(f"{what} should be a tensor; you returned a {type(answer).__name__}")
    if answer.shape != shape:
        raise Wrong(f"{what} should have shape {list(shape)}; yours has {list(answer.shape)}")
    return answer


def _call(answer: Callable, **arguments: Tensor) -> object:
    """The answer on copies of the arguments. Raises Wrong if it changes one of them."""
    copies = {name: value.clone() for name, value in arguments.items()}
    result = answer(*copies.values())
    for name, value in arguments.items():
        if not torch.equal(copies[name], value):
            raise Wrong(f"{name} was changed in place; the caller still needs it as it was")
    return result


def _name(got: Tensor, right: Tensor, faults: Mapping[str, Tensor], what: str) -> None:
    """Raise Wrong unless `got` is right: with the fault whose result it is, or else with the number that is furthest off."""
    if _same(got, right):
        return
    for fault, wrong in faults.items():
        if _same(got, wrong):
            raise Wrong(fault)
    at = tuple(int(i) for i in torch.unravel_index((got - right).abs().nan_to_num(torch.inf).argmax(), right.shape))
    raise Wrong(f"{what} at {list(at)} is {got[at]:.4f}; it should be {right[at]:.4f}")


# --- what an expert costs --------------------------------------------------------------------------------------------


@checker
def check_cost(answer: Callable) -> str:
    """answer(hidden, inter, tokens) -> (parameters, FLOPs of the three matrix products, bytes of the bfloat16 weights)."""
    draw = torch.randint(50, 5000, (5, 3), generator=_fresh()).tolist()
    for hidden, inter, tokens in [*draw, (7168, 2048, 1)]:
        got = given(answer(hidden, inter, tokens))
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong(f"expected three numbers, (parameters, flops, weight_bytes); you returned {got!r}")
        for name, number in zip(("parameters", "flops", "weight_bytes"), got):
            if not isinstance(number, Integral) or isinstance(number, bool):
                raise Wrong(f"{name} is {number!r}; a count is a whole number (use // where you divide)")
        _judge_cost(hidden, inter, tokens, *got)
    return "parameters, FLOPs and bytes right at five random sizes and at Kimi K2's"


def _judge_cost(hidden: int, inter: int, tokens: int, parameters: int, flops: int, weight_bytes: int) -> None:
    matrix, where = hidden * inter, f"hidden={hidden}, inter={inter}, tokens={tokens}"
    three = "gate_proj, up_proj and down_proj"
    lists = {
        "parameters": (
            parameters,
            3 * matrix,
            {
                f"parameters counts two matrices; an expert has three: {three}": 2 * matrix,
                f"parameters counts one matrix; an expert has three: {three}": matrix,
                "parameters counts biases; an expert of Kimi K2 has none": 3 * matrix + 2 * inter + hidden,
                "parameters grows with the tokens; every token uses the same weights": 3 * matrix * tokens,
            },
        ),
        "flops": (
            flops,
            6 * matrix * tokens,
            {
                "flops counts a multiplication and an addition as one; they are two, so a weight costs 2 FLOPs a token": (
                    3 * matrix * tokens
                ),
                "flops leaves one of the three matrices out (down_proj?)": 4 * matrix * tokens,
                "flops does not grow with the tokens; each token is multiplied by every weight": 6 * matrix,
                "flops is that of a whole training step; the forward pass is a third of it": 18 * matrix * tokens,
                "flops counts the element-wise operations too; this exercise counts the three matrix products": (
                    6 * matrix * tokens + inter * tokens
                ),
            },
        ),
        "weight_bytes": (
            weight_bytes,
            6 * matrix,
            {
                "weight_bytes is one byte a weight; bfloat16 takes two": 3 * matrix,
                "weight_bytes is four bytes a weight, as float32 takes; bfloat16 takes two": 12 * matrix,
                "weight_bytes counts bits; a byte has eight": 48 * matrix,
                "weight_bytes leaves one of the three matrices out (down_proj?)": 4 * matrix,
                "weight_bytes grows with the tokens; the weights are read once for all of them": 6 * matrix * tokens,
            },
        ),
    }
    for name, (got, right, faults) in lists.items():
        if got == right:
            continue
        for fault, wrong in faults.items():
            if got == wrong and wrong != right:
                raise Wrong(fault)
        raise Wrong(f"{name} is {got:,} at {where}; it should be {right:,}")


# --- gate_proj and up_proj in one matrix -----------------------------------------------------------------------------


@checker
def check_fused(answer: Callable) -> str:
    """answer(x [tokens, hidden], gate_up_proj [2·inter, hidden], down_proj [hidden, inter]) -> y [tokens, hidden]."""
    fresh = _fresh()
    for tokens, hidden, inter in ((5, 12, 8), (1, 6, 10), (0, 8, 4), (7, 16, 16)):
        x, both, down = (
            torch.randn(*shape, dtype=torch.float64, generator=fresh)
            for shape in ((tokens, hidden), (2 * inter, hidden), (hidden, inter))
        )
        got = _tensor(_call(answer, x=x, gate_up_proj=both, down_proj=down), x.shape, f"y for x {list(x.shape)}")
        gate, up = (x @ both.T).chunk(2, dim=-1)
        every_other = (x @ both.T).unflatten(-1, (inter, 2))
        even, odd = every_other[..., 0], every_other[..., 1]
        silu = "this expert's gate is SiLU(z) = z · sigmoid(z)"
        faults = {
            "gate and up are swapped: the first inter rows of gate_up_proj are the gate's": swiglu(up, gate),
            "gate and up are read from every other row; the gate's rows all come first, then up's": swiglu(even, odd),
            "gate and up are read from every other row, and swapped; the gate's rows all come first, then up's": swiglu(odd, even),
            "the gate goes through a sigmoid alone; SiLU(z) is z · sigmoid(z)": gate.sigmoid() * up,
            f"the gate goes through GELU; {silu}": F.gelu(gate) * up,
            f"the gate goes through tanh-GELU; {silu}": F.gelu(gate, approximate="tanh") * up,
            f"the gate goes through ReLU; {silu}": F.relu(gate) * up,
            "nothing bends the gate: SiLU is missing": gate * up,
            "a and u are added; they are multiplied, feature by feature": F.silu(gate) + up,
            "SiLU is applied to the product; it is applied to the gate alone, before the product": F.silu(gate * up),
            "SiLU is applied to up as well; up goes into the product as it is": F.silu(gate) * F.silu(up),
            "up is missing: only SiLU(gate) goes on to down_proj": F.silu(gate),
        }
        candidates = {fault: h @ down.T for fault, h in faults.items()}
        candidates["x is added to the output; the block does that, not the expert"] = x + swiglu(gate, up) @ down.T
        _name(got, swiglu(gate, up) @ down.T, candidates, "y")
    return "equal to the expert on four random cases, with one token and with none"


# --- the product's backward pass -------------------------------------------------------------------------------------


@checker
def check_backward(answer: Callable) -> str:
    """answer(grad_h, gate, up), all [rows, inter] -> (grad_gate, grad_up), of h = SiLU(gate) * up, without autograd's help."""
    fresh = _fresh()
    for rows, inter, spread in ((6, 9, 2.0), (1, 5, 1.0), (4, 3, 400.0)):
        grad_h, gate, up = (torch.randn(rows, inter, dtype=torch.float64, generator=fresh) for _ in range(3))
        gate = spread * gate
        if spread > 100:
            gate[0] = torch.tensor([-1000.0, 0.0, 1000.0])
        got = given(_call(answer, grad_h=grad_h, gate=gate, up=up))
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise Wrong("expected two tensors, (grad_gate, grad_up)")
        grad_gate, grad_up = (_tensor(g, gate.shape, what) for g, what in zip(got, ("grad_gate", "grad_up")))
        for what, grad in (("grad_gate", grad_gate), ("grad_up", grad_up)):
            if not grad.isfinite().all():
                worst = gate[~grad.isfinite()].min()
                raise Wrong(f"{what} is not finite where gate is {worst:.0f}; exp overflows there, torch.sigmoid does not")
        _judge_backward(grad_gate, grad_up, grad_h, gate, up)
    return "equal to autograd on three random cases, with gates from -1000 to 1000"


def _judge_backward(grad_gate: Tensor, grad_up: Tensor, grad_h: Tensor, gate: Tensor, up: Tensor) -> None:
    leaf_gate, leaf_up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    right_gate, right_up = torch.autograd.grad(swiglu(leaf_gate, leaf_up), (leaf_gate, leaf_up), grad_h)
    if not _same(grad_gate, grad_up) and _same(grad_gate, right_up) and _same(grad_up, right_gate):
        raise Wrong("the two gradients are in the wrong order; return (grad_gate, grad_up)")
    s, a = gate.sigmoid(), F.silu(gate)
    back = grad_h * up
    slope = s * (1 + gate * (1 - s))
    gate_faults = {
        "grad_gate lacks SiLU's slope: grad_h · up is the gradient at a, and a still has to go back to gate": back,
        "grad_gate uses sigmoid(z) as SiLU's slope; sigmoid moves too, and the term z · sigmoid(z) · (1 − sigmoid(z)) is missing": (
            back * s
        ),
        "grad_gate uses only z · sigmoid(z) · (1 − sigmoid(z)) as SiLU's slope; the term sigmoid(z) is missing": (
            back * gate * s * (1 - s)
        ),
        "grad_gate uses the sigmoid's slope; the gate goes through SiLU(z) = z · sigmoid(z)": back * s * (1 - s),
        "grad_gate uses 1 + z · (1 − sigmoid(z)) as SiLU's slope; the factor sigmoid(z) before it is missing": (
            back * (1 + gate * (1 - s))
        ),
        "grad_gate uses ReLU's slope; the gate goes through SiLU": back * (gate > 0),
        "grad_gate uses SiLU itself where its slope should stand": back * a,
        "grad_gate lacks the factor up": grad_h * slope,
        "grad_gate lacks the factor grad_h, what comes back from behind": up * slope,
        "grad_gate has its sign turned over": -right_gate,
    }
    _name(grad_gate, right_gate, gate_faults, "grad_gate")
    up_faults = {
        "grad_up uses gate where a = SiLU(gate) should stand": grad_h * gate,
        "grad_up uses sigmoid(gate) where a = SiLU(gate) should stand": grad_h * s,
        "grad_up uses SiLU's slope; a itself is what up is multiplied by": grad_h * slope,
        "grad_up lacks the factor grad_h, what comes back from behind": a,
        "grad_up has a factor up too many; h is linear in up": grad_h * a * up,
        "grad_up lacks the factor a = SiLU(gate)": grad_h,
        "grad_up has its sign turned over": -right_up,
    }
    _name(grad_up, right_up, up_faults, "grad_up")
