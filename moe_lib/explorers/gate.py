"""The gate explorer: one token's way through a router, in three linked views and a sentence."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import ipywidgets as W
import torch
from jaxtyping import Float
from torch import Tensor

from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.explorers import gate_views as views
from moe_lib.explorers.base import ORANGE, Explorer, says
from moe_lib.router import Router, top_k


@dataclass(frozen=True)
class Choice:
    """What a router decided for one token, and what it would have decided otherwise. Plain lists, ready to be drawn.

    `bias` is relative to its median, `offset`: what all experts share moves none of them. `order` holds all experts, best first
    by what the gate compares (score + bias), those of groups that were not kept last; it begins with `chosen`.
    """

    config: MoEConfig
    scores: list[float]
    bias: list[float]
    offset: float
    order: list[int]
    kept: list[bool]
    chosen: list[int]
    weights: list[float]
    pushed_in: list[int]
    pushed_out: list[int]
    lost_to_groups: list[int]

    def compared(self, expert: int) -> float:
        return self.scores[expert] + self.bias[expert]

    @functools.cached_property
    def rank(self) -> dict[int, int]:
        """Place of every expert in `order`, from 1."""
        return {e: r for r, e in enumerate(self.order, 1)}

    @functools.cached_property
    def score_rank(self) -> dict[int, int]:
        """Place of every expert by its score alone, from 1."""
        return {e: r for r, e in enumerate(sorted(range(len(self.scores)), key=lambda e: -self.scores[e]), 1)}


def variant(router: Router, config: MoEConfig, bias: Float[Tensor, " experts"]) -> Router:
    """The same gate, weight shared, under another config and another bias."""
    shared = (router.weight, router.e_score_correction_bias, router.config)
    gate = copy.deepcopy(router, {id(part): part for part in shared})
    gate.config, gate.e_score_correction_bias = config, bias
    return gate


@torch.no_grad()
def decide(router: Router, x: Float[Tensor, "1 hidden"], bias: Float[Tensor, " experts"], config: MoEConfig) -> Choice:
    """Route one token through `router` under this bias and config; every choice is Router.route's own."""
    gate = variant(router, config, bias)
    routing = gate(x)
    without_bias = variant(router, config, torch.zeros_like(bias)).route(routing.scores)
    without_groups = variant(router, config.replace(n_group=1, topk_group=1), bias).route(routing.scores)
    biased = routing.scores + bias
    kept = gate.kept_groups(biased)[0].tolist()
    ranked = top_k(biased, config.n_routed_experts)[0].tolist()
    chosen, before, ungrouped = (r.indices[0].tolist() for r in (routing, without_bias, without_groups))
    offset = bias.median()
    return Choice(
        config=config,
        scores=routing.scores[0].tolist(),
        bias=(bias - offset).tolist(),
        offset=offset.item(),
        order=[e for e in ranked if kept[e]] + [e for e in ranked if not kept[e]],
        kept=kept,
        chosen=chosen,
        weights=routing.weights[0].tolist(),
        pushed_in=[e for e in chosen if e not in before],
        pushed_out=[e for e in before if e not in chosen],
        lost_to_groups=[e for e in ungrouped if e not in chosen],
    )


def made_up(config: MoEConfig, seed: int, tokens: int = 16) -> tuple[Router, Float[Tensor, "tokens hidden"]]:
    """A gate with random weights and random tokens, both normal: its logits have a standard deviation of about 1."""
    generator = torch.Generator().manual_seed(seed)
    router = Router(config)
    with torch.no_grad():
        router.weight.normal_(std=config.hidden_size**-0.5, generator=generator)
    return router, torch.randn(tokens, config.hidden_size, generator=generator)


