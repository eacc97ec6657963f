"""The explorer of notebook 00: experts, top-k, width and precision -> total, active, bytes, and what machine holds them."""

from __future__ import annotations

import math

import ipywidgets as W

from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.explorers.base import BLUE, FAINT, INK, ORANGE, Explorer, line, rect, says, svg, text

EXPERTS, TOP_K = (32, 64, 128, 256, 384, 512, 1024), (1, 2, 4, 6, 8, 16, 32)
WIDTHS, PRECISIONS = (512, 1024, 1536, 2048, 3072, 4096), ("bf16", "fp8", "int4")
# Memory in GB of 10^9 bytes, smallest first. Weights only: a machine that works also needs room for what it computes.
MACHINES = {
    "a laptop with 16 GB": 16,
    "one GPU with 80 GB": 80,
    "one GPU with 141 GB": 141,
    "8 GPUs with 80 GB each": 640,
    "8 GPUs with 141 GB each": 1128,
    "16 GPUs with 141 GB each": 2256,
}
SHORT = ("laptop, 16 GB", "1 × 80", "1 × 141", "8 × 80", "8 × 141", "16 × 141 GB")
LEFT, RIGHT, LEAST, MOST = 310, 740, 0.1, 20_000  # the axis: pixels, and GB on a logarithmic scale
SIDE, LARGEST = 190, 5.5e12  # a square with sides of SIDE pixels stands for so many weights


def block_bytes(config: MoEConfig, precision: str) -> int:
    """Bytes of one block's weights: routed experts in `precision`, the rest in bfloat16, but for the float32 bias."""
    rest = 2 * (config.shared_params + config.router_params) + 2 * config.n_routed_experts
    return config.n_routed_experts * config.expert_bytes(precision) + rest


def model_bytes(config: MoEConfig, precision: str) -> int:
    """Bytes of the whole model's weights: all outside the routed experts in bfloat16, the biases in float32."""
    outside = config.total_params - config.n_moe_layers * config.block_params
    return config.n_moe_layers * block_bytes(config, precision) + 2 * outside


def machine_for(n_bytes: int) -> str:
    """The smallest of MACHINES that holds so many bytes."""
    fitting = (name for name, size in MACHINES.items() if n_bytes <= size * 1e9)
    return next(fitting, f"{math.ceil(n_bytes / 141e9)} GPUs with 141 GB each")


def draw_counts(experts: int, k: int, width: int, precision: str) -> str:
    """K2 with so many routed experts of this width, k of them for each token, at one precision."""
    config = KIMI_K2.replace(n_routed_experts=experts, num_experts_per_tok=k, moe_intermediate_size=width)
    total, active = config.total_params, config.active_params()
    model, block = model_bytes(config, precision), block_bytes(config, precision)
    words = (
        f"{experts} experts of width {width}, {k} for each token: {total / 1e9:,.1f} billion weights, of which a token uses "
        f"{active / 1e9:,.1f} billion ({active / total:.1%}). With the routed experts in {precision} the model takes "
        f"{_gb(model)}: {machine_for(model)}. One block takes {_gb(block)}: {machine_for(block)}."
    )
    return svg(_squares(total, active) + _bars(config, precision), 900, 290, words) + says(words)


def counts_explorer() -> Explorer:
    """Starts at K2 as its checkpoint is stored: in fp8."""
    return Explorer(
        draw_counts,
        {
            "experts": W.SelectionSlider(options=EXPERTS, value=KIMI_K2.n_routed_experts, description="routed experts"),
            "k": W.SelectionSlider(options=TOP_K, value=KIMI_K2.num_experts_per_tok, description="chosen, top-k"),
            "width": W.SelectionSlider(options=WIDTHS, value=KIMI_K2.moe_intermediate_size, description="width of an expert"),
            "precision": W.Dropdown(options=PRECISIONS, value="fp8", description="routed experts in"),
        },
    )


def _squares(total: int, active: int) -> str:
    """Two squares, one within the other: area is the number of weights, on one scale for every setting."""
    side, inner = (SIDE * math.sqrt(n / LARGEST) for n in (total, active))
    bottom = 60 + SIDE
    return (
        text(20, 20, "weights (area)", extra='font-weight="bold"')
        + rect(20, bottom - side, side, side, BLUE, 'fill-opacity="0.55"')
        + rect(20, bottom - inner, inner, inner, ORANGE)
        + text(20, bottom - side - 8, f"all: {total / 1e9:,.1f} billion")
        + rect(20, bottom + 12, 12, 12, ORANGE)
        + text(38, bottom + 22, f"for one token: {active / 1e9:,.1f} billion")
    )


def _bars(config: MoEConfig, chosen: str) -> str:
    out = [text(LEFT, 20, "bytes of weights, and the machines that hold them (GPUs × GB)", extra='font-weight="bold"')]
    for i, (name, size) in enumerate(zip(SHORT, MACHINES.values())):
        row = 40 + 14 * (i % 3)
        out += [line(_x(size), row + 4, _x(size), 252, FAINT), text(_x(size), row, name, "middle", 'font-size="11"')]
    for n, precision in enumerate(PRECISIONS):
        top = 84 + 58 * n
        strength = "1" if precision == chosen else "0.45"
        out.append(text(LEFT - 12, top + 24, precision, "end", 'font-weight="bold"' if precision == chosen else ""))
        sizes = (("whole model", model_bytes(config, precision), BLUE), ("one block", block_bytes(config, precision), ORANGE))
        for j, (what, size, colour) in enumerate(sizes):
            y, end = top + 22 * j, _x(size / 1e9)
            out.append(rect(LEFT, y, end - LEFT, 18, colour, f'fill-opacity="{strength}"'))
            out.append(text(end + 6, y + 13, f"{what}: {_gb(size)}"))
    out.append(line(LEFT, 252, RIGHT, 252))
    for gb, name in ((0.1, "0.1 GB"), (1, "1 GB"), (10, "10 GB"), (100, "100 GB"), (1000, "1 TB"), (10_000, "10 TB")):
        out.append(line(_x(gb), 252, _x(gb), 257, INK) + text(_x(gb), 272, name, "middle", 'font-size="11"'))
    return "".join(out)


def _x(gb: int | float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(gb / LEAST) / math.log(MOST / LEAST)


def _gb(n_bytes: int) -> str:
    gb = n_bytes / 1e9
    return f"{gb:,.0f} GB" if gb >= 100 else f"{gb:.1f} GB" if gb >= 1 else f"{gb:.2f} GB"
