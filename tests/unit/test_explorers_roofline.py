"""The explorer and the figures of notebook 07 say what roofline.floor computes."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from moe_lib import KIMI_K2
from moe_lib.explorers.roofline import LAPTOP, RANKS, TOKENS, draw_roofline, roofline
from moe_lib.figures.roofline import floors, measured
from moe_lib.roofline import H200, PRECISIONS, Machine, floor


@pytest.mark.parametrize(("precision", "machine"), itertools.product(PRECISIONS, (H200, LAPTOP)))
def test_every_state_draws_and_says_its_numbers(precision, machine):
    for tokens, ranks in itertools.product((TOKENS[0], 64, TOKENS[-1]), (RANKS[0], RANKS[1], RANKS[-1])):
        html = draw_roofline(KIMI_K2, tokens, precision, machine, ranks)
        ET.fromstring(html.split("<p ")[0])
        f = floor(KIMI_K2, tokens, precision, machine, ranks if machine.link else 1)
        assert f"{f.hit:.1f} experts are hit" in html
        what = {"memory": "reading weights", "compute": "computing", "exchange": "moving rows"}[f.bound]
        assert f"{what}" in html.split("Not faster")[1]


def test_the_table_of_the_h200_in_words():
    assert "Not faster than 1.11 ms; reading weights" in draw_roofline(KIMI_K2, 8, "bf16", H200, 1)
    assert "Not faster than 9.69 ms; computing" in draw_roofline(KIMI_K2, 16384, "fp8", H200, 1)


def test_a_control_that_moves_draws_again():
    e = roofline()
    before = e.view.value
    for name, value in (("tokens", 4096), ("precision", "int4"), ("machine", 1), ("ranks", 64)):
        e.controls[name].value = value
        assert e.error is None
    assert e.view.value != before and "4,096 tokens in int4 on a laptop" in e.view.value


def test_figures_say_their_numbers():
    words = floors(KIMI_K2, H200, [1, 64, 16384]).alt
    assert "bf16 0.166 ms at 1, 16.6 ms at 16384" in words and "fp8 0.0837 ms" in words
    here = Machine("here", 50e9, {"int4": 4e11})
    least = floor(KIMI_K2, 8, "int4", here).seconds
    assert "(50 % of the floor's speed)" in measured(KIMI_K2, here, "int4", {8: 2 * least}).alt


def test_ranks_without_a_link_are_told_to_count_as_one():
    drawings = [draw_roofline(KIMI_K2, 64, "bf16", LAPTOP, ranks) for ranks in RANKS]
    assert len(set(drawings)) == len(RANKS)
    assert "no link to others, so 8 ranks count as one" in drawings[1] and "count as one" not in drawings[0]
    assert "count as one" not in draw_roofline(KIMI_K2, 64, "bf16", H200, 8)
