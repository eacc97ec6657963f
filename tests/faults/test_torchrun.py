"""python -m moe_lib.ranks as torchrun starts it: what it prints, and how it ends when it cannot go on."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_lib import DEEPSEEK_V3, KIMI_K2
from moe_lib.torchrun import arguments, config_of, main

SMALL = ["--set", "hidden_size=64", "moe_intermediate_size=32", "n_routed_experts=16", "--tokens", "24"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(rank: int, size: int, port: int, *options: str) -> subprocess.Popen:
    """One rank by hand, with the variables that torchrun would set."""
    where = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "moe_lib.ranks", *SMALL, *options]
    return subprocess.Popen(command, env=ENVIRONMENT | where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_four_ranks_under_torchrun():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "moe_lib.ranks",
        *SMALL,
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ranks [0, 1, 2, 3] have no GPU of their own: all ranks use the CPU and gloo" in done.stdout
    assert "16 experts, 4 on each of 4 ranks; cpu, fp32" in done.stdout
    assert "x [24, 64] on each rank -> y [24, 64]" in done.stdout
    assert re.search(r"equal to one rank: yes, worst difference \d\.\de[-+]\d\d of the largest output", done.stdout)
    moved = float(re.search(r"left their rank: ([\d.]+) MB", done.stdout)[1])
    everything = 2 * 4 * 24 * 8 * 64 * 4 / 1e6  # out and back: ranks, tokens, copies, features, bytes
    assert 0.5 * everything < moved < everything  # a quarter of the experts is at home
    assert re.search(r"forward: [\d.]+ ms", done.stdout)


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        ranks = [start(rank, 2, port, "--time-limit", "3") for rank in range(2)]
        said = [process.communicate(timeout=60)[0] for process in ranks]
    assert all(process.returncode != 0 for process in ranks)
    assert f"the port of 127.0.0.1:{port} is taken; give torchrun another with --master-port" in said[0]
    assert f"rank 1 cannot meet the others at 127.0.0.1:{port}" in said[1]
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(("victim", "words"), [(1, "rank 1 is gone: no process is left"), (0, "the store that the ranks share")])
def test_a_rank_that_is_killed_ends_the_other_with_its_name(victim, words):
    port = free_port()
    ranks = [start(rank, 2, port, "--repeats", "1000000", "--time-limit", "20") for rank in range(2)]
    try:
        for line in ranks[0].stdout:  # said once all ranks have met
            if "all ranks use the CPU" in line:
                break
        time.sleep(1.5)
        ranks[victim].kill()
        said = ranks[1 - victim].communicate(timeout=40)[0]
        assert ranks[1 - victim].returncode == 1 and words in said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


def test_configs_from_the_command_line(tmp_path):
    assert config_of("kimi_k2", []) == KIMI_K2 and config_of("deepseek_v3", []) == DEEPSEEK_V3
    changed = config_of("kimi_k2", ["hidden_size=64", "norm_topk_prob=false", "routed_scaling_factor=1.5"])
    assert changed == KIMI_K2.replace(hidden_size=64, norm_topk_prob=False, routed_scaling_factor=1.5)
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 8, "moe_intermediate_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}')
    assert config_of(str(path), []).n_routed_experts == 4
    for bad in ("hiden_size=64", "hidden_size", "norm_topk_prob=maybe", "params_per_expert=3"):
        with pytest.raises(ValueError, match=f"--set {bad}"):
            config_of("kimi_k2", [bad])


def test_without_torchrun_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node"):
        main([])
    assert arguments([]).tokens == 64
