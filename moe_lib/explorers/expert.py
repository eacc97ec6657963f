"""The explorer of one gated feature: its point on the surface h(gate, up), and the slopes there."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import dataclass

import ipywidgets as W
import torch
from PIL import Image

from moe_lib.expert import swiglu
from moe_lib.explorers.base import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, VERMILION, Explorer, line, rect, says, svg, text

GATE, UP = 5.0, 4.0  # the surface reaches from -GATE to GATE and from -UP to UP
LEVELS = (0.25, 1.0, 4.0, 12.0)


def number(value: float, digits: int = 3) -> str:
    """With a real minus sign, and none before a value that rounds to zero."""
    rounded = round(value, digits) + 0.0
    return f"{rounded:.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class Feature:
    """One feature of an expert: what comes out, and how it answers to a small step of gate, of a and of up."""

    gate: float
    up: float
    a: float
    h: float
    by_gate: float
    by_a: float
    by_up: float
    silu_slope: float


def feature(gate: float, up: float) -> Feature:
    """The values by swiglu and the slopes by autograd."""
    g, u = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (gate, up))
    a = swiglu(g, torch.ones_like(g))
    h = swiglu(g, u)
    (silu_slope,) = torch.autograd.grad(a, g)
    by_gate, by_up = torch.autograd.grad(h, (g, u))
    b = a.detach().requires_grad_()
    (by_a,) = torch.autograd.grad(b * u, b)
    return Feature(gate, up, a.item(), h.item(), by_gate.item(), by_a.item(), by_up.item(), silu_slope.item())


def draw_gate(gate: float, up: float) -> str:
    """The surface h(gate, up) with the feature on it, the two cuts through it with their slopes, and a sentence."""
    f = feature(gate, up)
    reach = 1.15 * max(1.0, 1.5 * abs(up), abs(f.h))
    label = (
        f"The surface h = SiLU(gate) times up; at gate {number(gate, 1)}, up {number(up, 1)}, h is {number(f.h)}. "
        f"Beside it two cuts: along gate the slope is {number(f.by_gate)}, along up {number(f.by_up)}"
    )
    body = _surface() + _point(f) + _cut_along_gate(f, reach) + _cut_along_up(f, reach)
    return svg(body, 800.0, 400.0, label) + says(_feature_words(f))


def _feature_words(f: Feature) -> str:
    if f.a > 0.05:
        state = "The gate is open: h follows up, a times."
    elif f.a < -0.05:
        state = "The gate is below zero, yet not shut: a little of up comes through, with its sign turned over."
    else:
        state = "The gate is shut: whatever up is, h stays near 0, and up learns next to nothing."
    return (
        f"a = SiLU({number(f.gate, 1)}) = {number(f.a)}, so h = a · u = {number(f.a)} × {number(f.up, 1)} = {number(f.h)}. {state} "
        f"Slopes: ∂h/∂u = a = {number(f.by_up)}; ∂h/∂a = u = {number(f.by_a, 1)}, and on to gate "
        f"u · SiLU′(gate) = {number(f.up, 1)} × {number(f.silu_slope)} = {number(f.by_gate)}."
    )


LEFT, TOP, WIDE, HIGH = 46.0, 28.0, 350.0, 330.0  # the surface
CUT_LEFT, CUT_WIDE, CUT_HIGH = 500.0, 290.0, 135.0  # the two cuts


def _at(gate: float, up: float) -> tuple[float, float]:
    return LEFT + (gate + GATE) / (2 * GATE) * WIDE, TOP + (UP - up) / (2 * UP) * HIGH


@functools.cache
def _surface() -> str:
    """What does not move: colours, level lines, axes."""
    lines = "".join(_level(sign * level) for level in LEVELS for sign in (1, -1))
    parts = [
        rect(LEFT, TOP, WIDE, HIGH, PAPER, f'stroke="{FAINT}"'),
        f'<image x="{LEFT:g}" y="{TOP:g}" width="{WIDE:g}" height="{HIGH:g}" preserveAspectRatio="none" href="{_heat()}"/>',
        f'<svg x="{LEFT:g}" y="{TOP:g}" width="{WIDE:g}" height="{HIGH:g}">{lines}</svg>',
        line(*_at(0.0, UP), *_at(0.0, -UP), extra='stroke-opacity="0.6"'),
        line(*_at(-GATE, 0.0), *_at(GATE, 0.0), extra='stroke-opacity="0.6"'),
        text(LEFT + WIDE / 2, TOP + HIGH + 36, "gate", "middle", 'font-weight="bold"'),
        text(14.0, TOP + HIGH / 2, "up", "middle", f'font-weight="bold" transform="rotate(-90 14 {TOP + HIGH / 2})"'),
    ]
    for tick in (-4.0, -2.0, 0.0, 2.0, 4.0):
        parts += [text(_at(tick, 0.0)[0], TOP + HIGH + 18, number(tick, 0), "middle")]
        parts += [text(LEFT - 6, _at(0.0, tick)[1] + 4, number(tick, 0), "end")]
    for level in LEVELS[1:]:  # named where the line meets the edge, which is where SiLU(gate) = level / UP
        x = _at(_gate_of(level / UP), 0.0)[0]
        parts += [text(x, TOP - 6, f"{level:g}", "middle", 'font-size="11"')]
        parts += [text(x, TOP + HIGH - 5, f"−{level:g}", "middle", 'font-size="11"')]
    parts += [text(LEFT, TOP - 6, "lines of equal h:", extra='font-size="11"')]
    return "".join(parts)


def _gate_of(a: float) -> float:
    """The gate above 0 where SiLU is `a`."""
    gates = torch.linspace(0, GATE, 4001, dtype=torch.float64)
    return gates[(swiglu(gates, torch.ones_like(gates)) - a).abs().argmin()].item()


def _level(h: float) -> str:
    """Where the product is h: up = h / SiLU(gate), on either side of gate = 0."""
    paths = []
    for side in (torch.linspace(0.02, GATE, 120), torch.linspace(-GATE, -0.02, 120)):
        ups = (h / swiglu(side, torch.ones_like(side))).clamp(-3 * UP, 3 * UP)
        paths.append(_path([_at(g, u) for g, u in zip(side.tolist(), ups.tolist())], -LEFT, -TOP))
    return "".join(f'<path d="{d}" fill="none" stroke="{INK}" stroke-opacity="0.35"/>' for d in paths)


def _path(points: list[tuple[float, float]], dx: float = 0.0, dy: float = 0.0) -> str:
    return "M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for x, y in points)


def _heat() -> str:
    """The surface as a picture: orange above zero, blue below, and the paler the nearer to zero, whatever the page's colour."""
    gates, ups = torch.linspace(-GATE, GATE, 100), torch.linspace(UP, -UP, 80)
    h = swiglu(gates.expand(80, 100), ups[:, None].expand(80, 100))
    strength = (h.abs() / h.abs().max()).sqrt() * 0.9
    colours = torch.tensor([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (BLUE, ORANGE)])
    pixels = torch.cat([colours[(h > 0).long()], (255 * strength).round().long()[..., None]], dim=-1).byte()
    png = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{VERMILION}" stroke="{PAPER}" stroke-width="2"/>'


