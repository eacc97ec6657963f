"""Checkers of notebook 04: loads without padding, one step of the bias, and an optimiser step made of micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moe_lib.balance import bias_update, load
from moe_lib.checks.base import Wrong, checker, given
from moe_lib.config import MoEConfig
from moe_lib.router import Router


def _fresh() -> torch.Generator:
    """New random numbers at every call, and the notebook's own seed left alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _tensor(answer: object, shape: tuple[int, ...], what: str) -> Tensor:
    if not isinstance(given(answer), Tensor):
        raise Wrong(f"{what} should be a tensor; you returned a {type(answer).__name__}")
    if answer.shape != shape:
        raise Wrong(f"{what} should have shape {list(shape)}; yours has {list(answer.shape)}")
    return answer.detach()


# --- loads -----------------------------------------------------------------------------------------------------------


@checker
def check_load(answer: Callable) -> str:
    """`answer(indices [tokens, k], n_experts, mask [batch, tokens])` -> loads [experts], padding (mask False) not counted."""
    fresh, cases = _fresh(), ((4, 9, 7, 3), (3, 5, 16, 2), (1, 6, 5, 1), (2, 4, 12, 4))
    for batch, tokens, n_experts, k in cases:
        scores = torch.rand(batch * tokens, n_experts, generator=fresh)
        scores[:, -1] = -1.0  # the last expert serves nobody
        indices = scores.topk(k).indices
        lengths = torch.randint(1, tokens, (batch, 1), generator=fresh)
        mask = torch.arange(tokens).expand(batch, -1) < lengths
        _judge_load(answer(indices.clone(), n_experts, mask.clone()), indices, n_experts, mask)
    indices = torch.tensor([[2, 0], [1, 0]])
    _judge_load(answer(indices.clone(), 4, torch.zeros(1, 2, dtype=torch.bool)), indices, 4, torch.zeros(1, 2, dtype=torch.bool))
    return f"equal to moe_lib's load on {len(cases)} random batches with padding and an idle expert, and on padding alone"


def _judge_load(got: object, indices: Int64[Tensor, "rows k"], n_experts: int, mask: Bool[Tensor, "batch tokens"]) -> None:
    right, flat = load(indices, n_experts, mask), mask.flatten()
    if isinstance(got, Tensor) and got.ndim == 1 and len(got) < n_experts:
        raise Wrong(f"{len(got)} loads for {n_experts} experts: those that serve nobody need a 0 too (bincount's minlength)")
    got = _tensor(got, (n_experts,), "the loads")
    if torch.equal(got.double(), right.double()):
        return
    faults = {
        "padding is counted as load: the mask is False there": load(indices, n_experts),
        "the mask is the wrong way round: True is a real token, False is padding": load(indices, n_experts, ~mask),
        "only each token's first expert is counted; all k of them work": load(indices[:, :1], n_experts, mask),
        "this counts in which sequences an expert is used at all; count tokens": torch.stack(
            [load(i, n_experts, m) > 0 for i, m in zip(indices.view(*mask.shape, -1), mask)]
        ).sum(0),
        "these are shares that sum to 1; return counts": right / right.sum().clamp(min=1),
        "these are multiples of the mean; return counts": right / right.double().mean().clamp(min=1e-9),
        "padding is left out, and so is the last real token of every sequence": load(indices, n_experts, _without_last(mask)),
    }
    for words, wrong in faults.items():
        if torch.allclose(got.double(), wrong.double(), atol=1e-6):
            raise Wrong(words)
    e = int((got.double() != right.double()).nonzero()[0])
    raise Wrong(f"expert {e} serves {int(right[e])} of {int(flat.sum())} real tokens; you count {got[e].item():g}")


def _without_last(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(1) < mask.sum(1, keepdim=True))


# --- the bias --------------------------------------------------------------------------------------------------------


