"""Checkers of notebook 02: the scores, the groups, and the whole gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from moe_lib.checks.base import Wrong, checker, given
from moe_lib.config import MoEConfig
from moe_lib.router import Router, Routing, top_k


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)


def _tensor(answer: object, shape: tuple[int, ...], what: str) -> Tensor:
    """The answer as a tensor of this shape. Raises Wrong naming what came instead."""
    if not isinstance(given(answer), Tensor):
        raise Wrong(f"{what} should be a tensor; you returned a {type(answer).__name__}")
    if answer.shape != shape:
        raise Wrong(f"{what} should have shape {list(shape)}; yours has {list(answer.shape)}")
    return answer


def _fresh() -> torch.Generator:
    """New random numbers at every call, and the notebook's own seed left alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _untouched(arguments: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    for name, tensor in arguments.items():
        if not torch.equal(tensor, before[name]):
            raise Wrong(f"{name} was changed in place; the caller still needs it as it was")


# --- the scores ------------------------------------------------------------------------------------------------------------


@checker
def check_scores(answer: Callable) -> str:
    """`answer(x [tokens, hidden], weight [experts, hidden])` -> sigmoid scores [tokens, experts], in float32 for bfloat16 too."""
    tokens, experts, hidden, fresh = 64, 24, 96, _fresh()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, hidden, generator=fresh).to(dtype)
        weight = (2 * torch.randn(experts, hidden, generator=fresh) / hidden**0.5).to(dtype)
        before = {"x": x.clone(), "weight": weight.clone()}
        got = _tensor(answer(x, weight), (tokens, experts), "the scores")
        _untouched({"x": x, "weight": weight}, before)
        logits = x.float() @ weight.float().T
        right = logits.sigmoid()
        if _same(got, right) and got.dtype == torch.float32:
            continue
        _blame(got, _wrong_scores(x, weight, logits))
        if got.dtype != torch.float32:
            raise Wrong(
                f"the scores are {got.dtype} for {dtype} input; they should be float32: cast x and weight before the product"
            )
        t, e = divmod((got - right).abs().argmax().item(), experts)
        logit = f"its logit is {logits[t, e]:.4f}, the sigmoid of which is {right[t, e]:.4f}"
        raise Wrong(f"for token {t} and expert {e} the score is {got[t, e]:.4f}; {logit}")
    return "float32 sigmoid scores, from float32 and from bfloat16 input"


def _wrong_scores(x: Tensor, weight: Tensor, logits: Tensor) -> Iterable[tuple[str, Tensor]]:
    yield "these are softmax shares, which compete; each expert should have a sigmoid score of its own", logits.softmax(-1)
    yield "this is softmax over the tokens; each expert should have a sigmoid score of its own", logits.softmax(0)
    yield "these are the logits; the sigmoid is missing", logits
    if x.dtype == torch.bfloat16:
        low = x @ weight.T
        late = "the logits were computed in bfloat16, too coarse to tell close experts apart; cast x and weight to float32 first"
        yield late, low.float().sigmoid()
        yield late, low.sigmoid()
        yield "the float32 scores were rounded to bfloat16 at the end; keep them in float32", logits.sigmoid().bfloat16()


def _blame(got: Tensor, wrongs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise Wrong with the first message whose result is the one that was given."""
    for message, wrong in wrongs:
        if _same(got, wrong):
            raise Wrong(message)


# --- the groups ------------------------------------------------------------------------------------------------------------


@checker
def check_groups(answer: Callable) -> str:
    """`answer(choice [tokens, experts], n_group, topk_group)` -> True where the expert's group was kept, [tokens, experts]."""
    fresh = _fresh()
    for n_group, topk_group, size in ((8, 3, 6), (4, 2, 2), (1, 1, 12), (6, 2, 1)):
        experts = n_group * size
        choice = 0.4 * torch.randn(64, experts, generator=fresh)
        config = _config(experts, topk_group, n_group, topk_group)
        before = choice.clone()
        got = _tensor(answer(choice, n_group, topk_group), (64, experts), "the mask")
        _untouched({"choice": choice}, {"choice": before})
        if got.dtype != torch.bool:
            raise Wrong(f"the mask should be torch.bool, True for every expert of a kept group; yours is {got.dtype}")
        right = Router(config, device="meta").kept_groups(choice)
        if torch.equal(got, right):
            continue
        _blame(got, _wrong_groups(choice, right, n_group, topk_group))
        kept = got.sum(-1)
        if (kept != topk_group * size).any():
            t = (kept != topk_group * size).nonzero()[0].item()
            raise Wrong(f"for token {t} you keep {kept[t]} experts; {topk_group} groups of {size} are {topk_group * size}")
        t = (got != right).any(-1).nonzero()[0].item()
        mine, theirs = (m[t].nonzero().flatten().div(size, rounding_mode="floor").unique().tolist() for m in (got, right))
        raise Wrong(f"for token {t} you keep groups {mine}; the {topk_group} with the highest sums of their two best are {theirs}")
    return "the groups with the best pair are kept, in 4 shapes, groups of one expert among them"


def _wrong_groups(choice: Tensor, right: Tensor, n_group: int, topk_group: int) -> Iterable[tuple[str, Tensor]]:
    grouped = choice.unflatten(1, (n_group, -1))
    size = grouped.shape[-1]
    two = min(2, size)

    def mask(group_scores: Tensor) -> Tensor:
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, top_k(group_scores, topk_group), True)
        return kept.repeat_interleave(size, 1)

    yield "the mask is upside down: it is True where the group was dropped", ~right
    if size > 2:
        yield "a group's score is the sum of its best TWO experts; you took its best one", mask(grouped.amax(-1))
        yield "a group's score is the sum of its best two experts; you summed (or averaged) all of them", mask(grouped.sum(-1))
    strided = choice.unflatten(1, (-1, n_group)).transpose(1, 2)
    dealt = torch.zeros(len(choice), n_group, dtype=torch.bool).scatter_(
        1, top_k(strided.topk(two, -1).values.sum(-1), topk_group), True
    )
    yield "a group is a run of neighbouring experts; you dealt them out in turn (expert % n_group)", dealt.repeat(1, size)
    yield "you kept the groups with the LOWEST scores", mask(-grouped.topk(two, -1).values.sum(-1))


