"""Ranks: the processes a notebook speaks to. They start, answer in order, fail in words, and never outlive their notebook."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import live  # noqa: F401
import rank_work as work
from moe_lib.ranks import RankError, RankGone, Ranks, _cell


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def alive(pid: int) -> bool:
    """A process that runs; one that has ended and waits to be read by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_cell_runs_on_all_ranks_and_prints_in_their_order(four, capsys):
    four.cell("import time\ntime.sleep(0.1 * (ranks - rank))\nx = rank * 10\nprint('first')\nx + 1")
    said = capsys.readouterr().out.splitlines()
    assert said == [f"rank {r} │ {line}" for r in range(4) for line in ("first", str(10 * r + 1))]
    four.cell("x", only=[3, 1])  # variables last; those asked answer as asked
    assert capsys.readouterr().out.splitlines() == ["rank 3 │ 30", "rank 1 │ 10"]
    assert four.pull("x") == [0, 10, 20, 30]


def test_values_go_to_all_ranks_and_come_back(four):
    eight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    four.push(a=eight, b={"c": [1, 2]})
    assert all(torch.equal(a.view(torch.uint8), eight.view(torch.uint8)) for a in four.pull("a"))
    assert four.pull("b") == [{"c": [1, 2]}] * 4
    with pytest.raises(RankError, match="no 'missing' on this rank"):
        four.pull("missing")


def test_the_group_works_in_cells(four):
    four.cell("t = torch.tensor([rank]); dist.all_reduce(t); total = t.item()")
    assert four.pull("total") == [6] * 4


def test_an_error_names_its_rank_and_the_others_stay(four):
    with pytest.raises(RankError, match="rank 2: ZeroDivisionError") as caught:
        four.cell("1 / (rank - 2)")
    assert caught.value.rank == 2 and caught.value.kind == "ZeroDivisionError" and "<ranks>" in str(caught.value)
    assert four.run(work.ranks_of) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    with pytest.raises(RankError, match="SyntaxError"):
        four.cell("1 +")


def test_work_on_the_first_ranks_only(four):
    assert four.run(work.ranks_of, ranks=3) == [(0, 3), (1, 3), (2, 3)]


def test_what_cannot_be_asked_is_refused(four):
    with pytest.raises(ValueError, match=r"ranks \[4\] were asked; there are 0..3"):
        four.cell("1", only=[4])

    def local(group):
        return group

    local.__module__ = "__main__"
    with pytest.raises(ValueError, match="local is defined in this notebook"):
        four.run(local)
    for bad in ({"size": 0}, {"size": 2, "device": "tpu"}, {"size": 2, "device": "cuda"}):
        if bad.get("device") == "cuda" and torch.cuda.device_count() >= 2:
            continue
        with pytest.raises(ValueError, match="expected 1 or more ranks"):
            Ranks(**bad)


def test_a_rank_that_died_is_named_and_the_rest_still_answer():
    with Ranks(3) as ranks:
        ranks.kill(1)
        answers = ranks._ask([0, 1, 2], _cell, "rank")
        assert answers[0] == "0\n" and answers[2] == "2\n"
        assert isinstance(answers[1], RankGone) and "exit code -9" in str(answers[1])


def test_closed_ranks_leave_no_process_and_say_that_they_are_closed():
    ranks = Ranks(2)
    pids = [process.pid for process in ranks.processes]
    ranks.close()
    ranks.close()
    assert gone_within(1, pids) and repr(ranks) == "closed ranks"
    with pytest.raises(ValueError, match="start new ones"):
        ranks.cell("1")


def test_dropped_ranks_leave_no_process():
    """Running the cell that starts them a second time replaces the first ones."""
    ranks = Ranks(2)
    pids = [process.pid for process in ranks.processes]
    ranks = Ranks(2)
    assert gone_within(1, pids)
    assert ranks.run(work.ranks_of) == [(0, 2), (1, 2)]
    ranks.close()


def test_an_interrupt_stops_the_cell_and_the_next_answer_is_the_next_ones(four):
    timer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({os.getpid()}, 2)"])
    with pytest.raises(KeyboardInterrupt):
        four.cell("import time\ntime.sleep(2)\n'stale'")
    timer.wait()
    assert four.run(work.ranks_of) == [(r, 4) for r in range(4)]


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_end_with_a_process_that_is_killed(tmp_path, busy):
    """A test runner kills a kernel without a word, and it may do so while a cell runs on the ranks."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from moe_lib.ranks import Ranks
        if __name__ == "__main__":
            ranks = Ranks(2)
            print(*(process.pid for process in ranks.processes), flush=True)
            ranks.cell("while True: pass") if {busy} else time.sleep(600)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(word) for word in process.stdout.readline().split()]
    time.sleep(0.3)
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert len(pids) == 2 and all(map(alive, [*pids, server]))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert gone_within(5, pids)
    assert gone_within(20, [server])  # it unloads torch first
