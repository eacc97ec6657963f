"""The figures of notebook 04 say in words what their data holds, and draw it."""

import pytest
import torch

from moe_lib.balance import max_violation
from moe_lib.figures.balance import by_favourite, cost, loads, maxvio, share_of_even, violations, who_serves_whom
from toy_runs import KINDS, RUNS


def drawn(figure):
    data = figure._repr_mimebundle_()
    assert data["text/plain"] == figure.alt and "data:image/png;base64" in data["text/html"]


def test_violations_are_means_over_windows_of_each_batchs_maxvio():
    runs = {"one": [RUNS["no help"], RUNS["bias 0.01"]]}
    found = violations(runs, layer=1)
    assert found.shape == (1, 2, 3)
    by_hand = [max_violation(RUNS["no help"].loads[s, 1]).item() for s in range(10, 20)]
    assert found[0, 0, 1].item() == pytest.approx(sum(by_hand) / 10)
    assert found[0, 1, 2].item() == pytest.approx(
        sum(max_violation(RUNS["bias 0.01"].loads[s, 1]).item() for s in (20, 21, 22)) / 3
    )


def test_maxvio_draws_a_line_a_setting_a_band_over_seeds_and_the_floors():
    runs = {"left": [RUNS["no help"], RUNS["bias 0.01"]], "right": [RUNS["bias 0.01"]] * 2}
    figure = maxvio(runs, {"noise": 0.1, "documents": 0.3}, layer=0)
    found = violations(runs, 0)
    for name, curve in zip(runs, found):
        assert f"{name} {curve[:, 0].mean():.1f} and {curve[:, -3:].mean():.2f}" in figure.alt
    assert "mean of 2 seeds" in figure.alt and "noise 0.10; documents 0.30" in figure.alt
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["left", "right", "noise", "documents"]
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(found[0].mean(0).tolist())
    assert ax.get_ylim()[0] < 0.1 and ax.get_ylim()[1] > found.max()
    drawn(figure)


def test_cost_has_a_dot_for_each_seed():
    figure = cost({"no help": [1.3, 1.2, 1.1], "dense, equal total": [1.0, 1.4]})
    assert figure.alt == (
        "Held-out loss in nats a character: no help 1.200 (from 1.100 to 1.300); dense, equal total 1.200 (from 1.000 to 1.400)."
    )
    dots = [line.get_xdata() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [list(d) for d in dots] == [[1.3, 1.2, 1.1], [1.0, 1.4]]
    drawn(figure)


def test_shares_are_multiples_of_an_even_spread_and_experts_stand_by_favourite():
    table = torch.tensor([[0, 6, 0], [9, 0, 0], [0, 0, 12], [3, 6, 0], [0, 0, 0]])
    shares = share_of_even(table)
    assert torch.allclose(shares.sum(0), torch.tensor([5.0, 5.0, 5.0])) and shares[2, 2] == 5
    assert by_favourite(table) == [1, 0, 3, 2, 4]


def test_who_serves_whom_names_the_idle_and_the_darkest():
    table = RUNS["no help"].by_kind[0, 0]
    figure = who_serves_whom({"before": table, "after": torch.full((6, 3), 7)}, KINDS)
    assert "before: 1 of 6 experts serve less than a tenth" in figure.alt
    assert "after: 0 of 6 experts" in figure.alt and "sums at expert 0 (1 times)" in figure.alt
    most = share_of_even(table).max(0)
    for kind, value, e in zip(KINDS, most.values, most.indices.tolist()):
        assert f"{kind} at expert {e} ({value:.0f} times)" in figure.alt
    drawn(figure)


def test_loads_are_told_and_drawn_over_their_mean():
    figure = loads({"no help": torch.tensor([30, 0, 10, 0]), "even": torch.tensor([5, 5, 5, 5])})
    assert "no help: busiest 3.00, least busy 0.00, 2 below 0.1; even: busiest 1.00, least busy 1.00, 0 below 0.1" in figure.alt
    assert [bar.get_height() for bar in figure.axes[0].patches] == [3.0, 1.0, 0.0, 0.0]
    drawn(figure)
