"""Every fact on a card is held against the code, a real forward, the config, or the known order of the reference file."""

import json
import re
import sys
import tomllib
from collections import defaultdict
from fnmatch import fnmatchcase
from html import unescape
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_lib
from moe_lib import KIMI_K2, MoEBlock, SwiGLUExpert
from moe_lib.cards import card, find_marks, style
from moe_lib.config import MoEConfig
from moe_lib.evidence import DIMS, KINDS, cut, nodes, reference
from moe_lib.experts import LoopExperts
from moe_lib.experts.sharded import ShardedExperts
from moe_lib.paths import DATA

ROOT = Path(moe_lib.__file__).parent
NODES = nodes()
GATE = "gate_linear sigmoid correction_bias group_choice top_k gather normalise scale".split()
EXPERT = "gate_proj up_proj silu product down_proj".split()
EXCHANGE = "dispatch all_to_all_out all_to_all_back combine".split()
EXPECTED = ["block", *GATE, *EXPERT, *EXCHANGE, "shared_expert", "sum", "sharded_list", "unsharded_list"]
each_node = pytest.mark.parametrize("node", NODES.values(), ids=NODES)
# Sizes of which no two are equal, so that no dimension can pass for another.
SMALL = MoEConfig(hidden_size=12, moe_intermediate_size=14, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2)


def test_every_operation_has_a_card():
    assert set(NODES) == set(EXPECTED)


def test_cards_lead_to_the_notebooks_there_are():
    folder = DATA.parent / "notebooks"
    data = tomllib.loads((DATA / "evidence.toml").read_text(encoding="utf-8"))
    for node, raw in zip(NODES.values(), data["node"]):
        there = [path.name for path in folder.glob(f"{raw['notebook']}_*.ipynb")]
        assert ([node.notebook[0]] if node.notebook else []) == there, "correct [notebooks] in data/evidence.toml"
        if node.notebook:
            title = json.loads((folder / there[0]).read_text(encoding="utf-8"))["cells"][0]["source"]
            assert "".join(title).splitlines()[0] == f"# {node.notebook[1]}"


# --- the code on a card ------------------------------------------------------------------------------------------------


@each_node
def test_the_code_is_cut_from_the_source(node):
    for code in node.code:
        source = " ".join((ROOT.parent / code.file).read_text(encoding="utf-8").split())
        pieces = code.text.splitlines()
        assert pieces and all(" ".join(piece.split()) in source for piece in pieces)
        assert code.name.split(".")[-1] in source


def test_code_is_typed_nowhere_but_in_the_source():
    data = (DATA / "evidence.toml").read_text(encoding="utf-8")
    for node in NODES.values():
        for line in "\n".join(code.text for code in node.code).splitlines():
            if len(line) > 45:  # shorter ones are a mark: a symbol's place in the code
                assert line not in data, (node.id, line)


def test_a_cut_is_the_smallest_piece():
    assert cut("moe_lib.expert.swiglu", "F.silu(") == "F.silu(gate)"
    assert cut("moe_lib.expert.swiglu", "* up") == "F.silu(gate) * up"
    assert cut("moe_lib.expert.swiglu", "return F") == "return F.silu(gate) * up"


@pytest.mark.parametrize(
    ("symbol", "part", "message"),
    [
        ("moe_lib.router.Router.route", "weights", r"'weights' is in [2-9] separate pieces of moe_lib.router.Router.route"),
        ("moe_lib.expert.swiglu", "relu", "'relu' is in 0 separate pieces"),
        ("moe_lib.expert.swiglu", "No parameters", "is in 0 separate pieces"),  # the docstring is not code
        ("moe_lib.expert.swigloo", "gate", "moe_lib.expert has no swigloo"),
        ("moe_lib.exprt.swiglu", "gate", "moe_lib has no exprt.swiglu"),
        ("nowhere.at.all", "gate", "no such module"),
    ],
)
def test_a_cut_that_cannot_be_made_says_why(symbol, part, message):
    with pytest.raises(LookupError, match=message):
        cut(symbol, part)


@each_node
def test_marks_and_symbols_belong_together(node):
    marks = [symbol.mark for symbol in node.symbols]
    in_equation = set(re.findall(r"\{([^}]*)\}", node.equation))
    names = [symbol.s for symbol in node.symbols]
    assert len(set(names)) == len(names) and len(set(marks)) == len(marks)
    assert in_equation <= set(names)
    assert set(names) - in_equation <= {"n"}  # the counts travel beside the rows and are in no equation
    spans = []
    for mark in marks:
        found = [(i, *span) for i, code in enumerate(node.code) for span in find_marks(code.text, mark, marks)]
        assert found, f"{mark!r} is nowhere in the code of {node.id}"
        spans += found
    assert not any(a[0] == b[0] and a[1] < b[1] < a[2] < b[2] for a in spans for b in spans), "marks that cross cannot be drawn"
    assert all(symbol.role in ("in", "out", "weight") and symbol.means for symbol in node.symbols)


