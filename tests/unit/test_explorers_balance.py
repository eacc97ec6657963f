"""The balance explorer draws what a run holds: every corner of its controls, against numbers counted here."""

import base64
import io
import re
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from moe_lib.balance import sampling_floor
from moe_lib.explorers.balance import balance_explorer
from moe_lib.toy import Run
from toy_runs import EXPERTS, KINDS, LAYERS, RUNS, STEPS, TOKENS, K, made_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def explorer():
    return balance_explorer(RUNS, KINDS)


def parsed(html):
    drawing, sentence = re.fullmatch(r"(<svg.*</svg>)(<p class=\"moe-says\".*</p>)", html).groups()
    return ElementTree.fromstring(drawing), "".join(ElementTree.fromstring(sentence).itertext())


@pytest.mark.parametrize(("run", "step", "layer"), product(RUNS, (1, 10, 11, STEPS), range(LAYERS)))
def test_every_corner_tells_the_runs_own_numbers(explorer, run, step, layer):
    html = explorer.draw(run=run, step=step, layer=layer)
    assert not re.search(r"\b(nan|inf|None)\b", html)
    svg, sentence = parsed(html)
    loads = RUNS[run].loads[step - 1, layer].tolist()
    fair, floor = TOKENS * K / EXPERTS, sampling_floor(TOKENS, EXPERTS, K)
    idle, worst = sum(n < 0.1 * fair for n in loads), max(loads) / fair
    label = svg.get("aria-label")
    assert f"At step {step} the busiest expert has {worst:.1f} times a fair share, {idle} experts less than a tenth" in label
    assert f"MaxVio is {worst - 1:.2f}; sampling noise alone would give {floor:.2f}" in label
    busiest = loads.index(max(loads))
    assert sentence.startswith(f"{run}, step {step}, layer {layer}: expert {busiest} does {worst:.1f} times its fair share")
    assert f"MaxVio is {worst - 1:.2f}, {(worst - 1) / floor:.1f} times what sampling noise" in sentence
    who = {0: "no expert serves", 1: "1 expert serves"}.get(idle, f"{idle} experts serve")
    assert f"and {who} less than a tenth" in sentence
    table = RUNS[run].by_kind[(step - 1) // 10, layer].double()
    favourite = int((table[busiest] / table.sum(0)).argmax())
    assert f"own kind is {KINDS[favourite]}: {table[busiest, favourite] / table[busiest].sum():.0%} of its work" in sentence


def test_the_bars_are_the_loads(explorer):
    svg, _ = parsed(explorer.draw(run="no help", step=7, layer=1))
    path = next(p.get("d") for p in svg.iter(f"{SVG}path"))
    widths = [float(w) for w in re.findall(r"h([\d.]+)v", path)]
    shares = RUNS["no help"].loads[6, 1] / RUNS["no help"].loads[6, 1].float().mean()
    assert widths == pytest.approx((150 / 8 * shares).tolist(), abs=0.06)


def test_the_heatmap_has_a_pixel_for_each_expert_and_step_clear_where_fair(explorer):
    href = re.search(r'href="data:image/png;base64,([^"]+)"', explorer.draw(run="no help", step=1, layer=0)).group(1)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(href))).convert("RGBA")).astype(int)
    shares = (RUNS["no help"].loads[:, 0] / RUNS["no help"].loads[:, 0].float().mean(1, keepdim=True)).T.numpy()
    assert image.shape == (EXPERTS, STEPS, 4)
    blue, orange = image[..., 2] > image[..., 0], image[..., 0] > image[..., 2]
    opaque = image[..., 3] > 0
    assert (blue[opaque] == (shares < 1)[opaque]).all() and (orange[opaque] == (shares > 1)[opaque]).all()
    assert (image[..., 3][np.abs(np.log2(np.maximum(shares, 0.01))) < 0.09] == 0).all()
    assert (image[4, :, 3] == 255).all() and blue[4].all()  # the idle expert


def test_the_table_of_kinds_follows_the_step(explorer):
    def cells(step):
        svg, _ = parsed(explorer.draw(run="no help", step=step, layer=1))
        return sorted((r.get("x"), r.get("y"), r.get("fill-opacity")) for r in svg.iter(f"{SVG}rect") if r.get("fill-opacity"))

    assert cells(1) == cells(10) != cells(11)
    table = RUNS["no help"].by_kind[0, 1].double()
    wanted = sum(float(v) >= 0.2 for v in (table / table.mean(0)).flatten())
    assert len(cells(1)) == wanted


def test_moving_each_control_changes_drawing_and_sentence():
    explorer = balance_explorer(RUNS, KINDS)
    assert explorer.error is None
    for name, value in (("run", "bias 0.01"), ("step", 5), ("layer", 0)):
        before = parsed(explorer.view.value)
        explorer.controls[name].value = value
        after = parsed(explorer.view.value)
        assert explorer.error is None and before[1] != after[1]
        assert ElementTree.tostring(before[0]) != ElementTree.tostring(after[0])


def test_runs_that_do_not_compare_are_refused():
    with pytest.raises(ValueError, match=r"\[\[9, 2, 6\], \[23, 2, 6\]\]"):
        balance_explorer({"a": made_run(0), "b": made_run(0, steps=9)}, KINDS)
    with pytest.raises(ValueError, match="expected one shape"):
        balance_explorer({}, KINDS)
    dense = Run(torch.zeros(3), torch.zeros(3, 0, 6).long(), torch.zeros(1, 0, 6, 3).long(), 1.0, torch.zeros(1, 0, 6).long())
    with pytest.raises(ValueError, match="expected one shape"):
        balance_explorer({"dense": dense}, KINDS)
