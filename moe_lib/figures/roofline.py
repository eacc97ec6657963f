"""Figures of notebook 07: floors by precision, and what was measured above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from moe_lib.config import MoEConfig
from moe_lib.figures.base import BLUE, GREEN, ORANGE, VERMILION, Figure
from moe_lib.roofline import Machine, crossing, floor

COLOURS = {"bf16": BLUE, "fp8": ORANGE, "int4": GREEN}


def floors(config: MoEConfig, machine: Machine, tokens: Sequence[int]) -> Figure:
    """The least time of the block in each precision, over the batch."""
    lines = {p: [1e3 * floor(config, t, p, machine).seconds for t in tokens] for p in machine.rates}
    told = "; ".join(f"{p} {ms[0]:.3g} ms at {tokens[0]}, {ms[-1]:.3g} ms at {tokens[-1]}" for p, ms in lines.items())
    turns = ", ".join(f"{p} {crossing(config, p, machine):,}" for p in machine.rates)
    figure = Figure(
        f"Floors of the block on {machine.name} by tokens: {told}. Computing overtakes reading at: {turns}.", (8.4, 3.4)
    )
    ax = figure.subplots()
    for p, ms in lines.items():
        turn = crossing(config, p, machine)
        ax.plot(tokens, ms, color=COLOURS[p], lw=2, label=p)
        if turn <= tokens[-1]:
            ax.plot([turn], [1e3 * floor(config, turn, p, machine).seconds], "o", color=COLOURS[p], ms=7, mec="white")
    _axes(ax, tokens, f"{machine.name}; dots: from here on computing takes longer than reading")
    return figure


def measured(config: MoEConfig, machine: Machine, precision: str, seconds: Mapping[int, float]) -> Figure:
    """What was measured, above the floor that this machine's own ceilings set."""
    tokens = list(seconds)
    least = [1e3 * floor(config, t, precision, machine).seconds for t in tokens]
    told = ", ".join(
        f"{t}: {1e3 * s:.3g} ms ({ms / (10 * s):.0f} % of the floor's speed)" for (t, s), ms in zip(seconds.items(), least)
    )
    figure = Figure(f"The block in {precision} on {machine.name}, by tokens. {told}.", (8.4, 3.4))
    ax = figure.subplots()
    ax.plot(tokens, least, "--", color=COLOURS[precision], lw=2, label=f"floor, {precision}")
    ax.plot(tokens, [1e3 * s for s in seconds.values()], "o", color=VERMILION, ms=7, label="measured")
    for (t, s), ms in zip(seconds.items(), least):
        ax.annotate(f"{ms / (10 * s):.0f} %", (t, 1e3 * s), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9)
    _axes(ax, tokens, f"{machine.name}; in %, the floor over what was measured")
    ax.margins(y=0.2)
    return figure


def _axes(ax: Axes, tokens: Sequence[int], title: str) -> None:
    shown = [t for t in tokens if t in (1, 8, 64, 512, 4096, 16384)]
    ax.set(xscale="log", yscale="log", xlabel="tokens in the batch", ylabel="ms", title=title, xticks=shown)
    ax.set_xticklabels([f"{t:,}" for t in shown])
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(loc="upper left")