@each_node
def test_every_symbol_lights_up_in_equation_code_and_shapes(node):
    html = card(node.id).html()
    for i, symbol in enumerate(node.symbols):
        places = (r"<pre.*?</pre>", r'"moe-equation">(.*?)</p>', r'"moe-shapes">(.*?)</ul>')
        code, equation, shapes = ("".join(re.findall(place, html, re.S)) for place in places)
        assert re.search(f'class="moe-[st]-{i}"', code), symbol.s
        assert f'class="moe-s-{i}"' in equation or symbol.s == "n"
        assert f'class="moe-s-{i}" tabindex="0"' in shapes
        assert f".moe-card:has(.moe-s-{i}:is(:hover, :focus)) :is(.moe-s-{i}, .moe-t-{i})" in style()
    marked = unescape(re.sub("<[^>]*>", "", "".join(re.findall(r"<code>(.*?)</code>", html, re.S))))
    assert marked == "".join(code.text for code in node.code)  # no span loses or doubles a character


# --- shapes, against a real forward ------------------------------------------------------------------------------------

# Where a mark is no tensor by itself: what to look at instead.
INSTEAD = {("block", "w"): "routing.weights", ("group_choice", "c"): "choice", ("combine", "y"): "torch.cat(out)"}


def shapes_seen(run):
    """Run, and evaluate the marks of every node in the live frames of the functions that the cards name: {(node, s): shapes}."""
    seen, by_function = defaultdict(set), defaultdict(list)
    for node in NODES.values():
        for code in node.code:
            by_function[str(ROOT.parent / code.file), code.name].append((node, code))

    def look(frame, event, _arg):
        if event == "return":
            for node, code in by_function.get((frame.f_code.co_filename, frame.f_code.co_qualname), ()):
                for symbol in node.symbols:
                    if symbol.shape:
                        seen[node.id, symbol.s].add(shape_in(frame, node, code, symbol))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return dict(seen)


def shape_in(frame, node, code, symbol):
    expression = INSTEAD.get((node.id, symbol.s), symbol.mark.removesuffix(" ="))
    if not re.search(r"\w", expression) or expression in ("sum", "sigmoid", "self.all_to_all_back"):
        expression = code.text.splitlines()[-1].removeprefix("return ")  # an operation's own mark: its value is the whole piece
    value = eval(expression, frame.f_globals, dict(frame.f_locals))
    return tuple((value.weight if isinstance(value, nn.Module) else value).shape)


def check(seen, config, lead, only):
    """Every shape seen is the card's, with the config's sizes; `...` is what x has before its last dimension; rows = tokens x k."""
    tokens = torch.Size(lead).numel()
    sizes = {name: getattr(config, field) for name, field in DIMS.items() if field} | {
        "tokens": tokens,
        "rows": tokens * config.num_experts_per_tok,
    }
    for node_id in only:
        for symbol in NODES[node_id].symbols:
            if symbol.shape:
                fixed = tuple(sizes[name] for name in symbol.shape.split() if name != "...")
                expected = {lead + fixed} if "..." in symbol.shape else {fixed}
                if "..." in symbol.shape and node_id in EXPERT:  # in the block an expert sees its own share of the rows
                    expected |= {(n, *fixed) for n in range(1, sizes["rows"] + 1)}
                assert seen.get((node_id, symbol.s)), f"the forward never reached {node_id}.{symbol.s}"
                assert seen[node_id, symbol.s] <= expected, (node_id, symbol.s, symbol.shape)


class Passing(nn.Module):
    """The contract of experts, and nothing more: rows come back as they are."""

    def __init__(self, config):
        super().__init__()
        self.local = range(config.n_routed_experts)

    def forward(self, rows, counts):
        assert counts.sum() == len(rows)
        return rows


