"""Ranks inside one process, a thread each, with the two collectives that expert parallelism needs: for exercises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

PATIENCE = 2.0  # seconds that a rank waits for the others in a collective


class Lonely(RuntimeError):
    """Some ranks came to a collective and others did not."""


class Comm:
    """What one rank sees of the others: `rank`, `size`, and collectives that every rank must call, in the same order."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._table = barrier, table

    def all_to_all(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Give pieces[d] to rank d; get one piece from each rank, in rank order. Raises ValueError for another number of pieces."""
        if len(pieces) != self.size:
            raise ValueError(f"all_to_all got {len(pieces)} pieces; expected one for each of {self.size} ranks")
        return [given[self.rank].clone() for given in self._share("all_to_all", list(pieces))]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return torch.stack(self._share("all_reduce", tensor)).sum(0)

    def _share(self, what: str, mine) -> list:
        self._table[self.rank] = (what, mine)
        try:
            self._barrier.wait(PATIENCE)
            shared = list(self._table)
            self._barrier.wait(PATIENCE)  # nobody writes again before all have read
        except threading.BrokenBarrierError:
            raise Lonely(f"rank {self.rank} waited in {what} for ranks that did not come") from None
        if any(other != what for other, _ in shared):
            raise Lonely(f"rank {self.rank} called {what} while another called something else")
        return [given for _, given in shared]


def on_logical_ranks(work: Callable, size: int, *per_rank: Sequence) -> list:
    """work(comm, ...) on `size` ranks at once, with the rank's own entry of each of `per_rank`; what each returns, in rank order.

    Raises what the first rank raised that did not merely wait for another.
    """
    barrier, table = threading.Barrier(size), [None] * size

    def run(rank: int):
        try:
            return work(Comm(rank, size, barrier, table), *(values[rank] for values in per_rank))
        except Lonely:
            raise
        except BaseException:
            barrier.abort()  # the others need not wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Lonely)), errors[0])
    return [future.result() for future in futures]
