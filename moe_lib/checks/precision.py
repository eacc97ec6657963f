"""Checkers of notebook 06: open fp8 blocks, open packed int4 groups, quantise a weight into int4 groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_lib.checks.base import Wrong, checker, given
from moe_lib.experts import fp8, int4


@checker
def check_fp8(answer: Callable) -> str:
    """answer(weight float8_e4m3fn [out, in], scale_inv float32) -> float32 [out, in]; blocks of 128 x 128, partial at the edges."""
    shapes = ((256, 384), (256, 256), (300, 200), (1, 129), (64, 7))
    for rows, columns in shapes:
        generator = _fresh()
        w = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
        weight, scale = fp8.quantise(w)
        scale *= torch.rand(scale.shape, generator=generator) + 0.5  # no two alike
        where = f"with a weight of {rows} x {columns} and scales of {list(scale.shape)}"
        got = _call(answer, where, weight, scale)
        right = fp8.dequantise(weight, scale)
        _like(got, right, where)
        numbers, everywhere = weight.float(), fp8.spread(scale, rows, columns)
        faults = {
            "it divides by scale_inv; in spite of its name it is the factor to multiply with": numbers / everywhere,
            "the scales are left out: these are the stored numbers, between -448 and 448": numbers,
            "the scales are applied twice": right * everywhere,
            "all blocks get the first block's scale": numbers * scale[0, 0],
            "the scales are in bfloat16 by the time they are used; they are float32 and stay so": numbers * everywhere.bfloat16(),
        }
        if scale.shape[0] == scale.shape[1] and len(scale) > 1:
            faults["the scales are transposed: scale_inv[i, j] belongs to rows 128 i and columns 128 j"] = numbers * fp8.spread(
                scale.T.contiguous(), rows, columns
            )
        if len(scale) > 1:
            faults["only the first row of scales is used: rows have blocks of 128 too"] = numbers * fp8.spread(
                scale[:1].expand_as(scale), rows, columns
            )
        _name(got, right, faults, where)
    return f"equal to the formula on {len(shapes)} random weights, with partial blocks at both edges"


@checker
def check_int4(answer: Callable) -> str:
    """answer(packed int32 [out, in / 8], scale bfloat16 [out, in / 32]) -> float32 [out, in]."""
    shapes = ((6, 256), (8, 64), (1, 32))
    for rows, columns in shapes:
        generator = _fresh()
        packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).to(torch.int32)
        scale = (torch.rand(rows, columns // 32, generator=generator) + 0.5).bfloat16()
        where = f"with a weight of {rows} x {columns}"
        got = _call(answer, where, packed, scale)
        right = int4.dequantise(packed, scale)
        _like(got, right, where)
        numbers, each = int4.unpack(packed, torch.float32), scale.float().repeat_interleave(32, 1)
        in_eights, in_bytes = numbers.unflatten(1, (-1, 8)), numbers.unflatten(1, (-1, 2))
        nibble = numbers + 8
        faults = {
            "the nibbles of each int32 come out in the wrong order: value 0 sits at the lowest bits": in_eights.flip(2).flatten(1)
            * each,
            "the two nibbles of each byte are swapped: the even value is the low nibble": in_bytes.flip(2).flatten(1) * each,
            "the values come bit by bit, all first ones, then all second ones: eight neighbours share an int32": (
                in_eights.transpose(1, 2).flatten(1) * each
            ),
            "the zero point is off by one: a nibble n stands for n - 8, not n - 7": (numbers + 1) * each,
            "the zero point is off by one: a nibble n stands for n - 8, not n - 9": (numbers - 1) * each,
            "the zero point is missing: a nibble n stands for n - 8, and half of all weights are negative": nibble * each,
            "nibbles are read in two's complement; here a nibble n stands for n - 8": torch.where(nibble > 7, nibble - 16, nibble)
            * each,
            "the shift brought the sign bit along: mask with 15 after shifting": _signed(packed) * each,
            "it divides by the scale": numbers / each,
            "the scales are left out": numbers,
            "scales go round the row instead of one for each 32 neighbours (repeat, not repeat_interleave)": (
                numbers * scale.float().repeat(1, 32)
            ),
        }
        if rows == columns // 32:
            faults["the scales are transposed"] = numbers * scale.float().T.repeat_interleave(32, 1)
        _name(got, right, faults, where)
    return f"equal to the checkpoint's format on {len(shapes)} random weights"


@checker
def check_quantise(answer: Callable) -> str:
    """answer(weight float32 [out, in]) -> (numbers int8 of -8 ... 7 [out, in], scale [out, in / 32])."""
    shapes = ((5, 96), (3, 32))
    for rows, columns in shapes:
        generator = _fresh()
        w = torch.randn(rows, columns, generator=generator) * 10 ** (2 * torch.rand(rows, 1, generator=generator) - 1)
        w[0, :32] = 0  # a group of zeros
        w[1, 5], w[2, 7] = -9 * w[1].abs().max(), 9 * w[2].abs().max()  # an outlier of each sign
        where = f"with a weight of {rows} x {columns}, a group of zeros and two outliers"
        both = _call(answer, where, w)
        if not isinstance(both, tuple) or len(both) != 2:
            raise Wrong(f"it returned a {type(both).__name__}; expected the pair (numbers, scale)")
        _judge_quantise(*both, w, where)
    return f"every weight within half a step of its scale on {len(shapes)} random weights, zeros and outliers included"


def _judge_quantise(numbers: Tensor, scale: Tensor, w: Tensor, where: str) -> None:
    if numbers.shape != w.shape or scale.shape != (len(w), w.shape[1] // 32):
        raise Wrong(
            f"{where}, numbers are {list(numbers.shape)} and scales {list(scale.shape)}; expected one scale for each 32 in a row"
        )
    if numbers.is_floating_point():
        raise Wrong(f"numbers are {numbers.dtype}; expected whole numbers, int8")
    if not scale.isfinite().all() or not (numbers[0, :32] == 0).all():
        raise Wrong("a group of zeros must stay zeros, with a finite scale: its largest magnitude is 0, and 0 / 0 is not a number")
    if numbers.min() < -8 or numbers.max() > 7:
        raise Wrong(f"numbers run from {numbers.min()} to {numbers.max()}; four bits hold -8 to 7: clamp")
    largest = w.unflatten(1, (-1, 32)).abs().amax(2)
    steps = (largest / scale.float()).nan_to_num(7.5)[largest > 0]
    if (steps > 8.6).any():
        raise Wrong(
            f"{where}, the largest magnitude of a group is {steps.max():.1f} steps of its scale, and four bits reach 8 at most: "
            "take the largest |w|, of positive and negative ones, and divide it by 7.5"
        )
    if (steps < 6.9).any():
        raise Wrong(
            f"{where}, the largest magnitude of a group is only {steps.min():.1f} steps of its scale, so some of the sixteen "
            "values are never used; divide each group's own largest |w| by 7.5"
        )
    each = scale.float().repeat_interleave(32, 1)
    off = ((numbers.float() * each - w) / each.clamp_min(1e-30)).abs()
    if off.max() > 1.1:
        raise Wrong(f"{where}, a weight is off by {off.max():.1f} steps; numbers times the scale of their group should be near w")
    if off.max() > 0.6 and (numbers.float() * each - w).mean() < 0:
        raise Wrong("weights are rounded down (floor, or a cast); round to the nearest")
    if off.max() > 0.6:
        raise Wrong(f"{where}, a weight is off by {off.max():.2f} steps; rounding to the nearest leaves half a step at most")


# --- shared by the three ---------------------------------------------------------------------------------------------


def _fresh() -> torch.Generator:
    """New random numbers at every call, and the notebook's own seed left alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _signed(packed: Tensor) -> Tensor:
    """What shifts without a mask give, as far as a float can tell."""
    return torch.stack([(packed >> 4 * i) - 8 for i in range(8)], 2).flatten(1).float()


