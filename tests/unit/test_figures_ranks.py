"""The figures of notebook 05 say in words what their data holds, and draw it."""

import pytest
import torch
from matplotlib.colors import to_rgba

from moe_lib import KIMI_K2
from moe_lib.expert_parallel_cost import DEEPEP, H800, exchange_seconds, simulate, step_seconds
from moe_lib.figures.ranks import more_ranks, moves, published_times, rank_loads

COUNTS = torch.tensor([[2, 0, 1, 0], [0, 1, 0, 3]])


def drawn(figure):
    data = figure._repr_mimebundle_()
    assert data["text/plain"] == figure.alt and "data:image/png;base64" in data["text/html"]


def test_moves_tell_and_draw_every_row_and_idle_expert():
    figure = moves(COUNTS)
    assert figure.alt == (
        "7 rows of 2 ranks, 2 of which leave their rank. To ranks 0 to 1: rank 0 sends 2, 1; rank 1 sends 1, 3. "
        "The ranks' experts work on 3, 4 rows."
    )
    matrix, way = figure.axes
    assert [t.get_text() for t in matrix.texts] == ["2", "1", "1", "3"]
    words = [t.get_text() for t in way.texts]
    assert [words.count(str(e)) for e in range(4)] == COUNTS.sum(0).tolist()  # a box for each row that is sent, with its expert
    assert "rank 0: experts 0–1" in words and "rank 1: experts 2–3" in words and "expert 2" in words
    assert len(way.lines) == 7
    for line in way.lines:  # a line ends on the box of the rank it came from
        (_, end), colour = line.get_ydata(), line.get_color()
        box = next(p for p in way.patches if p.get_x() > 1 and abs(p.get_y() + 0.4 - end) < 1e-6)
        assert box.get_facecolor() == to_rgba(colour)
    drawn(figure)
    assert "expert 1 · no rows" in [t.get_text() for t in moves(torch.tensor([[1, 0]])).axes[1].texts]


@pytest.mark.parametrize("shape", [(7, 7), (2, 3)])
def test_moves_refuse_what_they_cannot_draw(shape):
    with pytest.raises(ValueError, match=f"{shape[1]} experts over {shape[0]} ranks"):
        moves(torch.ones(shape, dtype=torch.int64))


def test_published_and_predicted_times_stand_side_by_side():
    figure = published_times({n: exchange_seconds(KIMI_K2, 128, n, H800) for n in DEEPEP})
    assert "8 ranks 77 and 114, predicted 41 and 80" in figure.alt and "128 ranks 192 and 369, predicted 142 and 275" in figure.alt
    for ax, i in zip(figure.axes, range(2)):
        assert ax.lines[0].get_ydata().tolist() == [both[i] for both in DEEPEP.values()]
        assert [round(bar.get_height()) for bar in ax.patches][0] == (41, 80)[i]
    drawn(figure)


def test_more_ranks_stacks_the_parts():
    steps = {n: step_seconds(KIMI_K2, simulate(KIMI_K2, 16 * n, n, 0.0, None, 0), H800) for n in (8, 16)}
    figure = more_ranks(steps)
    for n, step in steps.items():
        assert f"{n} ranks {', '.join(f'{1e6 * seconds:.0f}' for seconds in step.values())}" in figure.alt
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].patches[-2:]]
    assert tops == pytest.approx([1e6 * sum(step.values()) for step in steps.values()])
    drawn(figure)


def test_rank_loads_show_the_busiest_first():
    ways = {"in order": simulate(KIMI_K2, 256, 16, 1.0, None, 0), "copies": simulate(KIMI_K2, 256, 16, 1.0, 32, 0)}
    figure = rank_loads(ways)
    assert figure.alt.startswith("Rows of each of 16 ranks, mean 128: in order: from ")
    for ax, (name, t) in zip(figure.axes, ways.items()):
        heights = [bar.get_height() for bar in ax.patches]
        assert heights == sorted(t.load.tolist(), reverse=True)
        assert f"{name}: from {t.load.min()} to {t.load.max()} rows, max/mean {t.imbalance:.2f}" in figure.alt
    drawn(figure)
