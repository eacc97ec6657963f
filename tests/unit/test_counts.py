"""Notebook 00: the figure's and the explorer's numbers against models on the meta device, and checkers that name the fault."""

import itertools
import json
import re
from xml.etree import ElementTree

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moe_lib import DEEPSEEK_V3, KIMI_K2, MoEBlock, SwiGLUExpert
from moe_lib.checks.counts import ACTIVE_FAULTS, GATE, RANK_FAULTS, TOTAL_FAULTS, check_count, check_gate_order, check_ranks_needed
from moe_lib.checks.counts import fewest_ranks as right_ranks
from moe_lib.evidence import nodes
from moe_lib.explorers.counts import (
    EXPERTS,
    MACHINES,
    PRECISIONS,
    TOP_K,
    WIDTHS,
    block_bytes,
    counts_explorer,
    draw_counts,
    machine_for,
    model_bytes,
)
from moe_lib.figures.counts import parts, where_the_weights_are
from moe_lib.paths import DATA


def n_weights(module):
    return sum(tensor.numel() for tensor in module.state_dict().values())


# --- counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grouped", "loop"])
def test_a_real_block_has_the_parameters_of_the_config(kind):
    assert n_weights(MoEBlock(KIMI_K2, kind, device="meta")) == KIMI_K2.block_params == 16_958_226_816


def test_one_dense_feed_forward_is_nine_experts():
    dense = SwiGLUExpert(KIMI_K2.hidden_size, KIMI_K2.intermediate_size, device="meta")
    expert = SwiGLUExpert(KIMI_K2.hidden_size, KIMI_K2.moe_intermediate_size, device="meta")
    assert n_weights(dense) == 396_361_728 == 9 * n_weights(expert)


@pytest.mark.parametrize("config, file", [(KIMI_K2, "kimi_k2"), (DEEPSEEK_V3, "deepseek_v3")])
def test_parts_are_those_of_transformers_whole_model(config, file):
    """A trillion parameters, counted on the meta device: each part under the names that transformers gives it."""
    raw = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))
    raw.pop("model_type", None)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**raw))
    dense = range(config.first_k_dense_replace)
    where = [
        ("routed experts", r"\.mlp\.experts\."),
        ("shared experts", r"\.mlp\.shared_experts\."),
        ("gates", r"\.mlp\.gate\."),
        ("dense feed-forward", rf"\.layers\.({'|'.join(map(str, dense))})\.mlp\."),
        ("embedding and head", r"embed_tokens|lm_head"),
        ("attention", r"\.self_attn\."),
        ("norms", r"norm"),
    ]
    counted = dict.fromkeys((name for name, _ in where), 0)
    for key, tensor in model.state_dict().items():
        counted[next(name for name, pattern in where if re.search(pattern, key))] += tensor.numel()
    assert counted == {name: total for name, (total, _) in parts(config).items()}
    assert sum(counted.values()) == config.total_params


def test_parts_add_up():
    for config in (KIMI_K2, DEEPSEEK_V3):
        totals, actives = zip(*parts(config).values())
        assert (sum(totals), sum(actives)) == (config.total_params, config.active_params())
    assert KIMI_K2.total_params == 1_026_408_232_448
    assert [f"{KIMI_K2.active_params(embeddings=n) / 1e9:.2f}" for n in (0, 1, 2)] == ["30.51", "31.69", "32.86"]


def test_the_figure_says_what_it_shows():
    figure = where_the_weights_are(KIMI_K2)
    for words in ("All weights, 1,026.4 billion", "routed experts 98.9%", "For one token, 31.7 billion", "routed experts 66.7%"):
        assert words in figure.alt, figure.alt
    assert len(figure.axes[0].patches) == 2 * len(parts(KIMI_K2))
    lengths = [patch.get_width() for patch in figure.axes[0].patches]
    assert sum(lengths[:7]) == pytest.approx(1) == sum(lengths[7:])


