"""The three linked views of the gate explorer, each an SVG computed from one Choice.

One language of colour in all three: blue is the score, orange is chosen, green what a bias lifts or brings in, vermilion what it
lowers or puts out. Shapes (outline, dashes, triangles) say the same to those who do not see the colours apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_lib.explorers.base import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, VERMILION, line, rect, svg, text

if TYPE_CHECKING:
    from moe_lib.explorers.gate import Choice

WIDTH = 960.0
HEIGHT = 276.0  # of the second and the third view
LEFT = 30.0
SMALL = 'font-size="10"'
BOLD = 'font-weight="600"'
TAKEN = 'fill="none" stroke-width="2"'
OUT = f'stroke="{VERMILION}" stroke-width="2" stroke-dasharray="3 2"'


def page(body: str, c: Choice | None = None) -> str:
    """The views in one frame. An expert under the mouse is lit in every view that shows it."""
    linked = [*c.chosen, *c.pushed_out] if c else []
    lit = f"{{stroke:{INK};stroke-width:3;stroke-dasharray:none}}"
    light = "".join(f".moe-gate:has(.x{e}:hover) .x{e}{lit}" for e in linked)
    style = f".moe-row{{display:flex;flex-wrap:wrap;gap:16px;margin-top:14px}}.moe-row>svg{{flex:1 1 300px}}{light}"
    return f'<div class="moe-gate" style="color:{INK}"><style>{style}</style>{body}</div>'


def up(x: float, y: float, size: float = 4.0) -> str:
    return f'<path d="M{x - size:.1f} {y + size:.1f}h{2 * size:g}l{-size:g} {-1.7 * size:g}z" fill="{GREEN}"/>'


def down(x: float, y: float, size: float = 4.0) -> str:
    return f'<path d="M{x - size:.1f} {y - size:.1f}h{2 * size:g}l{-size:g} {1.7 * size:g}z" fill="{VERMILION}"/>'


def pin(x: float, y: float) -> str:
    """Marks the expert under the slider."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{PAPER}" stroke="{INK}" stroke-width="1.4"/>'


# --- (1) all experts as tiles ----------------------------------------------------------------------------------------------


def ink(score: float) -> float:
    """Opacity of a tile: nearly paper at 0, never so full at 1 that a number on it cannot be read, in either theme."""
    return 0.04 + 0.76 * score * score


