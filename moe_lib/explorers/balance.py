"""The balance explorer: replay a training run step by step, and see who works, who idles and who serves whom."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ipywidgets as W
import numpy as np
from jaxtyping import Float, Integer
from PIL import Image

from moe_lib.balance import max_violation, sampling_floor
from moe_lib.explorers.base import BLUE, FAINT, INK, ORANGE, VERMILION, Explorer, line, rect, says, svg, text
from moe_lib.toy import WINDOW, Run

LEFT, TOP, WIDE = 54, 40, 432
BARS, BARS_WIDE = LEFT + WIDE + 34, 150
TABLE, CELL = BARS + BARS_WIDE + 44, 24
ROW, CURVE = 8, 96
STARVING = 0.1


@dataclass(frozen=True)
class Replay:
    """One layer of a run, ready to be drawn."""

    loads: Integer[np.ndarray, "steps experts"]
    by_kind: Integer[np.ndarray, "windows experts kinds"]
    violation: Float[np.ndarray, " steps"]

    @classmethod
    def of(cls, run: Run, layer: int) -> Replay:
        return cls(run.loads[:, layer].numpy(), run.by_kind[:, layer].numpy(), max_violation(run.loads[:, layer]).numpy())

    @functools.cached_property
    def shares(self) -> Float[np.ndarray, "steps experts"]:
        """Loads over their step's mean: 1 is a fair share."""
        return self.loads / self.loads.mean(1, keepdims=True)


def balance_explorer(runs: Mapping[str, Run], kinds: Sequence[str], k: int = 2) -> Explorer:
    """Replay runs of the toy model, all of one number of steps, layers and experts; a choice switches between them.

    `k` is how many experts a token goes to: it and the tokens of a step give the sampling-noise floor.
    Raises ValueError for no runs, runs without experts, or runs of different sizes.
    """
    shapes = {run.loads.shape for run in runs.values()}
    if len(shapes) != 1 or 0 in next(iter(shapes)):
        raise ValueError(
            f"runs have loads of shapes {[list(s) for s in sorted(shapes)]}; expected one shape [steps, layers, experts]"
        )
    steps, layers, _ = next(iter(shapes))

    @functools.lru_cache(maxsize=32)
    def replay(name: str, layer: int) -> tuple[Replay, str]:
        found = Replay.of(runs[name], layer)
        return found, heatmap(found)

    highest = max(float(max_violation(run.loads).max()) for run in runs.values())

    def draw(run: str = next(iter(runs)), step: int = steps, layer: int = layers - 1) -> str:
        found, image = replay(run, layer)
        tokens = int(found.loads[step - 1].sum()) // k
        floor = sampling_floor(tokens, found.loads.shape[1], k)
        return picture(found, image, step, kinds, floor, highest) + says(sentence(found, run, step, layer, kinds, floor))

    controls = {
        "run": W.Dropdown(options=list(runs), description="run"),
        "step": W.IntSlider(steps, 1, steps, description="step"),
        "layer": W.IntSlider(layers - 1, 0, layers - 1, description="layer"),
    }
    if layers == 1:
        del controls["layer"]
    return Explorer(draw, controls, columns=3)


