"""A block over ranks: built without ever holding another rank's experts, checked against one process, and trained like one."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_lib.block import EXPERTS, MoEBlock
from moe_lib.config import MoEConfig
from moe_lib.expert import swiglu
from moe_lib.experts.contract import row_ends
from moe_lib.experts.sharded import ShardedExperts, process_group, rank_experts
from moe_lib.rollcall import naming_the_lost


def sharded_block(
    config: MoEConfig,
    group: dist.ProcessGroup | DeviceMesh,
    local: str = "grouped",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MoEBlock:
    """This rank's part of a block: the whole gate and shared expert, and its share of the experts, of the kind `local`.

    Weights are random and differ between ranks until `fill_from_seed` or `block.load_hf`. Raises ValueError when the
    ranks do not divide the experts, or, on every rank, when their configs differ.
    """
    group = process_group(group)
    same_on_all_ranks(config, group)
    here = rank_experts(config, group.size(), group.rank())
    experts = ShardedExperts(EXPERTS[local](config, here, device=device, dtype=dtype), group)
    return MoEBlock(config, experts, device=device, dtype=dtype)


def same_on_all_ranks(config: MoEConfig, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank, naming field, ranks and values, when configs differ."""
    everyone: list = [None] * group.size()
    with naming_the_lost(group, "comparing the configs of all ranks"):
        dist.all_gather_object(everyone, dataclasses.asdict(config), group)
    differing = [name for name in everyone[0] if any(other[name] != everyone[0][name] for other in everyone)]
    if differing:
        told = "; ".join(f"{name}: " + ", ".join(f"rank {r} {c[name]}" for r, c in enumerate(everyone)) for name in differing)
        raise ValueError(f"configs differ between ranks ({told}); start all ranks with the same one")


def fill_from_seed(block: MoEBlock, seed: int) -> None:
    """Draw every weight anew, each from a seed of its own name: the same block on any number of ranks and any device.

    For experts whose `to_hf` shares memory with them. The correction bias is left as it is.
    """
    for name, tensor in block.to_hf().items():
        if not name.endswith("e_score_correction_bias"):
            tensor.copy_(drawn(name, tensor.shape, seed))


def drawn(name: str, shape: Iterable[int], seed: int) -> Float[Tensor, "out in"]:
    """The weight of that name, in float32 on the CPU; uniform as nn.Linear draws it, the gate's normal."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    weight = torch.empty(*shape)
    bound = weight.shape[1] ** -0.5
    return (
        weight.normal_(0, bound, generator=generator)
        if name == "gate.weight"
        else weight.uniform_(-bound, bound, generator=generator)
    )


class SeededExperts(nn.Module):
    """All experts of one process with none in memory: each is drawn by `fill_from_seed`'s rule when rows come, and dropped.

    Slow, and fit to be compared with any number of ranks, at any size. No gradients of weights.
    """

    def __init__(self, config: MoEConfig, seed: int) -> None:
        super().__init__()
        self.config, self.seed, self.local = config, seed, range(config.n_routed_experts)

    def forward(self, rows: Float[Tensor, "rows hidden"], counts: Integer[Tensor, " experts"]) -> Float[Tensor, "rows hidden"]:
        hidden, inter = self.config.hidden_size, self.config.moe_intermediate_size
        ends, outputs = row_ends(rows, counts, len(self.local)), []
        for e, start, end in zip(self.local, [0, *ends], ends):
            if end > start:
                shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
                gate, up, down = (drawn(f"experts.{e}.{p}.weight", shape, self.seed).to(rows) for p, shape in shapes.items())
                x = rows[start:end]
                outputs.append(F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down))
        return torch.cat(outputs) if outputs else rows.clone()

    def to_hf(self) -> dict[str, Tensor]:
        return {}

    def load_hf(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            raise ValueError("seeded experts take no weights")


def sum_replicated_gradients(block: MoEBlock, group: dist.ProcessGroup) -> None:
    """Add up the gradients of what every rank holds, the gate and the shared expert, over ranks that saw different tokens.

    An expert's own gradient is complete already: all ranks' rows came to it. Every rank must call this; a parameter without a
    gradient here counts as zero.
    """
    for name, parameter in block.named_parameters():
        if not name.startswith("experts.") and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            with naming_the_lost(group, f"adding up the gradient of {name}"):
                dist.all_reduce(parameter.grad, group=group)


def one_step(
    group: dist.ProcessGroup, config: MoEConfig, seed: int, shares: Sequence[Tensor], device: str = "cpu"
) -> dict[str, Tensor]:
    """Forward and backward of y.square().sum() over this rank's share of the tokens, to be compared with one process.

    "y" and "x" (its gradient) are of this rank's tokens. Under the checkpoint's names come the gradients of the weights that
    live here, those of gate and shared expert summed over ranks.
    """
    block = sharded_block(config, group, "loop", device, shares[0].dtype)
    fill_from_seed(block, seed)
    x = shares[group.rank()].to(device, copy=True).requires_grad_()
    y = block(x)
    y.square().sum().backward()
    sum_replicated_gradients(block, group)
    named = {name.replace("local_experts.", ""): p for name, p in block.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
