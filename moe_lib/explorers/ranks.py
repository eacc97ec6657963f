"""Explorer of notebook 05: who sends how much to whom, what each rank has to do, and how long one exchange takes."""

from __future__ import annotations

import base64
import functools
import io

import ipywidgets as W
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moe_lib.config import KIMI_K2
from moe_lib.expert_parallel_cost import H800, Traffic, gumbel, log_normal, step_seconds, traffic
from moe_lib.explorers.base import BLUE, FAINT, INK, ORANGE, SKY, VERMILION, Explorer, line, rect, says, svg, text
from moe_lib.placement import contiguous, place
from moe_lib.roofline import exchange_bytes

RANKS, TOKENS = (2, 4, 8, 16, 32, 64, 128), (1024, 2048, 4096)
PLACED = {"in order": None, "placed": 0, "+1 slot a rank": 1, "+2 slots a rank": 2}
WIDTH, LEFT, MATRIX, TOP = 940.0, 64.0, 300.0, 40.0
PARTS = {"dispatch": SKY, "experts": ORANGE, "combine": BLUE}


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> Tensor:
    return gumbel(TOKENS[-1], KIMI_K2.n_routed_experts, seed)


@functools.lru_cache(maxsize=4)
def _chosen(tokens: int, skew: float, seed: int) -> Tensor:
    popularity = log_normal(KIMI_K2.n_routed_experts, skew, seed // 2)
    return (popularity.log() + _noise(seed)[:tokens]).topk(KIMI_K2.num_experts_per_tok).indices


def batch_over_ranks(ranks: int, tokens: int, skew: float, placement: str, seed: int) -> Traffic:
    """A batch with log-normal popularity; the placement knows the loads of an earlier one with the same popularity."""
    now, earlier = _chosen(tokens, skew, 2 * seed), _chosen(tokens, skew, 2 * seed + 1)
    loads = torch.bincount(earlier.flatten(), minlength=KIMI_K2.n_routed_experts).tolist()
    extra = PLACED[placement]
    return traffic(now, contiguous(loads, ranks) if extra is None else place(loads, ranks, extra * ranks))


def draw_ranks(ranks: int, tokens: int, skew: float, placement: str, seed: int) -> str:
    """Left the matrix of rows from rank to rank; right the load of each rank; below, the time of each part of a step."""
    t = batch_over_ranks(ranks, tokens, skew, placement, seed)
    step = step_seconds(KIMI_K2, t, H800)
    words = _words(t, step, tokens)
    body = _matrix(t.rows) + _loads(t) + _times(step)
    return svg(body, WIDTH, TOP + MATRIX + 130, words[0]) + says(" ".join(words))


def ranks_explorer() -> Explorer:
    """Five controls: ranks, tokens, skew, where experts live, seed."""
    return Explorer(
        draw_ranks,
        {
            "ranks": W.SelectionSlider(options=RANKS, value=32, description="ranks"),
            "tokens": W.SelectionSlider(options=TOKENS, value=4096, description="tokens in all"),
            "skew": W.FloatSlider(1.0, min=0.0, max=2.0, step=0.25, description="skew"),
            "placement": W.SelectionSlider(options=list(PLACED), value="in order", description="experts"),
            "seed": W.IntSlider(0, 0, 20, description="seed"),
        },
    )


def _words(t: Traffic, step: dict[str, float], tokens: int) -> list[str]:
    ranks, load = len(t.rows), t.load.tolist()
    busiest, total, copies = max(load), int(t.rows.sum()), len(t.placement.experts) - KIMI_K2.n_routed_experts
    moved = t.away * sum(exchange_bytes(KIMI_K2, 2, 2)) / KIMI_K2.num_experts_per_tok / 1e6
    held = f"{t.placement.per_rank} {'expert' if t.placement.per_rank == 1 else 'experts'} on each"
    micro = {part: 1e6 * seconds for part, seconds in step.items()}
    label = (
        f"{tokens} tokens make {total} rows for {ranks} ranks, {held}{f', {copies} of them copies' if copies else ''}. "
        f"Loads from {min(load)} to {busiest}; the busiest is rank {load.index(busiest)}, {t.imbalance:.2f} times the mean."
    )
    return [
        label,
        f"{t.away / total:.0%} of the rows leave their rank: {moved:,.0f} MB out and back.",
        f"At least {micro['dispatch']:.0f} µs out, {micro['experts']:.0f} µs in the experts and {micro['combine']:.0f} µs back, "
        "as long as the slowest rank takes.",
    ]


def _matrix(rows: Tensor) -> str:
    ranks, most = len(rows), int(rows.max()) or 1
    side = MATRIX / ranks
    out = [text(LEFT + MATRIX / 2, TOP - 22, "rows from rank (down) to rank (across)", "middle", 'font-weight="bold"')]
    place_of = f'x="{LEFT}" y="{TOP}" width="{MATRIX}" height="{MATRIX}"'
    out.append(f'<image {place_of} style="image-rendering:pixelated" href="{_pixels(rows / most)}"/>')
    for s, row in enumerate(rows.tolist() if ranks <= 8 else ()):
        for d, count in enumerate(row):
            ink = 'fill="#fff"' if count > 0.55 * most else ""
            out.append(text(LEFT + (d + 0.5) * side, TOP + (s + 0.5) * side + 4, count, "middle", ink))
    out.append(rect(LEFT, TOP, MATRIX, MATRIX, "none", f'stroke="{FAINT}"'))
    for i in sorted({0, ranks // 2, ranks - 1}):
        out.append(text(LEFT - 8, TOP + (i + 0.5) * side + 4, i, "end"))
        out.append(text(LEFT + (i + 0.5) * side, TOP - 6, i, "middle"))
    return "".join(out)


def _pixels(strength: Tensor) -> str:
    """A pixel for each entry, in blue; 0 is clear, so that the page's own colour shows."""
    pixels = np.empty((*strength.shape, 4), dtype=np.uint8)
    pixels[..., :3] = [int(BLUE[i : i + 2], 16) for i in (1, 3, 5)]
    pixels[..., 3] = (255 * strength).round().numpy()
    png = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(png, format="png")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _loads(t: Traffic) -> str:
    x0, width = LEFT + MATRIX + 76, WIDTH - LEFT - MATRIX - 76 - 12
    load = t.load.tolist()
    top, mean, bar = max(load), sum(load) / len(load), width / len(load)
    scale = (MATRIX - 10) / (top or 1)
    out = [text(x0 + width / 2, TOP - 22, "rows that each rank's experts work on", "middle", 'font-weight="bold"')]
    for rank, n in enumerate(load):
        box = rect(x0 + rank * bar, TOP + MATRIX - n * scale, bar * 0.86, n * scale, VERMILION if n == top else SKY)
        out.append(box.replace("/>", f"><title>rank {rank}: {n} rows</title></rect>"))
    y = TOP + MATRIX - mean * scale
    out.append(line(x0, TOP + MATRIX, x0 + width, TOP + MATRIX) + line(x0, y, x0 + width, y, INK, 'stroke-dasharray="5 4"'))
    out.append(text(x0 - 6, y + 4, f"mean {mean:.0f}", "end") + text(x0 - 6, TOP + 14, top, "end", f'fill="{VERMILION}"'))
    return "".join(out)


def _times(step: dict[str, float]) -> str:
    y, total, width = TOP + MATRIX + 44, sum(step.values()), WIDTH - LEFT - 12
    longest = max(400e-6, total)  # up to 400 µs the bar's length can be compared
    out, x = [text(LEFT, y - 8, f"one step: at least {1e6 * total:.0f} µs", "start", 'font-weight="bold"')], LEFT
    for part, seconds in step.items():
        length = width * seconds / longest
        out.append(rect(x, y, length, 26, PARTS[part]).replace("/>", f"><title>{part}: {1e6 * seconds:.0f} µs</title></rect>"))
        x += length
    x = LEFT
    for part, seconds in step.items():
        out.append(rect(x, y + 40, 12, 12, PARTS[part]) + text(x + 18, y + 50, f"{part} {1e6 * seconds:.0f} µs"))
        x += 170
    return "".join(out)
