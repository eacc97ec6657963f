"""The explorers of notebook 01: drawn for every corner of their controls, and right in each by formulas of their own."""

import base64
import io
import math
import re
from itertools import product
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from moe_lib.explorers import expert, feature_row
from moe_lib.explorers.base import VERMILION
from moe_lib.explorers.expert import GATE, HIGH, LEFT, LEVELS, TOP, UP, WIDE, draw_gate, gated_feature, number
from moe_lib.explorers.feature_row import FEATURES, SCALES, draw_features, small_expert, token_scale

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html):
    drawing, sentence = re.fullmatch(r"(<svg.*</svg>)(<p class=\"moe-says\".*</p>)", html, re.S).groups()
    drawing = ElementTree.fromstring(drawing)
    assert drawing.tag == SVG + "svg" and drawing.get("role") == "img"
    assert "nan" not in html and "inf" not in html
    return drawing, "".join(ElementTree.fromstring(sentence).itertext()).replace("−", "-")


def words(drawing):
    return [(t.text or "").replace("−", "-") for t in drawing.iter(SVG + "text")]


def silu(z):
    return z / (1 + math.exp(-z))


def slope_of_silu(z):
    s = 1 / (1 + math.exp(-z))
    return s + z * s * (1 - s)


@pytest.mark.parametrize(
    ("value", "digits", "written"),
    [(-0.0004, 3, "0.000"), (-0.0006, 3, "−0.001"), (2.0, 1, "2.0"), (-0.0, 0, "0"), (19.8664, 2, "19.87")],
)
def test_numbers_have_a_minus_sign_and_no_negative_zero(value, digits, written):
    assert number(value, digits) == written


# --- one feature -----------------------------------------------------------------------------------------------------

GATES = (-GATE, -2.0, -1.3, -0.1, 0.0, 0.1, 1.0, GATE)
UPS = (-UP, -0.1, 0.0, 1.5, UP)


@pytest.mark.parametrize(("gate", "up"), [*product(GATES, UPS)])
def test_a_feature_is_drawn_where_it_is_and_told_right(gate, up):
    drawing, sentence = parsed(draw_gate(gate, up))
    a, slope = silu(gate), slope_of_silu(gate)
    told = {
        "a": rf"a = SiLU\({gate:.1f}\) = ([-.0-9]+),",
        "h": r"so h = a · u = [-.0-9]+ × [-.0-9]+ = ([-.0-9]+)\. ",
        "by_up": r"∂h/∂u = a = ([-.0-9]+);",
        "by_a": r"∂h/∂a = u = ([-.0-9]+),",
        "by_gate": r"u · SiLU′\(gate\) = [-.0-9]+ × [-.0-9]+ = ([-.0-9]+)\.$",
    }
    right = {"a": a, "h": a * up, "by_up": a, "by_a": up, "by_gate": up * slope}
    for name, pattern in told.items():
        assert float(re.search(pattern, sentence).group(1)) == pytest.approx(right[name], abs=5.1e-4), name
    state = "is open" if a > 0.05 else "below zero, yet not shut" if a < -0.05 else "is shut"
    assert f"The gate {state}" in sentence or f"The gate is {state}" in sentence
    label = drawing.get("aria-label").replace("−", "-")
    assert f"at gate {gate:.1f}, up {up:.1f}, h is" in label
    assert float(re.search(r"h is ([-.0-9]+)\. ", label).group(1)) == pytest.approx(a * up, abs=5.1e-4)
    dot = drawing.find(SVG + "circle")
    assert float(dot.get("cx")) == pytest.approx(LEFT + WIDE * (gate + GATE) / (2 * GATE), abs=0.06)
    assert float(dot.get("cy")) == pytest.approx(TOP + HIGH * (UP - up) / (2 * UP), abs=0.06)