@checker
def check_bias_update(answer: Callable) -> str:
    """`answer(bias [experts], loads [experts], gamma)` -> the new bias, in float32, its mean as before."""
    fresh, cases = _fresh(), ((8, 1e-3), (32, 1e-2), (5, 1e-3), (384, 1e-4))
    for n_experts, gamma in cases:
        bias = 2 * torch.randn(n_experts, generator=fresh)
        loads = torch.randint(0, 40, (n_experts,), generator=fresh)
        loads[0] = 60 * n_experts  # so that all others are below the mean, and an update that is not centred drifts
        _judge_bias(answer, bias, loads, gamma)
    _judge_bias(answer, torch.tensor([6.817, -1.25]), torch.tensor([10, 0]), 1e-3)
    _judge_bias(answer, torch.randn(6, generator=fresh), torch.full((6,), 7), 1e-2)
    return f"right for {len(cases)} random loads, for [10, 0], and for equal loads, which move nothing"


def _judge_bias(answer: Callable, bias: Float[Tensor, " experts"], loads: Int64[Tensor, " experts"], gamma: float) -> None:
    mine = bias.clone()
    got = answer(mine, loads.clone(), gamma)
    where = f"with loads {loads.tolist()} and gamma {gamma:g}, " if len(loads) < 9 else ""
    got = _tensor(got, tuple(bias.shape), "the new bias")
    if not torch.equal(mine, bias):
        raise Wrong("the given bias was changed in place; return a new one, the caller still needs it as it was")
    right = bias + bias_update(loads, gamma)
    _name(got, right, _wrong_biases(bias, loads, gamma), where)


def _wrong_biases(bias: Tensor, loads: Tensor, gamma: float) -> dict[str, Tensor]:
    mean, step = loads.double().mean(), bias_update(loads, gamma)
    sign = (mean - loads).sign().float()
    median = (loads.double().median() - loads).sign().float()
    proportional = ((mean - loads) / mean).float()
    return {
        "nothing moved: the step was not added": bias.clone(),
        "the sign is flipped: who has too much load gets still more": bias - step,
        "the mean drifts: take the mean of the step out of it, or all biases wander off together": bias + gamma * sign,
        "the sign is flipped, and the mean drifts": bias - gamma * sign,
        "the step is missing gamma": bias + sign - sign.mean(),
        "the step is missing gamma, and the mean drifts": bias + sign,
        "this is the step alone; add it to the bias": step,
        "the step grows with the distance from the mean; the rule takes its sign alone, every expert moves as far": (
            bias + gamma * (proportional - proportional.mean())
        ),
        "the step grows with the distance from the mean; take its sign alone": bias + gamma * (mean - loads).float(),
        "loads are compared with their median; compare with the mean": bias + gamma * (median - median.mean()),
        "the whole bias was centred; only the step is, what was there before stays": bias + step - (bias + step).mean(),
    }


def _name(got: Tensor, right: Tensor, faults: dict[str, Tensor], where: str = "") -> None:
    """Raise Wrong in the words of the fault whose result `got` is, bfloat16 first; else where it is wrong."""
    coarse = torch.equal(got, got.bfloat16().to(got.dtype)) and not torch.equal(right, right.bfloat16().float())
    if got.dtype.itemsize < 4 or coarse:
        raise Wrong("the bias went through bfloat16, which keeps 8 bits: at 6.8 it has steps of 0.03, and one of 0.001 is lost")
    if torch.allclose(got.double(), right.double(), rtol=0, atol=2e-6) and got.dtype in (torch.float32, torch.float64):
        return
    scale = 0.02 * (right - faults.get("nothing moved: the step was not added", right)).abs().max().clamp(min=1e-5).item()
    for words, wrong in faults.items():
        if not torch.equal(wrong, right) and torch.allclose(got.double(), wrong.double(), rtol=0, atol=max(2e-6, scale)):
            raise Wrong(where + words)
    e = int((got.double() - right.double()).abs().argmax())
    raise Wrong(f"{where}the new bias of expert {e} is {got[e].item():.5f}; expected {right[e].item():.5f}")


# --- an optimiser step -----------------------------------------------------------------------------------------------


