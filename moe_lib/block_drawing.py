"""The drawing of the block as data flows through it, with some of its operations lit."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from moe_lib.config import KIMI_K2
from moe_lib.evidence import nodes
from moe_lib.figures.base import BLUE

WIDTH, HEIGHT = 900, 200
INK, PAPER, WIRE = "#1f2328", "#ffffff", "#57606a"
# What follows what in a straight line; the other wires bend, and stand in _bends.
CHAINS = (
    "gate_linear sigmoid correction_bias group_choice top_k gather normalise scale",
    "dispatch all_to_all_out",
    "gate_proj silu",
    "product down_proj all_to_all_back combine sum",
)
Number = int | float
Box = tuple[Number, ...]  # x, y, width, height
Point = tuple[Number, Number]


@dataclass(frozen=True, repr=False)
class Drawing:
    """A still picture; `alt` says in words what is lit in it."""

    svg: str
    alt: str

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        # an image and not inline SVG, which JupyterLab drops from a notebook that nobody has run here yet
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" style="width:{WIDTH}px;max-width:100%" src="data:image/svg+xml;base64,{data}">'


def drawing(lit: list[str]) -> Drawing:
    """Raises KeyError naming an operation that is not in data/evidence.toml."""
    known = nodes()
    if unknown := [name for name in lit if name not in known]:
        raise KeyError(f"no operation {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    box = {name: node.box for name, node in known.items()}
    body = [
        _frame((32, 1, 866, 198), "", BLUE if "block" in lit else WIRE, 'stroke-width="2"'),
        _frame((46, 5, 838, 54), "the gate chooses"),
        _frame((240, 66, 362, 110), f"{KIMI_K2.n_routed_experts} experts, each:"),
    ]
    chains = (chain.split() for chain in CHAINS)
    body += [_wire(_right(box[a]), _left(box[b])) for ids in chains for a, b in zip(ids, ids[1:])]
    body += [_wire(*points) for points in _bends(box)]
    for name, node in known.items():
        x, y, width, height = node.box
        fill, ink = (BLUE, "#ffffff") if name in lit else (PAPER, INK)
        body.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{WIRE}"/>')
        body.append(_text(x + width / 2, y + height / 2 + 4, node.label, ink))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        '<defs><marker id="a" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">'
        f'<path d="M0 0L7 3L0 6z" fill="{WIRE}"/></marker></defs><rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{PAPER}"/>'
        f"{''.join(body)}{_text(14, 115, 'x', INK)}</svg>"
    )
    titles = "; ".join(known[name].title for name in lit)
    alt = f"{titles}, lit in a drawing of the whole block." if lit else f"The mixture-of-experts block in {len(known)} parts."
    return Drawing(svg, alt)


def _left(box: Box) -> Point:
    return box[0], box[1] + box[3] / 2


def _right(box: Box) -> Point:
    return box[0] + box[2], box[1] + box[3] / 2


def _top(box: Box) -> Point:
    return box[0] + box[2] / 2, box[1]


def _bottom(box: Box) -> Point:
    return box[0] + box[2] / 2, box[1] + box[3]


def _bends(box: dict[str, Box]) -> Iterator[tuple[Point, ...]]:
    """The wires that turn corners, or have an end outside every box."""
    row = _left(box["dispatch"])[1]
    yield (20, row), _left(box["dispatch"])
    for name in ("gate_linear", "shared_expert"):  # both read the block's input
        yield (40, row), (40, _left(box[name])[1]), _left(box[name])
    yield _right(box["sum"]), (896, row)
    (x, y), turn = _right(box["all_to_all_out"]), 10
    for name in ("gate_proj", "up_proj"):
        yield (x, y), (x + turn, y), (x + turn, _left(box[name])[1]), _left(box[name])
    (x, y), turn = _left(box["product"]), _right(box["silu"])[0] + 8
    for name, shift in (("silu", -4), ("up_proj", 4)):
        start = _right(box[name])
        yield start, (turn, start[1]), (turn, y + shift), (x, y + shift)
    for name, to in (("top_k", "dispatch"), ("scale", "combine")):  # whom, and with what weight
        start, end = _bottom(box[name]), _top(box[to])
        yield start, (start[0], 63), (end[0], 63), end
    start, end = _top(box["sigmoid"]), _top(box["gather"])  # the weights come from the scores without the bias
    yield start, (start[0], 17), (end[0], 17), end
    start, end = _right(box["shared_expert"]), _bottom(box["sum"])
    yield start, (end[0], start[1]), end


def _wire(*points: Point) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{WIRE}" marker-end="url(#a)"/>'


def _frame(box: Box, words: str, stroke: str = WIRE, extra: str = 'stroke-dasharray="4 3"') -> str:
    x, y, width, height = box
    outline = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="none" stroke="{stroke}" {extra}/>'
    return outline + _text(x + 8, y + 13, words, INK, "start", 11)


def _text(x: Number, y: Number, words: str, fill: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