@pytest.mark.parametrize(("gate", "up"), [*product(GATES, UPS)])
def test_the_tangents_have_the_slopes(gate, up):
    """The red line of each cut, read back from its pixels."""
    drawing, _ = parsed(draw_gate(gate, up))
    reach = 1.15 * max(1.0, 1.5 * abs(up), abs(silu(gate) * up))
    cuts = drawing.findall(SVG + "svg")[1:]
    assert len(cuts) == 2
    for cut, half, slope in zip(cuts, (GATE, UP), (up * slope_of_silu(gate), silu(gate))):
        (red,) = [part for part in cut.iter(SVG + "line") if part.get("stroke") == VERMILION]
        x1, y1, x2, y2 = (float(red.get(k)) for k in ("x1", "y1", "x2", "y2"))
        dx = (x2 - x1) / float(cut.get("width")) * 2 * half
        dy = (y1 - y2) / float(cut.get("height")) * 2 * reach
        rounding = 0.1 * 2 * (reach / float(cut.get("height")) + abs(slope) * half / float(cut.get("width")))  # 0.05 at either end
        assert dx > 0 and dy == pytest.approx(slope * dx, abs=rounding)


def test_level_lines_hold_their_height():
    drawing, _ = parsed(draw_gate(0.0, 0.0))
    paths = list(drawing.find(SVG + "svg").iter(SVG + "path"))
    heights = [sign * level for level in LEVELS for sign in (1, -1) for _ in range(2)]
    assert len(paths) == len(heights)
    for path, height in zip(paths, heights):
        inside = 0
        for x, y in re.findall(r"([-.\d]+) ([-.\d]+)", path.get("d")):
            gate, up = float(x) / WIDE * 2 * GATE - GATE, UP - float(y) / HIGH * 2 * UP
            if abs(up) <= UP:
                inside += 1
                assert silu(gate) * up == pytest.approx(height, abs=0.01 + 0.01 * abs(height))
        reached = UP * silu(GATE) if path in paths[0::2] else 0.2785 * UP  # a line beside gate < 0 reaches only the dip of SiLU
        assert (inside > 3) == (abs(height) < reached)


