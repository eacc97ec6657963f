"""What experts held in fewer bits share: frozen weights, opened one projection at a time, with a gradient for the rows only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_lib.config import MoEConfig
from moe_lib.expert import swiglu
from moe_lib.experts import native
from moe_lib.experts.contract import PROJECTIONS, local_experts, row_ends


class QuantisedExperts(nn.Module):
    """A subclass declares its tensors (`parts`), turns a plain weight into them (`close`) and back (`open`).

    All tensors of a kind are one buffer with the local experts as dimension 0, under the name "<projection>_<part>"; buffers,
    because small numbers cannot be trained by small steps. They keep their dtypes whatever `.to(dtype)` asks of the module.
    Rows of any floating dtype come back in that dtype; a weight is opened to it and dropped again after its product.
    """

    def __init__(self, config: MoEConfig, local: range | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.local = local_experts(config, local)
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.shapes = dict(zip(PROJECTIONS, ((inter, hidden), (inter, hidden), (hidden, inter))))
        for projection, shape in self.shapes.items():
            for part, (size, dtype) in self.parts(*shape).items():
                empty = torch.zeros(len(self.local), *size, dtype=dtype, device=device)
                self.register_buffer(f"{projection}_{part}", empty)

    # --- what a subclass says --------------------------------------------------------------------------------------------

    def parts(self, out_size: int, in_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors that hold one weight [out, in]: checkpoint name -> (shape, dtype)."""
        raise NotImplementedError

    def close(self, weight: Float[Tensor, "out in"]) -> dict[str, Tensor]:
        """Quantise one weight into its parts."""
        raise NotImplementedError

    def open(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight that the parts stand for."""
        raise NotImplementedError

    def draw(self, parts: Mapping[str, Tensor], seed: Sequence[int], std: float) -> None:
        """Fill parts in main memory with what random weights of this standard deviation look like when they are quantised."""
        raise NotImplementedError

    # --- the contract ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # the counts are data: compiled, every new set of counts would be a new program
    def forward(self, rows: Float[Tensor, "rows hidden"], counts: Integer[Tensor, " local"]) -> Float[Tensor, "rows hidden"]:
        """counts[i] rows belong to expert local[i]. Raises ValueError when the counts do not sum to the rows."""
        ends = row_ends(rows, counts, len(self.local))
        if torch.is_autocast_enabled(rows.device.type):  # the products here are not on autocast's list
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        return self.run(rows, ends)

    def run(self, rows: Float[Tensor, "rows hidden"], ends: list[int]) -> Float[Tensor, "rows hidden"]:
        """All experts in one call of compiled code where it serves; else one after the other, each weight opened when used."""
        stacks = [tuple(getattr(self, f"{name}_{part}") for part in self.parts(*shape)) for name, shape in self.shapes.items()]
        if native.serves(rows, []) and all(size % 16 == 0 for size in self.shapes["down_proj"]):
            return native.experts(rows, ends, stacks)
        outputs = [self._expert(i, rows[start:end]) for i, (start, end) in enumerate(zip([0, *ends], ends)) if end > start]
        return torch.cat(outputs) if outputs else rows.clone()

    def _expert(self, i: int, x: Tensor) -> Tensor:
        gate, up = (_Product.apply(x, self, self._parts_of(i, name)) for name in ("gate_proj", "up_proj"))
        return _Product.apply(swiglu(gate, up), self, self._parts_of(i, "down_proj"))

    def _parts_of(self, i: int, projection: str) -> dict[str, Tensor]:
        """Views of what holds one projection of the i-th local expert."""
        return {part: getattr(self, f"{projection}_{part}")[i] for part in self.parts(*self.shapes[projection])}

    def weight(self, expert: int, projection: str, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The weight that the stored numbers stand for, of an expert by its global number; in float64 without any rounding."""
        if expert not in self.local:
            raise ValueError(f"expert {expert} does not live here; {self.local} do")
        return self.open(self._parts_of(self.local.index(expert), projection), dtype)

    # --- in and out --------------------------------------------------------------------------------------------------------

    @classmethod
    def from_weights(
        cls,
        config: MoEConfig,
        weights: Mapping[str, Tensor],
        local: range | None = None,
        device: torch.device | str | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ):
        """Quantise plain weights, named "<expert>.gate_proj.weight" and so on (another implementation's `to_hf()`).

        One weight at a time: a mapping that makes or reads its tensors when asked never has more than that in memory.
        `progress` wraps the loop over the experts, as tqdm does.
        """
        experts = cls(config, local, device)
        for i in progress(range(len(experts.local))):
            for projection, shape in experts.shapes.items():
                key = f"{experts.local[i]}.{projection}.weight"
                given = weights[key]
                if given.shape != shape:
                    raise ValueError(f"{key} has shape {list(given.shape)}; this config needs {list(shape)}")
                experts._store(i, projection, experts.close(given.detach()))
        return experts

    def random_(self, seed: int, std: float, progress: Callable[[Iterable], Iterable] = iter) -> None:
        """Random weights, drawn in their stored form. An expert's depend on the seed and its number alone, not on where it lives.

        `progress` wraps the loop over the experts, as tqdm does.
        """

        def fill(i: int) -> None:
            for n, projection in enumerate(PROJECTIONS):
                mine = self._parts_of(i, projection)
                drawn = {part: t if t.device.type == "cpu" else torch.empty_like(t, device="cpu") for part, t in mine.items()}
                self.draw(drawn, [seed, self.local[i], n], std)
                if drawn[part := next(iter(mine))] is not mine[part]:
                    self._store(i, projection, drawn)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy lets go of the interpreter while it draws
            for done in progress([pool.submit(fill, i) for i in range(len(self.local))]):
                done.result()

    def _store(self, i: int, projection: str, parts: Mapping[str, Tensor]) -> None:
        for part, mine in self._parts_of(i, projection).items():
            mine.copy_(parts[part])

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the checkpoint's tensors of each local expert, in this precision, bit by bit. Nothing changes unless all fit:
        ValueError names one whose shape or dtype is another."""
        own = self.to_hf()
        for key, mine in own.items():
            if tensors[key].shape != mine.shape or tensors[key].dtype != mine.dtype:
                found = f"{tensors[key].dtype} {list(tensors[key].shape)}"
                raise ValueError(f"{key} is {found}; these experts hold {mine.dtype} {list(mine.shape)}")
        for key, mine in own.items():
            mine.copy_(tensors[key])

    def to_hf(self) -> dict[str, Tensor]:
        """The tensors under the checkpoint's names, sharing memory with this module."""
        out = {}
        for i, expert in enumerate(self.local):
            for projection in PROJECTIONS:
                out |= {f"{expert}.{projection}.{part}": tensor for part, tensor in self._parts_of(i, projection).items()}
        return out

    def _apply(self, fn, recurse=True):
        # .to(bfloat16), .float() and the like pass here: follow to the device, never to another dtype
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if self._buffers[name].dtype != tensor.dtype:
                self._buffers[name] = tensor.to(self._buffers[name].device)
        return self


class _Product(torch.autograd.Function):
    """A product with a frozen weight. The backward opens the weight once more rather than keep it."""

    @staticmethod
    def forward(ctx, x, experts, parts):
        ctx.experts, ctx.parts = experts, parts
        return F.linear(x, experts.open(parts, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad @ ctx.experts.open(ctx.parts, grad.dtype), None, None
