"""The figures of notebook 01 say in words what their data hold, and draw those data."""

import math
import re

import pytest
import torch

from moe_lib.figures.expert import gated_product, what_a_gate_buys

GATE = torch.tensor([-4.0, -2.0, -1.0, 0.0, 1.0, 4.0])
UP = torch.tensor([5.0, 3.0, -2.0, 4.0, 3.0, -1.0])


def silu(z):
    return z / (1 + math.exp(-z))


def shown(figure):
    bundle = figure._repr_mimebundle_()
    assert bundle["text/plain"] == figure.alt and 'src="data:image/png;base64,' in bundle["text/html"]
    return figure.alt.replace("−", "-")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_product_is_told_feature_by_feature(dtype):
    alt = shown(gated_product(GATE.to(dtype), UP.to(dtype)))
    told = re.findall(r"(\d): gate ([-.\d]+), up ([-.\d]+), h ([-.\d]+\d)", alt)
    assert [int(i) for i, *_ in told] == list(range(6))
    for (_, gate, up, h), g, u in zip(told, GATE.tolist(), UP.tolist()):
        assert (float(gate), float(up)) == (g, u)
        assert float(h) == pytest.approx(silu(g) * u, abs=5.1e-3)


def test_the_lowest_point_of_silu_is_where_the_words_say():
    """Its slope is zero there: 1 + z (1 − sigmoid(z)) = 0."""
    z = torch.linspace(-3, 0, 300001, dtype=torch.float64)
    at = torch.nn.functional.silu(z).argmin()
    alt = shown(gated_product(GATE, UP))
    lowest, where = (float(v) for v in re.search(r"gate: ([-.\d]+) at its lowest, near gate ([-.\d]+)", alt).groups())
    assert lowest == pytest.approx(torch.nn.functional.silu(z[at]).item(), abs=5.1e-3)
    assert where == pytest.approx(z[at].item(), abs=0.051)


def test_the_points_are_drawn_at_their_values():
    figure = gated_product(GATE, UP)
    curve, surface = figure.axes
    points = [dots for dots in curve.lines if dots.get_marker() == "o"][0]
    assert points.get_ydata() == pytest.approx([silu(g) for g in GATE.tolist()], abs=1e-6)
    points = [dots for dots in surface.lines if dots.get_marker() == "o"][0]
    assert list(points.get_xdata()) == GATE.tolist() and list(points.get_ydata()) == UP.tolist()


def test_errors_are_told_and_drawn():
    errors = {
        "products": {"SwiGLU": torch.tensor([0.01, 0.02, 0.03]), "plain": torch.tensor([0.1, 0.1, 0.4])},
        "folds": {"SwiGLU": torch.tensor([0.5, 0.5, 0.5]), "plain": torch.tensor([0.001, 0.002, 0.003])},
    }
    figure = what_a_gate_buys(errors)
    alt = shown(figure)
    assert "over 3 seeds" in alt
    assert "products: SwiGLU 2.0% ± 1.0%, plain 20.0% ± 17.3%." in alt
    assert "folds: SwiGLU 50.0% ± 0.0%, plain 0.2% ± 0.1%." in alt
    for ax, models in zip(figure.axes, errors.values()):
        dots = [line for line in ax.lines if line.get_marker() == "o"]
        means = [line for line in ax.lines if line.get_marker() == "|"]
        for d, m, e in zip(dots, means, models.values(), strict=True):
            assert list(d.get_xdata()) == e.tolist() and float(m.get_xdata()[0]) == pytest.approx(e.mean().item())
