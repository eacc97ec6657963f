"""Experts that live on other ranks: rows go to their owner by an all-to-all, through its experts, and back by another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from moe_lib.config import MoEConfig
from moe_lib.rollcall import naming_the_lost, sign_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)  # told by place
FINE, WRONG_LENGTH, WRONG_SUM = range(3)
GRAD_OFF, GRAD_UNUSED, GRAD_NEEDED = range(3)


def rank_experts(config: MoEConfig, ranks: int, rank: int) -> range:
    """The experts of one rank: equal shares in order. Source: modeling_deepseek.py lines 486-491.

    Raises ValueError when `ranks` does not divide the experts; the reference would leave the last ones nowhere.
    """
    experts = config.n_routed_experts
    if ranks not in config.ep_sizes:
        below = max((n for n in config.ep_sizes if n < ranks), default=None)
        above = min((n for n in config.ep_sizes if n > ranks), default=None)
        near = " and ".join(str(n) for n in (below, above) if n)
        raise ValueError(f"{experts} experts cannot be shared equally among {ranks} ranks; the nearest numbers that work: {near}")
    if rank not in range(ranks):
        raise ValueError(f"rank is {rank}; expected 0..{ranks - 1}")
    share = experts // ranks
    return range(rank * share, (rank + 1) * share)


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The group itself, or that of a mesh. Raises ValueError when the mesh has more than one dimension."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f'the mesh has {group.ndim} dimensions {group.mesh_dim_names}; give one of them, as in mesh["ep"]')
    return group.get_group()


class About(NamedTuple):
    """What a rank tells all others beside its counts: all see the same disagreement."""

    rows: int
    hidden: int
    dtype: int
    grad: int
    verdict: int


@dataclass(frozen=True)
class Exchange:
    """What one forward sends and receives, agreed between all ranks before any row moves."""

    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    arriving: Integer[Tensor, "ranks local"]
    """arriving[s, i]: rows from rank s for local expert i. Rows arrive in the order of its entries, row by row."""
    needs_grad: bool
    """Some rank will differentiate, so every rank records the collectives."""


class ShardedExperts(nn.Module):
    """Wraps the experts of this rank so that they stand for all of them: outward the contract with every expert's counts,
    inward the same contract with `local_experts`, whatever implementation that is.

    `group` is a process group or a DeviceMesh of one dimension (`mesh["ep"]`): gloo for CPU tensors, NCCL for CUDA. Every rank of
    the group must call forward, and backward, equally often, with any number of rows. State-dict keys are those of
    `local_experts`; `to_hf` and `load_hf` speak of this rank's experts only.
    A forward reads the device from the host once, to learn the sizes; a backward never does.
    Raises ValueError on every rank when the local experts are not equal shares in rank order. A collective that fails
    raises RankLost, which names the ranks that do not answer. Source: modeling_deepseek.py lines 543-598.
    """

    def __init__(self, local_experts: nn.Module, group: dist.ProcessGroup | DeviceMesh) -> None:
        super().__init__()
        group = process_group(group)
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.local_experts = local_experts
        sign_in(group)
        self._check_shares()
        self.local = range(len(local_experts.local) * self.ranks)
        self.register_state_dict_post_hook(_without_own_name)
        self.register_load_state_dict_pre_hook(_with_own_name)

    def _check_shares(self) -> None:
        everyone: list = [None] * self.ranks
        with naming_the_lost(self.group, "comparing which experts each rank holds"):
            dist.all_gather_object(everyone, self.local_experts.local, self.group)
        share = len(self.local_experts.local)
        if everyone != [range(r * share, (r + 1) * share) for r in range(self.ranks)]:
            held = "; ".join(f"rank {r} holds {e.start}..{e.stop - 1}" for r, e in enumerate(everyone))
            raise ValueError(f"{held}. Expected equal shares in rank order: give rank r rank_experts(config, {self.ranks}, r)")

    @torch.compiler.disable  # the splits are data: compiled, every new set of counts would be a new program
    def forward(self, rows: Float[Tensor, "rows hidden"], counts: Integer[Tensor, " experts"]) -> Float[Tensor, "rows hidden"]:
        """counts[e] rows belong to expert e, of all experts. Raises ValueError, on all ranks and before rows move, when one
        rank's counts do not fit its rows, or ranks differ in width, dtype or whether they want gradients."""
        exchange = self.exchange_counts(rows, counts)
        arrived, thread = self.all_to_all_out(rows, exchange)
        order = self.by_expert(exchange)  # arrived by source rank, then expert; the contract wants them by expert
        outputs = self.local_experts(arrived[order], exchange.arriving.sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        autocast = torch.is_autocast_enabled(rows.device.type)
        dtype = torch.get_autocast_dtype(rows.device.type) if autocast else rows.dtype
        # without rows an implementation may return its input's dtype under autocast; the ranks must send the same one
        return self.all_to_all_back(outputs.to(dtype)[back], exchange, thread)

    def exchange_counts(self, rows: Tensor, counts: Tensor) -> Exchange:
        """Tell every rank how many rows come for each of its experts, and what they look like; check what the others tell.

        The message has one size whatever it says, so a rank that is wrong still takes part and all ranks raise together.
        """
        share = len(self.local) // self.ranks
        fits = len(counts) == len(self.local)
        counts = counts if fits else counts.new_zeros(len(self.local))
        grad = GRAD_OFF
        if torch.is_grad_enabled():
            grad = GRAD_NEEDED if rows.requires_grad or any(p.requires_grad for p in self.parameters()) else GRAD_UNUSED
        dtype = DTYPES.index(rows.dtype) if rows.dtype in DTYPES else -1
        about = torch.tensor(About(len(rows), rows.shape[1], dtype, grad, FINE if fits else WRONG_LENGTH), device=counts.device)
        if fits:
            about[-1] = WRONG_SUM * ((counts.sum() != len(rows)) | (counts < 0).any())  # stays on the device
        told = torch.cat([counts.view(self.ranks, share).long(), about.expand(self.ranks, -1)], dim=1)
        heard = torch.empty_like(told)
        with naming_the_lost(self.group, "the all-to-all of the counts"):
            dist.all_to_all_single(heard, told, group=self.group)
        arriving, abouts = heard[:, :share], heard[:, share:]
        summary = torch.cat([told[:, :share].sum(1, keepdim=True), arriving.sum(1, keepdim=True), abouts], dim=1)
        send, receive, *columns = zip(*summary.tolist())  # the one read of the device
        self._check([About(*values) for values in zip(*columns)])
        return Exchange(list(send), list(receive), arriving, needs_grad=GRAD_NEEDED in columns[3])

    def _check(self, abouts: list[About]) -> None:
        for rank, about in enumerate(abouts):
            if about.verdict != FINE:
                wrong = "one count for each" if about.verdict == WRONG_LENGTH else "counts, 0 or more, that sum to the rows"
                raise ValueError(
                    f"rank {rank}: its counts do not fit {about.rows} rows and {len(self.local)} experts; expected {wrong}"
                )
        looks = [f"{a.hidden} x {DTYPES[a.dtype] if a.dtype >= 0 else 'a dtype that cannot travel'}" for a in abouts]
        if len(set(looks)) > 1 or any(a.dtype < 0 for a in abouts):
            each = "; ".join(f"rank {rank}: {look}" for rank, look in enumerate(looks))
            raise ValueError(f"rows must look the same on all ranks ({each}); build every block from one config and floating dtype")
        off = [rank for rank, a in enumerate(abouts) if a.grad == GRAD_OFF]
        if off and any(a.grad == GRAD_NEEDED for a in abouts):
            raise ValueError(f"ranks {off} run without gradients and others with; a backward would wait for them")

    def all_to_all_out(self, rows: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """The rows this rank's experts work on, in order of source rank, then expert; and the thread for the way back."""
        thread = torch.empty(0, device=rows.device, requires_grad=exchange.needs_grad and torch.is_grad_enabled())
        return _AllToAll.apply(rows, thread, exchange.receive, exchange.send, self.group)

    def all_to_all_back(self, outputs: Tensor, exchange: Exchange, thread: Tensor) -> Tensor:
        """Every row to the rank that sent it, in the order in which that rank sent it."""
        return _AllToAll.apply(outputs, thread, exchange.send, exchange.receive, self.group)[0]

    def by_expert(self, exchange: Exchange) -> Tensor:
        """The order that sorts arrived rows by expert, and by source rank within one."""
        ranks, share = exchange.arriving.shape
        experts = torch.arange(share, device=exchange.arriving.device).repeat(ranks)
        expert_of_row = experts.repeat_interleave(exchange.arriving.flatten(), output_size=sum(exchange.receive))
        return expert_of_row.argsort(stable=True)

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of this rank's experts, under global numbers."""
        self.local_experts.load_hf(tensors)

    def to_hf(self) -> dict[str, Tensor]:
        """This rank's experts; the shards of all ranks add up to the whole."""
        return self.local_experts.to_hf()


def all_to_all(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first send[0] rows to rank 0, the next to rank 1, …; the rows received, in order of rank. No gradient.

    float8 rows travel as bytes: gloo does not know the type. Raises ValueError when the splits do not fit, where gloo would end
    the process.
    """
    if {len(send), len(receive)} != {group.size()} or sum(send) != len(rows) or min(send + receive) < 0:
        expected = f"one size, 0 or more, for each of {group.size()} ranks, with the rows as the sum of send"
        raise ValueError(f"{len(rows)} rows, send={send}, receive={receive}; expected {expected}")
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    wire_out, wire_in = out, rows.contiguous()
    if rows.dtype.itemsize == 1 and rows.is_floating_point():
        wire_out, wire_in = wire_out.view(torch.uint8), wire_in.view(torch.uint8)
    with naming_the_lost(group, "an all-to-all of rows"):
        dist.all_to_all_single(wire_out, wire_in, receive, send, group=group)
    return out


class _AllToAll(torch.autograd.Function):
    """all_to_all whose gradient travels the opposite way.

    Every rank must join the collective of the backward, also one that received no rows or whose input needs no gradient, or the
    others wait for ever. So an empty `thread` runs from the way out to the way back: it keeps both in every rank's graph, in order.
    """

    @staticmethod
    def forward(ctx, rows, thread, receive, send, group):
        ctx.way_back = send, receive, group
        return all_to_all(rows, receive, send, group), thread.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_thread):
        return all_to_all(grad, *ctx.way_back), grad_thread, None, None, None


def _without_own_name(_module, state_dict, prefix, _metadata):
    for key in [key for key in state_dict if key.startswith(f"{prefix}local_experts.")]:
        state_dict[prefix + key.removeprefix(f"{prefix}local_experts.")] = state_dict.pop(key)


def _with_own_name(_module, state_dict, prefix, *_):
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}local_experts.{key.removeprefix(prefix)}"] = state_dict.pop(key)
