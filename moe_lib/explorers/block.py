"""Explorer of notebook 03: how tokens flow to their experts, and back."""

from __future__ import annotations

import ipywidgets as W
import torch
from torch import Tensor

from moe_lib.block import dispatch
from moe_lib.config import MoEConfig
from moe_lib.explorers.base import BLUE, FAINT, ORANGE, SKY, VERMILION, Explorer, rect, says, svg, text
from moe_lib.router import Router, Routing

MOST_TOKENS, EXPERT_CHOICES, MOST_K = 64, (8, 16, 32, 64, 128, 384), 8
WIDTH, TOP, HEIGHT = 940.0, 34.0, 440.0  # of the drawing, and of its columns
TOKENS_X, EXPERTS_X, BACK_X, TOKEN_WIDTH, EXPERT_WIDTH = 70.0, 400.0, 850.0, 20.0, 140.0


def flow_routing(tokens: int, experts: int, k: int, skew: float, seed: int) -> Routing:
    """The gate's decision for tokens whose logits are noise, plus `skew` times a popularity that all tokens share.

    One seed is one world: more tokens or experts leave those already there as they were.
    """
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(MOST_TOKENS, EXPERT_CHOICES[-1], generator=random)[:tokens, :experts]
    popularity = torch.randn(EXPERT_CHOICES[-1], generator=random)[:experts]
    router = Router(MoEConfig(1, 1, experts, k, routed_scaling_factor=2.827))
    return router.route(torch.sigmoid(noise + skew * popularity))


def draw_flow(tokens: int, experts: int, k: int, skew: float, seed: int, follow: int) -> str:
    """Tokens left, experts as high as their load, tokens again right; token `follow` (the last, if there are fewer) stands out."""
    routing = flow_routing(tokens, experts, k, skew, seed)
    _, counts, order = dispatch(torch.zeros(tokens, 1), routing, experts)
    follow = min(follow, tokens - 1)
    words = _words(routing, counts, follow)
    copies, boxes = _layout(tokens, k, counts)
    body = (
        _titles() + _ribbons(order, k, follow, copies, boxes, counts) + _tokens(tokens, k, follow, copies) + _experts(boxes, counts)
    )
    return svg(body, WIDTH, TOP + HEIGHT + 12, words[0]) + says(" ".join(words))


def flow() -> Explorer:
    """Six controls: tokens, experts, k, skew, the token to follow and the seed."""
    return Explorer(
        draw_flow,
        {
            "tokens": W.IntSlider(16, 1, MOST_TOKENS, description="tokens T"),
            "experts": W.SelectionSlider(options=EXPERT_CHOICES, value=16, description="experts E"),
            "k": W.IntSlider(2, 1, MOST_K, description="experts per token k"),
            "skew": W.FloatSlider(0.0, min=0.0, max=3.0, step=0.25, description="skew"),
            "follow": W.IntSlider(0, 0, MOST_TOKENS - 1, description="follow token"),
            "seed": W.IntSlider(0, 0, 20, description="seed"),
        },
    )


def _words(routing: Routing, counts: Tensor, follow: int) -> list[str]:
    """The drawing in words: first what its label says, then what the sentence adds."""
    tokens, k = routing.indices.shape
    loads, experts = counts.tolist(), len(counts)
    busiest, mean, idle = max(loads), tokens * k / experts, loads.count(0)
    each = f"Loads {', '.join(map(str, loads))}" if experts <= 16 else f"Loads from {min(loads)} to {busiest}"
    label = (
        f"{_many(tokens, 'token')} × {k} = {_many(tokens * k, 'row')} flow to {experts} experts and back. {each}; "
        f"the busiest is expert {loads.index(busiest)} with {_many(busiest, 'row')}; {idle} of {experts} idle."
    )
    visits = ", ".join(f"{e} (weight {w:.2f})" for e, w in zip(routing.indices[follow].tolist(), routing.weights[follow].tolist()))
    return [
        label,
        f"Mean {mean:.3g} rows, max/mean {busiest / mean:.2f}.",
        f"Token {follow} goes to {'expert' if k == 1 else 'experts'} {visits}.",
    ]


