"""Experts in int4: 32 neighbouring weights share a bfloat16 scale, packed as in Kimi K2's int4 releases (compressed-tensors)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Int32
from torch import Tensor

from moe_lib.config import MoEConfig
from moe_lib.experts import native
from moe_lib.experts.quantised import QuantisedExperts

GROUP = 32


def quantise(
    weight: Float[Tensor, "out in"], group: int = GROUP
) -> tuple[Int32[Tensor, "out in_by_8"], BFloat16[Tensor, "out groups"]]:
    """(weight_packed, weight_scale): the largest magnitude of a group becomes 7.5, and numbers are rounded to -8 … 7.

    Raises ValueError when the groups do not fill the rows, or a weight is not finite. Source: compressed-tensors,
    calculate_qparams, symmetric, 4 bits.
    """
    rows, columns = weight.shape
    if columns % group or columns % 8:
        raise ValueError(f"rows of {columns} weights; int4 here needs a multiple of the group of {group}, and of 8")
    if not weight.isfinite().all():
        raise ValueError("the weight holds a value that is not finite; it has no scale")
    grouped = weight.to(torch.float32).unflatten(1, (-1, group))
    scale = (grouped.abs().amax(2) / 7.5).to(torch.bfloat16)
    divide_by = torch.where(scale > 0, scale, 1).to(torch.float32)  # the scale as it is stored, rounded
    numbers = (grouped / divide_by[..., None]).round().clamp(-8, 7).to(torch.int8)
    return pack(numbers.flatten(1)), scale


def pack(numbers: Tensor) -> Int32[Tensor, "out in_by_8"]:
    """Eight numbers of -8 … 7 along a row into one int32: each plus 8, the i-th at bits 4i."""
    nibbles = (numbers + 8).to(torch.uint8).unflatten(1, (-1, 2))
    pairs = nibbles[..., 0] | nibbles[..., 1] << 4  # four bytes are an int32, the lowest first
    return pairs.contiguous().view(torch.int32)


def unpack(packed: Int32[Tensor, "out in_by_8"], dtype: torch.dtype = torch.int8) -> Tensor:
    """The numbers -8 … 7, [out, in]. Two at a time by a table of all 256 bytes."""
    pairs = torch.arange(256, device=packed.device)
    table = (torch.stack([pairs & 15, pairs >> 4], 1) - 8).to(dtype)
    return table.index_select(0, packed.contiguous().view(torch.uint8).flatten().int()).view(len(packed), -1)


def dequantise(
    weight_packed: Int32[Tensor, "out in_by_8"], weight_scale: Float[Tensor, "rows groups"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "out in"]:
    """(nibble - 8) * scale of its group; exact in float32. Raises ValueError when the scales do not fit."""
    rows, columns = len(weight_packed), 8 * weight_packed.shape[1]
    if len(weight_scale) != rows or columns % weight_scale.shape[1]:
        raise ValueError(f"scales {list(weight_scale.shape)} for a weight [{rows}, {columns}]; expected one row of groups for each")
    numbers = unpack(weight_packed, dtype).view(rows, weight_scale.shape[1], -1)
    return numbers.mul_(weight_scale.to(dtype)[..., None]).view(rows, columns)


class Int4Experts(QuantisedExperts):
    """Experts held in int4: 4.5 bits a weight.

    Rows in bfloat16 on a CPU meet the packed weights in the compiled experts_forward of kernels.c: up to 16 rows of an expert as
    they lie, with the scale in float32; more rows meet them opened to bfloat16, a few rows of weights at a time. Anywhere else, for
    a gradient, and without a C compiler, each projection is dequantised when it is used, which is slower; a warning says the last.
    Raises ValueError in the constructor when the config's sizes are not multiples of 32.
    """

    def __init__(self, config: MoEConfig, local: range | None = None, device: torch.device | str | None = None) -> None:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % GROUP:
                raise ValueError(f"{name} is {getattr(config, name)}; int4 shares a scale among {GROUP}, so it must be a multiple")
        super().__init__(config, local, device)

    def parts(self, out_size: int, in_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight_packed": ((out_size, in_size // 8), torch.int32),
            "weight_scale": ((out_size, in_size // GROUP), torch.bfloat16),
        }

    def close(self, weight: Float[Tensor, "out in"]) -> dict[str, Tensor]:
        return dict(zip(("weight_packed", "weight_scale"), quantise(weight)))

    def open(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Float[Tensor, "out in"]:
        if dtype == torch.bfloat16 and parts["weight_packed"].device.type == "cpu" and native.kernels()[0]:
            return native.dequantise(parts["weight_packed"], parts["weight_scale"])
        return dequantise(parts["weight_packed"], parts["weight_scale"], dtype)

    def run(self, rows: Float[Tensor, "rows hidden"], ends: list[int]) -> Float[Tensor, "rows hidden"]:
        library, why = native.kernels()
        if library is None and rows.device.type == "cpu":
            warnings.warn(f"int4 runs without its compiled kernel, tens of times slower: {why}", stacklevel=2)
        return super().run(rows, ends)

    def draw(self, parts: Mapping[str, Tensor], seed: Sequence[int], std: float) -> None:
        # The sum of two three-bit numbers and one, in all sixteen nibbles of a word at once: 1 … 15 with 8 in the middle and a
        # standard deviation of 3.24. Rounding Gaussian weights gives 3.1 (the largest of 32 is 2.4 of theirs, and becomes 7.5).
        source, words = np.random.SFC64(seed), parts["weight_packed"].view(-1).numpy().view(np.uint64)
        for at in range(0, len(words), 2**17):
            piece = words[at : at + 2**17]
            np.bitwise_and(source.random_raw(len(piece)), 0x7777777777777777, out=piece)
            piece += source.random_raw(len(piece)) & np.uint64(0x7777777777777777)
            piece += np.uint64(0x1111111111111111)
        scale = parts["weight_scale"]
        jitter = torch.from_numpy(np.random.Generator(source).random(scale.shape, dtype=np.float32)) / 2 + 0.75
        scale.copy_(jitter * (std / (2 * (8**2 - 1) / 12 * 49 / 48) ** 0.5))  # 49/48 is what the jitter adds to the square

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        for key, shape in self._weight_shapes().items():
            if tensors[key].tolist() != shape.tolist():
                raise ValueError(f"{key} says {tensors[key].tolist()}; these experts hold weights of {shape.tolist()}")
        super().load_hf(tensors)

    def to_hf(self) -> dict[str, Tensor]:
        return super().to_hf() | self._weight_shapes()

    def _weight_shapes(self) -> dict[str, Tensor]:
        sizes = {projection: torch.tensor(shape, dtype=torch.int32) for projection, shape in self.shapes.items()}
        return {f"{expert}.{projection}.weight_shape": size for expert in self.local for projection, size in sizes.items()}