def _point(f: Feature) -> str:
    x, y = _at(f.gate, f.up)
    dashed = 'stroke-dasharray="4 3" stroke-opacity="0.8"'
    across = line(LEFT, y, LEFT + WIDE, y, extra=dashed) + line(x, TOP, x, TOP + HIGH, extra=dashed)
    side, dx = ("end", -10) if f.gate > 2.5 else ("start", 10)
    return across + _dot(x, y) + text(x + dx, y - 9 if f.up < 3.5 else y + 18, f"h = {number(f.h)}", side, 'font-weight="bold"')


def _cut(top: float, title: str, reach: float, curve: list[tuple[float, float]], here: float, h: float, slope: float) -> str:
    """h along gate or up, as far as `curve` goes, with its tangent `here`; heights from -reach to reach."""
    half = curve[-1][0]

    def at(v: float, y: float) -> tuple[float, float]:
        return (v + half) / (2 * half) * CUT_WIDE, (reach - y) / (2 * reach) * CUT_HIGH

    step = min(1.2, 0.8 * reach / max(abs(slope), 1e-9))
    x1, y1 = at(here - step, h - step * slope)
    x2, y2 = at(here + step, h + step * slope)
    inside = (
        line(*at(-half, 0.0), *at(half, 0.0), FAINT)
        + line(*at(0.0, reach), *at(0.0, -reach), FAINT)
        + f'<path d="{_path([at(v, y) for v, y in curve])}" fill="none" stroke="{GREEN}" stroke-width="2"/>'
        + line(x1, y1, x2, y2, VERMILION, 'stroke-width="4" stroke-linecap="round"')
        + _dot(*at(here, h))
    )
    heights = (0.85 * reach, 0.0, -0.85 * reach)
    ticks = [v for v in (-4.0, -2.0, 0.0, 2.0, 4.0) if abs(v) <= half]
    return (
        text(CUT_LEFT, top - 8, title, extra='font-weight="bold"')
        + rect(CUT_LEFT, top, CUT_WIDE, CUT_HIGH, "none", f'stroke="{FAINT}"')
        + f'<svg x="{CUT_LEFT:g}" y="{top:g}" width="{CUT_WIDE:g}" height="{CUT_HIGH:g}">{inside}</svg>'
        + "".join(text(CUT_LEFT - 6, top + at(0.0, y)[1] + 4, number(y, 1), "end") for y in heights)
        + "".join(text(CUT_LEFT + at(v, 0.0)[0], top + CUT_HIGH + 15, number(v, 0), "middle") for v in ticks)
    )


def _cut_along_gate(f: Feature, reach: float) -> str:
    gates = torch.linspace(-GATE, GATE, 81)
    curve = list(zip(gates.tolist(), swiglu(gates, torch.full_like(gates, f.up)).tolist()))
    return _cut(TOP, f"h along gate: slope {number(f.by_gate)}", reach, curve, f.gate, f.h, f.by_gate)


def _cut_along_up(f: Feature, reach: float) -> str:
    ends = torch.tensor([-UP, UP])
    curve = list(zip(ends.tolist(), swiglu(torch.full_like(ends, f.gate), ends).tolist()))
    return _cut(TOP + 195, f"h along up: slope a = {number(f.by_up)}", reach, curve, f.up, f.h, f.by_up)


def gated_feature() -> Explorer:
    """One feature's gate and up on sliders. It opens where a closed-looking gate turns the sign over."""
    return Explorer(
        draw_gate,
        {
            "gate": W.FloatSlider(-2.0, min=-GATE, max=GATE, step=0.1, description="gate", readout_format=".1f"),
            "up": W.FloatSlider(3.0, min=-UP, max=UP, step=0.1, description="up", readout_format=".1f"),
        },
    )