def _many(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _slot(tokens: int, k: int) -> float:
    """The height of one copy in the columns of tokens."""
    return min(22.0, (HEIGHT - 60) / (tokens * k))


def _layout(tokens: int, k: int, counts: Tensor) -> tuple[list[float], list[tuple[float, float]]]:
    """Where things lie: the middle of each copy, from above; and of each expert the upper edge and the height."""
    gap, slot = min(4.0, 60 / tokens), _slot(tokens, k)
    top = TOP + (HEIGHT - tokens * (k * slot + gap) + gap) / 2
    copies = [top + c // k * gap + (c + 0.5) * slot for c in range(tokens * k)]
    gap, idle = min(8.0, 120 / len(counts)), min(6.0, 80 / len(counts))
    gaps = gap * (len(counts) - 1)
    row = min(22.0, (HEIGHT - gaps - idle * counts.tolist().count(0)) / (tokens * k))
    heights = [row * n or idle for n in counts.tolist()]
    y, boxes = TOP + (HEIGHT - sum(heights) - gaps) / 2, []
    for height in heights:
        boxes.append((y, height))
        y += height + gap
    return copies, boxes


def _ribbons(order: Tensor, k: int, follow: int, copies: list[float], boxes: list[tuple[float, float]], counts: Tensor) -> str:
    """A curve for each copy, there and back: one path an expert, and the followed token's over them."""
    paths, followed, opacity = [], [], 0.6 if len(order) <= 128 else 0.3
    for part, (top, height) in zip(order.split(counts.tolist()), boxes):
        curves = []
        for i, copy in enumerate(part.tolist()):
            y = top + (i + 0.5) * height / len(part)
            there = _curve(TOKENS_X + TOKEN_WIDTH, copies[copy], EXPERTS_X, y)
            back = _curve(EXPERTS_X + EXPERT_WIDTH, y, BACK_X, copies[copy])
            (followed if copy // k == follow else curves).append(there + back)
        if curves:
            paths.append(f'<path d="{"".join(curves)}" fill="none" stroke="{SKY}" stroke-opacity="{opacity}"/>')
    return "".join(paths) + f'<path d="{"".join(followed)}" fill="none" stroke="{VERMILION}" stroke-width="2.5"/>'


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (x1 + x2) / 2
    return f"M{x1:g} {y1:.1f}C{middle:g} {y1:.1f} {middle:g} {y2:.1f} {x2:g} {y2:.1f}"


def _tokens(tokens: int, k: int, follow: int, copies: list[float]) -> str:
    half = _slot(tokens, k) / 2
    step = -(-tokens // 24)  # so that numbers do not run into each other
    out = []
    for t in range(tokens):
        first, last = copies[t * k] - half, copies[t * k + k - 1] + half
        for x in (TOKENS_X, BACK_X):
            out.append(rect(x, first, TOKEN_WIDTH, last - first, VERMILION if t == follow else BLUE))
        if t == follow or (t % step == 0 and abs(t - follow) >= step):
            weight, middle = 'font-weight="bold"' if t == follow else "", (first + last) / 2 + 4
            out.append(text(TOKENS_X - 8, middle, t, "end", weight) + text(BACK_X + TOKEN_WIDTH + 8, middle, t, "start", weight))
    return "".join(out)


def _experts(boxes: list[tuple[float, float]], counts: Tensor) -> str:
    """A box an expert, with its load as a tooltip and, where there is room, in letters."""
    loads, out = counts.tolist(), []
    busiest = loads.index(max(loads))
    for e, (n, (y, height)) in enumerate(zip(loads, boxes)):
        colour = ORANGE if e == busiest else SKY if n else "none"
        edge = "" if n else f'stroke="{FAINT}" stroke-width="{min(1.0, height):.2f}"'
        box = rect(EXPERTS_X, y, EXPERT_WIDTH, height, colour, edge)
        out.append(f"<g><title>expert {e}: {_many(n, 'row')}</title>{box}</g>")
        if n and height >= 12:
            style = 'style="fill:#000;pointer-events:none"'  # black on the box in either theme
            out.append(text(EXPERTS_X + EXPERT_WIDTH / 2, y + height / 2 + 4, f"expert {e} · {_many(n, 'row')}", "middle", style))
    return "".join(out)


def _titles() -> str:
    bold = 'font-weight="bold"'
    return (
        text(TOKENS_X + TOKEN_WIDTH, 16.0, "tokens", "end", bold)
        + text(EXPERTS_X + EXPERT_WIDTH / 2, 16.0, "experts, as high as their load", "middle", bold)
        + text(BACK_X + TOKEN_WIDTH, 16.0, "tokens again, summed", "end", bold)
    )
