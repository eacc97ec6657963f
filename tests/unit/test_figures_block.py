"""The figures of notebook 03 say in words what their data holds, and draw it."""

import pytest
import torch

from moe_lib import KIMI_K2, Routing, SwiGLUExpert
from moe_lib.figures.block import distinct_experts, loads, permutation, work_growth
from moe_lib.work import work_of

INDICES = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]])


def routing(indices):
    return Routing(indices, torch.ones(indices.shape), torch.ones(len(indices), 4))


def words_of(figure):
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def drawn(figure):
    data = figure._repr_mimebundle_()
    assert data["text/plain"] == figure.alt and "data:image/png;base64" in data["text/html"]


def test_the_permutation_names_every_row_copy_and_idle_expert():
    figure = permutation(routing(INDICES), 4)
    assert figure.alt == (
        "8 copies of 4 tokens, sorted by expert: expert 0 gets tokens 0, 1, 3; expert 1 none; expert 2 gets tokens 0, 2, 3; "
        "expert 3 gets tokens 1, 2. Rows 0 to 7 hold copies 1, 2, 6, 0, 4, 7, 3, 5, and combine puts each back where it came from."
    )
    words = words_of(figure)
    rows = ["expert 0 · row 0", "expert 0 · row 1", "expert 0 · row 2", "expert 2 · row 3", "expert 2 · row 4", "expert 2 · row 5"]
    rows += ["expert 3 · row 6", "expert 3 · row 7"]
    assert set(rows) <= set(words) and "expert 1 · no rows" in words
    assert all(words.count(f"copy {c}") == 2 for c in range(8))
    drawn(figure)


def test_the_lines_of_the_permutation_join_each_copy_to_its_row():
    lines = permutation(routing(INDICES), 4).axes[0].lines
    there, back = lines[::2], lines[1::2]
    order = INDICES.flatten().argsort(stable=True).tolist()
    starts = [line.get_ydata()[0] for line in there]
    ends = [line.get_ydata()[1] for line in there]
    assert sorted(range(8), key=lambda i: starts[i]) == sorted(range(8), key=lambda i: order[i])  # copies from above: 0 to 7
    assert ends == sorted(ends)  # rows from above: 0 to 7
    assert [line.get_ydata()[::-1].tolist() for line in back] == [line.get_ydata().tolist() for line in there]


def test_the_permutation_refuses_more_tokens_than_it_has_colours():
    with pytest.raises(ValueError, match="routing is of 7 tokens; this drawing tells 1 to 6 apart"):
        permutation(routing(INDICES[:1].repeat(7, 1)), 4)


def test_work_growth_tells_the_counts_of_the_largest_batch():
    expert = SwiGLUExpert(16, 8)
    works = {name: [work_of(expert, torch.randn(t * wide, 16)) for t in (1, 4)] for name, wide in (("narrow", 1), ("wide", 100))}
    figure = work_growth((1, 4), works)
    assert figure.alt == (
        "The work of 2 ways from 1 to 4 tokens. At 4: narrow 3 products and 0.00307 MFLOP; wide 3 products and 0.307 MFLOP."
    )
    assert [ax.get_title() for ax in figure.axes] == ["matrix products", "other operations", "FLOPs"]
    assert list(figure.axes[2].lines[1].get_ydata()) == [100 * 768, 400 * 768]
    drawn(figure)


def test_distinct_experts_tells_the_formula_and_how_far_the_points_lie():
    tokens = (1, 8, 64, 512)
    formula = [KIMI_K2.expected_distinct_experts(t) for t in tokens]
    figure = distinct_experts(tokens, formula, [8.0, 60.0, 284.0, 384.0], 384)
    assert figure.alt == (
        "Distinct experts of 384 hit by a batch, by tokens: 8.0 at 1, 59.5 at 8, 284.2 at 64, 384.0 at 512. "
        "Simulated batches lie within 0.5 of the formula."
    )
    assert words_of(figure) == ["8.0", "59.5", "284.2", "384.0"]
    drawn(figure)


def test_loads_tells_the_busiest_the_mean_and_the_idle():
    figure = loads({"even": torch.tensor([2, 2, 2, 2]), "skewed": torch.tensor([0, 1, 7, 0])})
    assert figure.alt == (
        "Rows of each expert, busiest first. even: busiest 2 rows, 1.00 times the mean, 0 idle; "
        "skewed: busiest 7 rows, 3.50 times the mean, 2 idle."
    )
    assert [bar.get_height() for bar in figure.axes[1].patches] == [7, 1, 0, 0]
    drawn(figure)
