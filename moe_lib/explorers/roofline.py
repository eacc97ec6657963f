"""Explorer of notebook 07: tokens, precision, machine and ranks; what is read, what is computed, and which of them binds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as W

from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.explorers.base import BLUE, FAINT, GREEN, INK, ORANGE, VERMILION, Explorer, line, rect, says, svg, text
from moe_lib.roofline import H200, PRECISIONS, Floor, Machine, floor

TOKENS = tuple(2**n for n in range(15))
RANKS = (1, 8, 16, 32, 64, 128)
LAPTOP = Machine("a laptop: 60 GB/s, 0.4 TFLOP/s", 60e9, dict.fromkeys(PRECISIONS, 0.4e12))
COLOURS = {"memory": BLUE, "compute": ORANGE, "exchange": GREEN}
LEFT, TOP, WIDTH, HEIGHT = 60, 30, 520, 330  # of the plot, in pixels


def roofline(machines: Sequence[Machine] = (H200, LAPTOP), config: MoEConfig = KIMI_K2) -> Explorer:
    """Explore the floor of `config`'s block on these machines. Several ranks are for machines with a link; others count as one."""

    def draw(tokens: int, precision: str, machine: int, ranks: int) -> str:
        return draw_roofline(config, tokens, precision, machines[machine], ranks)

    controls = {
        "tokens": W.SelectionSlider(options=[(f"{t:,}", t) for t in TOKENS], value=64, description="tokens, all ranks"),
        "precision": W.Dropdown(options=PRECISIONS, value="bf16", description="precision"),
        "machine": W.Dropdown(options=[(m.name, i) for i, m in enumerate(machines)], value=0, description="machine"),
        "ranks": W.SelectionSlider(options=RANKS, value=1, description="ranks"),
    }
    return Explorer(draw, controls)


def draw_roofline(config: MoEConfig, tokens: int, precision: str, machine: Machine, ranks: int) -> str:
    """Times over tokens on two logarithmic axes, the chosen batch marked, and its bill beside it."""
    alone = f" It has no link to others, so {ranks} ranks count as one." if ranks > 1 and not machine.link else ""
    ranks = ranks if machine.link else 1
    floors = [floor(config, t, precision, machine, ranks) for t in TOKENS]
    at = floor(config, tokens, precision, machine, ranks)
    words = _sentence(config, tokens, precision, machine, ranks, at) + alone
    return svg(_plot(floors, tokens, at) + _bill(config, at, ranks), LEFT + WIDTH + 330, TOP + HEIGHT + 46, words) + says(words)


def _sentence(config: MoEConfig, tokens: int, precision: str, machine: Machine, ranks: int, at: Floor) -> str:
    each = f", on each of {ranks} ranks" if ranks > 1 else ""
    share = at.hit * ranks / config.n_routed_experts
    what = {"memory": "reading weights", "compute": "computing", "exchange": "moving rows between ranks"}[at.bound]
    many = f"{tokens:,} token{'s' if tokens > 1 else ''} in {precision} on {machine.name}{each}"
    return (
        f"{many}: {at.hit:.1f} experts are hit ({share:.0%} of all the experts there), {_si(at.bytes)}B are read and written, "
        f"{_si(at.flops)}FLOP computed. Not faster than {_time(at.seconds)}; {what} takes longest."
    )


def _plot(floors: list[Floor], tokens: int, at: Floor) -> str:
    kinds = [kind for kind in COLOURS if any(getattr(f, kind) for f in floors)]
    times = [getattr(f, kind) for f in floors for kind in kinds] + [f.seconds for f in floors]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(t: int) -> float:
        return LEFT + WIDTH * math.log2(t) / math.log2(TOKENS[-1])

    def y(s: float) -> float:
        return TOP + HEIGHT * (high - math.log10(s)) / (high - low)

    parts = [text(LEFT, 16, "Least time of one forward, by tokens", extra='font-weight="bold"')]
    for power in range(low, high + 1):
        parts += [line(LEFT, y(10.0**power), LEFT + WIDTH, y(10.0**power), FAINT)]
        parts += [text(LEFT - 6, y(10.0**power) + 4, _time(10.0**power), "end", 'font-size="11"')]
    for t in TOKENS[::2]:
        parts += [text(x(t), TOP + HEIGHT + 18, f"{t:,}", "middle", 'font-size="11"')]
    for kind in kinds:
        points = " ".join(f"{x(t):.1f},{y(getattr(f, kind)):.1f}" for t, f in zip(TOKENS, floors))
        parts += [f'<polyline points="{points}" fill="none" stroke="{COLOURS[kind]}" stroke-width="2" stroke-dasharray="5 3"/>']
    points = " ".join(f"{x(t):.1f},{y(f.seconds):.1f}" for t, f in zip(TOKENS, floors))
    parts += [f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-width="2.5"/>']
    parts += [line(x(tokens), TOP, x(tokens), TOP + HEIGHT, VERMILION)]
    parts += [f'<circle cx="{x(tokens):.1f}" cy="{y(at.seconds):.1f}" r="6" fill="{VERMILION}"/>']
    for i, (kind, colour) in enumerate([*((k, COLOURS[k]) for k in kinds), ("floor", INK)]):
        parts += [line(LEFT + 110 * i, TOP + HEIGHT + 36, LEFT + 22 + 110 * i, TOP + HEIGHT + 36, colour, 'stroke-width="2.5"')]
        parts += [text(LEFT + 28 + 110 * i, TOP + HEIGHT + 40, kind)]
    return "".join(parts)


def _bill(config: MoEConfig, at: Floor, ranks: int) -> str:
    left = LEFT + WIDTH + 40
    parts = [text(left, 16, "The chosen batch" + (", on one rank" if ranks > 1 else ""), extra='font-weight="bold"')]
    longest = max(at.memory, at.compute, at.exchange)
    rows = [
        ("memory", at.memory, f"{_si(at.bytes)}B"),
        ("compute", at.compute, f"{_si(at.flops)}FLOP"),
        ("exchange", at.exchange, "two all-to-alls"),
    ]
    for i, (kind, took, what) in enumerate(rows if ranks > 1 else rows[:2]):
        y = TOP + 14 + 56 * i
        bold = 'font-weight="bold"' if kind == at.bound else ""
        parts += [text(left, y, f"{kind}: {what}", extra=bold), text(left + 260, y, _time(took), "end", bold)]
        parts += [rect(left, y + 6, 260 * took / longest, 14, COLOURS[kind], 'rx="2"')]
    y = TOP + 14 + 56 * (3 if ranks > 1 else 2)
    share = at.hit * ranks / config.n_routed_experts
    parts += [text(left, y, f"experts hit: {at.hit:.1f}" + (" a rank" if ranks > 1 else f" of {config.n_routed_experts}"))]
    parts += [rect(left, y + 6, 260, 14, "none", f'stroke="{FAINT}"'), rect(left, y + 6, 260 * share, 14, VERMILION, 'rx="2"')]
    parts += [text(left, y + 56, f"not faster than {_time(at.seconds)}", extra='font-weight="bold"')]
    return "".join(parts)


def _si(n: float) -> str:
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor:
            return f"{n / factor:.3g} {letter}"
    return f"{n:.3g} "


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor * 0.9999:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
