"""Checkers of notebook 00: the gate's steps in order, the parameters of a block, the ranks that hold a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from moe_lib.checks.base import Wrong, checker, given
from moe_lib.config import KIMI_K2, MoEConfig

GATE = ("gate_linear", "sigmoid", "correction_bias", "group_choice", "top_k", "gather", "normalise", "scale")
# Two steps that must come in this order, and why.
BEFORE = {
    ("gate_linear", "sigmoid"): "the sigmoid turns the logits into scores, so the linear layer comes first",
    ("sigmoid", "correction_bias"): "the bias is added to scores, so the sigmoid comes first",
    ("correction_bias", "top_k"): "the bias has to be there when the experts are chosen; afterwards it could move nobody",
    ("correction_bias", "group_choice"): "groups are compared by their biased scores",
    ("group_choice", "top_k"): "experts of groups that were not kept must be out of the race before the choice",
    ("top_k", "gather"): "scores are gathered for the chosen experts, so they must be chosen first",
    ("gather", "normalise"): "only the chosen experts' scores are divided by their sum; of all scores it would be another sum",
    ("normalise", "scale"): "to normalise after scaling would undo the scale",
}


@checker
def check_gate_order(answer: Sequence[str] | None) -> str:
    """answer: the ids of the gate's eight steps, in the order in which data passes them."""
    steps = list(given(answer))
    if unknown := [step for step in steps if step not in GATE]:
        raise Wrong(f"{unknown[0]!r} is not a step of the gate; its steps are {', '.join(sorted(GATE))}")
    if twice := [step for step in GATE if steps.count(step) > 1]:
        raise Wrong(f"{twice[0]!r} stands there twice")
    if missing := [step for step in sorted(GATE) if step not in steps]:
        raise Wrong(f"{', '.join(missing)} missing; the gate has {len(GATE)} steps")
    for (first, then), why in BEFORE.items():
        if steps.index(first) > steps.index(then):
            raise Wrong(f"{then} stands before {first}: {why}")
    return "all eight steps, each after what it needs"


@checker
def check_count(answer: Callable) -> str:
    """answer(config) -> (all weights of one block, those that one token uses)."""
    cases = [_random_config() for _ in range(8)]
    answers = [given(answer(config)) for config in cases]
    for config, got in zip(cases, answers):
        if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(n, int) for n in got)):
            raise Wrong(f"for {_sizes(config)} it returned {got!r}; expected two whole numbers, (total, active)")
    totals, actives = zip(*answers)
    _judge("total", cases, totals, lambda c: c.block_params, TOTAL_FAULTS)
    _judge("active", cases, actives, lambda c: c.active_block_params, ACTIVE_FAULTS)
    return f"total and active of {len(cases)} random blocks, to the unit"


@checker
def check_ranks_needed(answer: Callable) -> str:
    """answer(config, precision, gigabytes) -> the smallest number of ranks, dividing the experts, whose share of the model's routed
    experts fits in so many GB (10^9 bytes)."""
    cases = [_random_fit() for _ in range(60)]
    answers = [given(answer(*case)) for case in cases]
    _judge("the number of ranks", cases, answers, lambda case: fewest_ranks(*case), RANK_FAULTS)
    return f"right for {len(cases)} random models, precisions and memories"


def fewest_ranks(config: MoEConfig, precision: str, gigabytes: int | float) -> int:
    total = config.n_moe_layers * config.n_routed_experts * config.expert_bytes(precision)
    return next(n for n in config.ep_sizes if total <= n * gigabytes * 1e9)


def _judge(what: str, cases: list, answers: Sequence, right: Callable, faults: dict[str, Callable]) -> None:
    """Raise Wrong with the fault that explains every answer, or with the first case that is wrong."""
    expected = [right(case) for case in cases]
    if list(answers) == expected:
        return
    for fault, wrong in faults.items():
        if list(answers) == [wrong(case) for case in cases]:
            raise Wrong(f"{what}: {fault}")
    case, got, want = next(triple for triple in zip(cases, answers, expected) if triple[1] != triple[2])
    config, *rest = case if isinstance(case, tuple) else (case,)
    raise Wrong(f"{what} is {got!r}, expected {want!r}, for {_sizes(config)}{''.join(f', {r}' for r in rest)}")


