"""Figures of notebook 05: rows that move between ranks, times predicted and published, the cost of more ranks, their loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Int64
from matplotlib.patches import Rectangle
from torch import Tensor

from moe_lib.expert_parallel_cost import DEEPEP, Traffic
from moe_lib.figures.base import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Figure

RANK_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)


def moves(counts: Int64[Tensor, "ranks experts"]) -> Figure:
    """counts[s, e]: rows that rank s has for expert e. Left the matrix of rows from rank to rank, right every row on its way.

    Raises ValueError for more ranks than there are colours, or experts that cannot be shared equally.
    """
    ranks, experts = counts.shape
    if ranks > len(RANK_COLOURS) or experts % ranks:
        raise ValueError(f"{experts} experts over {ranks} ranks; this drawing takes equal shares of 1 to {len(RANK_COLOURS)} ranks")
    share = experts // ranks
    matrix = counts.view(ranks, ranks, share).sum(2).tolist()
    figure = Figure(alt=_moves_words(matrix), figsize=(9.6, 0.17 * int(counts.sum()) + 0.34 * ranks + 1.2))
    left, right = figure.subplots(1, 2, width_ratios=(2, 5))
    most = max(max(row) for row in matrix) or 1
    for s, row in enumerate(matrix):
        for d, n in enumerate(row):
            left.add_patch(Rectangle((d, s), 1, 1, facecolor=RANK_COLOURS[s], alpha=0.08 + 0.6 * n / most, edgecolor="white", lw=2))
            left.text(d + 0.5, s + 0.5, n, ha="center", va="center", weight="bold" if s == d else "normal")
    numbers = [i + 0.5 for i in range(ranks)]
    left.set(xlim=(0, ranks), ylim=(ranks, 0), aspect="equal", xlabel="to rank", ylabel="from rank", title="rows from rank to rank")
    left.set(xticks=numbers, xticklabels=range(ranks), yticks=numbers, yticklabels=range(ranks))
    left.tick_params(length=0)
    for side in left.spines.values():
        side.set_visible(False)
    _draw_moves(right, counts.tolist(), share)
    return figure


def _draw_moves(ax, counts: list[list[int]], share: int) -> None:
    ranks, gap = len(counts), 1.6
    sent, y = {}, 0.0  # (source, expert) -> heights of its rows
    for s, row in enumerate(counts):
        top = y
        for e, n in enumerate(row):
            sent[s, e] = [y + i for i in range(n)]
            y += n
        ax.text(-0.05, (top + y - 1) / 2, f"rank {s}", ha="right", va="center", weight="bold")
        y += gap
    height, y = y, 0.0
    for e in range(ranks * share):
        start = y
        for s in range(ranks):
            for at in sent[s, e]:
                ax.add_patch(Rectangle((0, at - 0.4), 0.28, 0.8, color=RANK_COLOURS[s]))
                ax.text(0.14, at, e, ha="center", va="center", fontsize=7, color="white", weight="bold")
                ax.plot([0.28, 1.42], [at, y], color=RANK_COLOURS[s], lw=1.3, alpha=0.35 if e // share == s else 0.9)
                ax.add_patch(Rectangle((1.42, y - 0.4), 0.28, 0.8, color=RANK_COLOURS[s]))
                y += 1
        words = f"expert {e}" if y > start else f"expert {e} · no rows"
        if y == start:
            y += 1
        ax.text(1.75, (start + y - 1) / 2, words, va="center", fontsize=8.5)
        if (e + 1) % share == 0:
            first = e + 1 - share
            ax.text(
                2.5,
                y,
                f"rank {e // share}: experts {first}–{e}" if share > 1 else f"rank {e // share}",
                ha="right",
                va="center",
                weight="bold",
                fontsize=9,
            )
            y += gap + 0.4
    ax.set(xlim=(-0.4, 2.5), ylim=(max(height, y) - 0.6, -2.2))
    for x, words in ((0.14, "sent, by expert"), (1.56, "arrived, by expert")):
        ax.text(x, -1.5, words, ha="center", weight="bold", fontsize=9)
    ax.axis("off")


def _moves_words(matrix: list[list[int]]) -> str:
    ranks, total = len(matrix), sum(map(sum, matrix))
    away = total - sum(matrix[r][r] for r in range(ranks))
    loads = [sum(column) for column in zip(*matrix)]
    rows = "; ".join(f"rank {s} sends {', '.join(map(str, row))}" for s, row in enumerate(matrix))
    return (
        f"{total} rows of {ranks} ranks, {away} of which leave their rank. To ranks 0 to {ranks - 1}: {rows}. "
        f"The ranks' experts work on {', '.join(map(str, loads))} rows."
    )


def published_times(predicted: Mapping[int, tuple[float, float]]) -> Figure:
    """DeepEP's published microseconds beside predicted seconds (dispatch, combine), by the number of ranks."""
    ranks = list(predicted)
    micro = {r: [1e6 * t for t in both] for r, both in predicted.items()}
    told = "; ".join(
        f"{r} ranks {DEEPEP[r][0]} and {DEEPEP[r][1]}, predicted {micro[r][0]:.0f} and {micro[r][1]:.0f}" for r in ranks
    )
    figure = Figure(alt=f"Microseconds of dispatch and combine, published beside bytes over bandwidth: {told}.", figsize=(8.0, 3.0))
    for ax, i, name in zip(figure.subplots(1, 2, sharey=True), range(2), ("dispatch (fp8)", "combine (bfloat16)")):
        places = range(len(ranks))
        ax.bar(places, [micro[r][i] for r in ranks], color=SKY, label="bytes / bandwidth")
        ax.plot(places, [DEEPEP[r][i] for r in ranks], "o", color=VERMILION, label="published")
        ax.vlines(places, [micro[r][i] for r in ranks], [DEEPEP[r][i] for r in ranks], color=VERMILION, lw=1)
        ax.set(xticks=list(places), xticklabels=ranks, xlabel="ranks", title=name)
    figure.axes[0].set_ylabel("µs")
    figure.axes[0].legend(loc="upper left")
    return figure


