"""The explorer of sixteen features: what a longer token does to gates, ups and products, and to a swap of the two."""

from __future__ import annotations

import functools
import math

import ipywidgets as W
import torch
from jaxtyping import Float
from torch import Tensor

from moe_lib.expert import SwiGLUExpert, swiglu
from moe_lib.explorers.base import BLUE, FAINT, GREEN, INK, ORANGE, VERMILION, Explorer, line, rect, says, svg, text
from moe_lib.explorers.expert import number

FEATURES, HIDDEN = 16, 64
SCALES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@functools.cache
def small_expert() -> SwiGLUExpert:
    """64 -> 16 -> 64, weights of a size that gives gate and up the spread of the token."""
    expert = SwiGLUExpert(HIDDEN, FEATURES, dtype=torch.float64).requires_grad_(False)
    draw = torch.Generator().manual_seed(1000)  # not a token's seed: its numbers would be the first row of weights
    for weight in expert.parameters():
        weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64) / weight.shape[1] ** 0.5)
    return expert


def features(scale: float, token: int) -> tuple[Float[Tensor, " inter"], Float[Tensor, " inter"]]:
    """gate and up of that many times a random token, whose entries have spread 1."""
    x = scale * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(token), dtype=torch.float64)
    expert = small_expert()
    return expert.gate_proj(x), expert.up_proj(x)


def draw_features(scale: float, token: int) -> str:
    """The sixteen gates and what SiLU leaves of them, ups, and products; a mark where a swap of gate and up would land."""
    gate, up = features(scale, token)
    a, h, swapped = swiglu(gate, torch.ones_like(gate)), swiglu(gate, up), swiglu(up, gate)
    rows = (
        ("gate (outline)", "a = SiLU(gate)", a, gate, ORANGE, True),
        ("", "u = up", up, up, BLUE, False),
        ("swapped (mark)", "h = a · u", h, swapped, GREEN, False),
    )
    body = "".join(_row(28.0 + 125 * i, *row) for i, row in enumerate(rows))
    body += "".join(text(_bar_x(i) + 13, 405.0, i, "middle") for i in range(FEATURES)) + text(120.0, 405.0, "feature", "end")
    opened = int((gate > 0).sum())
    label = f"Bars of sixteen features at {scale:g} times token {token}: a, u and h; {opened} gates are above zero"
    return svg(body, 800.0, 412.0, label) + says(_features_words(scale, token))


def _features_words(scale: float, token: int) -> str:
    gate, up = features(scale, token)
    h, twice = swiglu(gate, up), swiglu(*features(2 * scale, token))
    share = gate.sigmoid()
    shut, open_ = share[gate <= 0], share[gate > 0]
    passes = [f"{_range(part)} of each gate {where} 0" for part, where in ((open_, "above"), (shut, "below")) if len(part)]
    gap = (h - swiglu(up, gate)).norm() / h.norm()
    return (
        f"{scale:g} × token {token}: {len(open_)} of {FEATURES} gates are above 0. SiLU passes {' and '.join(passes)}. "
        f"Twice the token would make h {number((twice.norm() / h.norm()).item(), 2)} times as long. "
        f"With gate and up swapped, h would be off by {number(100 * gap.item(), 1)}% of its length."
    )


def _range(share: Float[Tensor, " some"]) -> str:
    least, most = (f"{100 * v:.0f}" for v in (share.min().item(), share.max().item()))
    return f"{least}%" if least == most else f"{least} to {most}%"


def _bar_x(i: int) -> float:
    return 154.0 + 40 * i


def _row(top: float, note: str, name: str, solid: Tensor, mark: Tensor, colour: str, outline: bool) -> str:
    """Solid bars with a frame or a short line at the other value; the scale is the row's own and its ends are written."""
    most = torch.cat([solid, mark]).abs().max().item()
    digits = max(0, 1 - math.floor(math.log10(most)))  # two that count
    middle, half = top + 50, 50.0
    parts = [
        text(120.0, middle - 4, name, "end", 'font-weight="bold"'),
        text(120.0, middle + 13, note, "end", 'font-size="11"'),
        line(130.0, middle, 794.0, middle, FAINT),
        text(146.0, top + 4, number(most, digits), "end", 'font-size="11"'),
        text(146.0, top + 100, number(-most, digits), "end", 'font-size="11"'),
    ]
    for i, (value, other) in enumerate(zip(solid.tolist(), mark.tolist())):
        x, y, o = _bar_x(i), middle - half * value / most, middle - half * other / most
        parts.append(rect(x, min(y, middle), 26.0, abs(y - middle), colour))
        if outline:
            parts.append(rect(x, min(o, middle), 26.0, abs(o - middle), "none", f'stroke="{INK}" stroke-opacity="0.6"'))
        elif other != value:
            parts.append(line(x - 3, o, x + 29, o, VERMILION, 'stroke-width="2.5"'))
    return "".join(parts)


def token_scale() -> Explorer:
    """Sixteen features of one small expert, the token's length on a slider."""
    return Explorer(
        draw_features,
        {
            "scale": W.SelectionSlider(options=[(f"× {s:g}", s) for s in SCALES], value=1.0, description="length of the token"),
            "token": W.IntSlider(0, min=0, max=20, description="token"),
        },
    )
