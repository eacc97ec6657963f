"""Figures of notebook 04: loads, MaxVio while training, what balance costs in loss, and which expert serves which kind of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Integer
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from moe_lib.balance import max_violation
from moe_lib.figures.base import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Figure
from moe_lib.toy import WINDOW, Run

LINES = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY)
BLUES = LinearSegmentedColormap.from_list("white to blue", ["white", BLUE])


def violations(runs: Mapping[str, Sequence[Run]], layer: int) -> Float[Tensor, "settings seeds windows"]:
    """MaxVio of each batch, averaged over windows of steps, of one layer of every run."""
    every = [torch.stack([max_violation(run.loads[:, layer]) for run in seeds]) for seeds in runs.values()]
    return torch.stack([torch.stack([w.mean(1) for w in each.split(WINDOW, dim=1)], 1) for each in every])


def maxvio(runs: Mapping[str, Sequence[Run]], floors: Mapping[str, float], layer: int = 1) -> Figure:
    """MaxVio of each batch while training: a line for each setting (the mean over its seeds) in a band from lowest to highest seed.

    `floors` are levels below which no method can go, by name.
    """
    curves = violations(runs, layer)
    steps = [WINDOW * (w + 0.5) for w in range(curves.shape[2])]
    ends = [f"{name} {c[:, 0].mean():.1f} and {c[:, -3:].mean():.2f}" for name, c in zip(runs, curves)]
    alt = (
        f"MaxVio of each batch in layer {layer}, mean of {curves.shape[1]} seeds, at the start and over the last 30 steps: "
        f"{'; '.join(ends)}. "
        f"For comparison, {'; '.join(f'{name} {level:.2f}' for name, level in floors.items())}."
    )
    figure = Figure(alt=alt, figsize=(8.6, 3.6))
    ax = figure.subplots()
    for (name, colour), curve in zip(zip(runs, LINES), curves):
        ax.fill_between(steps, curve.min(0).values.tolist(), curve.max(0).values.tolist(), color=colour, alpha=0.18, lw=0)
        ax.plot(steps, curve.mean(0).tolist(), color=colour, lw=1.8, label=name)
    for (name, level), dashes in zip(floors.items(), (":", "--")):
        ax.axhline(level, color=BLACK, lw=1.2, ls=dashes, label=name)
    ax.set(xlabel="optimiser steps", ylabel="MaxVio of a batch", yscale="log", xlim=(0, None))
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(0.8 * min([*floors.values(), curves.min().item()]), 1.2 * curves.max().item())
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def cost(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Held-out loss of every setting: a dot for each seed, a bar at their mean."""
    means = {name: sum(seeds) / len(seeds) for name, seeds in losses.items()}
    told = [f"{name} {means[name]:.3f} (from {min(seeds):.3f} to {max(seeds):.3f})" for name, seeds in losses.items()]
    figure = Figure(alt=f"Held-out loss in nats a character: {'; '.join(told)}.", figsize=(8.0, 0.42 * len(losses) + 0.8))
    ax = figure.subplots()
    for row, (name, seeds) in enumerate(losses.items()):
        colour = ORANGE if name.startswith("dense") else BLUE
        ax.plot(seeds, [row] * len(seeds), "o", color=colour, ms=6, alpha=0.7, mew=0)
        ax.plot([means[name]] * 2, [row - 0.3, row + 0.3], color=colour, lw=2)
        ax.annotate(f"{means[name]:.3f}", (max(seeds), row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(losses)), list(losses))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel("held-out loss, nats a character")
    ax.grid(axis="x", alpha=0.25)
    return figure


def share_of_even(table: Integer[Tensor, "experts kinds"]) -> Float[Tensor, "experts kinds"]:
    """Each count over what an even spread of that kind's tokens would give: 1 everywhere when experts do not care."""
    table = table.double()
    return (table / table.mean(0)).float()


def by_favourite(table: Integer[Tensor, "experts kinds"]) -> list[int]:
    """Experts ordered by the kind they serve most, the busiest first; idle ones last."""
    shares = share_of_even(table)
    favourite, busy = shares.argmax(1).tolist(), shares.max(1).values.tolist()
    idle = (table.sum(1) < 0.1 * table.double().sum(1).mean()).tolist()
    return sorted(range(len(table)), key=lambda e: (idle[e], favourite[e], -busy[e]))


def who_serves_whom(tables: Mapping[str, Integer[Tensor, "experts kinds"]], kinds: Sequence[str]) -> Figure:
    """A panel for each table: kinds down, experts across, dark where an expert serves much of a kind.

    Experts stand in order of their favourite kind, those that serve less than a tenth of a fair share at the right end.
    """
    words = []
    for name, table in tables.items():
        idle = int((table.sum(1) < 0.1 * table.double().sum(1).mean()).sum())
        most = share_of_even(table).max(0)
        best = ", ".join(f"{kind} at expert {e} ({v:.0f} times)" for kind, v, e in zip(kinds, most.values, most.indices.tolist()))
        words.append(
            f"{name}: {idle} of {len(table)} experts serve less than a tenth of a fair share; the darkest cells are {best}"
        )
    alt = f"Tokens of each kind at each expert, as multiples of an even spread. {'. '.join(words)}."
    figure = Figure(alt=alt, figsize=(9.2, 2.3 * len(tables)))
    axes = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
    for ax, (name, table) in zip(axes, tables.items()):
        order = by_favourite(table)
        image = ax.imshow(share_of_even(table)[order].T.numpy(), cmap=BLUES, vmin=0, vmax=8, aspect="auto", interpolation="nearest")
        ax.set_yticks(range(len(kinds)), kinds, fontsize=9)
        ax.set_xticks(range(len(order)), order, fontsize=7)
        ax.set_title(name)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(True)
            spine.set_color("0.7")
    axes[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(axes), label="times an even spread", shrink=0.9)
    return figure


def loads(tables: Mapping[str, Integer[Tensor, " experts"]]) -> Figure:
    """Loads over their mean, busiest first, a panel for each setting."""
    shares = {name: (t.double() / t.double().mean()).sort(descending=True).values.tolist() for name, t in tables.items()}
    told = [
        f"{name}: busiest {s[0]:.2f}, least busy {s[-1]:.2f}, {sum(v < 0.1 for v in s)} below 0.1" for name, s in shares.items()
    ]
    figure = Figure(alt=f"Load of each expert over a fair share, busiest first. {'; '.join(told)}.", figsize=(9.0, 2.6))
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for ax, (name, share) in zip(axes, shares.items()):
        ax.bar(range(len(share)), share, color=BLUE, width=0.85)
        ax.axhline(1, color=VERMILION, ls=":", lw=1.6)
        ax.set(title=name, xlabel="experts, busiest first", xticks=[])
    axes[0].set_ylabel("load / fair share")
    return figure
