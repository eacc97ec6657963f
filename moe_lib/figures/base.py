"""What every static figure shares: a look, and a description in words computed from the same data."""

from __future__ import annotations

import base64
import io
from html import escape

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure as MatplotlibFigure

# Okabe and Ito's colours, told apart by colour-blind readers too.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip

STYLE = {
    "axes.prop_cycle": cycler(color=[BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, BLACK]),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "font.size": 10,
    "legend.frameon": False,
    "svg.hashsalt": "moe",
}


class Figure(MatplotlibFigure):
    """A matplotlib figure that shows itself as a PNG, with `alt` as its text form and its alternative text.

    `alt` says in words what is to be seen, with numbers from the data: readers who do not see the picture read it, and a
    notebook test compares it. Made without pyplot, so it leaves nothing open behind it.
    """

    def __init__(self, alt: str, figsize: tuple[float, float] = (8, 3), **kwargs) -> None:
        with matplotlib.rc_context(STYLE):
            super().__init__(figsize=figsize, layout="constrained", facecolor="white", **kwargs)
        self.alt = alt

    def subplots(self, *args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return super().subplots(*args, **kwargs)

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(png, format="png", dpi=144, metadata={"Software": None})
        width = round(72 * 1.35 * self.get_figwidth())
        # as HTML, because JupyterLab gives a bare image/png output no alternative text
        picture = (
            f'<img alt="{escape(self.alt)}" style="width:{width}px;max-width:100%" '
            f'src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">'
        )
        return {"text/html": picture, "text/plain": self.alt}
