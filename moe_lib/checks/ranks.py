"""Checkers of notebook 05: the exchange out and back, and one block from ranks that all hold every token."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from moe_lib.block import MoEBlock, combine, dispatch
from moe_lib.checks.base import Wrong, checker, given
from moe_lib.config import MoEConfig
from moe_lib.expert_parallel import fill_from_seed
from moe_lib.experts import LoopExperts
from moe_lib.logical_ranks import Comm, Lonely, on_logical_ranks


@checker
def check_exchange(answer: Callable) -> str:
    """answer(comm, rows, counts, local_experts) -> rows, with the counts of all experts and the contract's local experts."""
    cases = ((1, 3, "even"), (2, 4, "even"), (4, 2, "uneven"), (3, 2, "one rank"), (4, 3, "empty rank"))
    for ranks, share, load in cases:
        config = MoEConfig(6, 4, ranks * share, 2)
        whole = MoEBlock(config, "loop").double().experts
        counts = [_counts(ranks, share, load, rank) for rank in range(ranks)]
        rows = [torch.randn(int(c.sum()), 6, dtype=torch.float64) for c in counts]
        where = f"{ranks} ranks, {share} experts each, {load} load"
        locals_ = [_Watched(whole, range(r * share, (r + 1) * share)) for r in range(ranks)]
        with torch.no_grad():
            got = _on_ranks(where, answer, ranks, [r.clone() for r in rows], [c.clone() for c in counts], locals_)
            _judge_exchange(where, got, rows, counts, whole, locals_, share)
    return f"equal to one process on {len(cases)} cases, with uneven loads, one rank that owns all and one that gets nothing"


def _counts(ranks: int, share: int, load: str, rank: int) -> Tensor:
    counts = torch.randint(1, 6, (ranks * share,))
    if load == "uneven":
        counts = torch.randint(0, 9, (ranks * share,)) * (rank + 1)
    elif load == "one rank":
        counts[share:] = 0
    elif load == "empty rank":
        counts[share : 2 * share] = 0
    return counts


class _Watched:
    """The experts of one rank by the contract; remembers what it was given."""

    def __init__(self, whole: LoopExperts, local: range) -> None:
        self.whole, self.local, self.calls = whole, local, []

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        counts = torch.as_tensor(counts)
        self.calls.append((rows.clone(), counts.clone()))
        if counts.shape != (len(self.local),):
            raise Wrong(
                f"local_experts got counts of shape {list(counts.shape)}; it has {len(self.local)} experts, so it wants as many"
            )
        if int(counts.sum()) != len(rows):
            raise Wrong(
                f"local_experts got {len(rows)} rows and counts that sum to {int(counts.sum())}; "
                "its counts are those of the rows that arrived, which only the other ranks know: exchange the counts too"
            )
        everyone = torch.zeros(len(self.whole), dtype=torch.int64)
        everyone[self.local.start : self.local.stop] = counts
        return self.whole(rows, everyone)


def _judge_exchange(where: str, got: list, rows: list, counts: list, whole: LoopExperts, watched: list, share: int) -> None:
    ranks = len(rows)
    want = [whole(r, c) for r, c in zip(rows, counts)]
    for rank in range(ranks):
        if not isinstance(got[rank], Tensor) or got[rank].shape != rows[rank].shape:
            shape = list(got[rank].shape) if isinstance(got[rank], Tensor) else type(got[rank]).__name__
            raise Wrong(
                f"{where}: rank {rank} gives back {shape}; expected its own {len(rows[rank])} rows, {list(rows[rank].shape)}"
            )
    if all(torch.allclose(g, w) for g, w in zip(got, want)):
        return
    for rank, local in enumerate(watched):
        if len(local.calls) != 1:
            raise Wrong(
                f"{where}: rank {rank} calls its experts {len(local.calls)} times; once, with all rows that arrived, is enough"
            )
        here, their_counts = local.calls[0]
        right = torch.stack([c[rank * share : (rank + 1) * share] for c in counts])
        if not torch.equal(their_counts, right.sum(0)):
            own = torch.equal(their_counts, counts[rank][rank * share : (rank + 1) * share] * ranks)
            told = "these are its own counts times the ranks; " if own else ""
            wanted = f"counts {their_counts.tolist()}, expected {right.sum(0).tolist()}"
            raise Wrong(f"{where}: rank {rank}'s experts got {wanted}: {told}exchange the counts")
        arrived, by_expert = _arrivals(rows, counts, rank, share)
        if not torch.equal(here, by_expert):
            if torch.equal(here, arrived):
                fault = "get their rows in the order in which they arrived, by source rank; sort them by expert first"
            elif torch.equal(here.sort(0).values, by_expert.sort(0).values):
                fault = "get the right rows in a wrong order; expected by expert, then by source rank"
            else:
                fault = "get rows that are not theirs"
            raise Wrong(f"{where}: rank {rank}'s experts {fault}")
    for rank in range(ranks):
        if not torch.allclose(got[rank], want[rank]) and torch.allclose(got[rank].sort(0).values, want[rank].sort(0).values):
            raise Wrong(
                f"{where}: rank {rank} has its rows back in a wrong order; undo the sort by expert before sending rows back"
            )
    undo = "undo the sort by expert, then send back to each rank as many rows as it sent"
    raise Wrong(f"{where}: the experts worked on the right rows, but other rows came back; {undo}")


