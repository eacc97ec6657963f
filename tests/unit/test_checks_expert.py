"""The checkers of notebook 01 accept right answers, and name what is wrong with answers that only look right."""

import pytest
import torch
import torch.nn.functional as F

from moe_lib.checks.expert import check_backward, check_cost, check_fused


def stub(*_):
    raise NotImplementedError


@pytest.mark.parametrize("check", [check_cost, check_fused, check_backward])
@pytest.mark.parametrize("answer", [stub, lambda *_: None])
def test_a_stub_is_not_attempted(check, answer):
    verdict = check(answer)
    assert (verdict.passed, verdict.message) == (None, "not attempted yet")


@pytest.mark.parametrize("check", [check_cost, check_fused, check_backward])
def test_an_answer_that_raises_is_named(check):
    verdict = check(lambda *_: 1 // 0)
    assert verdict.passed is False
    assert verdict.message.startswith("raised ZeroDivisionError")


# --- what an expert costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda h, i, t: (3 * h * i, 2 * 3 * h * i * t, 2 * 3 * h * i),
        lambda h, i, t: [h * i + h * i + i * h, 2 * t * (i * h + i * h + h * i), 6 * i * h],
    ],
)
def test_right_costs_pass(answer):
    verdict = check_cost(answer)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda h, i, t: (2 * h * i, 6 * h * i * t, 6 * h * i), "counts two matrices"),
        (lambda h, i, t: (h * i, 6 * h * i * t, 6 * h * i), "counts one matrix"),
        (lambda h, i, t: (3 * h * i + 2 * i + h, 6 * h * i * t, 6 * h * i), "counts biases"),
        (lambda h, i, t: (3 * h * i * t, 6 * h * i * t, 6 * h * i), "same weights"),
        (lambda h, i, t: (3 * h * i, 3 * h * i * t, 6 * h * i), "they are two"),
        (lambda h, i, t: (3 * h * i, 4 * h * i * t, 6 * h * i), "flops leaves one of the three matrices out"),
        (lambda h, i, t: (3 * h * i, 6 * h * i, 6 * h * i), "does not grow with the tokens"),
        (lambda h, i, t: (3 * h * i, 18 * h * i * t, 6 * h * i), "training step"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t + i * t, 6 * h * i), "element-wise"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 3 * h * i), "one byte a weight"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 12 * h * i), "four bytes a weight"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 48 * h * i), "counts bits"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 4 * h * i), "weight_bytes leaves one"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 6 * h * i * t), "read once"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t, 6 * h * i + 1), "it should be"),
        (lambda h, i, t: (3 * h * i, 6 * h * i * t), "expected three numbers"),
        (lambda h, i, t: (3 * h * i, 6.0 * h * i * t, 6 * h * i), "whole number"),
    ],
)
def test_wrong_costs_are_named(answer, word):
    verdict = check_cost(answer)
    assert verdict.passed is False
    assert word in verdict.message


# --- gate_proj and up_proj in one matrix -----------------------------------------------------------------------------


def fused(mix):
    def answer(x, gate_up_proj, down_proj):
        gate, up = (x @ gate_up_proj.T).chunk(2, dim=-1)
        return mix(gate, up) @ down_proj.T

    return answer


def halves(x, gate_up_proj, down_proj):
    inter = down_proj.shape[1]
    gate = x @ gate_up_proj[:inter].T
    return (gate / (1 + torch.exp(-gate)) * (x @ gate_up_proj[inter:].T)) @ down_proj.T


def every_other(x, gate_up_proj, down_proj):
    return (F.silu(x @ gate_up_proj[::2].T) * (x @ gate_up_proj[1::2].T)) @ down_proj.T


def every_other_swapped(x, gate_up_proj, down_proj):
    return (F.silu(x @ gate_up_proj[1::2].T) * (x @ gate_up_proj[::2].T)) @ down_proj.T


def residual(x, gate_up_proj, down_proj):
    return x + halves(x, gate_up_proj, down_proj)


def no_way_back(x, gate_up_proj, down_proj):
    gate, up = (x @ gate_up_proj.T).chunk(2, dim=-1)
    return (F.silu(gate) * up)[:, : down_proj.shape[1]]


def in_place(x, gate_up_proj, down_proj):
    return halves(x.mul_(2), gate_up_proj, down_proj)