def test_the_heat_is_orange_above_zero_and_blue_below_and_strongest_at_the_top():
    drawing, _ = parsed(draw_gate(0.0, 0.0))
    picture = drawing.find(SVG + "image").get("href").removeprefix("data:image/png;base64,")
    pixels = Image.open(io.BytesIO(base64.b64decode(picture)))
    wide, high = pixels.size
    top_right, bottom_right, top_left = (pixels.getpixel(at) for at in ((wide - 1, 0), (wide - 1, high - 1), (wide // 3, 0)))
    orange, blue = (230, 159, 0), (0, 114, 178)
    assert (top_right[:3], bottom_right[:3], top_left[:3]) == (orange, blue, blue)
    assert (
        top_right[3]
        == bottom_right[3]
        == max(
            pixels.getchannel("A").get_flattened_data()
            if hasattr(pixels, "get_flattened_data")
            else pixels.getchannel("A").getdata()
        )
    )
    assert 0 < top_left[3] < top_right[3]


def test_the_surface_is_computed_once():
    expert._surface.cache_clear()
    draw_gate(1.0, 1.0)
    draw_gate(-1.0, 2.0)
    assert expert._surface.cache_info().misses == 1


# --- sixteen features ------------------------------------------------------------------------------------------------


def right_features(scale, token):
    x = torch.randn(64, generator=torch.Generator().manual_seed(token), dtype=torch.float64)
    gate, up = scale * small_expert().gate_proj.weight @ x, scale * small_expert().up_proj.weight @ x
    return gate, gate * torch.sigmoid(gate), up


@pytest.mark.parametrize(("scale", "token"), [*product(SCALES, (0, 10, 20))])
def test_sixteen_features_are_drawn_and_told_right(scale, token):
    drawing, sentence = parsed(draw_features(scale, token))
    gate, a, up = right_features(scale, token)
    h, swapped = a * up, gate * up * torch.sigmoid(up)
    opened = int((gate > 0).sum())
    assert f"{scale:g} × token {token}: {opened} of 16 gates are above 0." in sentence
    assert drawing.get("aria-label").endswith(f"{opened} gates are above zero")
    _, a2, up2 = right_features(2 * scale, token)
    ratio = float(re.search(r"make h ([.\d]+) times", sentence).group(1))
    assert ratio == pytest.approx(((a2 * up2).norm() / h.norm()).item(), abs=5.1e-3)
    off = float(re.search(r"off by ([.\d]+)%", sentence).group(1))
    assert off == pytest.approx(100 * ((h - swapped).norm() / h.norm()).item(), abs=0.051)
    least, most = re.search(r"passes (\d+)(?: to (\d+))?% of each gate above", sentence).groups()
    share = 100 * torch.sigmoid(gate[gate > 0])
    assert (int(least), int(most or least)) == (round(share.min().item()), round(share.max().item()))


@pytest.mark.parametrize("scale", (SCALES[0], 1.0, SCALES[-1]))
def test_bars_are_as_high_as_their_values(scale):
    drawing, _ = parsed(draw_features(scale, 3))
    gate, a, up = right_features(scale, 3)
    bars = [bar for bar in drawing.iter(SVG + "rect") if bar.get("fill") != "none"]
    frames = [bar for bar in drawing.iter(SVG + "rect") if bar.get("fill") == "none"]
    assert (len(bars), len(frames)) == (3 * FEATURES, FEATURES)
    swapped = gate * up * torch.sigmoid(up)
    rows = ((a, gate), (up, up), (a * up, swapped))
    for row, (value, other) in enumerate(rows):
        most = torch.cat([value, other]).abs().max()
        heights = torch.tensor([float(bar.get("height")) for bar in bars[row * FEATURES : (row + 1) * FEATURES]])
        torch.testing.assert_close(heights.double(), 50 * (value / most).abs(), atol=0.06, rtol=0)
    heights = torch.tensor([float(bar.get("height")) for bar in frames])
    torch.testing.assert_close(heights.double(), 50 * (gate / torch.cat([a, gate]).abs().max()).abs(), atol=0.06, rtol=0)


def test_a_long_token_shuts_the_gates_below_zero_and_a_short_one_half_opens_all():
    _, short = parsed(draw_features(SCALES[0], 0))
    _, long = parsed(draw_features(SCALES[-1], 0))
    for share in re.findall(r"(\d+)(?: to \d+)?% of each gate", short) + re.findall(r"to (\d+)% of each gate", short):
        assert 49 <= int(share) <= 51
    assert re.search(r"make h (3\.9\d|4\.0\d) times", short) and "make h 4.00 times" in long
    assert re.search(r"passes \d+ to 100% of each gate above 0 and 0 to \d+% of each gate below 0", long)


def test_gates_have_the_spread_of_the_token_and_none_is_an_odd_one_out():
    gates = torch.cat([right_features(1.0, token)[0] for token in range(21)])
    assert gates.std().item() == pytest.approx(1, abs=0.15) and gates.abs().max() < 4.5


def test_row_ends_are_plain_numbers():
    for scale in SCALES:
        drawing, _ = parsed(draw_features(scale, 0))
        assert not any(re.search(r"\de[-+]", word) for word in words(drawing))


# --- the controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "names"), [(gated_feature, ["gate", "up"]), (token_scale, ["scale", "token"])])
def test_every_control_moves_the_drawing(make, names):
    explorer = make()
    assert list(explorer.controls) == names and explorer.error is None
    for control in explorer.controls.values():
        before = explorer.view.value
        control.value = next(v for v in (getattr(control, "max", None), *SCALES) if v is not None and v != control.value)
        assert explorer.error is None and explorer.view.value != before
    assert feature_row.SCALES == SCALES
