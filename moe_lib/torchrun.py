"""One block over the ranks that torchrun starts: shapes, equality with one rank, bytes moved, time.

    torchrun --nproc-per-node 4 -m moe_lib.ranks --set hidden_size=256 n_routed_experts=64 --tokens 128

On several machines, the same on each: add --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:29500.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lib.block import EXPERTS, MoEBlock, dispatch
from moe_lib.config import DEEPSEEK_V3, KIMI_K2, MoEConfig
from moe_lib.expert_parallel import SeededExperts, fill_from_seed, sharded_block
from moe_lib.rollcall import GRACE, RankLost, naming_the_lost

NAMED = {"kimi_k2": KIMI_K2, "deepseek_v3": DEEPSEEK_V3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the largest output; another split of rows may round otherwise


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "torchrun … -m moe_lib.ranks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", default="kimi_k2", help="kimi_k2, deepseek_v3 or the path of a config.json")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the config to change")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank")
    parser.add_argument("--experts", default="grouped", choices=EXPERTS, help="the kind of a rank's experts")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, help="timed forwards")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds that a collective may wait for a rank")
    return parser.parse_args(given)


def config_of(name: str, changes: list[str]) -> MoEConfig:
    """Raises ValueError for an unknown field, or a value that is none."""
    config = NAMED[name] if name in NAMED else MoEConfig.from_json(Path(name))
    kinds = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    values = {}
    for change in changes:
        field, _, value = change.partition("=")
        try:
            values[field] = {"true": True, "false": False}[value] if kinds[field] is bool else kinds[field](value)
        except (KeyError, ValueError):
            raise ValueError(f"--set {change}: expected FIELD=VALUE with a field of the config, such as hidden_size=256") from None
    return config.replace(**values)


def join(limit: float) -> torch.device:
    """Join the group that torchrun describes; NCCL and a GPU each when every rank can have one, else gloo and the CPU, and say so.

    Raises RuntimeError naming the port when rank 0 finds it taken, or another rank does not find rank 0 behind it.
    """
    if "RANK" not in os.environ:
        raise SystemExit("no rank is set; start this with torchrun --nproc-per-node N -m moe_lib.ranks …")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    lonely = f"rank {os.environ['RANK']} cannot meet the others at {where}"
    # a stranger behind the port that takes the connection and says nothing would hold init_process_group for ever
    too_late = threading.Timer(limit + GRACE, lambda: (print(f"{lonely}: no answer in {limit:g} s", flush=True), os._exit(1)))
    too_late.daemon = True
    too_late.start()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=limit))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise RuntimeError(f"the port of {where} is taken; give torchrun another with --master-port") from error
        raise RuntimeError(f"{lonely}: {error}") from error
    finally:
        too_late.cancel()
    local = int(os.environ.get("LOCAL_RANK", 0))
    has_gpu: list = [None] * dist.get_world_size()
    dist.all_gather_object(has_gpu, local < torch.cuda.device_count())
    if all(has_gpu):
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    if dist.get_rank() == 0:
        print(f"ranks {[r for r, has in enumerate(has_gpu) if not has]} have no GPU of their own: all ranks use the CPU and gloo")
    return torch.device("cpu")


@torch.no_grad()
def report(config: MoEConfig, options: argparse.Namespace, device: torch.device) -> list[str]:
    """Run the block over all ranks; what there is to say about it, on rank 0. Raises RuntimeError when it differs from one rank."""
    group, dtype = dist.group.WORLD, DTYPES[options.dtype]
    rank, ranks = group.rank(), group.size()
    block = sharded_block(config, group, options.experts, device, dtype)
    fill_from_seed(block, options.seed)
    tokens = [_tokens(config, options, r).to(device, dtype) for r in range(ranks)]
    x = tokens[rank]
    seconds = []
    for _ in range(options.repeats + 1):  # the first one warms up
        with naming_the_lost(group, "meeting before a forward"):
            dist.barrier()
        start = time.perf_counter()
        y, routing = block(x, return_routing=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    _, counts, _ = dispatch(x.reshape(-1, config.hidden_size), routing, config.n_routed_experts)
    to_ranks = counts.view(ranks, -1).sum(1)
    away = (to_ranks.sum() - to_ranks[rank]).item()
    mine = {"y": y.cpu(), "away": away, "seconds": sorted(seconds[1:])[options.repeats // 2]}
    everyone: list = [None] * ranks
    with naming_the_lost(group, "gathering what the ranks found"):
        dist.all_gather_object(everyone, mine)
    if rank != 0:
        return []
    whole = MoEBlock(config, SeededExperts(config, options.seed), device=device, dtype=dtype)
    fill_from_seed(whole, options.seed)
    want = torch.cat([whole(t) for t in tokens]).cpu().double()
    got = torch.cat([other["y"] for other in everyone]).double()
    worst = ((got - want).abs().max() / want.abs().max()).item()
    if not worst <= TOLERANCE[options.dtype]:
        raise RuntimeError(f"the outputs of {ranks} ranks differ from one rank's by {worst:.1e} of the largest output")
    moved = 2 * sum(other["away"] for other in everyone) * config.hidden_size * dtype.itemsize
    slowest = max(other["seconds"] for other in everyone)
    each = config.n_routed_experts // ranks
    return [
        f"{config.n_routed_experts} experts, {each} on each of {ranks} ranks; {device.type}, {options.dtype}",
        f"x {list(x.shape)} on each rank -> y {list(y.shape)}",
        f"equal to one rank: yes, worst difference {worst:.1e} of the largest output",
        f"rows that left their rank: {moved / 1e6:.2f} MB in all, out and back",
        f"forward: {1e3 * slowest:.2f} ms, the slowest rank's median of {options.repeats}",
    ]


def _tokens(config: MoEConfig, options: argparse.Namespace, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + rank)
    return torch.randn(options.tokens, config.hidden_size, generator=generator)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    config = config_of(options.config, options.set)
    device = join(options.time_limit)
    try:
        for line in report(config, options, device):
            print(line)
        with naming_the_lost(dist.group.WORLD, "meeting before the end"):
            dist.barrier()
    except RankLost as lost:
        print(lost, flush=True)
        os._exit(1)  # leaving the group in order would wait for the rank that is lost
    dist.destroy_process_group()
