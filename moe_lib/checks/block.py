"""Checkers of notebook 03: the whole block from its parts, combine without an unsort, dispatch without a sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import torch
from torch import Tensor

from moe_lib.block import MoEBlock, combine, dispatch
from moe_lib.checks.base import Wrong, checker, given
from moe_lib.config import MoEConfig
from moe_lib.router import Routing
from moe_lib.work import Work


@checker
def check_block(answer: Callable) -> str:
    """answer(x, gate, experts, shared_experts) -> y, with x and y [batch, tokens, hidden]."""
    cases = ((2, 9, 7, 3), (3, 5, 16, 4), (1, 1, 6, 2), (2, 0, 5, 2))
    with _fresh():
        for batch, tokens, n_experts, k in cases:
            config = MoEConfig(12, 8, n_experts, k, routed_scaling_factor=2.827)
            block = MoEBlock(config, "loop").double()
            block.gate.e_score_correction_bias[0] = -100.0  # so that expert 0 has no rows
            x = torch.randn(batch, tokens, 12, dtype=torch.float64)
            given_x = x.clone()
            where = f"x {list(x.shape)}, {n_experts} experts, k={k}, expert 0 without rows"
            with torch.no_grad():
                y = _call(answer, where, given_x, block.gate, block.experts, block.shared_experts)
                _same_kind("y", y, x)
                if not torch.equal(given_x, x):
                    raise Wrong("it changes x in place; the caller still needs x (the residual stream does)")
                _judge_block(y, x, block)
    return f"equal to the block on {len(cases)} random blocks, with an idle expert, one token and none"


def _judge_block(y: Tensor, x: Tensor, block: MoEBlock) -> None:
    routing = block.gate(x)
    flat, k, scale = x.flatten(0, 1), routing.indices.shape[1], block.config.routed_scaling_factor
    rows, counts, order = dispatch(flat, routing, block.config.n_routed_experts)
    out = block.experts(rows, counts)
    shared = block.shared_experts(flat)
    routed = combine(out, routing, order)
    arrival = block.experts(flat.repeat_interleave(k, 0), counts)  # what an unsorted batch would get
    in_order = torch.arange(len(order))
    w, ones = routing.weights, torch.ones_like(routing.weights)

    def weighted(weights: Tensor) -> Tensor:
        return combine(out, routing._replace(weights=weights), order)

    unsorted = combine(out, routing, in_order)
    never_sorted, only_unsorted = combine(arrival, routing, in_order), combine(arrival, routing, order)
    faults = {
        "the shared expert is missing: every token also gets shared_experts(x)": routed,
        "the routed experts are missing: only the shared expert's output is there": shared,
        "the shared expert is added twice; each token gets it once": routed + 2 * shared,
        f"the shared expert is added once for each of the k={k} copies; a token gets it once": routed + k * shared,
        f"the shared expert is scaled by {scale}; it is added as it is, only the routed experts' weights hold that factor": (
            routed + scale * shared
        ),
        f"everything is scaled by {scale}; the routed experts' weights hold it already, and the shared expert has none": (
            scale * (routed + shared)
        ),
        f"the routed part is scaled by {scale} once more; the routing's weights hold it already": scale * routed + shared,
        "the sort is never undone: row r of the experts' output is copy order[r], not copy r": unsorted + shared,
        "the weights are applied twice": weighted(w * w) + shared,
        "the weights are never applied: copies are summed as they are": weighted(ones) + shared,
        "the copies are averaged; they are weighted and summed": weighted(ones / k) + shared,
        "the experts got the copies in arrival order; the contract wants them sorted by expert (dispatch does that)": (
            never_sorted + shared
        ),
        "the experts got the copies in arrival order, and a sort was undone that was never done: start with dispatch": (
            only_unsorted + shared
        ),
    }
    _name(y.flatten(0, 1), routed + shared, faults, _copies(out, routing, order))


@checker
def check_combine(answer: Callable) -> str:
    """answer(rows, routing, order) -> y [tokens, hidden]."""
    cases = ((9, 5, 3), (17, 12, 4), (1, 4, 2), (0, 4, 2))
    with _fresh():
        for tokens, n_experts, k in cases:
            routing = _routing(tokens, n_experts, k)
            x = torch.randn(tokens, 6, dtype=torch.float64)
            rows, _, order = dispatch(x, routing, n_experts)
            rows = torch.randn_like(rows)
            y = _call(answer, f"{tokens} tokens, {n_experts} experts, k={k}", rows.clone(), routing, order.clone())
            _same_kind("y", y, x)
            _judge_combine(y, rows, routing, order)
    _judge_rounding(answer)
    return f"equal to moe_lib's combine on {len(cases)} random batches, none and one token among them, and rounded once in bfloat16"


def _judge_combine(y: Tensor, rows: Tensor, routing: Routing, order: Tensor) -> None:
    w, (tokens, k) = routing.weights, routing.weights.shape
    in_order, ones = torch.arange(len(order)), torch.ones_like(w)
    right = combine(rows, routing, order)

    def weighted(weights: Tensor) -> Tensor:
        return combine(rows, routing._replace(weights=weights), order)

    def added(tokens_of_rows: Tensor, weights_of_rows: Tensor) -> Tensor:
        return torch.zeros_like(right).index_add_(0, tokens_of_rows, rows * weights_of_rows.unsqueeze(1))

    confused = (rows[order].view(tokens, k, rows.shape[1]) * w.unsqueeze(-1)).sum(1)
    faults = {
        "the rows were taken in expert order: row r is copy order[r], not copy r": combine(rows, routing, in_order),
        "order was used where its inverse is needed: order says where a row comes from, not where it goes": confused,
        "the rows are in expert order but the weights still in arrival order: take routing.weights.flatten()[order]": (
            added(order // k, w.flatten())
        ),
        "the weights are never applied": weighted(ones),
        "the weights are applied twice": weighted(w * w),
        "the copies are averaged; they are weighted and summed": weighted(ones / k),
        "the weights were normalised to 1 again, and the factor 2.827 is lost": weighted(w / w.sum(1, keepdim=True)),
    }
    if tokens >= k:
        faults["order % k is a copy's slot; its token is order // k"] = added(order % k, w.flatten()[order])
    _name(y, right, faults, _copies(rows, routing, order))


def _judge_rounding(answer: Callable) -> None:
    with _fresh():
        routing = _routing(64, 16, 8)
        routing = Routing(routing.indices, routing.weights.float(), routing.scores.float())
        rows, _, order = dispatch(torch.zeros(64, 16, dtype=torch.bfloat16), routing, 16)
        rows = torch.randn_like(rows)
    y = _call(answer, "rows in bfloat16 and weights in float32", rows.clone(), routing, order.clone())
    _same_kind("y", y, rows[:64])
    exact = combine(rows.double(), routing, order)
    off = ((y - exact).abs() > 1.01 * 2**-8 * exact.abs() + 1e-5).sum().item()  # bfloat16 keeps 8 bits
    if off:
        raise Wrong(
            f"with rows in bfloat16, {off} of {y.numel()} values are off by more than one rounding: "
            "weight and sum in the routing's float32 and round once, at the end"
        )


@checker
def check_places(answer: Callable) -> str:
    """answer(indices, n_experts) -> (places [tokens, k], counts [experts]): where dispatch puts each copy, found without a sort."""
    cases = ((9, 7, 3), (40, 16, 4), (1, 4, 2), (0, 4, 2))
    with _fresh():
        for tokens, n_experts, k in cases:
            indices = _routing(tokens, n_experts, k, idle=(0, n_experts - 1)).indices
            where = f"{tokens} tokens, k={k}, {n_experts} experts of which the first and the last have no rows"
            with Work() as work:
                both = _call(answer, where, indices.clone(), n_experts)
            if not isinstance(both, tuple) or len(both) != 2:
                raise Wrong(f"it returned a {type(both).__name__}; expected the pair (places, counts)")
            _judge_places(*both, indices, n_experts)
            if sorts := work.names.keys() & {"sort", "argsort", "topk", "msort"}:
                raise Wrong(
                    f"right, but it sorts (torch's {sorts.pop()}); "
                    "count instead: how many copies before this one want the same expert?"
                )
    return f"every copy in its row on {len(cases)} random batches with idle experts, none and one token among them; nothing sorted"


def _judge_places(places: Tensor, counts: Tensor, indices: Tensor, n_experts: int) -> None:
    flat = indices.flatten()
    right_counts = torch.bincount(flat, minlength=n_experts)
    if counts.shape != (n_experts,):
        raise Wrong(
            f"counts has shape {list(counts.shape)}; expected [{n_experts}], one for each expert, "
            "also for those without rows (bincount's minlength)"
        )
    if not torch.equal(counts, right_counts):
        raise Wrong(f"counts are {counts.tolist()}; {right_counts.tolist()} copies go to the experts")
    _same_kind("places", places, indices)
    order = flat.argsort(stable=True)
    right = order.argsort()
    starts, ends, got = right_counts.cumsum(0) - right_counts, right_counts.cumsum(0), places.flatten()
    if torch.equal(got, right):
        return
    if torch.equal(got, order):
        raise Wrong("this is order, which says for each row what copy lies in it; places is its inverse: for each copy, its row")
    if torch.equal(got, right + 1):
        raise Wrong("every place is one too high: rows count from 0, so leave the copy itself out when counting those before it")
    if torch.equal(got, right - starts[flat]):
        raise Wrong("places start at 0 for every expert: add the row at which each expert's rows start")
    if torch.equal(got, right - starts[flat] + ends[flat]):
        raise Wrong("each expert starts where it should end: subtract its own count from the running sum of the counts")
    if not torch.equal(got.sort().values, torch.arange(len(flat))):
        first = got.bincount(minlength=1).argmax().item() if len(got) and got.min() >= 0 else None
        twice = f"row {first} is given to {(got == first).sum().item()} copies" if first is not None else "a place is negative"
        raise Wrong(f"{twice}; {len(flat)} copies need rows 0 to {len(flat) - 1}, each once")
    e = flat[got != right][0].item()
    if torch.equal(got[flat == e].sort().values, right[flat == e]):
        rows = got[flat == e].tolist()
        raise Wrong(f"expert {e} gets its tokens in another order (rows {rows}): the first to arrive takes the first row")
    copy = (got != right).nonzero()[0].item()
    token = copy // indices.shape[1]
    raise Wrong(f"copy {copy} (token {token}, expert {e}) is put in row {got[copy]}; its row is {right[copy]}")


# --- shared by the three ---------------------------------------------------------------------------------------------


@contextmanager
def _fresh() -> Iterator[None]:
    """Other random cases at every call, and the caller's random state untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.seed()
        yield