def gate_explorer(router: Router | None = None, tokens: Float[Tensor, "*batch hidden"] | None = None) -> Explorer:
    """Explore a router on its own tokens. Without a router: one of K2's shape with random weights; without tokens: random ones.

    The router is copied as it is now. `draw` starts from its config and bias: k, groups, normalise and scale replace the
    config's values, `bias` is added to the bias of the one expert, and `spread` multiplies the logits.
    Raises ValueError for tokens of another width than the router's, or no tokens.
    """
    own = router is not None
    config = router.config if own else KIMI_K2.replace(hidden_size=64 if tokens is None else tokens.shape[-1])
    given = None if tokens is None else tokens.detach().reshape(-1, tokens.shape[-1]).cpu()
    if given is not None and (given.shape[0] == 0 or given.shape[1] != config.hidden_size):
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected at least one token of hidden_size={config.hidden_size}")
    gate = copy.deepcopy(router).cpu() if own else None

    @functools.lru_cache(maxsize=8)
    def source(seed: int) -> tuple[Router, Tensor]:
        drawn, random_tokens = made_up(config, seed)
        return gate or drawn, random_tokens if given is None else given

    first_gate, first_tokens = source(0)
    start = decide(first_gate, first_tokens[:1], first_gate.e_score_correction_bias, config)
    pinned, lift = _opening(start, own)

    def draw(
        token: int = 0,
        k: int = config.num_experts_per_tok,
        spread: float = 1.0,
        expert: int = pinned,
        bias: float = lift,
        groups: int = config.n_group,
        kept: int = config.topk_group,
        normalise: bool = config.norm_topk_prob,
        scale: float = config.routed_scaling_factor,
        seed: int = 0,
    ) -> str:
        gate, x = source(seed)
        x = x[token : token + 1] * spread
        moved = gate.e_score_correction_bias.clone()
        moved[expert] += bias
        try:
            wanted = config.replace(
                num_experts_per_tok=k, n_group=groups, topk_group=kept, norm_topk_prob=normalise, routed_scaling_factor=scale
            )
        except ValueError as refusal:
            # The controls can ask for a gate that cannot be built. The scores are there all the same; the choice is not.
            scores = decide(gate, x, moved, config).scores
            return views.page(views.score_tiles(scores, expert) + note(f"No such gate: {refusal}.", views.HEIGHT))
        choice = decide(gate, x, moved, wanted)
        below = f'<div class="moe-row">{views.cut(choice, expert)}{views.weights(choice)}</div>'
        return views.page(views.tiles(choice, expert) + below + says(sentence(choice, token, expert)), choice)

    controls = _controls(config, first_tokens.shape[0], pinned, lift, seeded=not (own and given is not None))
    return narrow_labels(Explorer(draw, controls, columns=3))


def _opening(start: Choice, own: bool) -> tuple[int, float]:
    """The expert and the bias to begin with: of a real router the first one left out, untouched; of a made-up one an expert
    far down that a bias of 0.3 carries to about the fourth place."""
    k, experts = len(start.chosen), len(start.scores)
    if own or experts < 3 * k:
        return start.order[min(k, experts - 1)], 0.0
    goal = start.scores[start.order[min(3, k - 1)]] - 0.3
    return min(range(experts), key=lambda e: abs(start.scores[e] - goal)), 0.3


def _controls(config: MoEConfig, tokens: int, pinned: int, lift: float, seeded: bool) -> dict[str, W.Widget]:
    experts, k, groups = config.n_routed_experts, config.num_experts_per_tok, config.n_group
    divisors = [n for n in config.ep_sizes if n <= 16 or n == groups]
    scales = sorted({1.0, 2.0, 2.5, 2.827, 4.0, config.routed_scaling_factor})
    names = {2.5: "2.5 (V3)", 2.827: "2.827 (K2)"}
    controls = {
        "token": W.IntSlider(0, 0, tokens - 1, description="token"),
        "spread": W.FloatSlider(1.0, min=0.0, max=4.0, step=0.1, description="logit spread", readout_format=".1f"),
        "seed": W.IntSlider(0, 0, 99, description="seed"),
        "expert": W.IntSlider(pinned, 0, experts - 1, description="bias of expert"),
        "bias": W.FloatSlider(lift, min=-1.0, max=1.0, step=0.01, description="bias", readout_format="+.2f"),
        "k": W.IntSlider(k, 1, max(k, min(16, experts)), description="k"),
        "groups": W.SelectionSlider(options=divisors, value=groups, description="groups"),
        "kept": W.IntSlider(config.topk_group, 1, max(8, config.topk_group), description="kept groups"),
        "scale": W.SelectionSlider(
            options=[(names.get(s, f"{s:g}"), s) for s in scales], value=config.routed_scaling_factor, description="scale"
        ),
        "normalise": W.Checkbox(config.norm_topk_prob, description="normalise", indent=True),
    }
    unused = (["token"] if tokens == 1 else []) + ([] if seeded else ["seed"])
    return {name: control for name, control in controls.items() if name not in unused}