@pytest.mark.parametrize("answer", [fused(lambda g, u: F.silu(g) * u), fused(lambda g, u: u * g * g.sigmoid()), halves])
def test_right_fused_experts_pass(answer):
    verdict = check_fused(answer)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (fused(lambda g, u: F.silu(u) * g), "gate and up are swapped"),
        (every_other, "every other row;"),
        (every_other_swapped, "every other row, and swapped"),
        (fused(lambda g, u: g.sigmoid() * u), "sigmoid alone"),
        (fused(lambda g, u: F.gelu(g) * u), "through GELU"),
        (fused(lambda g, u: F.gelu(g, approximate="tanh") * u), "tanh-GELU"),
        (fused(lambda g, u: F.relu(g) * u), "ReLU"),
        (fused(lambda g, u: g * u), "SiLU is missing"),
        (fused(lambda g, u: F.silu(g) + u), "added"),
        (fused(lambda g, u: F.silu(g * u)), "applied to the product"),
        (fused(lambda g, u: F.silu(g) * F.silu(u)), "up as well"),
        (fused(lambda g, u: F.silu(g)), "up is missing"),
        (residual, "x is added"),
        (no_way_back, "should have shape [5, 12]; yours has [5, 8]"),
        (in_place, "x was changed in place"),
        (fused(lambda g, u: 1.5 * F.silu(g) * u), "it should be"),
        (lambda *_: 3, "returned a int"),
    ],
)
def test_wrong_fused_experts_are_named(answer, word):
    verdict = check_fused(answer)
    assert verdict.passed is False
    assert word in verdict.message


# --- the product's backward pass -------------------------------------------------------------------------------------


def slope(z):
    return z.sigmoid() * (1 + z * (1 - z.sigmoid()))


def right_backward(grad_h, gate, up):
    return grad_h * up * slope(gate), grad_h * F.silu(gate)


def by_central_difference(grad_h, gate, up):
    return grad_h * up * (F.silu(gate + 1e-6) - F.silu(gate - 1e-6)) / 2e-6, grad_h * F.silu(gate)


def by_exp(grad_h, gate, up):
    e = torch.exp(-gate)
    return grad_h * up * (1 / (1 + e) + gate * e / (1 + e) ** 2), grad_h * F.silu(gate)


def of_gate(wrong):
    return lambda grad_h, gate, up: (wrong(grad_h, gate, up), grad_h * F.silu(gate))


def of_up(wrong):
    return lambda grad_h, gate, up: (grad_h * up * slope(gate), wrong(grad_h, gate, up))


def test_the_right_backward_passes():
    verdict = check_backward(right_backward)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (of_gate(lambda d, g, u: d * u), "lacks SiLU's slope"),
        (of_gate(lambda d, g, u: d * u * g.sigmoid()), "z · sigmoid(z) · (1 − sigmoid(z)) is missing"),
        (of_gate(lambda d, g, u: d * u * g * g.sigmoid() * (1 - g.sigmoid())), "the term sigmoid(z) is missing"),
        (of_gate(lambda d, g, u: d * u * g.sigmoid() * (1 - g.sigmoid())), "the sigmoid's slope"),
        (of_gate(lambda d, g, u: d * u * (1 + g * (1 - g.sigmoid()))), "the factor sigmoid(z) before it"),
        (of_gate(lambda d, g, u: d * u * (g > 0)), "ReLU's slope"),
        (of_gate(lambda d, g, u: d * u * F.silu(g)), "SiLU itself"),
        (of_gate(lambda d, g, u: d * slope(g)), "grad_gate lacks the factor up"),
        (of_gate(lambda d, g, u: u * slope(g)), "grad_gate lacks the factor grad_h"),
        (of_gate(lambda d, g, u: -d * u * slope(g)), "grad_gate has its sign turned over"),
        (of_gate(lambda d, g, u: 2 * d * u * slope(g)), "it should be"),
        (of_up(lambda d, g, u: d * g), "grad_up uses gate"),
        (of_up(lambda d, g, u: d * g.sigmoid()), "grad_up uses sigmoid(gate)"),
        (of_up(lambda d, g, u: d * slope(g)), "grad_up uses SiLU's slope"),
        (of_up(lambda d, g, u: F.silu(g)), "grad_up lacks the factor grad_h"),
        (of_up(lambda d, g, u: d * F.silu(g) * u), "a factor up too many"),
        (of_up(lambda d, g, u: d), "grad_up lacks the factor a"),
        (of_up(lambda d, g, u: -d * F.silu(g)), "grad_up has its sign turned over"),
        (lambda d, g, u: right_backward(d, g, u)[::-1], "wrong order"),
        (lambda d, g, u: right_backward(d, g, u)[0], "expected two tensors"),
        (lambda d, g, u: (right_backward(d, g, u)[0].sum(0), d * F.silu(g)), "grad_gate should have shape [6, 9]"),
        (lambda d, g, u: right_backward(d.neg_(), g, u), "grad_h was changed in place"),
        (by_exp, "not finite where gate is -"),
    ],
)
def test_wrong_backwards_are_named(answer, word):
    verdict = check_backward(answer)
    assert verdict.passed is False
    assert word in verdict.message


def test_a_numerical_slope_passes_too():
    verdict = check_backward(by_central_difference)
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", range(20))
def test_the_checkers_do_not_hang_on_luck(monkeypatch, seed):
    """Whatever cases are drawn, right passes and the swap is named."""

    def fixed():
        return torch.Generator().manual_seed(seed)

    monkeypatch.setattr("moe_lib.checks.expert._fresh", fixed)
    assert check_fused(halves).passed and check_backward(right_backward).passed
    assert "swapped" in check_fused(fused(lambda g, u: F.silu(u) * g)).message
    assert "lacks SiLU's slope" in check_backward(of_gate(lambda d, g, u: d * u)).message