class Grid:
    """Where the tile of each expert lies: 8 rows for a large router (K2: 8 x 48), rows of 16 for a small one."""

    def __init__(self, experts: int) -> None:
        self.columns = experts // 8 if experts >= 64 and experts % 8 == 0 else min(experts, 16)
        self.rows = -(-experts // self.columns)
        self.pitch = min(30.0, (WIDTH - LEFT - 4) / self.columns)
        self.top = 26.0
        self.bottom = self.top + self.rows * self.pitch
        self.height = self.bottom + 28

    def at(self, expert: int, across: float = 0.0, down: float = 0.0) -> tuple[float, float]:
        """A point of an expert's tile; across and down from 0 to 1."""
        row, column = divmod(expert, self.columns)
        return LEFT + (column + across) * self.pitch, self.top + (row + down) * self.pitch

    def outline(self, expert: int, extra: str) -> str:
        x, y = self.at(expert)
        return rect(x + 1, y + 1, self.pitch - 2, self.pitch - 2, "none", f'rx="2" class="x{expert}" {extra}')


def _board(grid: Grid, scores: list[float], titles: list[str], kept: list[bool]) -> str:
    """Every expert's tile, the number of each row's first expert, and a stroke through what was not kept."""
    side = grid.pitch - 2
    size = f'width="{side:.1f}" height="{side:.1f}" rx="2"'
    words = [text(0.0, 13.0, f"{len(scores)} experts, coloured by score", extra=BOLD)]
    words += [text(LEFT - 5, grid.top + (r + 0.7) * grid.pitch, r * grid.columns, "end", SMALL) for r in range(grid.rows)]
    boxes, strokes = [], ""
    for e, (score, title, alive) in enumerate(zip(scores, titles, kept)):
        x, y = grid.at(e)
        opacity = ink(score) * (1 if alive else 0.3)
        boxes.append(f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" {size} fill-opacity="{opacity:.2f}"><title>{title}</title></rect>')
        if not alive:
            strokes += f"M{x + 3:.1f} {y + side:.1f}l{side - 3:.1f} {3 - side:.1f}"
    return f'{"".join(words)}<g fill="{BLUE}">{"".join(boxes)}</g><path d="{strokes}" stroke="{FAINT}"/>'


def _legend(grid: Grid, entries: list[tuple[str, str]]) -> str:
    y, x = grid.bottom + 20, LEFT + 146.0
    steps = "".join(rect(LEFT + 42 + 9 * i, y - 10, 9.0, 12.0, BLUE, f'fill-opacity="{ink(i / 7):.2f}"') for i in range(8))
    parts = [text(LEFT, y, "score 0"), steps, text(LEFT + 120, y, "1")]
    for mark, words in entries:
        parts += [f'<g transform="translate({x:.0f} {y - 11:.0f})">{mark}</g>', text(x + 21, y, words)]
        x += 36 + 6.0 * len(words)
    return "".join(parts)


def _box(extra: str) -> str:
    return f'<rect x="1" y="1" width="12" height="12" rx="2" {extra}/>'


def score_tiles(scores: list[float], pinned: int) -> str:
    """The tiles alone, where there is no choice to show."""
    grid = Grid(len(scores))
    titles = [f"expert {e}: score {s:.3f}" for e, s in enumerate(scores)]
    body = _board(grid, scores, titles, [True] * len(scores)) + pin(*grid.at(pinned, 0.95, 0.95))
    legend = _legend(grid, [(pin(7.0, 7.0), f"expert {pinned}, under the slider")])
    return svg(body + legend, WIDTH, grid.height, f"{len(scores)} experts as tiles, coloured by score; none is chosen")


def tiles(c: Choice, pinned: int) -> str:
    """All experts coloured by score; the chosen outlined and numbered by rank; what the bias brought in or put out marked."""
    experts, grid = len(c.scores), Grid(len(c.scores))
    size = min(11.0, grid.pitch * 0.58)
    places = [f"rank {c.rank[e]}" if alive else "group not kept" for e, alive in enumerate(c.kept)]
    titles = [f"expert {e}: score {c.scores[e]:.3f}, bias {c.bias[e]:+.3f}, {places[e]}" for e in range(experts)]
    parts = [_board(grid, c.scores, titles, c.kept), *_group_edges(grid, experts, experts // c.config.n_group)]
    for e in c.pushed_out:
        parts += [grid.outline(e, OUT), down(*grid.at(e, 0.5, 0.5))]
    for r, e in enumerate(c.chosen, 1):
        x, y = grid.at(e, 0.5, 0.5)
        parts.append(grid.outline(e, f'stroke="{GREEN if e in c.pushed_in else ORANGE}" stroke-width="2.4"'))
        parts.append(text(x, y + size * 0.36, r, "middle", f'font-size="{size:.1f}" {BOLD} pointer-events="none"'))
        if e in c.pushed_in:
            parts.append(up(*grid.at(e, 0.95, 0.08)))
    parts.append(pin(*grid.at(pinned, 0.95, 0.95)))
    entries = [
        (_box(f'{TAKEN} stroke="{ORANGE}"'), "chosen, with its rank"),
        (_box(f'{TAKEN} stroke="{GREEN}"') + up(13.0, 2.0), "brought in by the bias"),
        (_box(f'fill="none" {OUT}') + down(7.0, 7.0, 3.0), "put out by the bias"),
        (pin(7.0, 7.0), f"expert {pinned}, under the slider"),
    ]
    if c.config.n_group > 1:
        entries.append((_box(f'fill="{BLUE}" fill-opacity=".2"') + f'<path d="M2 13L13 2" stroke="{FAINT}"/>', "not kept"))
    label = f"{experts} experts as tiles, coloured by score; chosen, best first: {', '.join(map(str, c.chosen))}"
    for words, who in (("brought in by the bias", c.pushed_in), ("put out by the bias", c.pushed_out)):
        label += f"; {words}: {', '.join(map(str, who))}" if who else ""
    return svg("".join(parts) + _legend(grid, entries), WIDTH, grid.height, label)


def _group_edges(grid: Grid, experts: int, size: int) -> list[str]:
    parts = []
    for first in range(size, experts, size):
        x, y = grid.at(first)
        inside = first % grid.columns
        parts.append(line(x, y, x, y + grid.pitch) if inside else line(LEFT, y, LEFT + grid.columns * grid.pitch, y))
    return parts


# --- (2) scores in falling order, and the cut -------------------------------------------------------------------------------


class Plot:
    """The frame of the second view: the first places as wide bars, all the others narrow, on one axis of scores."""

    width, left, top, bottom = 610.0, 30.0, 40.0, 214.0

    def __init__(self, c: Choice) -> None:
        kept = sum(c.kept)
        values = [c.compared(e) for e in c.order]
        self.low, self.high = min(0.0, *values), max(1.0, *values)
        self.wide = min(kept, len(c.chosen) + 8)
        room = self.width - self.left - 4
        self.step = (room if self.wide == len(values) else room * 0.72) / self.wide
        self.right = self.left + self.wide * self.step

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def axis(self) -> list[str]:
        unit = 0.5 if self.high - self.low <= 3 else 1.0
        ticks = [i * unit for i in range(int(self.low / unit) - 1, int(self.high / unit) + 2) if self.low <= i * unit <= self.high]
        lines = [line(self.left, self.y(t), self.width, self.y(t), FAINT, 'stroke-width=".6"') for t in ticks]
        return lines + [text(self.left - 5, self.y(t) + 3.5, f"{t:g}", "end", SMALL) for t in ticks]

    def lift(self, x: float, width: float, score: float, compared: float) -> str:
        """The bias of one expert, from its score to what is compared."""
        a, b = self.y(score), self.y(compared)
        if abs(a - b) < 0.3:
            return ""
        colour = GREEN if b < a else VERMILION
        look = f'fill-opacity=".3" stroke="{colour}" stroke-width="1.2" stroke-dasharray="2 2"'
        return rect(x, min(a, b), width, abs(a - b), colour, look)


def cut(c: Choice, pinned: int) -> str:
    """Scores in falling order of what the gate compares: a bar is the score, its lift the bias, the dashed line the cut."""
    plot, k = Plot(c), len(c.chosen)
    parts = [text(0.0, 13.0, "Scores in falling order, and the cut", extra=BOLD), *plot.axis()]
    parts += [_place(c, plot, i, e, e == pinned) for i, e in enumerate(c.order[: plot.wide])]
    parts += _tail(c, plot, pinned)
    edge, last = plot.left + k * plot.step, c.compared(c.chosen[-1])
    less = f" (less the median bias, {c.offset:.3f})" if abs(c.offset) > 5e-4 else ""
    parts += [
        line(edge, plot.top - 14, edge, plot.bottom + 16, INK, 'stroke-dasharray="5 3" stroke-width="1.2"'),
        line(plot.left, plot.y(last), plot.width, plot.y(last), INK, 'stroke-dasharray="1 3"'),
        text(edge + 5, plot.top - 6, f"cut after {k}", extra=SMALL),
        text(plot.left, HEIGHT - 2, f"bar: the score · tick: what is compared, score + bias{less}", extra=SMALL),
    ]
    label = f"{len(c.scores)} experts in falling order of score plus bias; the cut is after place {k}, at {last:.3f}. "
    label += f"In front: {', '.join(f'{e} at {c.compared(e):.3f}' for e in c.chosen)}"
    if k < sum(c.kept):
        label += f"; first left out: {c.order[k]} at {c.compared(c.order[k]):.3f}"
    return svg("".join(parts), plot.width, HEIGHT, label)


def _place(c: Choice, plot: Plot, i: int, e: int, pinned: bool) -> str:
    """One wide bar, with its rank above where it was chosen and its expert's number below."""
    x, middle, bar = plot.left + (i + 0.12) * plot.step, plot.left + (i + 0.5) * plot.step, plot.step * 0.76
    taken = i < len(c.chosen)
    new, gone = e in c.pushed_in, e in c.pushed_out
    edge = f'class="x{e}" stroke="{GREEN if new else ORANGE}" stroke-width="2"' if taken else f'class="x{e}" {OUT}' if gone else ""
    top, goal, foot = plot.y(c.scores[e]), plot.y(c.compared(e)), plot.bottom
    size = f'font-size="{min(11.0, plot.step * 0.46):.1f}"'
    parts = [
        rect(x, top, bar, plot.y(0.0) - top, BLUE, f'fill-opacity="{0.62 if taken else 0.3}" {edge}'),
        plot.lift(x, bar, c.scores[e], c.compared(e)),
        line(x - 1, goal, x + bar + 1, goal, INK, 'stroke-width="2"'),
        text(middle, goal - 5, i + 1, "middle", f"{size} {BOLD}") if taken else "",
        text(middle, foot + 14, e, "middle", f"{size} {BOLD if taken else ''}"),
        up(middle, foot + 23) if new else down(middle, foot + 23) if gone else "",
        pin(middle, foot + (35 if new or gone else 23)) if pinned else "",
    ]
    return "".join(parts)


def _tail(c: Choice, plot: Plot, pinned: int) -> list[str]:
    """Everybody else, narrow: experts that competed and lost, then those whose group was not kept."""
    kept, everyone = sum(c.kept), len(c.order)
    if plot.wide == everyone:
        return []
    start, end = plot.right + 10, plot.width - 4.0
    gap = 12 if plot.wide < kept < everyone else 0
    step = (end - start - gap) / (everyone - plot.wide)
    parts = []
    if (kept - plot.wide) * step > 62:
        parts.append(text(start, plot.bottom + 14, f"the other {kept - plot.wide}", extra=SMALL))
    if kept < everyone:
        parts.append(text(end, plot.bottom + 14, f"{everyone - kept} not kept", "end", SMALL))
    for first, last, opacity in ((plot.wide, kept, 0.3), (kept, everyone, 0.12)):
        x0 = start + (first - plot.wide) * step + (gap if first == kept else 0)
        profile = "".join(f"V{plot.y(c.scores[e]):.1f}h{step:.2f}" for e in c.order[first:last])
        base = f"{plot.y(0.0):.1f}"
        parts.append(f'<path d="M{x0:.1f} {base}{profile}V{base}z" fill="{BLUE}" fill-opacity="{opacity}"/>')
        for i, e in enumerate(c.order[first:last]):
            parts.append(_narrow(c, plot, e, x0 + i * step, step, e == pinned))
    return parts


def _narrow(c: Choice, plot: Plot, e: int, x: float, step: float, pinned: bool) -> str:
    lift = plot.lift(x, max(step, 1.0), c.scores[e], c.compared(e)) if c.bias[e] else ""
    gone = down(x + step / 2, plot.y(max(c.scores[e], c.compared(e))) - 8) if e in c.pushed_out else ""
    return lift + gone + (pin(x + step / 2, plot.bottom + 23) if pinned else "")


# --- (3) the weights --------------------------------------------------------------------------------------------------------


def weights(c: Choice) -> str:
    """The chosen experts' weights, written like an addition."""
    width, top, number = 334.0, 26.0, 326.0
    k, total, most = len(c.chosen), sum(c.weights), max(*c.weights, 1e-12)
    step = min(24.0, 206 / k)
    size = min(12.0, step * 0.85)
    style = f'font-size="{size:.1f}"'
    parts = [text(0.0, 13.0, f"Weights of the chosen {k}" if k > 1 else "Weight of the chosen one", extra=BOLD)]
    for i, (e, w) in enumerate(zip(c.chosen, c.weights)):
        y = top + i * step
        base = y + step / 2 + size * 0.36
        look = f'class="x{e}" fill-opacity=".65" rx="2" stroke="{GREEN if e in c.pushed_in else ORANGE}"'
        parts += [
            text(14.0, base, i + 1, "end", f"{style} {BOLD}"),
            text(24.0, base, f"expert {e}", extra=style),
            up(96.0, y + step / 2, min(4.0, step / 4)) if e in c.pushed_in else "",
            rect(108.0, y + step * 0.16, 164 * w / most, step * 0.68, ORANGE, look),
            text(number, base, f"{w:.3f}", "end", style),
        ]
    foot = top + k * step + 6
    parts += [line(280.0, foot, number, foot), text(24.0, foot + 17, "sum"), text(number, foot + 17, f"{total:.3f}", "end", BOLD)]
    label = "Weights: " + ", ".join(f"expert {e} {w:.3f}" for e, w in zip(c.chosen, c.weights)) + f"; sum {total:.3f}"
    return svg("".join(parts), width, HEIGHT, label)
