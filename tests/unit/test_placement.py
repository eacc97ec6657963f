"""Placement: the published worked examples, maps that are each other's inverse, and bounds that no placement can beat."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lib.placement import contiguous, place

# github.com/deepseek-ai/EPLB, README: two layers of 12 experts, 16 slots, 8 GPUs.
EPLB = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


@pytest.mark.parametrize(
    ("loads", "copies", "imbalance", "published"),
    [
        (EPLB[0], [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], 1.073, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
        (EPLB[1], [1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1], 1.190, [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
    ],
)
def test_the_published_examples(loads, copies, imbalance, published):
    ours = place(loads, ranks=8, redundant=4)
    assert [len(slots) for slots in ours.slots] == copies
    assert ours.imbalance == pytest.approx(imbalance, abs=5e-4)
    shares = [loads[e] / published.count(e) for e in published]  # the README's own answer, tied to nodes and groups
    theirs = max(a + b for a, b in zip(shares[::2], shares[1::2])) / (sum(loads) / 8)
    assert theirs == pytest.approx({1.073: 1.208, 1.190: 1.242}[imbalance], abs=5e-4)
    assert ours.imbalance < theirs


@st.composite
def problems(draw):
    ranks, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * per_rank))
    loads = draw(st.lists(st.one_of(st.integers(0, 1000), st.floats(0, 1e6)), min_size=experts, max_size=experts))
    return [*loads[:-1], loads[-1] + 1], ranks, ranks * per_rank - experts


@given(problems())
def test_every_slot_maps_to_an_expert_and_back(problem):
    loads, ranks, redundant = problem
    p = place(loads, ranks, redundant)
    assert len(p.experts) == len(loads) + redundant == p.per_rank * ranks
    assert len(p.slots) == len(loads) and all(p.slots)  # every expert lives somewhere
    assert sorted(slot for slots in p.slots for slot in slots) == list(range(len(p.experts)))
    assert all(p.experts[slot] == e for e, slots in enumerate(p.slots) for slot in slots)
    assert sum(p.loads) == pytest.approx(sum(loads))
    busiest_copy = max(load / len(slots) for load, slots in zip(loads, p.slots))
    assert max(p.loads) >= max(busiest_copy, sum(loads) / ranks) * (1 - 1e-9)
    # no other share-out of the copies has a lighter heaviest one: taking a copy from any expert would make that one heavier
    for load, slots in zip(loads, p.slots):
        assert len(slots) == 1 or load / (len(slots) - 1) >= busiest_copy * (1 - 1e-9)


def test_one_hot_expert_is_split_and_only_copies_can_do_it():
    """One expert a hundred times the rest: moving experts cannot help, copies can."""
    loads = [100] + [1] * 15
    assert contiguous(loads, 4).imbalance == pytest.approx(103 * 4 / 115)
    assert place(loads, 4).imbalance >= 100 * 4 / 115
    copied = place(loads, 4, redundant=4)
    assert len(copied.slots[0]) == 5 and copied.imbalance < 1.5


def test_contiguous_is_the_references_placement():
    p = contiguous([1, 2, 3, 4, 5, 6], 3)
    assert p.experts == (0, 1, 2, 3, 4, 5) and p.loads == (3, 7, 11) and p.imbalance == 11 / 7
    assert place([1, 2, 3, 4, 5, 6], 3).loads == (7, 7, 7)


@pytest.mark.parametrize(
    ("loads", "ranks", "redundant", "words"),
    [
        ([1] * 12, 8, 0, "12 slots for 12 experts over 8 ranks"),
        ([1] * 12, 8, 5, "17 slots"),
        ([1] * 12, 4, -4, "8 slots for 12 experts"),
        ([1] * 12, 0, 0, "over 0 ranks"),
        ([1, -1], 2, 0, "0 or more"),
        ([0, 0], 2, 0, "not all 0"),
    ],
)
def test_what_cannot_be_placed_is_refused(loads, ranks, redundant, words):
    with pytest.raises(ValueError, match=words):
        place(loads, ranks, redundant)
