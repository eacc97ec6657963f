"""Experts in fp8: e4m3 numbers with one float32 scale for every 128 x 128 block, as Kimi K2's checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from moe_lib.experts import native
from moe_lib.experts.quantised import QuantisedExperts

BLOCK = 128
E4M3_MAX = 448.0  # S.1111.110: the largest number; S.1111.111 is NaN and there is no infinity


def quantise(
    weight: Float[Tensor, "out in"], block: int = BLOCK
) -> tuple[Float[Tensor, "out in"], Float32[Tensor, "out_blocks in_blocks"]]:
    """(weight in float8_e4m3fn, scale_inv): in each block the largest magnitude becomes 448. Blocks at the edges may be partial.

    Dequantise by *multiplying* with scale_inv; the name is the checkpoint's. Raises ValueError for non-finite weights.
    """
    if not weight.isfinite().all():
        raise ValueError("the weight holds a value that is not finite; it has no scale")
    rows, columns = weight.shape
    w = weight.to(torch.float32)
    padded = torch.nn.functional.pad(w.abs(), (0, -columns % block, 0, -rows % block))
    largest = padded.unflatten(1, (-1, block)).amax(2).unflatten(0, (-1, block)).amax(1)
    scale_inv = torch.where(largest > 0, largest / E4M3_MAX, 1.0)  # a block of zeros needs none, but not 0/0
    numbers = (w / spread(scale_inv, rows, columns, block)).clamp(-E4M3_MAX, E4M3_MAX)
    return numbers.to(torch.float8_e4m3fn), scale_inv


def dequantise(
    weight: Float[Tensor, "out in"],
    scale_inv: Float[Tensor, "out_blocks in_blocks"],
    block: int = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "out in"]:
    """weight times the scale of its block, rounded once to `dtype`. Raises ValueError when the scales do not fit.

    Source: the checkpoint's config.json, quantization_config.weight_block_size.
    """
    rows, columns = weight.shape
    fits = (-(-rows // block), -(-columns // block))
    if scale_inv.shape != fits:
        raise ValueError(f"scales {list(scale_inv.shape)} for a weight {list(weight.shape)}; blocks of {block} need {list(fits)}")
    # the numbers have 4 bits and the scales 24: a float32 product rounds, a float64 one does not
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return (_numbers(weight, exact) * spread(scale_inv.to(exact), rows, columns, block)).to(dtype)


def spread(scales: Tensor, rows: int, columns: int, block: int = BLOCK) -> Tensor:
    """Each block's scale at each of its weights: [rows, columns]."""
    return scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def _numbers(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype != torch.float8_e4m3fn:
        return weight.to(dtype)
    # by table: torch's own cast of float8 on a CPU takes several times as long
    table = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn).to(dtype)
    return table.index_select(0, weight.contiguous().view(torch.uint8).flatten().int()).view(weight.shape)


class Fp8Experts(QuantisedExperts):
    """Experts held in fp8: half of bfloat16's bytes, and a scale for every 16,384 weights.

    Rows in bfloat16 on a CPU meet the weights in the compiled experts_forward of kernels.c, which opens a few rows of weights to
    bfloat16 at a time. Anywhere else, for a gradient, and without a C compiler, each projection is dequantised when it is used.
    """

    def parts(self, out_size: int, in_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        blocks = (-(-out_size // BLOCK), -(-in_size // BLOCK))
        return {"weight": ((out_size, in_size), torch.float8_e4m3fn), "weight_scale_inv": (blocks, torch.float32)}

    def close(self, weight: Float[Tensor, "out in"]) -> dict[str, Tensor]:
        return dict(zip(("weight", "weight_scale_inv"), quantise(weight)))

    def open(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Float[Tensor, "out in"]:
        weight, scale_inv = parts["weight"], parts["weight_scale_inv"]
        if dtype == torch.bfloat16 and weight.device.type == "cpu" and native.kernels()[0]:
            return native.dequantise(weight, scale_inv)
        return dequantise(weight, scale_inv, dtype=dtype)

    def draw(self, parts: Mapping[str, Tensor], seed: Sequence[int], std: float) -> None:
        # By table: 65,536 quantiles of a Gaussian whose largest would be 448, which is 4.3 standard deviations in a block.
        random = np.random.Generator(np.random.SFC64(seed))
        quantiles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
        table = (torch.special.ndtri(quantiles) * E4M3_MAX / 4.3).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        numbers, table = parts["weight"].view(-1).view(torch.uint8).numpy(), table.view(torch.uint8).numpy()
        for at in range(0, len(numbers), 2**18):
            piece = numbers[at : at + 2**18]
            np.take(table, random.integers(0, 2**16, len(piece), dtype=np.uint16), out=piece)
        scale = parts["weight_scale_inv"]
        scale.copy_(torch.from_numpy(random.random(scale.shape, dtype=np.float32)) * 0.2 + 0.9).mul_(std * 4.3 / E4M3_MAX)
