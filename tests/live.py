"""Live ranks for tests: processes with a gloo group between them, forked from a server that has imported everything once."""

import io
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch

HERE = Path(__file__).parent


def _pack(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["live", "rank_work"])
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), paths  # Python 3.11's server does not take sys.path over
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _serve(pipe, rank: int, size: int, store: str, limit: float) -> None:
    import torch.distributed as dist

    import rank_work

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    groups = {n: dist.new_group(list(range(n)), timeout=timedelta(seconds=limit)) for n in range(1, size)} | {
        size: dist.group.WORLD
    }
    while (message := pipe.recv()) is not None:
        work, ranks, arguments = message
        torch.manual_seed(rank)
        try:
            result = getattr(rank_work, work)(groups[ranks], *_unpack(arguments))
            pipe.send((True, _pack(result)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Failed(Exception):
    """A rank raised: .kind, .said and the traceback."""

    def __init__(self, rank, kind, said, trace):
        super().__init__(f"rank {rank}: {trace}")
        self.rank, self.kind, self.said = rank, kind, said


class Ranks:
    """`size` processes that wait for work: the name of a function of rank_work, called as work(group, *arguments)."""

    def __init__(self, size: int, limit: float = 30.0) -> None:
        context = _context()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, f"{self.folder.name}/store", limit), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self, work: str, *arguments, ranks: int | None = None, wait: float = 60.0) -> list:
        """What each of the first `ranks` ranks returns, a Failed where one raised, None where one died or gave no answer."""
        ranks = ranks or len(self.pipes)
        for pipe in self.pipes[:ranks]:
            pipe.send((work, ranks, _pack(arguments)))
        out = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            try:
                good, value = pipe.recv() if pipe.poll(wait) else (None, None)
            except EOFError:
                good = None
            out.append(_unpack(value) if good else None if good is None else Failed(rank, *value))
        return out

    def run(self, work: str, *arguments, ranks: int | None = None) -> list:
        """As `answers`, but raises when a rank did or did not answer."""
        out = self.answers(work, *arguments, ranks=ranks)
        for rank, answer in enumerate(out):
            if isinstance(answer, Failed):
                raise answer
            assert self.processes[rank].is_alive(), f"rank {rank} died with exit code {self.processes[rank].exitcode}"
        return out

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
