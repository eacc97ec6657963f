"""One expert: a SwiGLU feed-forward, the element-wise product h = SiLU(gate) * up between three matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """h = SiLU(gate) * up, feature by feature; SiLU(z) = z * sigmoid(z). No parameters.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202; modeling_deepseek.py line 389.
    """
    return F.silu(gate) * up


class SwiGLUExpert(nn.Module):
    """hidden -> inter twice (gate_proj, up_proj), their gated product, and back (down_proj); no biases.

    Source: modeling_deepseek.py lines 374-390.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < 1:
                raise ValueError(f"{name} is {size}; an expert needs at least 1")
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
