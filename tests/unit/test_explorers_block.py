"""The flow explorer: drawn for every corner of its controls, and right in each against moe_lib's own routing and dispatch."""

import re
from itertools import product
from xml.etree import ElementTree

import pytest
import torch

from moe_lib import dispatch
from moe_lib.explorers.block import EXPERT_CHOICES, MOST_K, MOST_TOKENS, draw_flow, flow, flow_routing

SVG = "{http://www.w3.org/2000/svg}"
START = {"tokens": 16, "experts": 16, "k": 2, "skew": 0.0, "seed": 0, "follow": 0}
RANGES = {
    "tokens": (1, 33, MOST_TOKENS),
    "experts": (EXPERT_CHOICES[0], 64, EXPERT_CHOICES[-1]),
    "k": (1, 4, MOST_K),
    "skew": (0.0, 1.5, 3.0),
    "seed": (0, 10, 20),
    "follow": (0, 31, MOST_TOKENS - 1),
}
ONE_AT_A_TIME = [START | {name: value} for name, values in RANGES.items() for value in values]
CORNERS = [dict(zip(RANGES, values)) for values in product(*((r[0], r[2]) for r in RANGES.values()))]  # every pair of extremes too


def parsed(html):
    drawing, sentence = re.fullmatch(r"(<svg.*</svg>)(<p class=\"moe-says\".*</p>)", html).groups()
    return ElementTree.fromstring(drawing), "".join(ElementTree.fromstring(sentence).itertext())


def right_loads(values):
    routing = flow_routing(values["tokens"], values["experts"], values["k"], values["skew"], values["seed"])
    _, counts, _ = dispatch(torch.zeros(values["tokens"], 1), routing, values["experts"])
    return routing, counts.tolist()


@pytest.mark.parametrize("values", [*ONE_AT_A_TIME, *CORNERS], ids=lambda v: "-".join(map(str, v.values())))
def test_every_corner_is_drawn_and_tells_the_loads_of_dispatch(values):
    html = draw_flow(**values)
    svg, sentence = parsed(html)
    routing, loads = right_loads(values)
    tokens, k, experts = values["tokens"], values["k"], values["experts"]
    rows, busiest = tokens * k, max(loads)
    assert not re.search(r"\b(nan|inf|None)\b", html)

    told = [re.fullmatch(r"expert (\d+): (\d+) rows?", title.text).groups() for title in svg.iter(f"{SVG}title")]
    assert [(int(e), int(n)) for e, n in told] == list(enumerate(loads))

    label = svg.get("aria-label")
    assert sentence.startswith(label)
    assert f"× {k} = {rows} row{'s' * (rows > 1)} flow to {experts} experts and back" in label
    assert f"the busiest is expert {loads.index(busiest)} with {busiest} row" in label
    assert f"; {loads.count(0)} of {experts} idle." in label
    assert (f"Loads {', '.join(map(str, loads))};" if experts <= 16 else f"Loads from {min(loads)} to {busiest};") in label
    assert f"Mean {rows / experts:.3g} rows, max/mean {busiest * experts / rows:.2f}." in sentence

    follow = min(values["follow"], tokens - 1)
    weighted = zip(routing.indices[follow].tolist(), routing.weights[follow].tolist())
    assert sentence.endswith(
        f"Token {follow} goes to expert{'s' * (k > 1)} {', '.join(f'{e} (weight {w:.2f})' for e, w in weighted)}."
    )


def shapes(html):
    svg, _ = parsed(html)
    curves = [
        [float(n) for n in re.findall(r"-?[\d.]+", piece)]
        for path in svg.iter(f"{SVG}path")
        for piece in path.get("d").split("M")[1:]
    ]
    boxes = [{k: float(r.get(k)) for k in ("x", "y", "width", "height")} for r in svg.iter(f"{SVG}rect")]
    return svg, curves, boxes


@pytest.mark.parametrize("values", [START, *CORNERS[::7]], ids=lambda v: "-".join(map(str, v.values())))
def test_each_copy_flows_from_its_token_into_its_expert_and_back(values):
    svg, curves, boxes = shapes(draw_flow(**values))
    routing, loads = right_loads(values)
    tokens, k = values["tokens"], values["k"]
    assert len(curves) == 2 * tokens * k
    columns = sorted({b["x"] for b in boxes})
    left, middle, right = ([b for b in boxes if b["x"] == x] for x in (columns[0], columns[1], columns[2]))

    def hit(column, y):
        return {
            i for i, b in enumerate(column) if b["y"] - 0.11 <= y <= b["y"] + b["height"] + 0.11
        }  # coordinates have one decimal

    flows, back = set(), set()
    for x, y, *_, y_end in curves:
        if x < middle[0]["x"]:
            flows |= set(product(hit(left, y), hit(middle, y_end)))
        else:
            back |= set(product(hit(right, y_end), hit(middle, y)))
    chosen = {(t, e) for t, row in enumerate(routing.indices.tolist()) for e in row}
    assert chosen <= flows and chosen <= back
    if values["experts"] == 8 and tokens * k <= 128:  # wide enough apart that a tenth of a pixel cannot touch a neighbour
        assert chosen == flows == back


def test_boxes_are_as_high_as_their_loads_and_stay_on_the_drawing():
    for values in CORNERS:
        svg, _, boxes = shapes(draw_flow(**values))
        _, loads = right_loads(values)
        width, height = (float(n) for n in svg.get("viewBox").split()[2:])
        assert all(0 <= b["x"] and b["x"] + b["width"] <= width and 0 <= b["y"] and b["y"] + b["height"] <= height for b in boxes)
        columns = sorted({b["x"] for b in boxes})
        experts = [b["height"] for b in boxes if b["x"] == columns[1]]
        unit = max(experts) / max(loads)
        assert all(abs(h - unit * n) < 0.11 for h, n in zip(experts, loads) if n)


def test_more_tokens_leave_those_already_there_as_they_were():
    few, many = flow_routing(5, 32, 4, 1.0, 3), flow_routing(50, 32, 4, 1.0, 3)
    assert torch.equal(few.indices, many.indices[:5])


def test_skew_makes_loads_uneven():
    worst = [max(right_loads(START | {"tokens": 64, "skew": skew})[1]) for skew in (0.0, 1.0, 3.0)]
    assert worst == sorted(worst) and worst[0] < worst[2]


def test_the_explorer_redraws_when_each_control_moves():
    explorer = flow()
    assert explorer.error is None and explorer.values() == START | {"follow": 0}
    for name, values in RANGES.items():
        before = explorer.view.value
        explorer.controls[name].value = values[1]
        assert explorer.error is None and explorer.view.value != before, name
        assert explorer.view.value == draw_flow(**explorer.values())