@checker
def check_step(answer: Callable) -> str:
    """`answer(gate, micro_batches, gamma)` -> the new bias after one optimiser step. `gate` is a Router; each micro-batch a pair
    (x [batch, tokens, hidden], mask [batch, tokens])."""
    fresh, cases = _fresh(), ((3, 2, 12), (4, 1, 30), (1, 3, 20))
    for parts, batch, tokens in cases:
        gate, micro_batches = _telling_step(parts, batch, tokens, fresh)
        given_batches = [(x.clone(), mask.clone()) for x, mask in micro_batches]
        got = _tensor(answer(copy.deepcopy(gate), given_batches, 1e-3), (12,), "the new bias")
        _name(got, *_step_and_faults(gate, micro_batches, 1e-3), where=f"of {parts} micro-batches, " if parts > 1 else "")
    return f"right for {len(cases)} optimiser steps of up to 4 micro-batches with padding"


def _telling_step(
    parts: int, batch: int, tokens: int, fresh: torch.Generator
) -> tuple[Router, list[tuple[Float[Tensor, "_ _ hidden"], Bool[Tensor, "_ _"]]]]:
    """A gate and micro-batches, drawn again until no fault happens to move the bias as the right step does, or as another fault."""
    while True:
        with torch.random.fork_rng(devices=[]):  # a Router draws its weights from the global generator
            gate = Router(MoEConfig(16, 8, 12, 2))
        with torch.no_grad():
            gate.weight.normal_(std=0.5, generator=fresh)
            gate.e_score_correction_bias.copy_(6.8 + 0.3 * torch.randn(12, generator=fresh))
        padding = torch.randn(16, generator=fresh)  # every padded place holds the same token, so padding loads the same experts
        micro_batches = []
        for _ in range(parts):
            mask = torch.arange(tokens).expand(batch, -1) < torch.randint(tokens // 4, tokens // 2, (batch, 1), generator=fresh)
            x = torch.randn(batch, tokens, 16, generator=fresh)
            micro_batches.append((torch.where(mask.unsqueeze(-1), x, padding), mask))
        right, faults = _step_and_faults(gate, micro_batches, 1e-3)
        named = ("padding", "only") if parts > 1 else ("padding",)
        told = [right, *(wrong for words, wrong in faults.items() if words.startswith(named))]
        each = [wrong for words, wrong in faults.items() if "every micro-batch" in words and parts > 1]
        pairs = [(a, b) for i, a in enumerate(told) for b in [*told[:i], *each]]
        if all((a - b).abs().max() > 1e-4 for a, b in pairs):
            return gate, micro_batches


@torch.no_grad()
def _step_and_faults(
    gate: Router, micro_batches: Sequence[tuple[Float[Tensor, "batch tokens hidden"], Bool[Tensor, "batch tokens"]]], gamma: float
) -> tuple[Float[Tensor, " experts"], dict[str, Tensor]]:
    bias, experts = gate.e_score_correction_bias, gate.config.n_routed_experts
    loads = [load(gate(x).indices, experts, mask) for x, mask in micro_batches]
    with_padding = [load(gate(x).indices, experts) for x, _ in micro_batches]
    one_by_one = copy.deepcopy(gate)
    for x, mask in micro_batches:
        one_by_one.e_score_correction_bias += bias_update(load(one_by_one(x).indices, experts, mask), gamma)
    total = sum(loads)
    right = bias + bias_update(total, gamma)
    per_part = "the bias moves once for every micro-batch; add up their loads and move it once, at the end of the step"
    faults = {
        **_wrong_biases(bias, total, gamma),
        per_part: one_by_one.e_score_correction_bias,
        per_part + " ": bias + sum(bias_update(n, gamma) for n in loads),
        "padding is counted as load: leave out the tokens whose mask is False": bias + bias_update(sum(with_padding), gamma),
        "only the last micro-batch's loads are used; add up all of them": bias + bias_update(loads[-1], gamma),
        "only the first micro-batch's loads are used; add up all of them": bias + bias_update(loads[0], gamma),
    }
    return right, faults
