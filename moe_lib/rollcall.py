"""Who is missing when a collective fails: ranks on this machine are looked up by process, the others sign in the group's store."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

GRACE = 3.0  # seconds in which a rank that met the same failure signs; it may have been computing when the others met it
LOOK = 0.5  # seconds in which processes that end together all end


class RankLost(RuntimeError):
    """A collective failed because a rank is gone, has raised, or is slower than the group's time limit.

    `missing` are the ranks of the group that are gone, or, where none can be seen to be, that did not answer; None where
    nobody could be asked. The group cannot be used again: start the ranks anew.
    """

    def __init__(self, message: str, missing: list[int] | None) -> None:
        super().__init__(message)
        self.missing = missing


def sign_in(group: dist.ProcessGroup) -> None:
    """Leave machine and process id in the group's store, so that others can see whether this rank still runs."""
    group.get_group_store().set(f"process/{group.rank()}", f"{os.getpid()} {socket.gethostname()}")


@contextmanager
def naming_the_lost(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Run a collective; when it fails, ask who is still there and raise RankLost, at most GRACE seconds later."""
    try:
        yield
    except RuntimeError as error:
        missing, how = roll_call(group)
        raise RankLost(f"rank {group.rank()}: {what} failed; {how} The cause: {error}", missing) from error


def roll_call(group: dist.ProcessGroup) -> tuple[list[int] | None, str]:
    """The missing ranks, and what is known of them in words."""
    try:
        store = group.get_group_store()
        store.set(f"here/{group.rank()}", "")
        absent = [rank for rank in range(group.size()) if rank != group.rank()]
        start = time.monotonic()
        while absent and time.monotonic() < start + GRACE:
            absent = [rank for rank in absent if not store.check([f"here/{rank}"])]
            gone = [rank for rank in absent if _process_ended(store, rank)]
            if gone and time.monotonic() > start + LOOK:
                return gone, f"{_ranks(gone)} gone: no process is left."
            time.sleep(0.05)
    except RuntimeError:
        return (
            None,
            "the store that the ranks share is gone, and with it the process that kept it (rank 0, unless a launcher keeps it).",
        )
    if not absent:
        return [], f"all {group.size()} ranks are there, so a connection broke or one was slower than the time limit."
    return absent, f"{_ranks(absent)} not answering: gone, stopped by an error of its own, or slower than the time limit."


def _process_ended(store: dist.Store, rank: int) -> bool:
    """Known for a rank that signed in on this machine; False for any other."""
    if not store.check([f"process/{rank}"]):
        return False
    pid, host = store.get(f"process/{rank}").decode().split(" ", 1)
    if host != socket.gethostname():
        return False
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"  # ended, not yet read by its parent
        except OSError:
            return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