def _routing(tokens: int, n_experts: int, k: int, idle: tuple[int, ...] = (0,)) -> Routing:
    """A random routing in float64 that leaves the `idle` experts without rows, while enough others are left."""
    scores = torch.rand(tokens, n_experts, dtype=torch.float64)
    choice = scores.clone()
    choice[:, list(idle)] = -1.0
    indices = choice.topk(k).indices
    weights = scores.gather(1, indices)
    return Routing(indices, weights / weights.sum(1, keepdim=True) * 2.827, scores)


def _call(answer: Callable, where: str, *args):
    """The answer's value; an exception in it is told with the case that raised it."""
    try:
        return given(answer(*args))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"with {where}, it raised {type(error).__name__}: {error}") from error


def _same_kind(name: str, got: object, like: Tensor) -> None:
    if not isinstance(got, Tensor):
        raise Wrong(f"{name} is a {type(got).__name__}; expected a tensor of shape {list(like.shape)}")
    if got.shape != like.shape:
        raise Wrong(f"{name} has shape {list(got.shape)}; expected {list(like.shape)}")
    if got.dtype != like.dtype:
        raise Wrong(f"{name} is {got.dtype}; expected {like.dtype}")


def _copies(out: Tensor, routing: Routing, order: Tensor) -> Tensor:
    """[tokens, k, hidden]: what each copy of a token adds to it."""
    tokens, k = routing.weights.shape
    return out[order.argsort()].view(tokens, k, out.shape[1]) * routing.weights.unsqueeze(-1)