def narrow_labels(explorer: Explorer) -> Explorer:
    """Three columns leave a slider little room beside labels of the usual width."""
    for control in explorer.controls.values():
        control.style.description_width = "100px"
    return explorer


def note(words: str, height: float) -> str:
    """A state of the drawing in which there is nothing to draw, and why. Not a failure; it keeps the room of what it stands for."""
    return (
        f'<div style="min-height:{height:g}px;padding-top:14px"><p class="moe-note" role="status" aria-live="polite" '
        f'style="border-left:4px solid {ORANGE};padding:10px 14px;line-height:1.45">{escape(words)}</p></div>'
    )


# --- the sentence ----------------------------------------------------------------------------------------------------------


def ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def listed(things: Sequence[object], what: str = "") -> str:
    """`expert 3`, `experts 3 and 5`, `experts 3, 5 and 8`."""
    words = [str(t) for t in things]
    joined = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
    return f"{what}{'s' if len(words) > 1 else ''} {joined}".strip() if what else joined


def sentence(c: Choice, token: int, pinned: int) -> str:
    """Who was chosen, who lost the place, and why."""
    return " ".join(filter(None, (_chosen(c, token), _bias(c), _groups(c), _pinned(c, pinned), _weights(c))))


def _chosen(c: Choice, token: int) -> str:
    size = len(c.scores) // c.config.n_group
    kept = [g for g in range(c.config.n_group) if c.kept[g * size]]
    of = f" in the kept {listed(kept, 'group')}" if c.config.n_group > 1 else ""
    what = "biased score" if any(c.bias) else "score"
    best = f"the {len(c.chosen)} highest of {sum(c.kept)} {what}s" if len(c.chosen) > 1 else f"the highest of {sum(c.kept)} {what}s"
    return f"Token {token} goes to {listed(c.chosen, 'expert')}: {best}{of}."


def _bias(c: Choice) -> str:
    if not any(c.bias):
        return "No expert's bias differs from another's, so the scores alone decide."
    if not c.pushed_in:
        return "The bias moves nobody in or out."

    def told(experts: list[int]) -> str:
        return listed([f"{e} (score {c.scores[e]:.3f}, {ordinal(c.score_rank[e])} by score)" for e in experts], "expert")

    came, went = told(c.pushed_in), told(c.pushed_out)
    if any(c.bias[e] > 0 for e in c.pushed_in):
        return f"The bias brings in {came}, so {went} {'loses its place' if len(c.pushed_out) == 1 else 'lose their places'}."
    return f"The bias puts out {went}; {came} moved up."


def _groups(c: Choice) -> str:
    if c.config.n_group == 1:
        return ""
    if not c.lost_to_groups:
        return "The groups cost nobody a place."
    which = "its group was" if len(c.lost_to_groups) == 1 else "their groups were"
    return f"Without groups, {listed(c.lost_to_groups, 'expert')} would have been chosen; {which} not kept."


def _pinned(c: Choice, e: int) -> str:
    if not c.kept[e]:
        return f"Expert {e} is in group {e * c.config.n_group // len(c.scores)}, which was not kept."
    if e in c.chosen:
        rivals = [o for o in c.order[len(c.chosen) :] if c.kept[o]]
        lead = f", {c.compared(e) - c.compared(rivals[0]):.3f} above the best one left out" if rivals else ""
        return f"Expert {e} is {ordinal(c.rank[e])}{lead}."
    return f"Expert {e} is {ordinal(c.rank[e])}, {c.compared(c.chosen[-1]) - c.compared(e):.3f} short of the last place."


def _weights(c: Choice) -> str:
    scale, total = c.config.routed_scaling_factor, sum(c.weights)
    how = "divided by their sum and" if c.config.norm_topk_prob else "not normalised but"
    return f"The weights are the chosen scores without the bias, {how} multiplied by {scale:g}: they sum to {total:.3f}."