def _each(config: MoEConfig) -> int:
    return config.params_per_expert


TOTAL_FAULTS = {
    "an expert has three matrices, not two: gate_proj, up_proj and down_proj": lambda c: (
        c.block_params - (c.n_routed_experts + c.n_shared_experts) * _each(c) // 3
    ),
    "the shared expert is missing": lambda c: c.block_params - c.shared_params,
    "one shared expert is counted; there are n_shared_experts": lambda c: c.block_params - c.shared_params + _each(c),
    "the gate is missing, its weight and its bias": lambda c: c.block_params - c.router_params,
    "the gate's correction bias is missing, one number for each expert": lambda c: c.block_params - c.n_routed_experts,
    "only the chosen experts are counted; all of them are weights of the block": lambda c: c.active_block_params,
}
ACTIVE_FAULTS = {
    "all experts are counted; a token runs through num_experts_per_tok of them": lambda c: c.block_params,
    "the shared expert is missing; every token runs through it": lambda c: c.active_block_params - c.shared_params,
    "the gate is missing; every token is scored": lambda c: c.active_block_params - c.router_params,
    "the gate is counted for the chosen experts only; it scores all of them to choose": lambda c: (
        c.active_block_params - (c.n_routed_experts - c.num_experts_per_tok) * (c.hidden_size + 1)
    ),
    "the gate's correction bias is missing": lambda c: c.active_block_params - c.n_routed_experts,
    "an expert has three matrices, not two": lambda c: (
        c.active_block_params - (c.num_experts_per_tok + c.n_shared_experts) * _each(c) // 3
    ),
}
RANK_FAULTS = {
    "it does not always divide the experts; some rank would hold fewer than the others": lambda case: (
        -(-_routed_bytes(case) // int(case[2] * 1e9))
    ),
    "a GB is 10^9 bytes here, not 2^30": lambda case: fewest_ranks(case[0], case[1], case[2] * 2**30 / 1e9),
    "only one layer's experts are counted; the model has n_moe_layers of them": lambda case: fewest_ranks(
        case[0].replace(first_k_dense_replace=case[0].num_hidden_layers - 1), *case[1:]
    ),
    "every layer is counted as a mixture of experts; the first first_k_dense_replace are dense": lambda case: fewest_ranks(
        case[0].replace(first_k_dense_replace=0), *case[1:]
    ),
    "bf16 is counted whatever the precision": lambda case: fewest_ranks(case[0], "bf16", case[2]),
    "that is the number of experts; fewer ranks are enough": lambda case: case[0].n_routed_experts,
}


def _routed_bytes(case: tuple) -> int:
    config, precision, _ = case
    return config.n_moe_layers * config.n_routed_experts * config.expert_bytes(precision)


def _random_config() -> MoEConfig:
    experts = random.randrange(5, 40)
    return MoEConfig(
        hidden_size=random.randrange(20, 90),
        moe_intermediate_size=random.randrange(10, 60),
        n_routed_experts=experts,
        num_experts_per_tok=random.randrange(1, experts),
        n_shared_experts=random.randrange(1, 4),
    )


def _random_fit() -> tuple[MoEConfig, str, float]:
    """A model, a precision and a memory in which a rank's share fits at some number of ranks between one and one an expert."""
    layers = random.randrange(4, 62)
    config = KIMI_K2.replace(
        n_routed_experts=random.choice((64, 96, 160, 256, 384)),
        moe_intermediate_size=random.choice((1024, 1536, 2048)),
        num_hidden_layers=layers,
        first_k_dense_replace=random.randrange(1, 4),
    )
    precision = random.choice(("bf16", "fp8", "int4"))
    # room for every layer in bf16 on one rank an expert, so that each wrong way of counting also has an answer
    least = layers * config.expert_bytes("bf16") / 1e9
    return config, precision, least * random.uniform(1.05, config.n_routed_experts / 2)


def _sizes(config: MoEConfig) -> str:
    return (
        f"{config.n_routed_experts} experts, {config.num_experts_per_tok} chosen, {config.n_shared_experts} shared, "
        f"hidden {config.hidden_size}, inter {config.moe_intermediate_size}"
    )