@pytest.fixture(scope="module")
def alone():
    """A group of one rank, so that the all-to-alls really run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


WITH_SHAPES = [name for name, node in NODES.items() if any(symbol.shape for symbol in node.symbols)]


def test_shapes_in_a_small_block(alone):
    block = MoEBlock(SMALL, ShardedExperts(LoopExperts(SMALL), alone))
    seen = shapes_seen(lambda: block(torch.randn(2, 5, SMALL.hidden_size)))
    check(seen, SMALL, (2, 5), WITH_SHAPES)


def test_shapes_at_k2s_sizes_outside_the_experts(alone):
    """Routing and dispatch depend on data, which the meta device has not: they run on the CPU at K2's own sizes, around experts
    that pass their rows on."""
    block = MoEBlock(KIMI_K2, ShardedExperts(Passing(KIMI_K2), alone), dtype=torch.bfloat16)
    seen = shapes_seen(lambda: block(torch.randn(1, 3, KIMI_K2.hidden_size, dtype=torch.bfloat16)))
    check(seen, KIMI_K2, (1, 3), [name for name in WITH_SHAPES if name not in EXPERT])


def test_shapes_at_k2s_sizes_in_an_expert():
    expert = SwiGLUExpert(KIMI_K2.hidden_size, KIMI_K2.moe_intermediate_size, device="meta")
    seen = shapes_seen(lambda: expert(torch.empty(2, 5, KIMI_K2.hidden_size, device="meta")))
    check(seen, KIMI_K2, (2, 5), EXPERT)


def test_a_wrong_shape_would_be_seen():
    expert = SwiGLUExpert(12, 14)
    seen = shapes_seen(lambda: expert(torch.randn(2, 5, 12)))
    check(seen, SMALL, (2, 5), EXPERT)
    with pytest.raises(AssertionError, match="product"):
        check(seen, SMALL.replace(moe_intermediate_size=15), (2, 5), ["product"])
    with pytest.raises(AssertionError, match="never reached scale"):
        check(seen, SMALL, (2, 5), ["scale"])


# --- parameters ----------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_block():
    tensors = MoEBlock(KIMI_K2, "loop", device="meta").to_hf()
    for node in NODES.values():
        patterns = [pattern.replace(".E.", ".0.") for pattern in node.tensors]
        matched = [key for key in tensors if any(fnmatchcase(key, pattern) for pattern in patterns)]
        assert all(any(fnmatchcase(key, pattern) for key in tensors) for pattern in patterns), node.id
        assert node.n_params == sum(tensors[key].numel() for key in matched), node.id
    leaves = [p.replace(".E.", ".*.") for node in NODES.values() if "block" not in node.id for p in node.tensors]
    assert all(any(fnmatchcase(key, pattern) for pattern in leaves) for key in tensors)  # no tensor without a card


def test_parameters_in_words():
    assert card("product").params == "no parameters"
    assert card("gate_proj").params == "14,680,064 parameters = 7,168 × 2,048"
    assert card("correction_bias").params == "384 parameters"
    assert card("block").params == f"{KIMI_K2.block_params:,} parameters"


# --- the reference -------------------------------------------------------------------------------------------------------

# Lines of the pinned file, first and last of each part.
PARTS = {"expert": (374, 390), "gate": (393, 474), "block": (477, 609)}
PART_OF = dict.fromkeys(GATE, "gate") | dict.fromkeys(EXPERT, "expert")


@each_node
def test_evidence_lies_where_the_file_has_it(node):
    first, last = PARTS[PART_OF.get(node.id, "block")]
    for e in node.evidence:
        assert e.kind in KINDS and e.claim.endswith(".")
        if e.kind == "derived":
            assert e.lines is None
            continue
        start, end = e.lines
        assert start <= end
        if e.kind == "direct":
            assert (start, end) in {(486, 515), (486, 503), (504, 515)}
        else:
            assert first <= start and end <= last and not (486 <= start and end <= 515)
    assert any(e.lines for e in node.evidence)


def test_operations_stand_in_the_file_in_the_order_of_the_data():
    for names in (GATE, EXCHANGE):
        starts = [NODES[name].evidence[0].lines[0] for name in names]
        assert starts == sorted(set(starts))


def test_the_seeds_page():
    """The element-wise product and the two lists, fact by fact."""
    product = repr(card("product"))
    assert product.splitlines()[0] == "Kimi K2 › 61 transformer blocks › 60 MoE blocks › Mixture of experts › 384 routed experts"
    for fact in ("Element-wise product", "no parameters", "F.silu(gate) * up", "h = a ⊙ u", "SwiGLU", "moe_intermediate_size"):
        assert fact in product
    for fact in (*(f"{s} […, 2048 inter]" for s in "auh"), "B batch, T positions", "lines 486–515", "fd1984e2b7a3"):
        assert fact in product
    sharded, unsharded = repr(card("sharded_list")), repr(card("unsharded_list"))
    for fact in ("ep_size", "experts_per_rank", "ep_rank", "None", "384", "lines 486–503", "number of ranks", "Direct evidence"):
        assert fact in sharded
    for fact in ("ep_size is 1", "ep_rank is 0", "experts_per_rank is all 384", "lines 504–515", "Direct evidence"):
        assert fact in unsharded


def test_no_reference_code():
    data = (DATA / "evidence.toml").read_text(encoding="utf-8")
    everything = data + "".join(repr(card(name)) for name in NODES)
    theirs = "DeepseekV3 hasattr act_fn get_world_size get_rank() topk_idx topk_weight scores_for_choice tmp_scores moe_infer"
    assert not [word for word in theirs.split() if word in everything]


def test_links_are_pinned():
    assert reference((486, 515)) == (
        "lines 486–515",
        "https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/fd1984e2b7a3/modeling_deepseek.py#L486-L515",
    )
    assert reference((389, 389))[0] == "line 389" and reference((389, 389))[1].endswith("#L389")
    links = re.findall(r'href="(http[^"]*)"', "".join(card(name).html() for name in NODES))
    assert links and all("/blob/fd1984e2b7a3/modeling_deepseek.py" in link for link in links)
