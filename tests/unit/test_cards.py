"""What a reader sees of a card and the map: the same words in HTML and text, colours that stand out, boxes that fit."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from moe_lib.block_drawing import CHAINS, HEIGHT, INK, PAPER, WIDTH
from moe_lib.cards import block_map, card, style
from moe_lib.evidence import nodes
from moe_lib.figures.base import BLUE

NODES = nodes()
each_node = pytest.mark.parametrize("node", NODES.values(), ids=NODES)


class Page(HTMLParser):
    """Text in reading order; complains when tags are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text = [], []
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        assert "id" not in dict(attributes), "an id would be doubled when a card is shown twice"
        if tag not in ("img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


@each_node
def test_html_and_text_say_the_same_in_the_same_order(node):
    html = "".join(Page(card(node.id)._repr_html_()).text)
    plain = repr(card(node.id))
    facts = [node.trail[-1], node.title, card(node.id).params, node.code[0].text, node.code[0].name, node.says]
    facts += [symbol.means for symbol in node.symbols] + [claim for e in node.evidence for claim in [e.claim]]
    at = 0
    for fact in facts[:6] + [symbol.means for symbol in node.symbols]:
        assert fact in html[at:], fact
        at = html.index(fact, at)
    for fact in facts:
        assert fact in html and all(line in plain for line in fact.splitlines())
    assert not re.search(r"[{}]", node.title + node.label + node.says + "".join(e.claim for e in node.evidence))


def test_a_card_is_the_same_every_time():
    h = torch.randn(2, 5, 64)
    assert card("product", h)._repr_html_() == card("product", h + 1)._repr_html_()
    assert repr(card("product", h)) == repr(card("product", h + 1))


def test_live_shapes():
    a = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert "h […, 2048 inter], here [3, 64] bfloat16: " in repr(card("product", a))
    both = repr(card("product", a=a, u=a))
    assert "a […, 2048 inter], here [3, 64] bfloat16" in both and "h […, 2048 inter]: " in both
    assert "here [3, 64] bfloat16" in card("product", a).html()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: card("produkt"), KeyError, "no card 'produkt'; there are block, "),
        (lambda: card("product", z=torch.zeros(3)), KeyError, "has no tensor z; its tensors by symbol: a, u, h"),
        (lambda: card("unsharded_list", torch.zeros(3)), KeyError, "has no tensor as its output"),
        (lambda: card("scale", torch.zeros(2, 3, 8)), ValueError, r"w̃ is \[tokens, k\]; a tensor of shape \[2, 3, 8\] cannot"),
        (lambda: card("product", torch.tensor(1.0)), ValueError, r"h is \[..., inter\]; a tensor of shape \[\] cannot"),
        (lambda: card("product", a=torch.zeros(2, 8), u=torch.zeros(2, 9)), ValueError, "inter is 8 in a and 9 in u"),
        (lambda: block_map(lit=["silu", "selu"]), KeyError, "no operation 'selu'; there are block, "),
    ],
)
def test_a_wrong_call_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- colours -------------------------------------------------------------------------------------------------------------


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def themes():
    light, dark, *_ = (dict(re.findall(r"--moe-([\w-]+): (#\w{6})", rule)) for rule in style().split("}"))
    return light, light | dark


def test_contrast_is_computed_as_the_standard_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_text_stands_out(theme):
    for text, ground in (("ink", "paper"), ("quiet", "paper"), ("link", "paper"), ("ink", "ground"), ("on-lit", "lit")):
        assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    for edge in ("rule", "focus"):
        assert contrast(theme[edge], theme["paper"]) >= 3, edge


def test_cards_use_only_the_colours_of_their_theme():
    light, dark = themes()
    assert dark != light and set(dark) == set(light)
    rules = style().split("}")[2:]
    for rule in rules:
        if ".moe-card" in rule:
            assert not re.search(r"#[0-9a-f]{3,8}\b", rule), rule
            assert not any(value not in light for value in re.findall(r"var\(--moe-([\w-]+)\)", rule))


def test_the_drawing_stands_out():
    assert contrast(INK, PAPER) >= 4.5 and contrast("#ffffff", BLUE) >= 4.5 and contrast(BLUE, PAPER) >= 3


# --- the drawing and the map ---------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def picture(shown):
    return ElementTree.fromstring(base64.b64decode(re.search(r"base64,([^\"]*)", shown._repr_html_())[1]))


def lit_boxes(shown):
    blue = [box for box in picture(shown).iter(f"{SVG}rect") if box.get("fill") == BLUE]
    return {tuple(float(box.get(side)) for side in ("x", "y", "width", "height")) for box in blue}


@pytest.mark.parametrize("lit", [[], ["silu"], ["gate_proj", "up_proj"], list(NODES)])
def test_exactly_what_is_asked_for_is_lit(lit):
    shown = block_map(lit=lit)
    assert lit_boxes(shown) == {tuple(map(float, NODES[name].box)) for name in lit}
    assert all(NODES[name].title in shown.alt for name in lit)
    assert repr(shown) == shown.alt and f'alt="{shown.alt}"' in shown._repr_html_()


def test_boxes_fit_the_drawing_their_labels_and_each_other():
    def overlap(a, b):
        return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]

    for node in NODES.values():
        x, y, width, height = node.box
        assert 0 < x and x + width < WIDTH and 0 < y and y + height < HEIGHT and min(width, height) >= 20
        assert 6.3 * len(node.label) <= width - 6, node.label
        assert not [other.id for other in NODES.values() if other is not node and overlap(node.box, other.box)]


def test_wires_join_boxes():
    """No operation but the whole block and the two lists stands without a wire that ends at its edge."""
    wires = [wire.get("points").split() for wire in picture(block_map(lit=[])).iter(f"{SVG}polyline")]
    ends = [tuple(map(float, end.split(","))) for wire in wires for end in (wire[0], wire[-1])]
    for node in NODES.values():
        x, y, width, height = node.box
        within = [(left, top) for left, top in ends if x <= left <= x + width and y <= top <= y + height]
        joined = any(left in (x, x + width) or top in (y, y + height) for left, top in within)
        assert joined == (node.id not in ("block", "sharded_list", "unsharded_list")), node.id
    assert {name for chain in CHAINS for name in chain.split()} <= set(NODES)


def test_the_map_holds_every_card_in_the_order_of_the_data():
    html = block_map()._repr_html_()
    Page(html)
    assert re.findall(r"<summary [^>]*><span>(.*?)</span>", html) == [node.title for node in NODES.values()]
    for node, part in zip(NODES.values(), html.split("<details")[1:]):
        assert card(node.id).html() in part
    assert html.count(" open>") == 1 and list(NODES)[0] == "block"
    assert block_map(lit=["silu"], interactive=True)._repr_html_() == html
