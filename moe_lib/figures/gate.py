"""Figures of notebook 02: sigmoid beside softmax, and one token's way through the gate."""

from __future__ import annotations

import matplotlib
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from moe_lib.figures.base import BLACK, BLUE, GREEN, ORANGE, STYLE, VERMILION, Figure
from moe_lib.router import Routing


def sigmoid_softmax(before: Float[Tensor, " experts"], after: Float[Tensor, " experts"]) -> Figure:
    """Two sets of logits, scored by softmax and by sigmoid: who moves when one logit moves?"""
    names = {"softmax": lambda z: z.softmax(-1), "sigmoid": lambda z: z.sigmoid()}
    moved = {name: int((f(after) - f(before)).abs().gt(1e-6).sum()) for name, f in names.items()}
    raised = int((after - before).abs().argmax())
    alt = (
        f"Scores of {len(before)} experts before and after the logit of expert {raised} rises from {before[raised]:.1f} to "
        f"{after[raised]:.1f}. With softmax {moved['softmax']} scores move, with sigmoid {moved['sigmoid']}."
    )
    figure = Figure(alt, figsize=(8.0, 2.6))
    axes = figure.subplots(1, 2)
    for axis, (name, f) in zip(axes, names.items()):
        for shift, logits, colour, label in ((-0.2, before, BLUE, "before"), (0.2, after, ORANGE, "after")):
            axis.bar([e + shift for e in range(len(logits))], f(logits).tolist(), width=0.38, color=colour, label=label)
        axis.set(title=f"{name}: {moved[name]} of {len(before)} move", xlabel="expert", xticks=range(len(before)), ylim=(0, 1))
    axes[0].legend(loc="upper left", frameon=False)
    return figure


def one_token(routing: Routing, bias: Float[Tensor, " experts"], token: int = 0) -> Figure:
    """One token through a gate of one group, as in the explorer: all scores as tiles, the places around the cut, the weights."""
    scores = routing.scores[token].cpu()
    bias, chosen, weights = bias.cpu(), routing.indices[token].tolist(), routing.weights[token].tolist()
    by_score = scores.argsort(descending=True, stable=True).tolist()
    k = len(chosen)
    new, gone = [e for e in chosen if e not in by_score[:k]], [e for e in by_score[:k] if e not in chosen]
    alt = f"Token {token}: experts {', '.join(map(str, chosen))} of {len(scores)} are chosen. "
    for e in new:
        alt += f"The bias of {bias[e]:+.2f} brings in expert {e}, which has the score {scores[e]:.3f}. "
    for e in gone:
        alt += f"Expert {e} with the score {scores[e]:.3f} loses its place. "
    alt += f"The weights sum to {sum(weights):.3f}."
    figure = Figure(alt, figsize=(8.0, 4.2))
    with matplotlib.rc_context(STYLE):
        axes = figure.subplot_mosaic([["tiles", "tiles"], ["cut", "weights"]], height_ratios=[1, 1.2], width_ratios=[1.7, 1])
    _tiles(axes["tiles"], scores, chosen, new, gone)
    _cut(axes["cut"], scores, bias, chosen, new)
    _weights(axes["weights"], chosen, weights, new)
    return figure


def _tiles(axis: Axes, scores: Float[Tensor, " experts"], chosen: list[int], new: list[int], gone: list[int]) -> None:
    rows = 8 if len(scores) % 8 == 0 and len(scores) >= 64 else 1
    columns = len(scores) // rows
    axis.imshow(scores.view(rows, columns).float().numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="equal")
    for e in (*chosen, *gone):
        y, x = divmod(e, columns)
        colour = GREEN if e in new else VERMILION if e in gone else ORANGE
        style = ":" if e in gone else "-"
        axis.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=colour, linewidth=1.8, linestyle=style))
        axis.text(x, y + 0.03, "×" if e in gone else chosen.index(e) + 1, ha="center", va="center", fontsize=7.5, weight="bold")
    axis.set_yticks(range(rows), [r * columns for r in range(rows)], fontsize=7)
    axis.set(xticks=[], title=f"{len(scores)} experts by score; the bias brought in the green one and put out ×")
    axis.spines[:].set_visible(False)


def _cut(axis: Axes, scores: Float[Tensor, " experts"], bias: Float[Tensor, " experts"], chosen: list[int], new: list[int]) -> None:
    order = (scores + bias).argsort(descending=True, stable=True).tolist()[: len(chosen) + 6]
    edges = [GREEN if e in new else ORANGE if e in chosen else BLUE for e in order]
    axis.bar(range(len(order)), scores[order].tolist(), color=(BLUE, 0.55), edgecolor=edges, linewidth=1.6)
    for i, e in enumerate(order):
        if bias[e]:
            axis.bar(i, bias[e].item(), bottom=scores[e].item(), color=(GREEN, 0.25), edgecolor=GREEN, linestyle=":")
    axis.axvline(len(chosen) - 0.5, color=BLACK, linestyle="--", linewidth=1)
    axis.set_xticks(range(len(order)), order, fontsize=7, rotation=45)
    axis.set(title="score, and the bias as a lift; the cut", ylim=(0, 1.05))


def _weights(axis: Axes, chosen: list[int], weights: list[float], new: list[int]) -> None:
    axis.barh(
        range(len(chosen)), weights, color=(ORANGE, 0.7), edgecolor=[GREEN if e in new else ORANGE for e in chosen], linewidth=1.6
    )
    for i, w in enumerate(weights):
        axis.text(w, i, f" {w:.3f}", va="center", fontsize=8)
    axis.set_yticks(range(len(chosen)), chosen, fontsize=8)
    axis.invert_yaxis()
    axis.set(title=f"weights, sum {sum(weights):.3f}", xlim=(0, max(weights) * 1.25), xticks=[])
