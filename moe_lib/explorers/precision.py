"""Explorer of notebook 06: one outlier among Gaussian weights, and which of its neighbours pay for it."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import ipywidgets as W
import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from moe_lib.experts import fp8, int4
from moe_lib.explorers.base import BLUE, FAINT, INK, ORANGE, SKY, VERMILION, Explorer, line, rect, says, svg, text

SIZE = 256  # the piece of a weight that is shown
OUTLIER = (100, 140)
FORMATS = {"fp8 (e4m3, square blocks)": "fp8", "int4 (groups along a row)": "int4"}
BLOCKS = (8, 16, 32, 64, 128, 256)
MAP, LEFT, TOP = 384, 8, 40  # of the drawing, in pixels
FULL = 0.5  # the error that is drawn darkest, in standard deviations of the weights


@dataclass(frozen=True)
class Opened:
    """A weight, what is left of it after a trip through a format, and what that takes."""

    weight: Float[Tensor, "size size"]
    opened: Float[Tensor, "size size"]
    block: tuple[slice, slice]
    """The block or group that the outlier lies in."""
    values: Float[Tensor, " values"]
    """What a weight of that block can become."""
    bits: float
    """For each weight, its share of the scales included."""

    @property
    def error(self) -> Float[Tensor, "size size"]:
        return (self.opened - self.weight).abs()


def through(kind: str, block: int, outlier: float | int, seed: int = 0) -> Opened:
    """Gaussian weights of standard deviation 1, one of them `outlier`, quantised and opened again."""
    w = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    w[OUTLIER] = outlier
    r, c = OUTLIER
    across = slice(c // block * block, (c // block + 1) * block)
    if kind == "fp8":
        numbers, scale = fp8.quantise(w, block)
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = every[every.isfinite()].unique() * scale[r // block, c // block]
        rows = slice(r // block * block, (r // block + 1) * block)
        return Opened(w, fp8.dequantise(numbers, scale, block), (rows, across), values, 8 + 32 / block**2)
    packed, scale = int4.quantise(w, block)
    values = torch.arange(-8, 8) * scale[r, c // block].float()
    return Opened(w, int4.dequantise(packed, scale), (slice(r, r + 1), across), values, 4 + 16 / block)


def draw_precision(kind: str, block: int, outlier: float | int, seed: int) -> str:
    """The map of errors, the block's numbers on a line, and the sums in a sentence."""
    o = through(kind, block, outlier, seed)
    inside, elsewhere, lost = _sums(o)
    label = (
        f"Error of {SIZE} by {SIZE} weights in {kind} with {'blocks' if kind == 'fp8' else 'groups'} of {block}, one weight being "
        f"{outlier:g}: around it {inside:.3f}, elsewhere {elsewhere:.3f}"
    )
    return svg(_map(o) + _line(o), 2 * LEFT + MAP + 470, TOP + MAP + 30, label) + says(_sentence(o, outlier))


def precision() -> Explorer:
    """Four controls: format, block, the outlier's size and the seed."""
    controls = {
        "kind": W.Dropdown(options=list(FORMATS.items()), value="int4", description="format"),
        "block": W.SelectionSlider(options=BLOCKS, value=32, description="block or group size"),
        "outlier": W.SelectionSlider(options=(0, 2, 5, 10, 20, 50, 100, 200), value=20, description="outlier (std. dev.)"),
        "seed": W.IntSlider(0, 0, 20, description="seed"),
    }
    return Explorer(draw_precision, controls)


def _others(o: Opened) -> Tensor:
    mask = torch.ones_like(o.weight, dtype=torch.bool)
    mask[OUTLIER] = False
    return mask


def _sums(o: Opened) -> tuple[float, float, int]:
    """Root mean square error of the outlier's neighbours in its block, of all others, and how many neighbours became zero."""
    near = torch.zeros_like(_others(o))
    near[o.block] = True
    near &= _others(o)
    rms = [o.error[m].square().mean().sqrt().item() if m.any() else 0.0 for m in (near, _others(o) & ~near)]
    return rms[0], rms[1], int(((o.opened == 0) & near).sum())