def _call(answer: Callable, where: str, *tensors: Tensor) -> object:
    """The answer on copies; an exception in it is told with the case that raised it."""
    copies = [tensor.clone() for tensor in tensors]
    try:
        result = given(answer(*copies))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"{where}, it raised {type(error).__name__}: {error}") from error
    if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(copies, tensors)):
        raise Wrong("it changes its arguments in place; the checkpoint's tensors are needed again")
    return result


def _like(got: object, right: Tensor, where: str) -> None:
    if not isinstance(got, Tensor):
        raise Wrong(f"it returned a {type(got).__name__}; expected a tensor of shape {list(right.shape)}")
    if got.shape != right.shape:
        raise Wrong(f"{where}, the result has shape {list(got.shape)}; expected {list(right.shape)}")
    if got.dtype != torch.float32:
        raise Wrong(f"the result is {got.dtype}; expected torch.float32")


def _name(got: Tensor, right: Tensor, faults: Mapping[str, Tensor], where: str) -> None:
    """Raise Wrong unless `got` is right: in the words of the fault whose result it is, or with the first place that is wrong."""
    if torch.allclose(got, right, rtol=1e-6, atol=0):
        return
    for words, wrong in faults.items():
        if not torch.allclose(wrong, right, rtol=1e-6, atol=0) and torch.allclose(got, wrong, rtol=1e-6, atol=1e-12):
            raise Wrong(words)
    r, c = (~torch.isclose(got, right, rtol=1e-6, atol=0)).nonzero()[0].tolist()
    raise Wrong(f"{where}, the weight at row {r}, column {c} is {got[r, c]:.6g}; it should be {right[r, c]:.6g}")
