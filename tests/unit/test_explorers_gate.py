"""The gate's explorers show what Router decides, wherever their controls stand."""

import base64
import functools
import io
import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

from moe_lib import DEEPSEEK_V3, KIMI_K2, MoEConfig, Router
from moe_lib.explorers.batch import batch_explorer, route_batch
from moe_lib.explorers.gate import decide, gate_explorer, listed, made_up, ordinal, variant

SVG = "{http://www.w3.org/2000/svg}"


@functools.cache
def explorer(which):
    return {"gate": gate_explorer, "batch": batch_explorer}[which]()


def ends(control):
    """The least, a middle and the greatest value of a control, as its reader can set it."""
    if hasattr(control, "options"):
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        return values[0], values[len(values) // 2], values[-1]
    if hasattr(control, "min"):
        middle = (control.min + control.max) / 2
        return control.min, round(middle) if isinstance(control.min, int) else middle, control.max
    return False, True, True


def sweep(which):
    """Every control at its ends and middle, and every two of them at their extremes."""
    e = explorer(which)
    start = e.values()
    single = [{name: v} for name, control in e.controls.items() for v in ends(control)]
    pairs = [
        {a: u, b: v}
        for (a, x), (b, y) in itertools.combinations(e.controls.items(), 2)
        for u in (ends(x)[0], ends(x)[2])
        for v in (ends(y)[0], ends(y)[2])
    ]
    return [{**start, **change} for change in [{}, *single, *pairs]]


def views(html):
    """The drawings in a page, each parsed as XML."""
    return [ET.fromstring(found) for found in re.findall(r"<svg\b.*?</svg>", html, re.S)]


def sentence(html):
    (words,) = re.findall(r'<p class="moe-says"[^>]*>(.*?)</p>', html)
    return words.replace("&#x27;", "'")


def routed(v):
    """What Router decides at these values, with nothing of the explorer but its random numbers. Raises what the config raises."""
    drawn, tokens = made_up(KIMI_K2.replace(hidden_size=64), v["seed"])
    router = Router(
        KIMI_K2.replace(
            hidden_size=64,
            num_experts_per_tok=v["k"],
            n_group=v["groups"],
            topk_group=v["kept"],
            norm_topk_prob=v["normalise"],
            routed_scaling_factor=v["scale"],
        )
    )
    router.load_state_dict(drawn.state_dict())
    router.e_score_correction_bias[v["expert"]] += v["bias"]
    with torch.no_grad():
        return router(tokens[v["token"] : v["token"] + 1] * v["spread"])


# --- the gate explorer -----------------------------------------------------------------------------------------------------


def check_gate(v):
    html = explorer("gate").draw(**v)
    ET.fromstring(html if html.startswith("<div") else f"<div>{html}</div>")
    assert "moe-error" not in html
    try:
        routing = routed(v)
    except ValueError as refusal:
        (board,) = views(html)
        assert board.get("aria-label").endswith("none is chosen")
        assert str(refusal) in html and 'class="moe-note" role="status"' in html and "moe-says" not in html
        return False
    chosen, weights = routing.indices[0].tolist(), routing.weights[0].tolist()
    board, cut, bars = views(html)
    assert all(view.get("role") == "img" for view in (board, cut, bars))
    names = ", ".join(map(str, chosen))
    assert re.search(rf"chosen, best first: {names}(;|$)", board.get("aria-label"))
    assert cut.get("aria-label").startswith("384 experts")
    assert re.findall(r"(\d+) at -?\d", cut.get("aria-label"))[: len(chosen)] == [str(e) for e in chosen]
    shown = [float(w) for w in re.findall(r"expert \d+ (-?[\d.]+)", bars.get("aria-label"))]
    assert shown == [round(w, 3) for w in weights] or np.allclose(shown, weights, atol=6e-4)
    total = float(bars.get("aria-label").rsplit("sum ", 1)[1])
    assert abs(total - sum(weights)) < 6e-4
    if v["normalise"]:
        assert abs(total - v["scale"]) < 1e-3
    check_tiles(board, routing, chosen)
    check_bars(bars, chosen, weights)
    words = sentence(html)
    assert words.startswith(f"Token {v['token']} goes to {listed(chosen, 'expert')}:")
    assert f"they sum to {total:.3f}" in words
    return True


def check_tiles(board, routing, chosen):
    """The number r lies on the tile of the r-th chosen expert, and a tile is the darker, the higher the score."""
    pitch = (960 - 30 - 4) / 48
    ranks = {t.text: t for t in board.iter(f"{SVG}text") if t.get("pointer-events") == "none"}
    assert sorted(ranks, key=int) == [str(r) for r in range(1, len(chosen) + 1)]
    for r, e in enumerate(chosen, 1):
        x, y = float(ranks[str(r)].get("x")), float(ranks[str(r)].get("y"))
        assert int((x - 30) // pitch) + 48 * int((y - 26) // pitch) == e
    tiles = [t for t in board.iter(f"{SVG}rect") if t.find(f"{SVG}title") is not None]
    assert len(tiles) == 384
    scores = [float(re.search(r"score ([\d.]+)", t.find(f"{SVG}title").text)[1]) for t in tiles]
    assert np.allclose(scores, routing.scores[0], atol=6e-4)
    alive = [i for i, t in enumerate(tiles) if "not kept" not in t.find(f"{SVG}title").text]
    depth = np.array([float(tiles[i].get("fill-opacity")) for i in alive])
    assert np.allclose(depth, 0.04 + 0.76 * np.square([scores[i] for i in alive]), atol=0.011)


def check_bars(view, chosen, weights):
    bars = [r for r in view.iter(f"{SVG}rect") if (r.get("class") or "").startswith("x")]
    assert [int(r.get("class")[1:]) for r in bars] == chosen
    lengths = np.array([float(r.get("width")) for r in bars])
    assert np.allclose(lengths, 164 * np.array(weights) / max(weights), atol=0.06)


def test_the_gate_over_all_its_controls():
    drawn = [check_gate(v) for v in sweep("gate")]
    assert len(drawn) > 200 and sum(drawn) > 150 and not all(drawn)


def test_the_bias_is_marked_and_told():
    start = explorer("gate").values()
    e = start["expert"]
    plain, lifted = routed({**start, "bias": 0.0}), routed(start)
    (lost,) = set(plain.indices[0].tolist()) - set(lifted.indices[0].tolist())
    board, cut, _ = views(explorer("gate").draw(**start))
    assert f"brought in by the bias: {e}; put out by the bias: {lost}" in board.get("aria-label")
    words = sentence(explorer("gate").draw(**start))
    score = lifted.scores[0]
    assert f"brings in expert {e} (score {score[e]:.3f}, " in words
    assert f"so expert {lost} (score {score[lost]:.3f}, 8th by score) loses its place" in words
    lowered = {**start, "expert": lost, "bias": -0.5}
    (heir,) = set(routed(lowered).indices[0].tolist()) - set(plain.indices[0].tolist())
    words = sentence(explorer("gate").draw(**lowered))
    assert f"The bias puts out expert {lost} (" in words and f"; expert {heir} (" in words and "9th by score) moved up" in words


def test_the_lift_is_as_high_as_the_bias():
    start = explorer("gate").values()
    cut = views(explorer("gate").draw(**start))[1]
    axis = {t.text: float(t.get("y")) for t in cut.iter(f"{SVG}text") if t.get("text-anchor") == "end"}
    lifts = [r for r in cut.iter(f"{SVG}rect") if r.get("stroke-dasharray") == "2 2"]
    assert len(lifts) == 1
    assert float(lifts[0].get("height")) / (axis["0"] - axis["1"]) == pytest.approx(start["bias"], abs=1e-3)


def test_the_distance_told_is_the_bias_that_is_missing():
    """Add the number in the sentence to the bias, and the expert takes the last place; a little less, and it does not."""
    start = {**explorer("gate").values(), "expert": 5, "bias": 0.0}
    assert 5 not in routed(start).indices[0].tolist()
    short = float(re.search(r"Expert 5 is \d+\w\w, ([\d.]+) short of the last place", sentence(explorer("gate").draw(**start)))[1])
    assert 5 in routed({**start, "bias": short + 1e-3}).indices[0].tolist()
    assert 5 not in routed({**start, "bias": short - 1e-3}).indices[0].tolist()


def test_groups_are_told():
    v = {**explorer("gate").values(), "groups": 8, "kept": 2, "bias": 0.0}
    words = sentence(explorer("gate").draw(**v))
    kept = sorted({e // 48 for e in routed(v).indices[0].tolist()})
    lost = set(routed({**v, "groups": 1, "kept": 1}).indices[0].tolist()) - set(routed(v).indices[0].tolist())
    named = re.search(r"in the kept groups (\d) and (\d)", words)
    assert set(kept) <= {int(g) for g in named.groups()}
    told = re.search(r"Without groups, experts? (.*?) would have been chosen", words)[1]
    assert {int(n) for n in re.findall(r"\d+", told)} == lost


def test_equal_scores_go_to_the_lower_numbers():
    v = {**explorer("gate").values(), "spread": 0.0, "bias": 0.0}
    assert sentence(explorer("gate").draw(**v)).startswith("Token 0 goes to experts 0, 1, 2, 3, 4, 5, 6 and 7:")


@pytest.mark.parametrize("made", [gate_explorer, batch_explorer])
def test_moving_every_control_changes_the_view(made):
    e = made()
    for name, control in e.controls.items():
        before, start = e.view.value, control.value
        control.value = next(value for value in ends(control) if value != start)
        assert e.error is None and e.view.value != before, name
        control.value = start
        assert e.view.value == before, name


ROUTERS = {
    "eight experts": (MoEConfig(6, 1, 8, 2), torch.float32),
    "one expert": (MoEConfig(6, 1, 1, 1), torch.float32),
    "a prime number": (MoEConfig(6, 1, 97, 5), torch.float32),
    "DeepSeek-V3": (DEEPSEEK_V3.replace(hidden_size=32), torch.bfloat16),
    "all chosen": (MoEConfig(6, 1, 20, 20), torch.float32),
}


@pytest.mark.parametrize(("config", "dtype"), ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("bias", [0.0, 6.8])
def test_any_router(config, dtype, bias):
    router = Router(config, dtype=dtype)
    router.e_score_correction_bias += bias + 0.1 * torch.randn(config.n_routed_experts)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    x = torch.randn(2, 5, config.hidden_size, dtype=dtype)
    e = gate_explorer(router, x)
    assert "seed" not in e.controls
    routing = router(x)
    for token in range(10):
        html = e.draw(**{**e.values(), "token": token})
        board, cut, bars = views(html)
        names = ", ".join(map(str, routing.indices[token].tolist()))
        assert re.search(rf"best first: {names}(;|$)", board.get("aria-label"))
        shown = [float(w) for w in re.findall(r"expert \d+ (-?[\d.]+)", bars.get("aria-label"))]
        assert np.allclose(shown, routing.weights[token].detach(), atol=6e-4)
    assert ("less the median bias" in html) == (abs(router.e_score_correction_bias.median().item()) > 5e-4)
    for control in e.controls.values():
        for value in ends(control):
            control.value = value
            assert e.error is None
    after = router.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()) and router.config == config


def test_one_token_needs_no_token_control_and_no_tokens_are_refused():
    router = Router(MoEConfig(6, 1, 8, 2))
    assert "token" not in gate_explorer(router, torch.randn(6)).controls
    assert "seed" in gate_explorer(router).controls
    for make in (gate_explorer, batch_explorer):
        with pytest.raises(ValueError, match=r"tokens has shape \(2, 5\).*hidden_size=6"):
            make(router, torch.randn(2, 5))
        with pytest.raises(ValueError, match=r"tokens has shape \(0, 6\)"):
            make(router, torch.randn(0, 6))


def test_the_order_begins_with_the_chosen():
    router, x = made_up(KIMI_K2.replace(hidden_size=64), 3)
    for groups, kept in ((1, 1), (8, 4), (4, 1)):
        bias = 0.3 * torch.randn(384)
        c = decide(router, x[:1], bias, router.config.replace(n_group=groups, topk_group=kept))
        assert c.order[:8] == c.chosen and sorted(c.order) == list(range(384))
        best = variant(router, c.config.replace(num_experts_per_tok=sum(c.kept)), bias)(x[:1])
        assert c.order[: sum(c.kept)] == best.indices[0].tolist()


def test_words():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 101, 111, 122)] == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 101st 111th 122nd".split()
    )
    assert [listed(things, "expert") for things in ([3], [3, 5], [3, 5, 8])] == [
        "expert 3",
        "experts 3 and 5",
        "experts 3, 5 and 8",
    ]


# --- the batch explorer ----------------------------------------------------------------------------------------------------


def loads_of(v):
    router, x = made_up(KIMI_K2.replace(hidden_size=64), 0, tokens=256)
    with torch.no_grad():
        logits = x @ router.weight.T
    shift = v["skew"] * torch.randn(384, generator=torch.Generator().manual_seed(v["seed"]))
    routing = route_batch(router, logits[: v["tokens"]], shift, v["bias"], v["k"])
    return routing, torch.bincount(routing.indices.flatten(), minlength=384)


def check_batch(v):
    html = explorer("batch").draw(**v)
    ET.fromstring(f"<div>{html}</div>")
    assert "moe-error" not in html
    (view,) = views(html)
    routing, loads = loads_of(v)
    busiest, idle = int(loads.argmax()), int((loads == 0).sum())
    label = view.get("aria-label")
    assert f"{v['tokens']} token" in label and f"the busiest is expert {busiest} with {loads[busiest]}," in label
    assert f"and {idle} experts serve nobody" in label
    words = sentence(html)
    assert f"= {v['tokens'] * v['k']} choices" in words and f"Expert {busiest} serves {loads[busiest]} token" in words
    half = int(re.search(r"the busiest (\d+)\.$", words)[1])
    fallen = loads.sort(descending=True).values
    assert fallen[:half].sum() * 2 >= loads.sum() and fallen[: half - 1].sum() * 2 < loads.sum()
    (image,) = view.iter(f"{SVG}image")
    picture = Image.open(io.BytesIO(base64.b64decode(image.get("href").split(",")[1])))
    assert picture.size == (384, v["tokens"])
    taken = np.asarray(picture.convert("RGBA"))[..., :3] == (230, 159, 0)
    chosen = torch.zeros(v["tokens"], 384, dtype=torch.bool).scatter(1, routing.indices, True)
    assert np.array_equal(taken.all(-1), chosen.numpy())


def test_the_batch_over_all_its_controls():
    states = sweep("batch")
    assert len(states) == 1 + 3 * 5 + 4 * 10
    for v in states:
        check_batch(v)


def test_a_batch_without_skew_and_bias_is_the_routers_own():
    router = Router(DEEPSEEK_V3.replace(hidden_size=32), dtype=torch.bfloat16)
    router.e_score_correction_bias += 0.1 * torch.randn(256)
    x = torch.randn(40, 32)
    routing = router(x)
    e = batch_explorer(router, x)
    label = views(e.draw(tokens=40, skew=0.0, bias=0.0))[0].get("aria-label")
    loads = torch.bincount(routing.indices.flatten(), minlength=256)
    assert f"expert {int(loads.argmax())} with {loads.max()}, the mean 1.25" in label


def test_the_balancing_bias_takes_load_off_the_busiest():
    router, x = made_up(KIMI_K2.replace(hidden_size=64), 0, tokens=256)
    logits, shift = router(x).scores.detach().logit(), torch.randn(384)
    most = [int(torch.bincount(route_batch(router, logits, shift, b, 8).indices.flatten()).max()) for b in (0.0, 0.5, 1.0)]
    assert most[0] > 2 * max(most[1:])