# --- bytes ---------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_block_are_those_of_its_tensors():
    tensors = MoEBlock(KIMI_K2, "loop", device="meta", dtype=torch.bfloat16).to_hf()
    assert block_bytes(KIMI_K2, "bf16") == sum(t.numel() * t.element_size() for t in tensors.values())


def test_bytes_of_the_model_are_near_the_published_checkpoints():
    """958.5 GiB in fp8. There attention is in fp8 too, which is the difference; it is under one per cent."""
    assert model_bytes(KIMI_K2, "fp8") == pytest.approx(958.5 * 2**30, rel=0.01)
    assert model_bytes(KIMI_K2, "bf16") == 2 * KIMI_K2.total_params + 2 * KIMI_K2.n_moe_layers * KIMI_K2.n_routed_experts


def test_the_smallest_machine_that_holds_it():
    assert machine_for(16 * 10**9) == "a laptop with 16 GB"
    assert machine_for(16 * 10**9 + 1) == "one GPU with 80 GB"
    assert machine_for(10 * 141 * 10**9 * 4) == "40 GPUs with 141 GB each"
    sizes = list(MACHINES.values())
    assert sizes == sorted(sizes)


# --- the explorer --------------------------------------------------------------------------------------------------------

CONTROLS = {"experts": EXPERTS, "k": TOP_K, "width": WIDTHS, "precision": PRECISIONS}
START = {"experts": 384, "k": 8, "width": 2048, "precision": "fp8"}


def settings():
    """Every value of every control, and all pairs of extremes."""
    for name, options in CONTROLS.items():
        yield from ({**START, name: option} for option in options)
    for one, other in itertools.combinations(CONTROLS, 2):
        for a, b in itertools.product((0, -1), repeat=2):
            yield {**START, one: CONTROLS[one][a], other: CONTROLS[other][b]}


@pytest.mark.parametrize("setting", list(settings()), ids=lambda s: "-".join(map(str, s.values())))
def test_a_drawing_is_sound_and_says_the_models_numbers(setting):
    html = draw_counts(**setting)
    drawing = ElementTree.fromstring(html[: html.index("</svg>") + 6])
    label = drawing.get("aria-label")
    config = KIMI_K2.replace(
        n_routed_experts=setting["experts"], num_experts_per_tok=setting["k"], moe_intermediate_size=setting["width"]
    )
    assert f"{config.total_params / 1e9:,.1f} billion weights, of which a token uses {config.active_params() / 1e9:,.1f}" in label
    assert machine_for(model_bytes(config, setting["precision"])) in label and label in html.split("</svg>")[1]
    for shape in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(shape.get(side)) for side in ("x", "y", "width", "height"))
        assert 0 <= x and x + width <= 740 and 0 <= y and y + height <= 290 and width > 0
    for words in drawing.iter("{http://www.w3.org/2000/svg}text"):
        if words.get("text-anchor") == "start":
            assert float(words.get("x")) + 6.2 * len(words.text) <= 900, words.text


def test_areas_are_in_proportion():
    drawing = ElementTree.fromstring(draw_counts(**START).split("</svg>")[0] + "</svg>")
    big, small = list(drawing.iter("{http://www.w3.org/2000/svg}rect"))[:2]
    ratio = (float(small.get("width")) / float(big.get("width"))) ** 2
    assert ratio == pytest.approx(KIMI_K2.active_params() / KIMI_K2.total_params, rel=0.02)


def test_k2_in_words():
    label = draw_counts(**START)
    for words in (
        "1,026.4 billion weights",
        "31.7 billion (3.1%)",
        "1,038 GB: 8 GPUs with 141 GB each",
        "17.0 GB: one GPU with 80 GB",
    ):
        assert words in label
    assert "9.6 GB: a laptop with 16 GB" in draw_counts(**{**START, "precision": "int4"})


def test_the_explorer_redraws():
    explorer = counts_explorer()
    assert explorer.values() == START and explorer.error is None
    for name, options in CONTROLS.items():
        before = explorer.view.value
        explorer.controls[name].value = options[0]
        assert explorer.error is None and explorer.view.value != before


