"""What every explorer shares: a pure draw function from values to HTML, and the wires from controls to it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from html import escape

import ipywidgets as W

from moe_lib.figures.base import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW  # noqa: F401  (the colours of a drawing)

# JupyterLab's own colours where they are defined, so that a drawing follows the light and the dark theme.
INK = "var(--jp-content-font-color1, #212121)"
FAINT = "var(--jp-border-color1, #bdbdbd)"
PAPER = "var(--jp-layout-color1, #fff)"


def svg(body: str, width: int | float, height: int | float, label: str) -> str:
    """A drawing of the given size in pixels that shrinks with its page. `label` says in words what it shows."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:g}px;width:100%;display:block;color:{INK};fill:currentColor;'
        f'font:12px var(--jp-ui-font-family, sans-serif)">{body}</svg>'
    )


def text(x: int | float, y: int | float, words: object, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(str(words))}</text>'


def rect(x: int | float, y: int | float, width: int | float, height: int | float, fill: str, extra: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{fill}" {extra}/>'


def line(x1: int | float, y1: int | float, x2: int | float, y2: int | float, stroke: str = INK, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" {extra}/>'


def says(words: str) -> str:
    """The sentence under a drawing; a screen reader reads it out when it changes."""
    style = f"color:{INK};margin:6px 0;line-height:1.45"
    return f'<p class="moe-says" role="status" aria-live="polite" style="{style}">{escape(words)}</p>'


def alert(error: BaseException) -> str:
    """A failed draw, shown in the drawing's place: a widget's callback has no cell in which its traceback could appear."""
    trace = "".join(traceback.format_exception(error))
    return (
        f'<div class="moe-error" role="alert" style="color:{VERMILION}"><b>This drawing failed.</b> {escape(repr(error))}'
        f'<pre style="white-space:pre-wrap">{escape(trace)}</pre></div>'
    )


class Explorer(W.VBox):
    """Controls over a view that `draw(**values)` fills again whenever one of them moves.

    `controls` maps draw's arguments to widgets. `error` holds the exception of the last draw, or None.
    Its text form is fixed, so a notebook that shows one can be compared between machines.
    """

    def __init__(self, draw: Callable[..., str], controls: Mapping[str, W.Widget], columns: int = 2) -> None:
        self.draw, self.controls, self.error = draw, dict(controls), None
        self.view = W.HTML()
        for control in self.controls.values():
            control.style.description_width = "150px"
            control.layout.width = "auto"
            control.observe(self._redraw, "value")
        template = f"repeat({columns}, minmax(280px, 1fr))"
        grid = W.GridBox(list(self.controls.values()), layout=W.Layout(grid_template_columns=template))
        super().__init__([grid, self.view], layout=W.Layout(max_width="980px"))
        self._redraw()

    def values(self) -> dict[str, object]:
        return {name: control.value for name, control in self.controls.items()}

    def _redraw(self, _change: object = None) -> None:
        self.error = None
        try:
            self.view.value = self.draw(**self.values())
        except Exception as error:
            self.error = error
            self.view.value = alert(error)

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        bundle["text/plain"] = f"An explorer with {len(self.controls)} controls. Run this cell to move them."
        return bundle
