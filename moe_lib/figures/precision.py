"""Figures of notebook 06: the numbers that a format has, and what each precision costs and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from moe_lib.figures.base import BLUE, GREEN, ORANGE, VERMILION, Figure


def number_lines(formats: Mapping[str, Float[Tensor, " values"]], weights: Float[Tensor, " weights"]) -> Figure:
    """Every number that a format can hold, as ticks on a line for each format, under the weights that have to use them."""
    near = {name: (v[:, None] - weights).abs().amin(0) for name, v in formats.items()}
    told = "; ".join(
        f"{name} has {len(v)} values and leaves an error of {near[name].square().mean().sqrt():.3f}" for name, v in formats.items()
    )
    largest = weights.abs().max().item()
    alt = (
        f"{len(weights)} weights between {-largest:.2f} and {largest:.2f}, and the values of {len(formats)} formats: "
        f"{told} (root mean square)."
    )
    figure = Figure(alt, figsize=(8.6, 0.75 * (1 + len(formats)) + 0.5))
    ax = figure.subplots()
    ax.plot(weights, [0] * len(weights), "o", color=BLUE, ms=5, alpha=0.7)
    labels = ["weights"]
    for row, (name, values) in enumerate(formats.items(), 1):
        shown = values[values.abs() <= 1.1 * largest]
        ax.vlines(shown, -row - 0.3, -row + 0.3, color=(ORANGE, GREEN, VERMILION)[row % 3], lw=0.8)
        labels.append(f"{name}\n{len(values)} values")
    ax.set(yticks=[-r for r in range(len(labels))], ylim=(-len(formats) - 0.5, 0.5), xlim=(-1.1 * largest, 1.1 * largest))
    ax.set_yticklabels(labels)
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)
    return figure


def costs(errors: Mapping[str, Sequence[float]], places: Sequence[str], megabytes: Mapping[str, float]) -> Figure:
    """Relative errors of each precision at several places, and the bytes of one expert."""
    told = "; ".join(
        f"{name}: " + ", ".join(f"{place} {100 * e:.1f} %" for place, e in zip(places, of)) for name, of in errors.items()
    )
    sizes = ", ".join(f"{name} {size:.1f} MB" for name, size in megabytes.items())
    figure = Figure(f"Relative errors, {told}. One expert takes: {sizes}.", figsize=(9.2, 3.0))
    left, right = figure.subplots(1, 2, width_ratios=[1.9, 1])
    colours = dict(zip(megabytes, (BLUE, ORANGE, GREEN)))
    wide = 0.8 / len(errors)
    for i, (name, of) in enumerate(errors.items()):
        at = [p + (i - (len(errors) - 1) / 2) * wide for p in range(len(places))]
        bars = left.bar(at, [100 * e for e in of], width=0.92 * wide, color=colours[name], label=name)
        left.bar_label(bars, [f"{100 * e:.1f}" for e in of], padding=2, fontsize=9)
    left.set(xticks=range(len(places)), ylabel="error, % of the size", title="what it costs")
    left.set_xticklabels(places)
    left.margins(y=0.15)
    left.legend(loc="upper left")
    bars = right.bar(list(megabytes), list(megabytes.values()), color=list(colours.values()), width=0.6)
    right.bar_label(bars, [f"{size:.1f}" for size in megabytes.values()], padding=2, fontsize=9)
    right.set(ylabel="MB for one expert", title="what it saves")
    right.margins(y=0.15)
    return figure
