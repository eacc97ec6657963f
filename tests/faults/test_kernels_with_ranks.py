"""Ranks of a notebook's kernel: started twice, after a restart, and gone with the kernel, however it is stopped."""

import os
import time
from pathlib import Path

import pytest

manager = pytest.importorskip("jupyter_client.manager")

START = "from moe_lib.ranks import Ranks\nranks = Ranks(2)\nprint(*(process.pid for process in ranks.processes))"


def run(client, source: str) -> str:
    said = []
    client.execute_interactive(source, timeout=120, output_hook=lambda message: said.append(message["content"]))
    errors = [content for content in said if "ename" in content]
    assert not errors, errors[0]["evalue"]
    return "".join(content.get("text", "") for content in said)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def all_end(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not all(map(ended, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return all(map(ended, pids))


def test_ranks_live_and_end_with_their_kernel():
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    kernel = manager.KernelManager(kernel_name="python3")
    kernel.start_kernel(env=env)
    client = kernel.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        first = [int(pid) for pid in run(client, START).split()]
        assert run(client, "%%ranks\nx = rank + 1\nx") == "rank 0 │ 1\nrank 1 │ 2\n"
        assert run(client, "%%ranks 1\nx") == "rank 1 │ 2\n"

        second = [int(pid) for pid in run(client, START).split()]  # the notebook run again in the same kernel
        assert not set(first) & set(second) and all_end(first)
        assert run(client, "%%ranks\nrank") == "rank 0 │ 0\nrank 1 │ 1\n"

        kernel.restart_kernel(now=True)  # "restart and run all"
        client.wait_for_ready(timeout=60)
        assert all_end(second)
        third = [int(pid) for pid in run(client, START).split()]
        assert run(client, "%%ranks\nrank") == "rank 0 │ 0\nrank 1 │ 1\n"
        run(client, "import threading; threading.Timer(0, lambda: ranks.try_cell('while True: pass')).start()")
        time.sleep(0.5)
        kernel.shutdown_kernel(now=True)  # killed while its ranks are busy
        assert all_end(third)
    finally:
        client.stop_channels()
        if kernel.is_alive():
            kernel.shutdown_kernel(now=True)