# --- the whole gate --------------------------------------------------------------------------------------------------------


def _config(experts: int, k: int, n_group: int, topk_group: int, scale: float = 1.0) -> MoEConfig:
    return MoEConfig(1, 1, experts, k, n_group=n_group, topk_group=topk_group, routed_scaling_factor=scale)


@checker
def check_route(answer: Callable) -> str:
    """`answer(scores [tokens, experts], bias [experts], k, n_group, topk_group, scale)` -> indices, weights, each [tokens, k]."""
    for name, scores, bias, config in _cases():
        c, tokens = config, len(scores)
        arguments = {"scores": scores, "bias": bias}
        before = {key: tensor.clone() for key, tensor in arguments.items()}
        got = given(answer(scores, bias, c.num_experts_per_tok, c.n_group, c.topk_group, c.routed_scaling_factor))
        if not isinstance(got, (tuple, list)) or len(got) < 2:
            raise Wrong(f"return two tensors, indices and weights; you returned a {type(got).__name__}")
        indices = _tensor(got[0], (tokens, c.num_experts_per_tok), "the indices")
        weights = _tensor(got[1], (tokens, c.num_experts_per_tok), "the weights")
        _untouched(arguments, before)
        if indices.dtype != torch.int64:
            raise Wrong(f"the indices should be int64, to index with; yours are {indices.dtype}")
        if indices.min() < 0 or indices.max() >= c.n_routed_experts:
            raise Wrong(
                f"the indices should be between 0 and {c.n_routed_experts - 1}; yours reach from {indices.min()} to {indices.max()}"
            )
        right = _router(bias, c).route(scores)
        if torch.equal(indices, right.indices) and _same(weights, right.weights):
            continue
        _blame_route(indices, weights, scores, bias, c)
        _describe(name, indices, weights, right, scores + bias, c)
    return "the same experts and weights as moe_lib.Router: one group, eight groups, negative bias, ties"


def _router(bias: Float[Tensor, " experts"], config: MoEConfig) -> Router:
    router = Router(config, device="meta")
    router.e_score_correction_bias = bias
    return router


def _cases() -> Iterable[tuple[str, Tensor, Tensor, MoEConfig]]:
    fresh = _fresh()
    scale = 1.5 + torch.rand((), generator=fresh).item()
    scores = (1.5 * torch.randn(64, 48, generator=fresh)).sigmoid()
    bias = 0.3 * torch.randn(48, generator=fresh)
    yield "one group", scores, bias, _config(48, 6, 1, 1, scale)
    yield "eight groups", scores, bias, _config(48, 6, 8, 3, scale)
    yield "a negative bias", scores, -1.5 - bias.abs(), _config(48, 6, 8, 3, scale)
    yield "equal scores", torch.randint(1, 5, (64, 48), generator=fresh) / 8, torch.zeros(48), _config(48, 6, 1, 1, scale)


