"""Figures of notebook 01: SiLU and the gated product, and what a gate buys on a small regression."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from moe_lib.expert import swiglu
from moe_lib.figures.base import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION, Figure

COLOURS = (BLUE, SKY, ORANGE, VERMILION, GREEN, BLACK)


def gated_product(gate: Float[Tensor, " features"], up: Float[Tensor, " features"]) -> Figure:
    """SiLU beside ReLU with these gates on it, and the surface h(gate, up) with these features on it, numbered from 0."""
    gate, up = gate.detach().cpu(), up.detach().cpu()
    a, h = F.silu(gate).tolist(), swiglu(gate, up).tolist()
    gates, ups = gate.tolist(), up.tolist()
    z = torch.linspace(-max(5.0, 1.1 * max(map(abs, gates))), max(5.0, 1.1 * max(map(abs, gates))), 401, dtype=torch.float64)
    lowest = F.silu(z).argmin()
    points = "; ".join(f"{i}: gate {g:g}, up {u:g}, h {y:.2f}" for i, (g, u, y) in enumerate(zip(gates, ups, h)))
    alt = (
        f"Left, SiLU over the gate: {F.silu(z)[lowest]:.2f} at its lowest, near gate {z[lowest]:.1f}, then rising towards the gate "
        f"itself, as ReLU does. Right, the surface h = SiLU(gate) · up: steep where the gate is open, flat where it is shut, its "
        f"sign turned over left of gate 0. On it, {len(gates)} features. {points}."
    ).replace("-", "−")
    figure = Figure(alt=alt, figsize=(9.6, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    left.plot(z.numpy(), F.silu(z).numpy(), color=BLUE, lw=2, label="SiLU(gate)")
    left.plot(z.numpy(), F.relu(z).numpy(), color="0.5", ls="--", label="ReLU(gate)")
    left.plot(gates, a, "o", color=VERMILION)
    for i, (g, y) in enumerate(zip(gates, a)):
        left.annotate(str(i), (g, y), xytext=(0, 8), textcoords="offset points", ha="center")
    left.set(xlabel="gate", ylabel="a", title="a = SiLU(gate)")
    left.legend(loc="upper left")
    _surface(right, z[-1].item(), max(5.0, 1.2 * max(map(abs, ups))))
    right.plot(gates, ups, "o", color=BLACK)
    for i, (g, u, y) in enumerate(zip(gates, ups, h)):
        side, dx = ("left", 7) if g < 0.6 * z[-1] else ("right", -7)
        label = f"{i}: h = {y:.2f}".replace("-", "−")
        right.annotate(label, (g, u), xytext=(dx, 5), textcoords="offset points", ha=side, weight="bold", fontsize=9)
    right.set(xlabel="gate", ylabel="up", title="h = SiLU(gate) · up, and lines of equal h")
    return figure


def _surface(ax: Axes, gate_reach: float, up_reach: float) -> None:
    gates, ups = torch.linspace(-gate_reach, gate_reach, 201), torch.linspace(-up_reach, up_reach, 161)
    h = swiglu(gates.expand(len(ups), -1), ups[:, None].expand(-1, len(gates)))
    # the square root gives the small values left of 0 a colour of their own
    tint = (h.sign() * h.abs().sqrt()).numpy()
    ax.pcolormesh(gates.numpy(), ups.numpy(), tint, cmap="PuOr_r", vmin=-6.5, vmax=6.5, shading="nearest", rasterized=True)
    levels = [-16, -4, -1, -0.25, 0.25, 1, 4, 16]
    ax.contour(gates.numpy(), ups.numpy(), h.numpy(), levels=levels, colors="0.35", linewidths=0.7, linestyles="solid")
    ax.axhline(0, color="0.35", lw=0.8)
    ax.axvline(0, color="0.35", lw=0.8)


def what_a_gate_buys(errors: Mapping[str, Mapping[str, Float[Tensor, " seeds"]]]) -> Figure:
    """errors[target][model]: the error of each seed as a share of the target's variance. One panel a target, a dot a seed."""
    words = [
        f"{target}: " + ", ".join(f"{model} {e.mean():.1%} ± {e.std():.1%}" for model, e in models.items())
        for target, models in errors.items()
    ]
    seeds = len(next(iter(next(iter(errors.values())).values())))
    alt = f"Errors as a share of the variance, mean and standard deviation over {seeds} seeds. {'. '.join(words)}."
    figure = Figure(alt=alt, figsize=(9.6, 2.9))
    axes = figure.subplots(1, len(errors), sharex=True, squeeze=False)[0]
    for ax, (target, models) in zip(axes, errors.items()):
        for row, (colour, e) in enumerate(zip(COLOURS, models.values())):
            ax.plot(e.tolist(), [row] * len(e), "o", color=colour, alpha=0.45)
            ax.plot([e.mean().item()], [row], "|", color=colour, markersize=22, markeredgewidth=3)
        ax.set(title=target, xlabel="error, share of the variance", xscale="log", ylim=(len(models) - 0.5, -0.5))
        ax.set_yticks(range(len(models)), list(models))
        ax.grid(axis="x", color="0.9")
    return figure
