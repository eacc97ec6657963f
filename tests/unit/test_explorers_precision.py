"""The explorer and the figures of notebook 06 say what the quantisers do."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from moe_lib.explorers.precision import BLOCKS, FORMATS, OUTLIER, draw_precision, precision, through
from moe_lib.figures.precision import costs, number_lines


@pytest.mark.parametrize(("kind", "block"), itertools.product(FORMATS.values(), BLOCKS))
def test_every_state_draws_and_says_its_numbers(kind, block):
    for outlier in (0, 200):
        html = draw_precision(kind, block, outlier, 3)
        drawing, sentence = html.split("<p ")
        ET.fromstring(drawing)
        o = through(kind, block, outlier, 3)
        near = torch.zeros(256, 256, dtype=torch.bool)
        near[o.block] = True
        near[OUTLIER] = False
        assert f"{near.sum():,} neighbours" in sentence
        assert f"error is {100 * o.error[near].square().mean().sqrt():.1f} %" in sentence
        assert f"{((o.opened == 0) & near).sum():,} of the neighbours became 0" in sentence
        bits = 8 + 32 / block**2 if kind == "fp8" else 4 + 16 / block
        assert re.search(r"([\d.]+) bits", sentence).group(1) == f"{bits:.3g}"


@pytest.mark.parametrize("kind", FORMATS.values())
def test_what_a_weight_became_is_one_of_the_values_drawn(kind):
    o = through(kind, 32, 20.0)
    assert torch.isin(o.opened[o.block].flatten(), o.values).all()
    assert len(o.values) == (253 if kind == "fp8" else 16)  # two zeros are one value, two patterns are NaN


def test_an_outlier_ruins_its_group_in_int4_and_hardly_its_block_in_fp8():
    def inside(kind, outlier):
        o = through(kind, 32, outlier)
        error = o.error.clone()
        error[OUTLIER] = 0
        return error[o.block].square().mean().sqrt().item()

    assert inside("int4", 20.0) > 4 * inside("int4", 2.0)
    assert inside("fp8", 20.0) < 1.1 * inside("fp8", 2.0)


def test_a_control_that_moves_draws_again():
    e = precision()
    before = e.view.value
    e.controls["outlier"].value = 100
    assert e.error is None and e.view.value != before and "100 standard deviations" in e.view.value


def test_figures_say_their_numbers():
    words = number_lines({"int4": torch.arange(-8, 8) / 8}, torch.tensor([-1.0, 0.5, 0.49])).alt
    assert "int4 has 16 values" in words and "0.006" in words
    words = costs({"fp8": [0.02, 0.05]}, ["weights", "output"], {"bf16": 88.1, "fp8": 44.1}).alt
    assert "fp8: weights 2.0 %, output 5.0 %" in words and "fp8 44.1 MB" in words
