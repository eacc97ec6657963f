"""The gate: which experts a token goes to, and with what weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from moe_lib.config import MoEConfig


class Routing(NamedTuple):
    """What the gate decided. Plain tensors: index it, send it, or draw it."""

    indices: Int64[Tensor, "tokens k"]
    """The chosen experts, the one with the highest biased score first."""
    weights: Float[Tensor, "tokens k"]
    """What each chosen expert's output is multiplied with: from the scores *without* the bias."""
    scores: Float[Tensor, "tokens experts"]
    """sigmoid(logits) of every expert, without the bias."""


def top_k(values: Float[Tensor, "rows columns"], k: int) -> Int64[Tensor, "rows k"]:
    """The columns of the k largest values, largest first; of equal values the lower column first.

    torch.topk breaks ties in no fixed order, so equal scores would go to other experts on another device or another day.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


class Router(nn.Module):
    """sigmoid scores -> + correction bias, for the choice only -> best groups -> top-k -> unbiased weights -> normalise -> scale.

    Everything is computed in float32 (float64 for float64 input) whatever the model's dtype and autocast say, and
    `e_score_correction_bias` is never stored below float32: it moves in steps of 0.001, which bfloat16 cannot hold at 7.
    The bias is a buffer, because a balancing rule moves it and no gradient does.

    Source: modeling_deepseek.py lines 393-474; DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Two things differ, on purpose: groups
    that were not kept are masked with -inf (the reference's 0.0 beats a negative biased score), and the gate can be trained.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, device=device, dtype=dtype))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, device=device, dtype=torch.float32))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Routing:
        """Raises ValueError when the last dimension is not the config's hidden_size."""
        if x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be hidden_size={self.config.hidden_size}")
        tokens = x.reshape(-1, x.shape[-1])
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
            return self.route(logits.sigmoid())

    def route(self, scores: Float[Tensor, "tokens experts"]) -> Routing:
        """From sigmoid scores to the decision: everything the gate does after its one matrix product."""
        c = self.config
        choice = scores.detach() + self.e_score_correction_bias
        if c.n_group > 1:
            choice = choice.masked_fill(~self.kept_groups(choice), float("-inf"))
        indices = top_k(choice, c.num_experts_per_tok)
        weights = scores.gather(1, indices)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(indices, weights * c.routed_scaling_factor, scores)

    def kept_groups(self, choice: Float[Tensor, "tokens experts"]) -> Tensor:
        """True for every expert of the `topk_group` groups whose two best biased scores have the highest sum.

        A group of one expert counts that one alone.
        """
        c = self.config
        grouped = choice.unflatten(1, (c.n_group, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, top_k(group_scores, c.topk_group), True)
        return kept.repeat_interleave(grouped.shape[-1], dim=1)

    def _apply(self, fn, recurse=True):
        # .to(bfloat16), .half() and the like pass here; the bias follows to the device, never to the lower precision.
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after.dtype.itemsize < 4:
            self.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name in ("weight", "e_score_correction_bias"):
            key, tensor = prefix + name, state_dict.get(prefix + name)
            if tensor is None or tensor.is_meta:
                continue
            if not tensor.isfinite().all():
                where = (~tensor.isfinite()).nonzero()[0].tolist()
                errors.append(
                    f"{key} holds {tensor[tuple(where)].item()} at {where}; a gate with a non-finite value routes at random"
                )
            if name == "e_score_correction_bias" and tensor.dtype.itemsize < 4:
                state_dict[key] = tensor.float()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