def _name(got: Tensor, right: Tensor, faults: dict[str, Tensor], copies: Tensor) -> None:
    """Raise Wrong in the words of the fault whose output `got` is; of lost copies, if those explain it; else where it is wrong."""
    if torch.allclose(got, right, rtol=1e-9, atol=1e-9):
        return
    for words, wrong in faults.items():
        if torch.allclose(got, wrong, rtol=1e-9, atol=1e-9):
            raise Wrong(words)
    bad = (~torch.isclose(got, right, rtol=1e-9, atol=1e-9)).any(1).nonzero().flatten().tolist()
    lost = [_lost(right[t] - got[t], copies[t]) for t in bad]
    if all(lost):
        raise Wrong(
            f"{len(bad)} of {len(got)} tokens lost copies on the way: token {bad[0]} lacks {lost[0]} of its {copies.shape[1]}; "
            "nothing may be dropped or overwritten"
        )
    off = (got - right)[bad[0]].abs().max().item()
    raise Wrong(f"{len(bad)} of {len(got)} tokens are wrong; token {bad[0]} is off by up to {off:.3g}")


def _lost(gap: Tensor, copies: Tensor) -> int:
    """How many of one token's copies add up to the gap; 0 when none do."""
    for n in range(1, len(copies) + 1):
        for some in combinations(range(len(copies)), n):
            if torch.allclose(gap, copies[list(some)].sum(0), rtol=1e-9, atol=1e-9):
                return n
    return 0
