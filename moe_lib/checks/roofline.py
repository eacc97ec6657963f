"""Checkers of notebook 07: the memory floor from the experts that are hit, and where computing overtakes reading."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from numbers import Real

from moe_lib.checks.base import Wrong, checker, given


@checker
def check_floor(answer: Callable) -> str:
    """answer(tokens, experts, k, expert_bytes, read) -> seconds to read the routed experts that a batch hits, expected."""
    draw = random.Random()
    for _ in range(6):
        tokens, experts = draw.randint(2, 40), draw.choice([64, 256, 384])  # never all of them
        k, expert_bytes, read = draw.randint(2, 8), draw.uniform(1e6, 1e8), draw.uniform(1e10, 5e12)
        hit = experts * (1 - (1 - k / experts) ** tokens)
        per_expert = expert_bytes / read
        faults = {
            "these are the bytes of all experts; only the experts that are hit are read": experts * per_expert,
            "every choice reads its expert anew here; an expert that many tokens chose is read once": tokens * k * per_expert,
            "tokens * k experts, at most all, is what is hit when no two tokens choose alike; they do": min(tokens * k, experts)
            * per_expert,
            "this is one token's share: k experts. A batch hits more": k * per_expert,
            "these are the experts that are *missed*": (experts - hit) * per_expert,
            "1 / experts is the chance of one choice; a token makes k": experts * (1 - (1 - 1 / experts) ** tokens) * per_expert,
            "a token's k choices differ, so it misses an expert with 1 - k / experts, not (1 - 1 / experts) ** k": experts
            * (1 - (1 - 1 / experts) ** (k * tokens))
            * per_expert,
            "seconds are bytes over bytes per second; this is their inverse": 1 / (hit * per_expert),
            "bytes, not bits, are asked for: no factor of 8": 8 * hit * per_expert,
            "a factor of 2 too much: weights are read, not written": 2 * hit * per_expert,
        }
        case = f"tokens={tokens}, experts={experts}, k={k}, expert_bytes={expert_bytes:.3g}, read={read:.3g}"
        _judge(_call(answer, case, tokens, experts, k, expert_bytes, read), hit * per_expert, faults, case)
    return "equal to the expected floor on 6 random machines and batches"


@checker
def check_crossing(answer: Callable) -> str:
    """answer(read, rate, bits) -> the rows an expert needs for computing to take as long as reading its weights."""
    draw = random.Random()
    for _ in range(6):
        read, rate, bits = draw.uniform(1e10, 5e12), draw.uniform(1e11, 1e15), draw.choice([4.5, 8.002, 16.0])
        right = rate / read * bits / 8 / 2
        faults = {
            "each weight takes a multiplication *and* an addition for a row: divide by 2": 2 * right,
            "bits are not bytes: divide by 8": 8 * right,
            "upside down: more FLOP/s move the crossing to more rows": 1 / right,
            "the bytes of a weight are missing: read / (bits / 8) weights come in each second": rate / read / 2,
            "more bits move the crossing to more rows, since reading takes longer": rate / read / (bits / 8) / 2,
        }
        case = f"read={read:.3g}, rate={rate:.3g}, bits={bits}"
        _judge(_call(answer, case, read, rate, bits), right, faults, case)
    return "right on 6 random machines"


def _call(answer: Callable, case: str, *args) -> float:
    try:
        got = given(answer(*args))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"with {case}, it raised {type(error).__name__}: {error}") from error
    if not isinstance(got, Real):
        raise Wrong(f"it returned a {type(got).__name__}; expected one number")
    return float(got)


def _judge(got: float, right: float, faults: Mapping[str, float], case: str) -> None:
    """Raise Wrong in the words of the fault whose result `got` is, or with both numbers."""

    def near(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=1e-4)

    if near(got, right):
        return
    for words, wrong in faults.items():
        if near(got, wrong) and not near(wrong, right):
            raise Wrong(words)
    raise Wrong(f"with {case} it gives {got:.4g}; expected {right:.4g}")