def _sentence(o: Opened, outlier: float | int) -> str:
    inside, elsewhere, lost = _sums(o)
    neighbours = o.weight[o.block].numel() - 1
    whole = o.weight.numel() * o.bits / 8 / 1024
    rms = (o.opened - o.weight)[_others(o)].square().mean().sqrt().item()
    return (
        f"{o.bits:.3g} bits a weight, scales included: {whole:.1f} KiB where bfloat16 takes 128. Relative error of the weights "
        f"{100 * rms:.1f} %. The outlier of {outlier:g} standard deviations shares its scale with {neighbours:,} neighbours: "
        f"their error is {100 * inside:.1f} %, that of all others {100 * elsewhere:.1f} %, and {lost:,} of the neighbours became 0."
    )


def _map(o: Opened) -> str:
    """A pixel a weight, as dark as its error; the block around the outlier is framed."""
    levels = (255 * (o.error / FULL).clamp(0, 1)).to(torch.uint8).numpy()
    picture = np.zeros((SIZE, SIZE, 4), dtype=np.uint8)
    picture[..., :3] = tuple(bytes.fromhex(VERMILION[1:]))
    picture[..., 3] = levels  # no error is transparent, so that the picture follows the page's theme
    png = io.BytesIO()
    Image.fromarray(picture, "RGBA").save(png, "PNG", compress_level=1)
    data = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    scale = MAP / SIZE
    rows, columns = o.block
    frame = 'stroke-width="1.5" stroke="' + BLUE + '"'
    x, y = LEFT + columns.start * scale, TOP + rows.start * scale
    wide, high = (columns.stop - columns.start) * scale, (rows.stop - rows.start) * scale
    return (
        text(LEFT, 16, "Error of each weight", extra='font-weight="bold"')
        + text(LEFT, 32, f"darkest: {FULL:g} standard deviations · frame: shares the outlier's scale")
        + f'<image x="{LEFT}" y="{TOP}" width="{MAP}" height="{MAP}" href="{data}" style="image-rendering:pixelated"/>'
        + rect(LEFT, TOP, MAP, MAP, "none", f'stroke="{FAINT}"')
        + rect(x - 1.5, y - 1.5, wide + 3, high + 3, "none", frame)
    )


def _line(o: Opened) -> str:
    """Up to 40 neighbours of the outlier: each as a dot, and the value that it became."""
    left, wide = LEFT + MAP + 50, 400
    block = o.weight[o.block].flatten()
    opened = o.opened[o.block].flatten()
    step = max(1, len(block) // 40)
    pairs = [(w, v) for w, v in zip(block[::step].tolist(), opened[::step].tolist()) if abs(w) <= 3.5][:40]

    def at(value: float | int) -> float:
        return left + wide * (value + 3.5) / 7

    top, bottom = TOP + 90, TOP + 250
    ticks = [v for v in o.values.tolist() if abs(v) <= 3.5]
    parts = [
        text(left, 16, "Neighbours of the outlier, and what they became", extra='font-weight="bold"'),
        text(left, 32, f"{len(ticks)} of the format's {len(o.values)} values lie within 3.5 standard deviations"),
        text(left, top - 14, "weights"),
        text(left, bottom + 34, "values there are"),
    ]
    parts += [line(at(w), top, at(v), bottom, SKY, 'stroke-opacity=".8"') for w, v in pairs]
    parts += [f'<circle cx="{at(w):.1f}" cy="{top}" r="3.5" fill="{BLUE}"/>' for w, _ in pairs]
    parts += [line(at(v), bottom, at(v), bottom + 14, ORANGE, 'stroke-width="1.2"') for v in ticks]
    parts += [line(left, bottom, left + wide, bottom, INK)]
    parts += [text(at(v), bottom + 54, v, "middle", 'font-size="11"') for v in (-3, -2, -1, 0, 1, 2, 3)]
    return "".join(parts)
