"""All 384 experts at true size: what fits here, how it is built, and how a part of it is checked in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor, nn

from moe_lib.block import MoEBlock
from moe_lib.config import MoEConfig
from moe_lib.expert import swiglu
from moe_lib.experts import Fp8Experts, GroupedExperts, Int4Experts, ShardedExperts
from moe_lib.experts.contract import PROJECTIONS
from moe_lib.experts.formats import Opened
from moe_lib.experts.sharded import rank_experts

KINDS = {"bf16": GroupedExperts, "fp8": Fp8Experts, "int4": Int4Experts}  # the best first
STD = 0.02  # of a weight; K2's config draws its weights so (initializer_range)
WORK = 2**30  # bytes for one forward: rows, an opened expert, what torch keeps
SHARE = 0.85  # of the free memory that may be asked for


@dataclass(frozen=True)
class Plan:
    """What will be built, and why. Bytes are those of one rank."""

    config: MoEConfig
    precision: str
    needed: int
    free: int
    ranks: int = 1

    def __str__(self) -> str:
        shared = f", one {self.ranks}th of them on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{self.config.n_routed_experts} experts in {self.precision}{shared}: "
            f"{self.needed / 1e9:.1f} GB needed, {self.free / 1e9:.1f} GB free"
        )


def free_bytes(device: torch.device | str = "cpu") -> int:
    """Memory that can be had now without pushing anything out: of the device, or of this machine and what limits this process."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
    try:
        most, used = (int(Path(path).read_text()) for path in limits)
    except (OSError, ValueError):  # no such limit, or "max"
        return free
    return min(free, most - used)


def needed_bytes(config: MoEConfig, precision: str, ranks: int = 1) -> int:
    """One rank's share of the experts, the shared expert and the router in bfloat16, and room for a forward."""
    experts = config.n_routed_experts // ranks * config.expert_bytes(precision)
    return experts + 2 * (config.shared_params + config.router_params) + WORK


def plan(
    config: MoEConfig, device: torch.device | str = "cpu", precision: str | None = None, ranks: int = 1, free: int | None = None
) -> Plan:
    """The best precision of which all experts fit, or the one asked for. Nothing is allocated yet.

    Raises MemoryError when it does not fit, with the bytes it would take; ValueError for an unknown precision, or ranks that do
    not divide the experts.
    """
    if precision is not None and precision not in KINDS:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(KINDS)}, or None for the best that fits")
    rank_experts(config, ranks, 0)
    free = free_bytes(device) if free is None else free
    plans = [
        Plan(config, name, needed_bytes(config, name, ranks), free, ranks) for name in (KINDS if precision is None else [precision])
    ]
    for p in plans:
        if p.needed <= SHARE * free:
            return p
    least = plans[-1]
    raise MemoryError(
        f"{least}, of which {SHARE:.0%} may be used. Free {max(0, least.needed / SHARE - free) / 1e9:.1f} GB, share the experts "
        "among more ranks, or build fewer: config.replace(n_routed_experts=…)"
    )


def build(
    plan: Plan,
    seed: int = 0,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> MoEBlock:
    """The block with random weights, the same for a seed however many ranks share them. Never more than an expert beyond its size.

    `progress` wraps the loop over the experts, as tqdm does. With a group, this rank's share, sharded over the group.
    """
    if (1 if group is None else group.size()) != plan.ranks:
        raise ValueError(f"the plan is for {plan.ranks} ranks; expected a group of as many, or none for one rank")
    local = None if group is None else rank_experts(plan.config, plan.ranks, group.rank())
    experts = empty(plan.config, plan.precision, local, device)
    experts.random_(seed, STD, progress)
    if group is not None:
        experts = ShardedExperts(experts, group)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = MoEBlock(plan.config, experts, dtype=torch.bfloat16)
        if block.shared_experts is not None:
            for weight in block.shared_experts.parameters():
                torch.nn.init.normal_(weight, std=STD)
    return block.to(device).requires_grad_(False)


def empty(config: MoEConfig, precision: str, local: range | None = None, device: torch.device | str = "cpu") -> nn.Module:
    """Experts in this precision whose memory is asked for and not written yet."""
    if precision == "bf16":
        return GroupedExperts(config, local, "meta", torch.bfloat16).to_empty(device=device)  # spares its own random numbers
    return KINDS[precision](config, local, device)


def exact(block: MoEBlock, x: Float[Tensor, "tokens hidden"], tokens: Sequence[int]) -> Float64[Tensor, "sample hidden"]:
    """The block's output for some of the tokens, in float64 throughout from the weights as stored, one expert at a time."""
    weights = Opened(block.to_hf(), (), torch.float64)
    routing = block.gate(x[list(tokens)].double())

    def expert(name: str, row: Tensor) -> Tensor:
        gate, up, down = (weights[f"{name}.{p}.weight"].double() for p in PROJECTIONS)
        return swiglu(row @ gate.T, row @ up.T) @ down.T

    out = []
    for row, experts, shares in zip(x[list(tokens)].double(), routing.indices.tolist(), routing.weights):
        y = sum(share * expert(f"experts.{e}", row) for e, share in zip(experts, shares))
        out.append(y if block.shared_experts is None else y + expert("shared_experts", row))
    return torch.stack(out)
