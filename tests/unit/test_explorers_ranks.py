"""The explorer of notebook 05: drawn for every corner of its controls, and right in each against plain counting."""

import base64
import io
import re
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from moe_lib import KIMI_K2
from moe_lib.expert_parallel_cost import H800, step_seconds
from moe_lib.explorers.ranks import PLACED, RANKS, TOKENS, batch_over_ranks, draw_ranks, ranks_explorer

SVG = "{http://www.w3.org/2000/svg}"
CORNERS = list(product((RANKS[0], 8, RANKS[-1]), (TOKENS[0], TOKENS[-1]), (0.0, 2.0), PLACED, (0, 20)))


def parsed(html):
    drawing, sentence = re.fullmatch(r"(<svg.*</svg>)(<p class=\"moe-says\".*</p>)", html).groups()
    return ElementTree.fromstring(drawing), "".join(ElementTree.fromstring(sentence).itertext())


@pytest.mark.parametrize("values", CORNERS[::3], ids=lambda v: "-".join(map(str, v)))
def test_every_corner_is_drawn_and_tells_what_was_counted(values):
    ranks, tokens, *_, placement, _ = values
    html = draw_ranks(*values)
    svg, sentence = parsed(html)
    assert not re.search(r"\b(nan|inf|None)\b", html)
    t = batch_over_ranks(*values)
    load, label = t.rows.sum(0).tolist(), svg.get("aria-label")
    assert t.rows.sum().item() == tokens * 8 and t.rows.sum(1).tolist() == [tokens * 8 // ranks] * ranks
    assert sentence.startswith(label) and f"{tokens} tokens make {tokens * 8} rows for {ranks} ranks" in label
    assert f"Loads from {min(load)} to {max(load)}; the busiest is rank {load.index(max(load))}" in label
    assert f"{max(load) * ranks / sum(load):.2f} times the mean" in label
    copies = (PLACED[placement] or 0) * ranks
    assert f"{(384 + copies) // ranks} expert" in label
    assert f"{copies} of them copies" in label if copies else "copies" not in label
    step = step_seconds(KIMI_K2, t, H800)
    assert f"At least {1e6 * step['dispatch']:.0f} µs out, {1e6 * step['experts']:.0f} µs in the experts" in sentence
    away = sum(sum(row) for row in t.rows.tolist()) - sum(t.rows[r, r].item() for r in range(ranks))
    assert f"{away / (tokens * 8):.0%} of the rows leave their rank: {away * (7168 + 4 * 56 + 2 * 7168) / 1e6:,.0f} MB" in sentence

    titles = [title.text for title in svg.iter(f"{SVG}title")]
    assert titles[:ranks] == [f"rank {r}: {n} rows" for r, n in enumerate(load)]
    assert [title.split(":")[0] for title in titles[ranks:]] == ["dispatch", "experts", "combine"]


def test_the_pixels_are_the_matrix():
    values = (16, 1024, 1.0, "in order", 3)
    image = next(parsed(draw_ranks(*values))[0].iter(f"{SVG}image"))
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.get("href").partition("base64,")[2]))))
    rows = batch_over_ranks(*values).rows
    assert pixels.shape == (16, 16, 4)
    assert np.abs(pixels[..., 3] - (255 * rows / rows.max()).numpy()).max() <= 0.5


def test_what_the_notebook_says_will_be_seen():
    def worst(ranks=32, tokens=4096, skew=1.0, placement="in order", seed=0):
        return batch_over_ranks(ranks, tokens, skew, placement, seed).imbalance

    for seed in range(3):
        assert worst(skew=0.0, seed=seed) < 1.12 < 1.3 < worst(skew=1.0, seed=seed)
        assert worst(skew=0.5, placement="placed", seed=seed) < 1.15 < worst(skew=0.5, seed=seed)
        by_ranks = [worst(ranks=n, seed=seed) for n in (8, 16, 32, 64, 128)]
        assert by_ranks == sorted(by_ranks)
        assert worst(skew=1.5, placement="+1 slot a rank", seed=seed) < 1.12
    assert worst(skew=1.5, placement="placed") > 2
    near, far = (step_seconds(KIMI_K2, batch_over_ranks(n, 4096, 0.0, "in order", 0), H800)["dispatch"] for n in (8, 16))
    assert 0.9 * near < far < near
    columns = batch_over_ranks(32, 4096, 2.0, "in order", 0).rows.double()
    assert columns.sum(1).std() == 0 and columns.sum(0).std() > 100


def test_every_control_redraws_without_an_error():
    explorer = ranks_explorer()
    seen = {explorer.view.value}
    for name, value in {"ranks": 8, "tokens": 1024, "skew": 2.0, "placement": "+2 slots a rank", "seed": 7}.items():
        explorer.controls[name].value = value
        assert explorer.error is None
        seen.add(explorer.view.value)
    assert len(seen) == 6
    assert torch.equal(batch_over_ranks(8, 1024, 2.0, "placed", 7).rows, batch_over_ranks(8, 1024, 2.0, "placed", 7).rows)
