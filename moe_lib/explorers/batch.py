"""The batch explorer: tokens x experts as a heatmap, the load of every expert beneath, and what skew and bias do to it."""

from __future__ import annotations

import base64
import functools
import io

import ipywidgets as W
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.explorers.base import BLUE, FAINT, INK, ORANGE, VERMILION, Explorer, line, rect, says, svg, text
from moe_lib.explorers.gate import made_up, narrow_labels, variant
from moe_lib.router import Router, Routing

LEFT, TOP, LOADS = 46.0, 26.0, 110.0


@torch.no_grad()
def route_batch(
    router: Router, logits: Float[Tensor, "tokens experts"], popularity: Float[Tensor, " experts"], bias: float, k: int
) -> Routing:
    """Route tokens by these logits, shifted by `popularity`, under a bias that holds up the unpopular.

    `bias` times (mean score of all - mean score of the expert) is added to the router's own bias: at 1 every expert's mean
    biased score is the same. Every choice is Router.route's own.
    """
    scores = (logits + popularity).sigmoid()
    means = scores.mean(0)
    moved = router.e_score_correction_bias + bias * (means.mean() - means)
    return variant(router, router.config.replace(num_experts_per_tok=k), moved).route(scores)


def batch_explorer(router: Router | None = None, tokens: Float[Tensor, "*batch hidden"] | None = None) -> Explorer:
    """Explore how a router spreads a batch over its experts. Without a router: one of K2's shape with random weights.

    `skew` is the standard deviation of a random shift of the experts' logits, the same shift for every token.
    Raises ValueError for tokens of another width than the router's, or no tokens.
    """
    config = KIMI_K2.replace(hidden_size=64) if router is None else router.config
    own, x = made_up(config, seed=0, tokens=256)
    if router is not None:
        own = variant(router, config, router.e_score_correction_bias).cpu()
    if tokens is not None:
        x = tokens.detach().reshape(-1, tokens.shape[-1]).cpu()
        if x.shape[0] == 0 or x.shape[1] != config.hidden_size:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected one or more of hidden_size={config.hidden_size}")
    with torch.no_grad():
        logits = F.linear(x[:256].float(), own.weight.float())
    most = len(logits)

    @functools.lru_cache(maxsize=8)
    def shift(seed: int) -> Tensor:
        return torch.randn(config.n_routed_experts, generator=torch.Generator().manual_seed(seed))

    def draw(
        tokens: int = min(64, most), k: int = config.num_experts_per_tok, skew: float = 1.0, bias: float = 0.0, seed: int = 0
    ) -> str:
        routing = route_batch(own, logits[:tokens], skew * shift(seed), bias, k)
        return picture(routing) + says(sentence(routing))

    controls = {
        "skew": W.FloatSlider(1.0, min=0.0, max=3.0, step=0.1, description="skew", readout_format=".1f"),
        "bias": W.FloatSlider(0.0, min=0.0, max=2.0, step=0.05, description="balancing bias", readout_format=".2f"),
        "tokens": W.IntSlider(min(64, most), 1, most, description="tokens"),
        "k": W.IntSlider(config.num_experts_per_tok, 1, _most_k(config), description="k"),
        "seed": W.IntSlider(0, 0, 99, description="seed"),
    }
    if most == 1:
        del controls["tokens"]
    return narrow_labels(Explorer(draw, controls, columns=3))


def _most_k(config: MoEConfig) -> int:
    left = config.n_routed_experts // config.n_group * config.topk_group
    return min(left, max(16, config.num_experts_per_tok))


def chosen(routing: Routing) -> Bool[np.ndarray, "tokens experts"]:
    hit = np.zeros(routing.scores.shape, dtype=bool)
    np.put_along_axis(hit, routing.indices.numpy(), True, axis=1)
    return hit


