"""Experts as the reference holds them: a list of modules, run one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from moe_lib.config import MoEConfig
from moe_lib.expert import SwiGLUExpert
from moe_lib.experts.contract import hf_keys, local_experts, row_ends


class LoopExperts(nn.ModuleList):
    """One SwiGLUExpert an entry, under its global number; None where an expert lives elsewhere.

    `local` says which experts live here (default: all). Keys keep global numbers whatever is local, so shards of a state
    dict add up to the whole. Source: modeling_deepseek.py lines 486-515.
    """

    def __init__(
        self,
        config: MoEConfig,
        local: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.local = local_experts(config, local)
        sizes = config.hidden_size, config.moe_intermediate_size
        super().__init__(SwiGLUExpert(*sizes, device, dtype) if e in self.local else None for e in range(config.n_routed_experts))

    @torch.compiler.disable  # the counts are data: compiled, every new set of counts would be a new program
    def forward(self, rows: Float[Tensor, "rows hidden"], counts: Integer[Tensor, " local"]) -> Float[Tensor, "rows hidden"]:
        """counts[i] rows belong to expert local[i]. Raises ValueError when the counts do not sum to the rows."""
        ends = row_ends(rows, counts, len(self.local))
        outputs = [self[e](rows[start:end]) for e, start, end in zip(self.local, [0, *ends], ends) if end > start]
        return torch.cat(outputs) if outputs else rows.clone()

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors named "<expert>.gate_proj.weight" and so on, one of each local expert."""
        with torch.no_grad():
            for key, mine in self.to_hf().items():
                mine.copy_(tensors[key])

    def to_hf(self) -> dict[str, Tensor]:
        return {key: self.get_parameter(key).detach() for key in hf_keys(self.local)}