def more_ranks(steps: Mapping[int, Mapping[str, float]]) -> Figure:
    """Seconds of dispatch, experts and combine of one step, by the number of ranks."""
    parts, ranks = ("dispatch", "experts", "combine"), list(steps)
    told = "; ".join(f"{r} ranks {', '.join(f'{1e6 * steps[r][p]:.0f}' for p in parts)}" for r in ranks)
    figure = Figure(alt=f"Microseconds of dispatch, experts and combine, stacked: {told}.", figsize=(8.0, 3.0))
    ax, below = figure.subplots(), [0.0] * len(ranks)
    for part, colour in zip(parts, (SKY, ORANGE, BLUE)):
        heights = [1e6 * steps[r][part] for r in ranks]
        ax.bar(range(len(ranks)), heights, bottom=below, color=colour, label=part)
        below = [b + h for b, h in zip(below, heights)]
    ax.set(xticks=range(len(ranks)), xticklabels=ranks, xlabel="ranks", ylabel="µs")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def rank_loads(ways: Mapping[str, Traffic]) -> Figure:
    """The load of every rank, busiest first, for each way of placing experts."""
    told = "; ".join(
        f"{name}: from {int(t.load.min())} to {int(t.load.max())} rows, max/mean {t.imbalance:.2f}" for name, t in ways.items()
    )
    first: Sequence[Traffic] = list(ways.values())
    mean = first[0].load.double().mean().item()
    figure = Figure(alt=f"Rows of each of {len(first[0].load)} ranks, mean {mean:.0f}: {told}.", figsize=(9.0, 2.6))
    for ax, (name, t) in zip(figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways.items()):
        loads = sorted(t.load.tolist(), reverse=True)
        ax.bar(range(len(loads)), loads, width=1.0, color=[VERMILION] + [SKY] * (len(loads) - 1))
        ax.axhline(mean, color=BLACK, lw=1, ls="--")
        ax.set(title=f"{name}: {t.imbalance:.2f}", xticks=[], xlabel="ranks, busiest first")
    figure.axes[0].set_ylabel("rows")
    return figure
