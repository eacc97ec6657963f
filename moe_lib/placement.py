"""Which expert lives on which rank: greedy placement, and copies of the busiest experts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """experts[s] is the expert in slot s; rank r holds the slots r * per_rank … (r + 1) * per_rank - 1."""

    experts: tuple[int, ...]
    ranks: int
    loads: tuple[float | int, ...]
    """Of each rank, when the copies of an expert share its load equally."""

    @property
    def per_rank(self) -> int:
        return len(self.experts) // self.ranks

    @property
    def slots(self) -> list[list[int]]:
        """slots[e]: where expert e lives, in rising order; the inverse of `experts`."""
        out: list[list[int]] = [[] for _ in range(max(self.experts) + 1)]
        for slot, expert in enumerate(self.experts):
            out[expert].append(slot)
        return out

    @property
    def imbalance(self) -> float:
        """The busiest rank's load over the mean: how much longer the slowest works. 1 is perfect."""
        return max(self.loads) * self.ranks / sum(self.loads)


def contiguous(loads: Sequence[float | int], ranks: int) -> Placement:
    """Experts in their own order, equal shares, as the checkpoint's reference places them."""
    _check(loads, ranks, len(loads))
    return _placement(list(range(len(loads))), loads, [1] * len(loads), ranks)


def place(loads: Sequence[float | int], ranks: int, redundant: int = 0) -> Placement:
    """Give the `redundant` extra slots to the experts whose copies are busiest, then fill ranks, heaviest copy first, always the
    least loaded rank that has room.

    Raises ValueError when the slots cannot be shared equally, or a load is negative or all are 0.
    Source of the rule: github.com/deepseek-ai/EPLB, its global policy.
    """
    n_slots = len(loads) + redundant
    _check(loads, ranks, n_slots)
    copies = [1] * len(loads)
    busiest = [(-load, e) for e, load in enumerate(loads)]  # of one copy; lower numbers first among equals
    heapq.heapify(busiest)
    for _ in range(redundant):
        e = busiest[0][1]
        copies[e] += 1
        heapq.heapreplace(busiest, (-loads[e] / copies[e], e))
    parts = sorted((-loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e]))
    held: list[list[int]] = [[] for _ in range(ranks)]
    room = [(0.0, rank) for rank in range(ranks)]
    for part, e in parts:
        total, rank = heapq.heappop(room)
        held[rank].append(e)
        if len(held[rank]) < n_slots // ranks:
            heapq.heappush(room, (total - part, rank))
    return _placement([e for experts in held for e in experts], loads, copies, ranks)


def _placement(experts: list[int], loads: Sequence[float | int], copies: list[int], ranks: int) -> Placement:
    per_rank = len(experts) // ranks
    shares = [loads[e] / copies[e] for e in experts]
    return Placement(tuple(experts), ranks, tuple(sum(shares[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)))


def _check(loads: Sequence[float | int], ranks: int, slots: int) -> None:
    if ranks < 1 or slots < len(loads) or slots % ranks:
        given = f"{slots} slots for {len(loads)} experts over {ranks} ranks"
        raise ValueError(f"{given}; expected equally many slots on each rank, and at least one an expert")
    if min(loads) < 0 or max(loads) <= 0:
        raise ValueError("loads must be 0 or more, and not all 0")
