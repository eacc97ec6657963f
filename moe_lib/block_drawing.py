"""The drawing of the block as data flows through it, with some of its operations lit."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape

from moe_lib.config import MoEConfig
from moe_lib.evidence import nodes
from moe_lib.figures.base import BLUE

WIDTH, HEIGHT = 900, 200
INK, PAPER, WIRE, FRAME = "#1f2328", "#ffffff", "#57606a", "#8c959f"

# Where data flows: from one box's right edge to the next one's left edge, unless the points say otherwise.
STRAIGHT = [
    "gate_linear sigmoid correction_bias group_choice top_k gather normalise scale",
    "dispatch all_to_all_out",
    "gate_proj silu",
    "all_to_all_back combine sum",
]


@dataclass(frozen=True, repr=False)
class Drawing:
    """A still picture with `alt` as its text form and alternative text."""

    svg: str
    alt: str

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, decorative: bool = False) -> str:
        # an image, not inline SVG: JupyterLab keeps it in a notebook that is not trusted yet
        data = base64.b64encode(self.svg.encode()).decode()
        alt = "" if decorative else escape(self.alt)
        return f'<img alt="{alt}" style="width:{WIDTH}px;max-width:100%" src="data:image/svg+xml;base64,{data}">'


def describe(lit: list[str], config: MoEConfig) -> str:
    known = nodes(config)
    if not lit:
        return f"The mixture-of-experts block, {len(known)} parts."
    return f"The mixture-of-experts block. Lit in it: {', '.join(known[name].title for name in lit)}."


def drawing(lit: list[str], config: MoEConfig) -> Drawing:
    """Raises KeyError naming an operation that is not in data/evidence.toml."""
    known = nodes(config)
    if unknown := [name for name in lit if name not in known]:
        raise KeyError(f"no operation {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    box = {name: node.box for name, node in known.items()}
    body = [_frame(46, 4, 838, 54, "gate: which experts, with what weight"), _frame(240, 66, 362, 110, f"{config.n_routed_experts} experts, each:")]
    for chain in STRAIGHT:
        ids = chain.split()
        body += [_wire((_right(box[a]), _left(box[b]))) for a, b in zip(ids, ids[1:])]
    body += [_wire(points) for points in _bends(box)]
    for name, node in known.items():
        x, y, width, height = node.box
        fill, ink, stroke = (BLUE, "#ffffff", BLUE) if name in lit else (PAPER, INK, WIRE)
        body.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{stroke}"/>')
        body.append(_text(x + width / 2, y + height / 2 + 4, node.label, ink))
    outer = f'<rect x="32" y="1" width="866" height="198" rx="6" fill="none" stroke="{BLUE if "block" in lit else FRAME}" stroke-width="2"/>'
    arrow = f'<marker id="a" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto"><path d="M0 0L7 3L0 6z" fill="{WIRE}"/></marker>'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<defs>{arrow}</defs><rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{PAPER}"/>{outer}{"".join(body)}'
        f"{_text(14, 115, 'x', INK)}</svg>"
    )
    return Drawing(svg, describe(lit, config))


def _left(box):
    return box[0], box[1] + box[3] / 2


def _right(box):
    return box[0] + box[2], box[1] + box[3] / 2


def _top(box):
    return box[0] + box[2] / 2, box[1]


def _bottom(box):
    return box[0] + box[2] / 2, box[1] + box[3]


def _bends(box):
    gate, shared, dispatch, product = box["gate_linear"], box["shared_expert"], box["dispatch"], box["product"]
    yield (20, 111), _left(dispatch)
    yield (40, 111), (40, _left(gate)[1]), _left(gate)
    yield (40, 111), (40, 162), (690, 162), (690, _left(shared)[1]), _left(shared)
    out = _right(box["all_to_all_out"])
    for name in ("gate_proj", "up_proj"):
        yield out, (out[0] + 10, out[1]), (out[0] + 10, _left(box[name])[1]), _left(box[name])
    silu, up = _right(box["silu"]), _right(box["up_proj"])
    yield silu, (silu[0] + 8, silu[1]), (silu[0] + 8, 107), (product[0], 107)
    yield up, (silu[0] + 8, up[1]), (silu[0] + 8, 117), (product[0], 117)
    yield _right(product), _left(box["down_proj"])
    yield _right(box["down_proj"]), _left(box["all_to_all_back"])
    top_k, scale = _bottom(box["top_k"]), _bottom(box["scale"])
    yield top_k, (top_k[0], 62), (_top(dispatch)[0], 62), _top(dispatch)
    yield scale, (scale[0], 62), (_top(box["combine"])[0], 62), _top(box["combine"])
    sigmoid, gather = _top(box["sigmoid"]), _top(box["gather"])
    yield sigmoid, (sigmoid[0], 19), (gather[0], 19), gather
    total = box["sum"]
    yield (_right(shared)[0], _right(shared)[1]), (_bottom(total)[0], _right(shared)[1]), _bottom(total)
    yield _right(total), (896, _right(total)[1])


def _wire(points) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{WIRE}" marker-end="url(#a)"/>'


def _frame(x, y, width, height, words) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="none" stroke="{FRAME}" stroke-dasharray="4 3"/>' + _text(
        x + 8, y + 13, words, WIRE, "start", 10
    )


def _text(x, y, words, fill, anchor="middle", size=12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(str(words))}</text>'