def _arrivals(rows: list, counts: list, rank: int, share: int) -> tuple[Tensor, Tensor]:
    """What rank's experts should get: as it arrived, and sorted by expert."""
    parts = [r.split(c.tolist())[rank * share : (rank + 1) * share] for r, c in zip(rows, counts)]
    return torch.cat([p for source in parts for p in source]), torch.cat([source[i] for i in range(share) for source in parts])


@checker
def check_replicated(answer: Callable) -> str:
    """answer(comm, x, gate, local_experts, shared_experts, n_experts) -> y [tokens, hidden], the same on every rank."""
    cases = ((2, 7, 2), (4, 6, 2), (3, 1, 2), (1, 5, 3))
    for ranks, tokens, share in cases:
        config = MoEConfig(6, 4, ranks * share, 2, routed_scaling_factor=2.827)
        block = MoEBlock(config, "loop").double()
        fill_from_seed(block, random.randrange(10**6))
        x = torch.randn(tokens, 6, dtype=torch.float64)
        where = f"{ranks} ranks, {tokens} tokens, {share} experts each"
        locals_ = [_Local(block.experts, range(r * share, (r + 1) * share)) for r in range(ranks)]
        same = [[value] * ranks for value in (block.gate, block.shared_experts, ranks * share)]
        with torch.no_grad():
            got = _on_ranks(where, answer, ranks, [x.clone() for _ in range(ranks)], same[0], locals_, same[1], same[2])
            _judge_replicated(where, got, x, block, share)
    return f"equal to one process on {len(cases)} random blocks over 1 to 4 ranks"


class _Local(_Watched):
    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        counts = torch.as_tensor(counts)
        if len(counts) == len(self.whole) and len(self.local) != len(self.whole):
            raise Wrong(
                f"local_experts got {len(counts)} counts; this rank has {len(self.local)} experts: cut out their rows and counts"
            )
        if counts.shape != (len(self.local),) or int(counts.sum()) != len(rows):
            raise Wrong(f"local_experts got {len(rows)} rows and counts {counts.tolist()}, which do not fit together")
        return super().__call__(rows, counts)


def _judge_replicated(where: str, got: list, x: Tensor, block: MoEBlock, share: int) -> None:
    ranks = len(got)
    routing, shared = block.gate(x), block.shared_experts(x)
    rows, counts, order = dispatch(x, routing, ranks * share)
    out = block.experts(rows, counts)
    routed = combine(out, routing, order)
    ends = [0, *counts.cumsum(0).tolist()]
    for rank, y in enumerate(got):
        if not isinstance(y, Tensor) or y.shape != x.shape:
            what = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise Wrong(f"{where}: rank {rank} gives {what}; expected {list(x.shape)}")
        mine = torch.zeros_like(out)
        mine[ends[rank * share] : ends[(rank + 1) * share]] = out[ends[rank * share] : ends[(rank + 1) * share]]
        part = combine(mine, routing, order)
        if torch.allclose(y, routed + shared):
            continue
        unweighted = combine(out, routing._replace(weights=torch.ones_like(routing.weights)), order)
        faults = {
            f"the shared expert is summed over the ranks, {ranks} times in y. Every rank holds it: add it once, after the sum": (
                routed + ranks * shared
            ),
            "the shared expert is missing": routed,
            "each rank has only its own experts' part; sum the parts over ranks": part + shared,
            "each rank has only its own experts' part, without the shared expert": part,
            f"the shared expert is divided by the {ranks} ranks; add it whole, once, after the sum": routed + shared / ranks,
            f"the parts are averaged over {ranks} ranks; sum them": routed / ranks + shared,
            "the rows are never weighted": unweighted + shared,
        }
        for fault, value in faults.items():
            if torch.allclose(y, value):
                raise Wrong(f"{where}: {fault}")
        raise Wrong(f"{where}: rank {rank} differs from one process by up to {(y - routed - shared).abs().max():.2g}")


def _on_ranks(where: str, answer: Callable, ranks: int, *per_rank) -> list:
    def work(comm: Comm, *own):
        return given(answer(comm, *own))

    try:
        return on_logical_ranks(work, ranks, *per_rank)
    except Lonely as lonely:
        raise Wrong(f"{where}: {lonely}; every rank must call the same collectives, also one with nothing to send") from None