def _gate(
    scores: Tensor, bias: Tensor, c: MoEConfig, choose: str = "", mask: float = float("-inf"), group: str = "pair", weigh: str = ""
) -> tuple[Tensor, Tensor]:
    """The gate with faults to order; without any it is the right one."""
    choice = {"no bias": scores, "softmax": scores.softmax(-1) + bias, "lowest": -(scores + bias)}.get(choose, scores + bias)
    if group != "none" and c.n_group > 1:
        grouped = choice.unflatten(1, (c.n_group, -1))
        value = {"pair": grouped.topk(2, -1).values.sum(-1), "best": grouped.amax(-1), "all": grouped.sum(-1)}[group]
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, top_k(value, c.topk_group), True)
        choice = choice.masked_fill(~kept.repeat_interleave(grouped.shape[-1], 1), mask)
    if choose == "ties up":
        indices = choice.shape[1] - 1 - top_k(choice.flip(1), c.num_experts_per_tok)
    else:
        indices = top_k(choice, c.num_experts_per_tok)
    source = {"biased": scores + bias, "biased, masked": choice, "softmax": scores.softmax(-1)}.get(weigh, scores)
    weights = source.gather(1, indices)
    if weigh == "over all":
        weights = weights / scores.sum(-1, keepdim=True)
    elif weigh == "softmax of the chosen":
        weights = weights.softmax(-1)
    elif weigh != "raw":
        weights = weights / weights.sum(-1, keepdim=True)
    power = {"no scale": 0, "twice": 2}.get(weigh, 1)
    return indices, weights * c.routed_scaling_factor**power


BLAME = {
    "the weights come from the biased scores; the bias says who, never how much: gather from the scores alone": {"weigh": "biased"},
    "the weights do not sum to the scale but to 1: the multiplication by scale is missing": {"weigh": "no scale"},
    "the weights sum to scale * scale: the scale is applied twice": {"weigh": "twice"},
    "the chosen scores are scaled but not normalised: divide by their sum first": {"weigh": "raw"},
    "the weights are normalised over all experts, before the choice; divide by the sum of the chosen only": {"weigh": "over all"},
    "the weights are a softmax of the chosen scores; divide by their sum instead": {"weigh": "softmax of the chosen"},
    "the scores went through a softmax; they are sigmoid scores already, use them as they are": {"choose": "softmax"},
    "the bias has no part in the choice; add it to the scores before the top-k": {"choose": "no bias"},
    "the k LOWEST were chosen": {"choose": "lowest"},
    "dropped groups are masked with 0.0, which beats a negative biased score; mask with -inf": {"mask": 0.0},
    "the groups are ignored: experts of dropped groups were chosen": {"group": "none"},
    "a group is scored by its best expert; it should be by the sum of its best two": {"group": "best"},
    "a group is scored by the sum of all its experts; it should be by the sum of its best two": {"group": "all"},
    "of equal scores the higher expert number was chosen; it should be the lower": {"choose": "ties up"},
}  # fmt: skip


def _blame_route(indices: Int64[Tensor, "tokens k"], weights: Tensor, scores: Tensor, bias: Tensor, c: MoEConfig) -> None:
    """Raise Wrong where the answer is, in every token, what one known fault gives."""
    for message, fault in BLAME.items():
        wrong_indices, wrong_weights = _gate(scores, bias, c, **fault)
        if torch.equal(indices, wrong_indices) and _same(weights, wrong_weights):
            raise Wrong(message)


def _describe(
    name: str, indices: Tensor, weights: Tensor, right: Routing, choice: Float[Tensor, "tokens experts"], c: MoEConfig
) -> None:
    """Raise Wrong with the first token that differs, when no known fault explains the answer."""
    sets = indices.sort(-1).values == right.indices.sort(-1).values
    if not sets.all():
        t = (~sets).any(-1).nonzero()[0].item()
        got, wanted = indices[t].tolist(), right.indices[t].tolist()
        if len(set(got)) < len(got):
            raise Wrong(f"{name}, token {t}: an expert was chosen twice in {got}")
        if torch.equal(choice[t, indices[t]].sort().values, choice[t, right.indices[t]].sort().values):
            raise Wrong(
                f"{name}, token {t}: experts {got} tie with {wanted}; of equal scores the lower number must win, and torch.topk "
                "promises no order: sort with stable=True"
            )
        raise Wrong(
            f"{name}, token {t}: experts {got} were chosen; {wanted} have the {c.num_experts_per_tok} highest biased scores"
        )
    if not torch.equal(indices, right.indices):
        t = (indices != right.indices).any(-1).nonzero()[0].item()
        raise Wrong(f"{name}, token {t}: the right experts in another order; the highest biased score comes first, ties by number")
    t, slot = divmod((weights - right.weights).abs().argmax().item(), c.num_experts_per_tok)
    raise Wrong(
        f"{name}, token {t}: expert {indices[t, slot]} has weight {weights[t, slot]:.4f}; expected {right.weights[t, slot]:.4f}, "
        f"its score over the sum of the chosen, times the scale {c.routed_scaling_factor:.4f}"
    )
