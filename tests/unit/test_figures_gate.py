"""The figures of notebook 02 show what their data say, and say it in words."""

import pytest
import torch
from matplotlib.colors import to_rgba

from moe_lib import KIMI_K2, Router
from moe_lib.figures.base import GREEN, ORANGE, VERMILION
from moe_lib.figures.gate import one_token, sigmoid_softmax


def heights(axis):
    return torch.tensor([[bar.get_height() for bar in group] for group in axis.containers]).float()


def test_softmax_competes_and_sigmoid_does_not():
    before = torch.tensor([0.5, -1.0, 2.0, 0.0])
    after = before + torch.tensor([0.0, 0.0, 0.0, 2.0])
    figure = sigmoid_softmax(before, after)
    softmax, sigmoid = figure.axes
    torch.testing.assert_close(heights(softmax), torch.stack([before.softmax(-1), after.softmax(-1)]))
    torch.testing.assert_close(heights(sigmoid), torch.stack([before.sigmoid(), after.sigmoid()]))
    assert "expert 3 rises from 0.0 to 2.0" in figure.alt
    assert "softmax 4 scores move, with sigmoid 1" in figure.alt
    assert softmax.get_title() == "softmax: 4 of 4 move" and sigmoid.get_title() == "sigmoid: 1 of 4 move"


@pytest.fixture
def lifted():
    """A routing of K2's shape in which the bias lifts expert 200 over the cut of token 1."""
    router = Router(KIMI_K2.replace(hidden_size=16))
    x = torch.randn(3, 16)
    with torch.no_grad():
        plain = router(x)
        assert 200 not in plain.indices[1]
        router.e_score_correction_bias[200] = plain.scores[1].max() - plain.scores[1, 200] - 1e-3
        return plain, router(x), router.e_score_correction_bias


def test_one_token_shows_the_routing(lifted):
    plain, routing, bias = lifted
    figure = one_token(routing, bias, token=1)
    chosen, lost = routing.indices[1].tolist(), plain.indices[1, -1].item()
    tiles, cut, weights = figure.axes
    assert f"experts {', '.join(map(str, chosen))} of 384 are chosen" in figure.alt
    assert f"brings in expert 200, which has the score {routing.scores[1, 200]:.3f}" in figure.alt
    assert f"Expert {lost} with the score {routing.scores[1, lost]:.3f} loses its place" in figure.alt
    assert "weights sum to 2.827" in figure.alt
    assert torch.equal(torch.tensor(tiles.images[0].get_array().tolist()), routing.scores[1].view(8, 48))
    numbers = {t.get_text(): divmod(chosen[int(t.get_text()) - 1], 48) for t in tiles.texts if t.get_text() != "×"}
    assert len(numbers) == 8
    for t in tiles.texts:
        if t.get_text() != "×":
            assert (round(t.get_position()[1]), round(t.get_position()[0])) == numbers[t.get_text()]
    edges = [p.get_edgecolor() for p in tiles.patches]
    assert [edges.count(to_rgba(c)) for c in (ORANGE, GREEN, VERMILION)] == [7, 1, 1]
    assert [label.get_text() for label in cut.get_xticklabels()][:8] == [str(e) for e in chosen]
    torch.testing.assert_close(torch.tensor([bar.get_width() for bar in weights.patches]), routing.weights[1].double())
    assert weights.get_title() == "weights, sum 2.827"


def test_one_token_without_a_bias_marks_nobody():
    router = Router(KIMI_K2.replace(hidden_size=16, n_routed_experts=12, num_experts_per_tok=3))
    with torch.no_grad():
        routing = router(torch.randn(2, 16))
    figure = one_token(routing, router.e_score_correction_bias)
    assert "bias" not in figure.alt and "loses" not in figure.alt
    assert "×" not in [t.get_text() for t in figure.axes[0].texts]
    assert figure._repr_mimebundle_()["text/plain"] == figure.alt