# --- the checkers --------------------------------------------------------------------------------------------------------


def test_the_gates_order():
    assert check_gate_order(list(GATE)).passed
    assert list(GATE) == [name for name in nodes() if name in GATE]
    assert check_gate_order(None).passed is None


def swapped(first, then):
    steps = list(GATE)
    i, j = steps.index(first), steps.index(then)
    steps[i], steps[j] = steps[j], steps[i]
    return steps


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (swapped("normalise", "scale"), "scale stands before normalise: to normalise after scaling would undo the scale"),
        (swapped("gather", "normalise"), "normalise stands before gather"),
        (swapped("group_choice", "top_k"), "top_k stands before group_choice"),
        ([s for s in GATE if s != "correction_bias"] + ["correction_bias"], "afterwards it could move nobody"),
        (swapped("sigmoid", "correction_bias"), "correction_bias stands before sigmoid"),
        (list(GATE)[:-1], "scale missing"),
        ([*GATE, "scale"], "'scale' stands there twice"),
        ([*GATE, "softmax"], "'softmax' is not a step of the gate"),
    ],
)
def test_a_wrong_order_is_explained(answer, words):
    verdict = check_gate_order(answer)
    assert verdict.passed is False and words in verdict.message


def test_the_right_count_passes():
    def count(config):
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        gate = config.n_routed_experts * (config.hidden_size + 1)
        always = gate + config.n_shared_experts * expert
        return config.n_routed_experts * expert + always, config.num_experts_per_tok * expert + always

    assert check_count(count).passed
    assert check_count(lambda config: None).passed is None


@pytest.mark.parametrize("fault", TOTAL_FAULTS)
def test_a_wrong_total_is_named(fault):
    verdict = check_count(lambda c: (TOTAL_FAULTS[fault](c), c.active_block_params))
    assert verdict.passed is False and verdict.message == f"total: {fault}"


@pytest.mark.parametrize("fault", ACTIVE_FAULTS)
def test_a_wrong_active_count_is_named(fault):
    verdict = check_count(lambda c: (c.block_params, ACTIVE_FAULTS[fault](c)))
    assert verdict.passed is False and verdict.message == f"active: {fault}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda c: (c.block_params + 1, c.active_block_params), "total is "),
        (lambda c: c.block_params, "expected two whole numbers, (total, active)"),
        (lambda c: (float(c.block_params), c.active_block_params), "expected two whole numbers"),
        (lambda c: c.nothing, "raised AttributeError"),
    ],
)
def test_any_other_wrong_count_is_shown(answer, words):
    verdict = check_count(answer)
    assert verdict.passed is False and words in verdict.message


def by_hand(config, precision, gigabytes):
    share = [config.n_moe_layers * config.n_routed_experts // n * config.expert_bytes(precision) for n in config.ep_sizes]
    return min(n for n, size in zip(config.ep_sizes, share) if size <= gigabytes * 10**9)


def test_the_right_ranks_pass():
    assert check_ranks_needed(by_hand).passed
    assert check_ranks_needed(right_ranks).passed
    # 384 experts of 60 layers in fp8 are 1,015 GB: 7.2 times 141 GB, so 8 ranks
    assert by_hand(KIMI_K2, "fp8", 141) == 8 and by_hand(KIMI_K2, "int4", 80) == 8 and by_hand(KIMI_K2, "bf16", 141) == 16


@pytest.mark.parametrize("fault", RANK_FAULTS)
def test_wrong_ranks_are_named(fault):
    verdict = check_ranks_needed(lambda *case: RANK_FAULTS[fault](case))
    assert verdict.passed is False and verdict.message == f"the number of ranks: {fault}"


def test_other_wrong_ranks_are_shown():
    verdict = check_ranks_needed(lambda *case: 2 * right_ranks(*case))
    assert verdict.passed is False and re.match(r"the number of ranks is \d+, expected \d+, for \d+ experts", verdict.message)
