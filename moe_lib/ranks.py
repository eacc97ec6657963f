"""Live ranks: processes that hold a torch.distributed group, started and spoken to from a notebook; and the same under torchrun.

In a notebook, `ranks = Ranks(4)` starts four; a cell that begins with `%%ranks` runs on each of them and prints in rank order.
On a cluster, `torchrun --nproc-per-node N -m moe_lib.ranks` runs one block over N ranks a machine (see moe_lib/torchrun.py).

Why not ipyparallel: it starts 17 processes for four ranks, and a notebook's kernel that is killed, as test runners do, leaves all
of them behind. Here a rank's parent is the kernel, and a rank ends when the kernel does, however it ends.
"""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist


class RankError(Exception):
    """Work failed on a rank: which, and `kind`, the name of the exception there."""

    def __init__(self, rank: int, kind: str, said: str, trace: str = "") -> None:
        super().__init__(f"rank {rank}: {kind}: {said}")
        self.rank, self.kind, self.said, self.trace = rank, kind, said, trace


class RankGone(RankError):
    """The process of a rank ended; `said` tells how."""


class Ranks:
    """`size` processes of this machine with a group between them, and variables that last from call to call.

    A collective that waits longer than `limit` seconds fails. device: "cpu", "cuda" (needs a GPU for each rank) or "auto".
    The ranks end with `close`, with this object, or with this process. Raises ValueError for sizes or devices that cannot be.
    """

    def __init__(self, size: int, limit: float = 20.0, device: str = "cpu") -> None:
        gpus = torch.cuda.device_count()
        if size < 1 or device not in ("cpu", "cuda", "auto") or (device == "cuda" and gpus < size):
            expected = 'expected 1 or more ranks on "cpu", "cuda" (a GPU for each) or "auto"'
            raise ValueError(f"size={size}, device={device!r}, and {gpus} GPUs here; {expected}")
        self.size, self.limit = size, limit
        self.device = "cuda" if device != "cpu" and gpus >= size else "cpu"
        self._asked = 0
        folder = tempfile.TemporaryDirectory(prefix="moe-ranks-")
        self._pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        context = _context()
        for rank in range(size):
            ours, theirs = context.Pipe()
            meeting = f"file://{folder.name}/meeting"  # a file, so that no port can be taken and no rank's end takes it along
            process = context.Process(target=_serve, args=(theirs, rank, size, meeting, limit, self.device), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._close = weakref.finalize(self, _close, self._pipes, self.processes, folder)
        try:
            self.run(_ready)
        except BaseException:
            self.close()
            raise
        if "IPython" in sys.modules:
            _offer_magic(self)

    def run(self, work: Callable, *args, ranks: int | None = None) -> list:
        """work(group, *args) on the first `ranks` ranks at once (default: all): what each returns, in rank order.

        `work` is a function of a module that the ranks can import. Raises RankError for the first cause when one fails.
        """
        return _checked(self.answers(work, *args, ranks=ranks))

    def answers(self, work: Callable, *args, ranks: int | None = None) -> list:
        """As `run`, but a rank that failed answers with its RankError or RankGone."""
        size = self.size if ranks is None else ranks
        return self._ask(range(size), _call, work, size, args)

    def cell(self, source: str, only: Iterable[int] | None = None) -> None:
        """Run source on all ranks, or only on some, and print what each says, in rank order; the last value is said too."""
        asked = list(range(self.size) if only is None else only)
        answers = self.try_cell(source, asked)
        for rank, answer in zip(asked, answers):
            for line in answer.splitlines() if isinstance(answer, str) else ():
                print(f"rank {rank} │ {line}")
        _checked(answers)

    def try_cell(self, source: str, only: Iterable[int] | None = None) -> list[str | RankError]:
        """As `cell`, but return what each rank said; one that failed answers with its RankError or RankGone."""
        return self._ask(range(self.size) if only is None else only, _cell, source)

    def push(self, **values) -> None:
        """Give every rank variables for its cells."""
        _checked(self._ask(range(self.size), _push, values))

    def pull(self, name: str) -> list:
        """A variable's value on each rank, in rank order."""
        return _checked(self._ask(range(self.size), _pull, name))

    def kill(self, rank: int) -> None:
        """End a rank as a machine failure would: at once, and without a word to the others."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        """End all ranks. A second time does nothing."""
        self._close()

    def _ask(self, ranks: Iterable[int], task: Callable, *args) -> list:
        if not self._close.alive:
            raise ValueError("these ranks are closed; start new ones with Ranks(…)")
        ranks = list(ranks)
        if any(rank not in range(self.size) for rank in ranks):
            raise ValueError(f"ranks {ranks} were asked; there are 0..{self.size - 1}")
        self._asked += 1
        message = _message(self._asked, task, args)
        for rank in ranks:
            with contextlib.suppress(OSError):  # its process is gone; the answer will say so
                self._pipes[rank].send_bytes(message)
        return [self._answer(rank) for rank in ranks]

    def _answer(self, rank: int):
        pipe, process = self._pipes[rank], self.processes[rank]
        try:
            while pipe in wait([pipe, process.sentinel]) or pipe.poll():
                asked, good, value = _unpack(pipe.recv_bytes())
                if asked == self._asked:  # an earlier one belongs to a call that was interrupted
                    return value if good else RankError(rank, *value)
        except (EOFError, OSError):
            pass
        process.join()
        return RankGone(rank, "Gone", f"its process ended with exit code {process.exitcode}")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self.size} ranks on {self.device}" if self._close.alive else "closed ranks"


def _context():
    """How ranks are made: forked from a server that has imported torch once, where the system can; else each a fresh Python."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    home = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with _environment(PYTHONPATH=home, OMP_NUM_THREADS="1"):  # the server finds this package wherever the notebook lies
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(**values: str):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _message(asked: int, task: Callable, args: tuple) -> bytes:
    work = args[0] if task is _call else None
    if getattr(work, "__module__", None) == "__main__":
        where = "in this notebook, where ranks cannot find it; put it in a module, or run its code in a %%ranks cell"
        raise ValueError(f"{work.__name__} is defined {where}")
    return _pack((asked, _pack((task, args))))


def _pack(value: object) -> bytes:
    """With torch.save: plain pickle cannot carry float8, and multiprocessing's would share memory with a process that may end."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes):
    """Tensors arrive on the CPU, whichever device they left: another rank's GPU is not this one's."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)  # from a process of our own


def _checked(answers: list) -> list:
    errors = [answer for answer in answers if isinstance(answer, RankError)]
    if errors:
        first = next((e for e in errors if e.kind != "RankLost"), errors[0])  # the others only lost it
        others = "".join(f"\n{e}" for e in errors if e is not first)
        raise RankError(first.rank, first.kind, f"{first.said}{others}\n\n{first.trace}")
    return answers


def _close(pipes: list[Connection], processes: list, folder: tempfile.TemporaryDirectory) -> None:
    for pipe in pipes:
        pipe.close()  # a rank that waits for work ends on this
    for process in processes:
        process.join(0.5)
        if process.is_alive():
            process.kill()
            process.join()
    folder.cleanup()


def _offer_magic(ranks: Ranks) -> None:
    """`%%ranks` runs a cell on all ranks, `%%ranks 0 2` on those two."""
    from IPython import get_ipython

    if (shell := get_ipython()) is not None:
        these = weakref.ref(ranks)

        def cell(line: str, source: str) -> None:
            if (now := these()) is None:
                raise ValueError("there are no ranks; start some with Ranks(…)")
            now.cell(source, [int(word) for word in line.split()] or None)

        shell.register_magic_function(cell, "cell", "ranks")


# --- in a rank's process ----------------------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int, size: int, meeting: str, limit: float, device: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"  # all ranks are on this machine
    if device == "cuda":
        torch.cuda.set_device(rank)
    time_limit = timedelta(seconds=limit)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=time_limit)
    groups = {n: dist.new_group(list(range(n)), timeout=time_limit) for n in range(1, size)} | {size: dist.group.WORLD}
    here = {
        "rank": rank,
        "ranks": size,
        "group": dist.group.WORLD,
        "device": device,
        "torch": torch,
        "dist": dist,
        "_groups": groups,
    }
    while True:
        try:
            asked, order = _unpack(pipe.recv_bytes())
        except KeyboardInterrupt:
            continue  # an interrupt of the notebook reaches its whole process group; here was nothing to stop
        except (EOFError, OSError):
            os._exit(0)  # closed; not waiting for other ranks to leave the group
        try:
            task, args = _unpack(order)
            message = _pack((asked, True, task(here, *args)))
        except BaseException as error:
            message = _pack((asked, False, (type(error).__name__, str(error), traceback.format_exc())))
        with contextlib.suppress(OSError):
            pipe.send_bytes(message)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _ready(_group) -> None:
    """Answered once a rank has joined the group."""


def _call(here: dict, work: Callable, size: int, args: tuple):
    return work(here["_groups"][size], *args)


def _cell(here: dict, source: str) -> str:
    """Run source like a cell: what it prints, and the value of a last expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "<ranks>", "exec"), here)
        if last is not None and (value := eval(compile(last, "<ranks>", "eval"), here)) is not None:
            print(repr(value))
    return out.getvalue()


def _push(here: dict, values: dict) -> None:
    here.update(values)


def _pull(here: dict, name: str):
    if name not in here:
        raise NameError(f"there is no {name!r} on this rank")
    return here[name]


if __name__ == "__main__":
    from moe_lib.torchrun import main

    main()