def heatmap(routing: Routing) -> str:
    """A PNG as a data URL, one pixel for each token and expert: blue as deep as the score, orange where chosen."""
    levels = (15 * routing.scores.numpy() ** 2).astype(np.uint8)
    levels[chosen(routing)] = 16
    image = Image.fromarray(levels)
    image.putpalette(16 * _rgb(BLUE) + _rgb(ORANGE))
    png = io.BytesIO()
    # low scores are transparent, so that the picture follows the page's theme
    image.save(png, "PNG", transparency=bytes([*range(15, 175, 10), 255]), compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def picture(routing: Routing) -> str:
    """The heatmap, and under each column of it that expert's load."""
    tokens, experts = routing.scores.shape
    k = routing.indices.shape[1]
    loads = chosen(routing).sum(0)
    mean, most = tokens * k / experts, int(loads.max())
    cell = float(max(1, round(864 / experts)))
    width, high = cell * experts, min(max(3.0 * tokens, 48.0), 260.0)
    foot = TOP + high + 26
    image = (
        f'<image x="{LEFT:g}" y="{TOP:g}" width="{width:g}" height="{high:g}" preserveAspectRatio="none" href="{heatmap(routing)}" '
    )
    parts = [
        text(0.0, 13.0, f"Scores of {_tokens(tokens)}, and what each chose", extra='font-weight="600"'),
        rect(LEFT + 300, 4.0, 11.0, 11.0, BLUE, 'fill-opacity=".5" rx="2"') + text(LEFT + 316, 13.0, "score"),
        rect(LEFT + 366, 4.0, 11.0, 11.0, ORANGE, 'rx="2"') + text(LEFT + 382, 13.0, "chosen"),
        image + 'style="image-rendering:pixelated"/>',
        rect(LEFT, TOP, width, high, "none", f'stroke="{FAINT}"'),
        text(LEFT - 6, TOP + 10, "token 0", "end", 'font-size="10"'),
        text(LEFT - 6, TOP + high, tokens - 1, "end", 'font-size="10"') if tokens > 1 else "",
        text(0.0, foot - 6, "Load: how many tokens each expert serves", extra='font-weight="600"'),
    ]
    tall = LOADS / max(most, 1)
    bottom = foot + 6 + LOADS
    path = "".join(f"V{bottom - tall * n:.1f}h{cell:g}" for n in loads.tolist())
    parts.append(f'<path d="M{LEFT:g} {bottom:g}{path}V{bottom:g}z" fill="{ORANGE}"/>')
    level = bottom - tall * mean
    parts += [
        line(LEFT, bottom, LEFT + width, bottom, INK),
        line(LEFT, level, LEFT + width, level, VERMILION, 'stroke-dasharray="5 3" stroke-width="1.5"'),
        text(LEFT + width + 5, level + 4, "mean", extra='font-size="10"'),
        text(LEFT - 6, bottom - tall * most + 9, most, "end", 'font-size="10"'),
        text(LEFT - 6, bottom, 0, "end", 'font-size="10"'),
        text(LEFT, bottom + 14, "expert 0", extra='font-size="10"'),
        text(LEFT + width, bottom + 14, experts - 1, "end", 'font-size="10"'),
    ]
    busiest = int(loads.argmax())
    label = (
        f"Heatmap of {_tokens(tokens)} by {experts} experts, with the {k} chosen of every token; loads beneath: "
        f"the busiest is expert {busiest} with {most}, the mean {mean:.2f}, and {int((loads == 0).sum())} experts serve nobody"
    )
    return svg("".join(parts), LEFT + width + 36, bottom + 20, label)


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def sentence(routing: Routing) -> str:
    tokens, experts = routing.scores.shape
    k = routing.indices.shape[1]
    loads = chosen(routing).sum(0)
    mean, most, idle = tokens * k / experts, int(loads.max()), int((loads == 0).sum())
    half = int((np.cumsum(np.sort(loads)[::-1]) < tokens * k / 2).sum()) + 1
    nobody = "every expert serves somebody" if idle == 0 else f"{idle} of {experts} experts serve nobody"
    choices = f"{_tokens(tokens)} × {k} = {tokens * k} choices, {mean:.2f} for each expert on average."
    busiest = f"Expert {int(loads.argmax())} serves {_tokens(most)}, {most / mean:.1f} times the mean; {nobody}."
    return f"{choices} {busiest} Half of the work lies with the busiest {half}."
