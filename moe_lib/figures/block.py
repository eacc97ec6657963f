"""Figures of notebook 03: dispatch and combine as a permutation, the work of five ways, experts hit, loads under skew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Integer
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from moe_lib.block import dispatch
from moe_lib.figures.base import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Figure
from moe_lib.router import Routing
from moe_lib.work import Work

TOKEN_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)


def permutation(routing: Routing, n_experts: int) -> Figure:
    """Token copies on the left, the sorted rows that dispatch makes of them in the middle, and back in token order on the right.

    Rows are those of moe_lib's dispatch; a colour is a token. Raises ValueError for more tokens than there are colours.
    """
    tokens, k = routing.indices.shape
    if not 1 <= tokens <= len(TOKEN_COLOURS):
        raise ValueError(
            f"routing is of {tokens} tokens; this drawing tells 1 to {len(TOKEN_COLOURS)} apart by colour, show it fewer"
        )
    _, counts, order = dispatch(torch.zeros(tokens, 1, device=routing.indices.device), routing, n_experts)
    order, counts = order.tolist(), counts.tolist()
    figure = Figure(alt=_permutation_words(order, counts, k), figsize=(8.4, 0.36 * (tokens * k + n_experts) + 0.9))
    ax = figure.subplots()
    copy_y = [c + 0.6 * (c // k) for c in range(tokens * k)]  # a little air between tokens
    row_y, y = [], 0.0
    for expert, count in enumerate(counts):
        if not count:
            ax.add_patch(Rectangle((1.1, y - 0.42), 0.6, 0.84, facecolor="none", edgecolor="0.6", ls=":"))
            ax.text(1.4, y, f"expert {expert} · no rows", ha="center", va="center", fontsize=8.5, color="0.4")
        for i in range(count):
            _box(ax, 1.1, 0.6, y + i, TOKEN_COLOURS[order[len(row_y)] // k], f"expert {expert} · row {len(row_y)}")
            row_y.append(y + i)
        y += max(count, 1) + 0.6
    for row, copy in enumerate(order):
        colour = TOKEN_COLOURS[copy // k]
        for x in (0.0, 2.5):
            _box(ax, x, 0.3, copy_y[copy], colour, f"copy {copy}")
        ax.plot([0.3, 1.1], [copy_y[copy], row_y[row]], color=colour, lw=1.5)
        ax.plot([1.7, 2.5], [row_y[row], copy_y[copy]], color=colour, lw=1.5)
    for token in range(tokens):
        middle = sum(copy_y[token * k : (token + 1) * k]) / k
        ax.text(-0.06, middle, f"token {token}", ha="right", va="center")
        ax.text(2.86, middle, f"token {token}: sum", ha="left", va="center")
    for x, words in ((0.15, "arrival order"), (1.4, "dispatch: sorted by expert"), (2.65, "combine: arrival order")):
        ax.text(x, -1.1, words, ha="center", va="center", weight="bold")
    ax.set(xlim=(-0.45, 3.4), ylim=(max(copy_y[-1], y - 1.6) + 0.7, -1.7))
    ax.axis("off")
    return figure


def _permutation_words(order: list[int], counts: list[int], k: int) -> str:
    visits, start = [], 0
    for expert, count in enumerate(counts):
        tokens = [str(copy // k) for copy in order[start : start + count]]
        visits.append(
            f"expert {expert} gets {'token' if count == 1 else 'tokens'} {', '.join(tokens)}" if tokens else f"expert {expert} none"
        )
        start += count
    return (
        f"{len(order)} copies of {len(order) // k} tokens, sorted by expert: {'; '.join(visits)}. "
        f"Rows 0 to {len(order) - 1} hold copies {', '.join(map(str, order))}, and combine puts each back where it came from."
    )


def _box(ax: Axes, x: float, width: float, y: float, colour: str, words: str) -> None:
    ax.add_patch(Rectangle((x, y - 0.42), width, 0.84, facecolor=colour, alpha=0.25, edgecolor=colour))
    ax.text(x + width / 2, y, words, ha="center", va="center", fontsize=8.5)


def work_growth(tokens: Sequence[int], works: Mapping[str, Sequence[Work]]) -> Figure:
    """How three counts grow with the batch, a line for each way: matrix products, other operations, FLOPs."""
    panels = {"matrix products": "products", "other operations": "others", "FLOPs": "flops"}
    last = {name: of[-1] for name, of in works.items()}
    told = "; ".join(f"{name} {work.products:,} products and {work.flops / 1e6:.3g} MFLOP" for name, work in last.items())
    figure = Figure(
        alt=f"The work of {len(works)} ways from {tokens[0]} to {tokens[-1]} tokens. At {tokens[-1]}: {told}.", figsize=(9.4, 3.2)
    )
    axes = figure.subplots(1, 3)
    for ax, (title, count) in zip(axes, panels.items()):
        for (name, of), style in zip(works.items(), ("-o", "-s", "-^", "--D", "-v")):
            ax.plot(tokens, [getattr(work, count) for work in of], style, label=name, ms=5, lw=1.6)
        ax.set(title=title, xlabel="tokens", xscale="log", yscale="log", xticks=tokens)
        ax.set_xticklabels(map(str, tokens))
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(works), frameon=False)
    return figure


def distinct_experts(tokens: Sequence[int], formula: Sequence[float], simulated: Sequence[float], n_experts: int) -> Figure:
    """How many different experts a batch reaches: the closed form as a line, simulated batches as points."""
    told = ", ".join(f"{f:.1f} at {t}" for t, f in zip(tokens, formula))
    far = max(abs(s - f) for s, f in zip(simulated, formula))
    alt = (
        f"Distinct experts of {n_experts} hit by a batch, by tokens: {told}. Simulated batches lie within {far:.1f} of the formula."
    )
    figure = Figure(alt=alt, figsize=(8.0, 3.2))
    ax = figure.subplots()
    ax.plot(tokens, formula, color=BLUE, label="E (1 − (1 − k/E)^T)")
    ax.plot(tokens, simulated, "o", color=VERMILION, label="simulated", ms=6, mfc="none", mew=1.6)
    for t, f in zip(tokens, formula):
        ax.annotate(f"{f:.1f}", (t, f), xytext=(-3, 6), textcoords="offset points", ha="right", fontsize=9)
    ax.axhline(n_experts, color="0.6", lw=1, ls=":")
    ax.set(
        xscale="log",
        xticks=tokens,
        xlabel="tokens in the batch",
        ylabel="experts whose weights are read",
        ylim=(0, 1.14 * n_experts),
    )
    ax.set_xticklabels(map(str, tokens))
    ax.minorticks_off()
    share = ax.secondary_yaxis("right", functions=(lambda n: 100 * n / n_experts, lambda p: p * n_experts / 100))
    share.set_ylabel("% of the routed weights")
    ax.legend(loc="lower right", frameon=False)
    return figure


def loads(counts: Mapping[str, Integer[Tensor, " experts"]]) -> Figure:
    """Rows of each expert, busiest first, a panel for each batch; the dotted line is the mean."""
    facts = {name: (max(c.tolist()), max(c.tolist()) / mean(c), c.tolist().count(0)) for name, c in counts.items()}
    words = [f"{name}: busiest {most} rows, {ratio:.2f} times the mean, {idle} idle" for name, (most, ratio, idle) in facts.items()]
    figure = Figure(alt=f"Rows of each expert, busiest first. {'; '.join(words)}.", figsize=(9.0, 2.8))
    axes = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for ax, (name, c) in zip(axes, counts.items()):
        ax.bar(range(len(c)), sorted(c.tolist(), reverse=True), color=BLUE, width=0.8)
        ax.axhline(mean(c), color=VERMILION, ls=":", lw=1.6)
        ax.set(title=name, xlabel="experts, busiest first", xticks=[])
        _, ratio, idle = facts[name]
        ax.text(0.97, 0.93, f"max/mean {ratio:.2f}\nidle {idle}", transform=ax.transAxes, ha="right", va="top")
    axes[0].set_ylabel("rows")
    return figure


def mean(counts: Integer[Tensor, " experts"] | Float[Tensor, " experts"]) -> float:
    return counts.double().mean().item()