def heatmap(replay: Replay) -> str:
    """A PNG as a data URL, a pixel for each expert and step: blue below a fair share, orange above it, clear where it is fair."""
    ratio = np.log2(np.maximum(replay.shares.T, 0.0625))  # an idle expert counts as a sixteenth
    levels = np.rint(np.clip(ratio * 5, -15, 15)).astype(np.int16)
    image = Image.fromarray((levels + 15).astype(np.uint8), "P")
    image.putpalette([*15 * _rgb(BLUE), *_rgb(ORANGE) * 16])
    png = io.BytesIO()
    # the fainter the nearer to fair, so that the picture follows the page's theme
    image.save(png, "PNG", transparency=bytes(min(255, 17 * abs(level)) for level in range(-15, 16)), compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def picture(replay: Replay, image: str, step: int, kinds: Sequence[str], floor: float, highest: float) -> str:
    """Experts are rows in all three upper views: loads over the steps, loads now, kinds served now. MaxVio runs below."""
    steps, experts = replay.loads.shape
    high, now = ROW * experts, LEFT + WIDE * (step - 0.5) / steps
    bottom = TOP + high
    parts = [
        text(LEFT, 14, "Load of every expert, step by step", extra='font-weight="600"'),
        _key(LEFT, 24),
        f'<image x="{LEFT}" y="{TOP}" width="{WIDE}" height="{high}" preserveAspectRatio="none" href="{image}" '
        'style="image-rendering:pixelated"/>',
        rect(LEFT, TOP, WIDE, high, "none", f'stroke="{FAINT}"'),
        text(LEFT - 6, TOP + 9, "expert 0", "end", 'font-size="10"'),
        text(LEFT - 6, bottom, experts - 1, "end", 'font-size="10"'),
        *_bars(replay.shares[step - 1], step),
        *_kinds(replay.by_kind[(step - 1) // WINDOW], kinds, (step - 1) // WINDOW, steps),
        *_curve(replay.violation, bottom + 34, floor, highest, now, step),
        line(now, TOP, now, bottom + 34 + CURVE, INK, 'stroke-width="1.2"'),
    ]
    starving = int((replay.shares[step - 1] < STARVING).sum())
    label = (
        f"Loads of {experts} experts over {steps} steps as a heatmap. At step {step} the busiest expert has "
        f"{replay.shares[step - 1].max():.1f} times a fair share, {starving} experts less than a tenth of one, and MaxVio is "
        f"{replay.violation[step - 1]:.2f}; sampling noise alone would give {floor:.2f}"
    )
    return svg("".join(parts), TABLE + CELL * len(kinds) + 20, bottom + 34 + CURVE + 22, label)


def _key(x: int, y: int) -> str:
    blue = rect(x, y, 10, 10, BLUE, 'rx="2"') + text(x + 14, y + 9, "idle", extra='font-size="10"')
    clear = rect(x + 44, y, 10, 10, "none", f'rx="2" stroke="{FAINT}"') + text(
        x + 58, y + 9, "a fair share", extra='font-size="10"'
    )
    return blue + clear + rect(x + 126, y, 10, 10, ORANGE, 'rx="2"') + text(x + 140, y + 9, "8 times that", extra='font-size="10"')


def _bars(shares: np.ndarray, step: int) -> list[str]:
    """Loads at this step, an expert a row; the scale is fixed, so that steps and runs compare."""
    experts, unit = len(shares), BARS_WIDE / 8
    fair, end = BARS + unit, TOP + ROW * experts
    path = "".join(f"M{BARS} {TOP + ROW * e + 1}h{unit * min(s, 8):.1f}v{ROW - 2}H{BARS}z" for e, s in enumerate(shares.tolist()))
    return [
        text(BARS, 14, f"Load at step {step}", extra='font-weight="600"'),
        f'<path d="{path}" fill="{ORANGE}"/>',
        line(BARS, TOP, BARS, end, INK),
        line(fair, TOP, fair, end, VERMILION, 'stroke-dasharray="4 3" stroke-width="1.4"'),
        text(fair, TOP - 5, "fair share", "middle", 'font-size="10"'),
        *(text(BARS + unit * n, end + 13, f"{n}×", "middle", 'font-size="10"') for n in (2, 4, 6, 8)),
    ]


def _kinds(table: np.ndarray, kinds: Sequence[str], window: int, steps: int) -> list[str]:
    """Tokens of each kind at each expert in this step's window, as multiples of an even spread of that kind."""
    experts, first = len(table), WINDOW * window + 1
    shares = table / np.maximum(table.mean(0), 1e-9)
    cells = [
        rect(TABLE + CELL * c, TOP + ROW * e, CELL - 1, ROW - 1, BLUE, f'fill-opacity="{min(v / 8, 1):.2f}"')
        for e, row in enumerate(shares.tolist())
        for c, v in enumerate(row)
        if v >= 0.2
    ]
    end = TOP + ROW * experts
    turned = [(TABLE + CELL * (c + 0.5) + 3, end + 8, kind) for c, kind in enumerate(kinds)]
    return [
        text(TABLE - 10, 14, f"Kinds served, steps {first}–{min(first + WINDOW - 1, steps)}", extra='font-weight="600"'),
        rect(TABLE - 1, TOP - 1, CELL * len(kinds) + 1, end - TOP + 1, "none", f'stroke="{FAINT}"'),
        *cells,
        *(text(x, y, kind, "end", f'font-size="11" transform="rotate(-55 {x:.1f} {y:.1f})"') for x, y, kind in turned),
        text(TABLE - 10, 31, "dark: 8 times an even spread", extra='font-size="10"'),
    ]


def _curve(violation: np.ndarray, top: int, floor: float, highest: float, now: float, step: int) -> list[str]:
    steps, bottom, unit = len(violation), top + CURVE, CURVE / highest
    points = " ".join(f"{LEFT + WIDE * (s + 0.5) / steps:.1f},{bottom - unit * v:.1f}" for s, v in enumerate(violation.tolist()))
    level = bottom - unit * floor
    here = bottom - unit * float(violation[step - 1])
    return [
        text(LEFT, top - 10, "MaxVio of each batch", extra='font-weight="600"'),
        f'<polyline points="{points}" fill="none" stroke="{VERMILION}" stroke-width="1.4"/>',
        line(LEFT, bottom, LEFT + WIDE, bottom, INK),
        line(LEFT, level, LEFT + WIDE, level, INK, 'stroke-dasharray="2 3"'),
        text(LEFT + WIDE + 5, level + 3, f"sampling noise {floor:.2f}", extra='font-size="10"'),
        f'<circle cx="{now:.1f}" cy="{here:.1f}" r="3.5" fill="{VERMILION}"/>',
        text(LEFT + WIDE + 5, top + 9, f"now {violation[step - 1]:.2f}", extra='font-size="11" font-weight="600"'),
        text(LEFT - 6, top + 9, f"{highest:.0f}", "end", 'font-size="10"'),
        text(LEFT - 6, bottom, 0, "end", 'font-size="10"'),
        text(LEFT, bottom + 14, "step 1", extra='font-size="10"'),
        text(LEFT + WIDE, bottom + 14, steps, "end", 'font-size="10"'),
    ]


def sentence(replay: Replay, run: str, step: int, layer: int, kinds: Sequence[str], floor: float) -> str:
    shares, table = replay.shares[step - 1], replay.by_kind[(step - 1) // WINDOW]
    busiest, starving, now = int(shares.argmax()), int((shares < STARVING).sum()), replay.violation[step - 1]
    favourite = int((table[busiest] / np.maximum(table.sum(0), 1)).argmax())
    part = table[busiest, favourite] / max(table[busiest].sum(), 1)
    who = "no expert serves" if starving == 0 else "1 expert serves" if starving == 1 else f"{starving} experts serve"
    return (
        f"{run}, step {step}, layer {layer}: expert {busiest} does {shares[busiest]:.1f} times its fair share, and {who} less "
        f"than a tenth of one. MaxVio is {now:.2f}, {now / floor:.1f} times what sampling noise alone gives. "
        f"The busiest expert's own kind is {kinds[favourite]}: {part:.0%} of its work."
    )
