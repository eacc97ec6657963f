"""Who is missing when a collective fails: the ranks that are still there sign in the group's store, and the rest are named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

GRACE = 3.0  # seconds in which a rank that met the same failure signs; it may have been computing when the others met it


class RankLost(RuntimeError):
    """A collective failed because a rank is gone, has raised, or is slower than the group's time limit.

    `missing` are the ranks of the group that did not sign within the grace period; None where nobody could be asked. The
    group cannot be used again: start the ranks anew.
    """

    def __init__(self, message: str, missing: list[int] | None) -> None:
        super().__init__(message)
        self.missing = missing


@contextmanager
def naming_the_lost(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Run a collective; when it fails, ask who is still there and raise RankLost, at most GRACE seconds later."""
    try:
        yield
    except RuntimeError as error:
        missing = roll_call(group)
        raise RankLost(f"rank {group.rank()}: {what} failed; {_who(missing, group.size())} The cause: {error}", missing) from error


def roll_call(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks that do not sign within GRACE seconds. None when the store, which one of the processes keeps, is gone too."""
    try:
        store = group.get_group_store()
        store.set(f"here/{group.rank()}", "")
        absent = [rank for rank in range(group.size()) if rank != group.rank()]
        end = time.monotonic() + GRACE
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not store.check([f"here/{rank}"])]
            time.sleep(0.05)
        return absent
    except RuntimeError:
        return None


def _who(missing: list[int] | None, size: int) -> str:
    if missing is None:
        return "the store in which ranks sign is gone, and with it the process that kept it (rank 0, unless a launcher keeps it)."
    if not missing:
        return f"all {size} ranks are there, so the connection failed or one was slower than the time limit."
    names = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
    return f"{names} not answer: gone, stopped by an error of its own, or slower than the time limit."
