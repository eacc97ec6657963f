"""The block in float64 with every expert run on every token and masked: slow, obvious, and what everything else must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lib import MoEBlock

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def stacked(block: MoEBlock) -> dict[str, Tensor]:
    """The block's weights in float64, experts stacked, each a leaf that wants a gradient."""
    tensors = block.to_hf()
    out = {p: torch.stack([tensors[f"experts.{e}.{p}.weight"] for e in range(block.config.n_routed_experts)]) for p in PROJECTIONS}
    out["gate"] = tensors["gate.weight"]
    if block.shared_experts is not None:
        out |= {f"shared.{p}": tensors[f"shared_experts.{p}.weight"] for p in PROJECTIONS}
    return {name: t.double().clone().requires_grad_() for name, t in out.items()}


def dense(block: MoEBlock, weights: dict[str, Tensor], x: Tensor, indices: Tensor) -> Tensor:
    """y for tokens x [T, hidden], each weighted over the experts it was sent to; differentiable in all weights and x."""
    c = block.config
    scores = torch.sigmoid(x @ weights["gate"].T)
    chosen = torch.zeros_like(scores).scatter(1, indices, 1.0)
    share = scores * chosen
    if c.norm_topk_prob:
        share = share / (share.sum(1, keepdim=True) + 1e-20)
    share = share * c.routed_scaling_factor
    gate = torch.einsum("th,eih->eti", x, weights["gate_proj"])
    up = torch.einsum("th,eih->eti", x, weights["up_proj"])
    y = torch.einsum("te,eti,ehi->th", share, F.silu(gate) * up, weights["down_proj"])
    if block.shared_experts is not None:
        y = y + (F.silu(x @ weights["shared.gate_proj"].T) * (x @ weights["shared.up_proj"].T)) @ weights["shared.down_proj"].T
    return y


def gradients(block: MoEBlock) -> dict[str, Tensor]:
    """The block's own gradients under the names of `stacked`; a weight that no row reached counts as zero."""

    def of(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    parameters = dict(block.named_parameters())
    out = {"gate": of(block.gate.weight)}
    for p in PROJECTIONS:
        if f"experts.{p}" in parameters:
            out[p] = of(parameters[f"experts.{p}"])
        else:
            out[p] = torch.stack([of(parameters[f"experts.{e}.{p}.weight"]) for e in range(block.config.n_routed_experts)])
        if block.shared_experts is not None:
            out[f"shared.{p}"] = of(parameters[f"shared_experts.{p}.weight"])
    return out


def choice(scores: list[float], bias: list[float], k: int, n_group: int, topk_group: int) -> list[int]:
    """The gate's decision for one token in plain Python: experts, best first, lower number first among equals."""
    biased = [s + b for s, b in zip(scores, bias)]
    size = len(biased) // n_group
    best_two = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    kept = sorted(range(n_group), key=lambda g: (-best_two[g], g))[:topk_group]
    return sorted((e for e in range(len(biased)) if e // size in kept), key=lambda e: (-biased[e], e))[:k]
