"""What the exchange costs: rows and bytes in closed form and by simulation, seconds over two kinds of link, and what skew adds."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from moe_lib.config import MoEConfig
from moe_lib.placement import Placement, contiguous, place
from moe_lib.roofline import H200, Machine, exchange_bytes

# Microseconds of one dispatch (fp8) and one combine (bfloat16), 128 tokens a rank, hidden 7168, top 8, on H800 with ConnectX-7:
# github.com/deepseek-ai/DeepEP, docs/legacy.md, low-latency kernels.
DEEPEP = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369)}


@dataclass(frozen=True)
class Links:
    """How ranks are wired: `node` of them share the fast links. Bytes a second that one rank can send over each."""

    node: int
    inside: float
    outside: float


# The machines of that table as its page describes them: eight GPUs a node on NVLink, one 400 Gb/s InfiniBand card a GPU.
H800 = Links(8, 160e9, 50e9)


def rows_away(config: MoEConfig, ranks: int, deduplicated: bool = False) -> float:
    """Rows that a token sends to other ranks, expected, when it chooses k experts uniformly.

    Naive: one a chosen expert that lives elsewhere. Deduplicated: one a rank that holds any of them.
    """
    experts, k = config.n_routed_experts, config.num_experts_per_tok
    if not deduplicated:
        return k * (1 - 1 / ranks)
    elsewhere = experts - experts // ranks
    return (ranks - 1) * (1 - comb(elsewhere, k) / comb(experts, k))


def count_rows_away(
    indices: Int64[Tensor, "tokens k"],
    home: Int64[Tensor, " tokens"],
    rank_of: Int64[Tensor, " experts"],
    deduplicated: bool = False,
) -> int:
    """The same counted, for tokens at `home` and experts at `rank_of`."""
    targets = rank_of[indices]
    away = targets != home[:, None]
    if not deduplicated:
        return int(away.sum())
    reached = torch.zeros(len(indices), int(rank_of.max()) + 1, dtype=torch.bool)
    reached[torch.arange(len(indices))[:, None].expand_as(targets)[away], targets[away]] = True
    return int(reached.sum())


def exchange_seconds(config: MoEConfig, tokens: int, ranks: int, links: Links) -> tuple[float, float]:
    """Of one dispatch and one combine, by bytes over bandwidth alone, with uniform choices and `tokens` tokens a rank.

    Ranks of a node are reached over the fast links, the others over the slow ones, both at once: the slower of the two counts.
    """
    out, back = exchange_bytes(config, tokens, ranks)
    near, far = min(ranks, links.node) - 1, max(ranks - links.node, 0)
    share = max(near / links.inside, far / links.outside) / (ranks - 1) if ranks > 1 else 0.0
    return out * share, back * share


def log_normal(experts: int, sigma: float, seed: int) -> Float[Tensor, " experts"]:
    """How popular each expert is: exp of normal numbers; 0 makes all alike."""
    return (sigma * torch.randn(experts, generator=torch.Generator().manual_seed(seed))).exp()


def gumbel(tokens: int, experts: int, seed: int) -> Float[Tensor, "tokens experts"]:
    """Noise that turns a sort into a draw: -log(-log(uniform))."""
    uniform = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return -(-uniform.clamp_min(1e-12).log()).log()


def choices(tokens: int, popularity: Float[Tensor, " experts"], k: int, seed: int) -> Int64[Tensor, "tokens k"]:
    """k different experts for each token, drawn one after the other in proportion to popularity."""
    return (popularity.log() + gumbel(tokens, len(popularity), seed)).topk(k).indices


@dataclass(frozen=True)
class Traffic:
    """One batch over ranks."""

    rows: Int64[Tensor, "ranks ranks"]
    """rows[s, d]: from rank s to rank d; the diagonal stays at home."""
    placement: Placement
    hit: Int64[Tensor, " ranks"]
    """Slots of each rank that got any rows."""

    @property
    def load(self) -> Int64[Tensor, " ranks"]:
        """Rows that each rank's experts work on."""
        return self.rows.sum(0)

    @property
    def imbalance(self) -> float:
        return (self.load.max() / self.load.double().mean()).item()

    @property
    def away(self) -> int:
        """Rows that leave their rank."""
        return int(self.rows.sum() - self.rows.trace())


def traffic(indices: Int64[Tensor, "tokens k"], placement: Placement) -> Traffic:
    """Tokens lie on ranks in equal runs; an expert's rows take its copies in turn. Raises ValueError when tokens do not divide."""
    tokens, ranks = len(indices), placement.ranks
    if tokens % ranks:
        raise ValueError(f"{tokens} tokens cannot lie equally on {ranks} ranks")
    where = placement.slots
    flat = indices.flatten()
    order = torch.from_numpy(
        np.argsort(flat.numpy().astype(np.int16), kind="stable")
    )  # of short integers: much faster than torch's
    counts = torch.bincount(flat, minlength=len(where))
    turn = torch.arange(len(flat)) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # its number among its expert's rows
    copies = torch.tensor([len(slots) for slots in where])
    table = torch.zeros(len(where), int(copies.max()), dtype=torch.int64)
    for e, slots in enumerate(where):
        table[e, : len(slots)] = torch.tensor(slots)
    expert = flat[order]
    slot = table[expert, turn % copies[expert]]
    source = torch.arange(tokens).repeat_interleave(indices.shape[1])[order] // (tokens // ranks)
    rows = torch.bincount(source * ranks + slot // placement.per_rank, minlength=ranks * ranks).view(ranks, ranks)
    used = torch.bincount(slot, minlength=len(placement.experts)) > 0
    return Traffic(rows, placement, used.view(ranks, -1).sum(1))


def simulate(
    config: MoEConfig, tokens: int, ranks: int, sigma: float, redundant: int | None, seed: int, hindsight: bool = False
) -> Traffic:
    """A batch of `tokens` in all with log-normal popularity.

    redundant: None leaves experts in their order; a number places them greedily with so many extra copies, by the loads of an
    earlier batch, or in hindsight by this batch's own.
    """
    popularity = log_normal(config.n_routed_experts, sigma, seed)
    now = choices(tokens, popularity, config.num_experts_per_tok, 2 * seed)
    if redundant is None or hindsight:
        known = now
    else:
        known = choices(tokens, popularity, config.num_experts_per_tok, 2 * seed + 1)
    loads = torch.bincount(known.flatten(), minlength=config.n_routed_experts).tolist()
    return traffic(now, contiguous(loads, ranks) if redundant is None else place(loads, ranks, redundant))


def step_seconds(config: MoEConfig, t: Traffic, links: Links, machine: Machine = H200, precision: str = "fp8") -> dict[str, float]:
    """Floors of one batch: dispatch, experts, combine, each as long as its slowest rank takes."""
    ranks = len(t.rows)
    row_out, row_back = (both / config.num_experts_per_tok for both in exchange_bytes(config, 2, 2))  # one of two rows is away
    node = torch.arange(ranks) // links.node
    home = torch.eye(ranks, dtype=torch.bool)
    near = t.rows.masked_fill(home | (node[:, None] != node), 0)
    far = t.rows.masked_fill(node[:, None] == node, 0)
    slowest = max(
        max(rows.sum(0).max(), rows.sum(1).max()).item() / rate for rows, rate in ((near, links.inside), (far, links.outside))
    )
    flops = 2 * config.params_per_expert * t.load.double() / machine.rates[precision]
    read = config.expert_bytes(precision) * t.hit.double() / machine.read
    return {"dispatch": row_out * slowest, "experts": torch.maximum(flops, read).max().item(), "combine": row_back * slowest}
