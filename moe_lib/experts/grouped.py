"""Experts as three stacked weights: one tensor a projection, with experts as dimension 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn

from moe_lib.config import MoEConfig
from moe_lib.expert import swiglu
from moe_lib.experts import native
from moe_lib.experts.contract import PROJECTIONS, hf_keys, local_experts, row_ends

SMALL = 2**18
"""Weights of one matrix of one expert, up to which a grouped product on a CPU trains faster than one expert at a time."""


class GroupedExperts(nn.Module):
    """gate_proj, up_proj [local, inter, hidden] and down_proj [local, hidden, inter].

    On a GPU three grouped matrix products do all experts, with no read of the counts on the host. On a CPU a grouped product is a
    loop inside. For small experts it is taken all the same, because its backward is one loop too: forward and backward together
    measure 0.36 to 0.87 of each expert over views of the stack, a forward alone 0.9 to 1.1 (float32 and bfloat16, matrices of 64 x
    32 to 1024 x 256, 4 to 2000 rows an expert; see benchmarks/train_step.py). Large experts run one at a time over the views.
    bfloat16 rows that want no gradient meet large experts in the compiled kernel of native.py, where there is a C compiler and the
    processor has AVX-512 BF16: torch lays a bfloat16 weight out anew at every product, and that kernel reads it as it lies.
    """

    def __init__(
        self,
        config: MoEConfig,
        local: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.local = local_experts(config, local)
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        for name, shape in zip(PROJECTIONS, ((inter, hidden), (inter, hidden), (hidden, inter))):
            weight = torch.empty(len(self.local), *shape, device=device, dtype=dtype)
            bound = shape[1] ** -0.5  # as nn.Linear draws each of them
            setattr(self, name, nn.Parameter(nn.init.uniform_(weight, -bound, bound)))

    def forward(self, rows: Float[Tensor, "rows hidden"], counts: Integer[Tensor, " local"]) -> Float[Tensor, "rows hidden"]:
        """counts[i] rows belong to expert local[i]. Raises ValueError when the counts do not sum to the rows (on a GPU, where
        looking would stall the stream, only when there are too few or too many counts)."""
        if len(counts) != len(self.local):
            raise ValueError(f"{len(counts)} counts for {len(self.local)} local experts; expected one count for each")
        if rows.is_cuda and self._aligned(rows):
            return self._grouped(rows, counts)
        small = rows.device.type == "cpu" and self.down_proj[0].numel() <= SMALL
        return self._grouped_on_cpu(rows, counts) if small and self._aligned(rows) else self._each(rows, counts)

    @torch.compiler.disable  # as _each
    def _grouped_on_cpu(self, rows: Tensor, counts: Tensor) -> Tensor:
        row_ends(rows, counts, len(self.local))  # says when the counts do not fit, which a grouped product does not
        return self._grouped(rows, counts)

    @torch.compiler.disable  # the counts are data: compiled, every new set of counts would be a new program
    def _each(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = row_ends(rows, counts, len(self.local))
        if self._compiled(rows):
            return native.experts(rows, ends, [(getattr(self, name).detach(), None) for name in PROJECTIONS])
        # unbind, not indexing: its backward stacks the gradients once; that of w[e] makes a whole stack for each expert
        experts = zip([0, *ends], ends, self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind())
        outputs = []
        for start, end, gate, up, down in experts:
            if end > start:
                x = rows[start:end]
                outputs.append(F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down))
        return torch.cat(outputs) if outputs else rows.clone()

    def _compiled(self, rows: Tensor) -> bool:
        weights = [getattr(self, name) for name in PROJECTIONS]
        bf16 = all(weight.dtype == torch.bfloat16 for weight in weights) and not torch.is_autocast_enabled("cpu")
        return bf16 and native.serves(rows, weights) and native.wide(*self.down_proj.shape[1:])

    def _grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        weights = [getattr(self, name) for name in PROJECTIONS]
        if torch.is_autocast_enabled(rows.device.type):  # grouped_mm is not on autocast's list
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weights = rows.to(dtype), [w.to(dtype) for w in weights]
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up, down = (lambda x, w=w: F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights)
        return _DenseGradient.apply(down(swiglu(gate(rows), up(rows))))

    def _aligned(self, rows: Tensor) -> bool:
        """grouped_mm takes rows whose length in bytes is a multiple of 16, in float32 and bfloat16."""
        sizes = self.down_proj.shape[1:]
        return rows.dtype in (torch.float32, torch.bfloat16) and all(n * rows.element_size() % 16 == 0 for n in sizes)

    def random_(self, seed: int, std: float, progress: Callable[[Iterable], Iterable] = iter) -> None:
        """Gaussian weights. An expert's depend on the seed and its number alone, not on where it lives.

        `progress` wraps the loop over the experts, as tqdm does.
        """
        for i in progress(range(len(self.local))):
            for n, name in enumerate(PROJECTIONS):
                weight = getattr(self, name).detach()[i]
                random = torch.Generator(weight.device).manual_seed((seed * 2**20 + self.local[i]) * 4 + n)
                weight.normal_(std=std, generator=random)

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors named "<expert>.gate_proj.weight" and so on, one of each local expert."""
        with torch.no_grad():
            for key, mine in self.to_hf().items():
                mine.copy_(tensors[key])

    def to_hf(self) -> dict[str, Tensor]:
        stacks = [getattr(self, name).detach() for name in PROJECTIONS]
        return dict(zip(hf_keys(self.local), (stack[i] for i in range(len(self.local)) for stack in stacks)))


class _DenseGradient(torch.autograd.Function):
    """Identity whose gradient has real strides: grouped_mm's backward refuses the stride-0 one of out.sum()."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()
