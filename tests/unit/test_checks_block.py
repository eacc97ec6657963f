"""Each checker of notebook 03 takes the right answer, says so of an empty one, and names the fault of every plausible wrong one."""

import pytest
import torch
import torch.nn.functional as F

from moe_lib import combine, dispatch
from moe_lib.checks.block import check_block, check_combine, check_places
from verdicts import rejected, stub


@pytest.mark.parametrize("check", [check_block, check_combine, check_places])
def test_an_empty_answer_is_not_attempted(check):
    for answer in (stub, lambda *_: None):
        verdict = check(answer)
        assert verdict.passed is None and repr(verdict) == "… not attempted yet"


@pytest.mark.parametrize("check", [check_block, check_combine, check_places])
def test_the_callers_random_state_is_left_alone(check):
    state = torch.random.get_rng_state()
    check(lambda *_: torch.rand(3))
    assert torch.equal(torch.random.get_rng_state(), state)


# --- the whole block -------------------------------------------------------------------------------------------------


def block(
    x, gate, experts, shared_experts, *, weigh=lambda w: w, sort=True, unsort=True, after=lambda routed, shared: routed + shared
):
    routing = gate(x)
    routing = routing._replace(weights=weigh(routing.weights))
    flat = x.flatten(0, 1)
    rows, counts, order = dispatch(flat, routing, len(experts))
    if not sort:
        rows = flat.repeat_interleave(routing.indices.shape[1], 0)
    if not unsort:
        order = torch.arange(len(order))
    return after(combine(experts(rows, counts), routing, order).view(x.shape), shared_experts(x))


def variant(**changes):
    return lambda *args: block(*args, **changes)


def test_the_right_block_passes():
    for _ in range(5):
        verdict = check_block(block)
        assert verdict.passed and "idle expert" in verdict.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unsort": False}, "the sort is never undone"),
        ({"sort": False, "unsort": False}, "the experts got the copies in arrival order; the contract"),
        ({"sort": False}, "undone that was never done"),
        ({"after": lambda routed, _: routed}, "the shared expert is missing"),
        ({"after": lambda _, shared: shared}, "the routed experts are missing"),
        ({"after": lambda routed, shared: routed + 2 * shared}, "the shared expert is added twice"),
        ({"after": lambda routed, shared: routed + 3 * shared}, "once for each of the k=3 copies"),
        ({"after": lambda routed, shared: routed + 2.827 * shared}, "the shared expert is scaled by 2.827"),
        ({"after": lambda routed, shared: 2.827 * (routed + shared)}, "everything is scaled by 2.827"),
        ({"after": lambda routed, shared: 2.827 * routed + shared}, "the routed part is scaled by 2.827 once more"),
        ({"weigh": lambda w: w * w}, "the weights are applied twice"),
        ({"weigh": torch.ones_like}, "the weights are never applied"),
        ({"weigh": lambda w: torch.ones_like(w) / w.shape[1]}, "the copies are averaged"),
        ({"after": lambda routed, shared: (routed + shared).flatten(0, 1)}, "y has shape [18, 12]; expected [2, 9, 12]"),
        ({"after": lambda routed, shared: (routed + shared).float()}, "y is torch.float32; expected torch.float64"),
        ({"after": lambda routed, shared: routed + shared + 0.01}, "18 of 18 tokens are wrong; token 0 is off by up to 0.01"),
    ],
)
def test_a_wrong_block_is_named(changes, words):
    rejected(check_block, variant(**changes), words)


def test_a_block_that_drops_what_overflows_an_expert_is_named():
    def dropping(x, gate, experts, shared_experts, capacity=4):
        routing = gate(x)
        rows, counts, order = dispatch(x.flatten(0, 1), routing, len(experts))
        parts = [
            F.pad(expert(r[:capacity]), (0, 0, 0, max(len(r) - capacity, 0)))
            for expert, r in zip(experts, rows.split(counts.tolist()))
        ]
        return combine(torch.cat(parts), routing, order).view(x.shape) + shared_experts(x)

    rejected(check_block, dropping, "tokens lost copies on the way", "of its 3")


def test_a_block_that_changes_x_is_named():
    def in_place(x, gate, experts, shared_experts):
        y = block(x, gate, experts, shared_experts)
        x += y
        return y

    rejected(check_block, in_place, "changes x in place")


def test_a_block_that_stumbles_over_an_idle_expert_is_told_when():
    def means(x, gate, experts, shared_experts):
        routing = gate(x)
        rows, counts, order = dispatch(x.flatten(0, 1), routing, len(experts))
        for part in rows.split(counts.tolist()):
            part[0]  # fails where there is no row
        return block(x, gate, experts, shared_experts)

    rejected(check_block, means, "expert 0 without rows, it raised IndexError")


# --- combine ---------------------------------------------------------------------------------------------------------


def by_adding(rows, routing, order):
    weights = routing.weights.flatten()[order]
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=weights.dtype)
    return y.index_add_(0, order // routing.weights.shape[1], rows * weights.unsqueeze(1)).to(rows.dtype)


@pytest.mark.parametrize("right", [combine, by_adding])
def test_the_right_combine_passes(right):
    for _ in range(5):
        assert check_combine(right).passed


def weighted(change):
    return lambda rows, routing, order: combine(rows, routing._replace(weights=change(routing.weights)), order)


def in_expert_order(rows, routing, order):
    return combine(rows, routing, torch.arange(len(order)))


def with_order_for_its_inverse(rows, routing, order):
    return combine(rows, routing, order.argsort())


def weights_in_arrival_order(rows, routing, order):
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
    return y.index_add_(0, order // routing.weights.shape[1], rows * routing.weights.view(-1, 1))


def slot_for_token(rows, routing, order):
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
    return y.index_add_(0, order % routing.weights.shape[1], rows * routing.weights.flatten()[order].unsqueeze(1))


def overwriting(rows, routing, order):
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
    y[order // routing.weights.shape[1]] += rows * routing.weights.flatten()[order].unsqueeze(1)  # keeps one of the copies
    return y


def first_row_lost(rows, routing, order):
    return combine(torch.cat([torch.zeros_like(rows[:1]), rows[1:]]), routing, order)


def weighted_in_bfloat16(rows, routing, order):
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
    return y.index_add_(0, order // routing.weights.shape[1], rows * routing.weights.flatten()[order].unsqueeze(1).to(rows.dtype))


def summed_in_bfloat16(rows, routing, order):
    y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
    weights = routing.weights.flatten()[order].unsqueeze(1)
    return y.index_put_((order // routing.weights.shape[1],), (rows * weights).to(rows.dtype), accumulate=True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_expert_order, "the rows were taken in expert order"),
        (with_order_for_its_inverse, "order was used where its inverse is needed"),
        (weights_in_arrival_order, "the weights still in arrival order"),
        (slot_for_token, "order % k is a copy's slot; its token is order // k"),
        (overwriting, "9 of 9 tokens lost copies on the way: token 0 lacks 2 of its 3"),
        (first_row_lost, "1 of 9 tokens lost copies on the way"),
        (weighted(torch.ones_like), "the weights are never applied"),
        (weighted(lambda w: w * w), "the weights are applied twice"),
        (weighted(lambda w: torch.ones_like(w) / w.shape[1]), "the copies are averaged"),
        (weighted(lambda w: w / w.sum(1, keepdim=True)), "the factor 2.827 is lost"),
        (weighted_in_bfloat16, "of 1024 values are off by more than one rounding"),
        (summed_in_bfloat16, "of 1024 values are off by more than one rounding"),
        (lambda rows, routing, order: rows, "y has shape [27, 6]; expected [9, 6]"),
        (lambda rows, routing, order: by_adding(rows, routing, order).float(), "y is torch.float32; expected torch.float64"),
        (lambda rows, routing, order: rows.nothing, "it raised AttributeError"),
    ],
)
def test_a_wrong_combine_is_named(answer, words):
    rejected(check_combine, answer, words)


# --- dispatch without a sort -----------------------------------------------------------------------------------------


def counted(indices, n_experts):
    flat = indices.flatten()
    chosen = F.one_hot(flat, n_experts)
    counts, earlier = chosen.sum(0), chosen.cumsum(0) - chosen
    places = (counts.cumsum(0) - counts + earlier).gather(1, flat.unsqueeze(1))
    return places.view_as(indices), counts


def test_the_right_places_pass():
    for _ in range(5):
        assert check_places(counted).passed


def changed(change):
    """The right answer with one thing changed: change(places, counts, starts of the copies' experts, indices)."""

    def answer(indices, n_experts):
        places, counts = counted(indices, n_experts)
        return change(places, counts, (counts.cumsum(0) - counts)[indices], indices)

    return answer


def latest_first(places, counts, starts, indices):
    return starts + (counts[indices] - 1 - (places - starts)), counts


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (changed(lambda p, c, s, i: (p.flatten().argsort().view_as(p), c)), "this is order"),
        (changed(lambda p, c, s, i: (p, i.flatten().bincount())), "(bincount's minlength)"),
        (changed(lambda p, c, s, i: (p, c + 1)), "copies go to the experts"),
        (changed(lambda p, c, s, i: (p + 1, c)), "every place is one too high"),
        (changed(lambda p, c, s, i: (p - s, c)), "places start at 0 for every expert"),
        (changed(lambda p, c, s, i: (p + c[i], c)), "each expert starts where it should end"),
        (changed(latest_first), "in another order"),
        (changed(lambda p, c, s, i: (p.clamp(max=20), c)), "row 20 is given to 7 copies"),
        (changed(lambda p, c, s, i: (p - 1, c)), "a place is negative"),
        (changed(lambda p, c, s, i: (p.flatten(), c)), "places has shape [27]; expected [9, 3]"),
        (changed(lambda p, c, s, i: (torch.where(p % (p.numel() - 1) == 0, p.numel() - 1 - p, p), c)), "its row is"),  # first, last
        (changed(lambda p, c, s, i: p), "expected the pair (places, counts)"),
        (changed(lambda p, c, s, i: (i.flatten().argsort(stable=True).argsort().view_as(p), c)), "right, but it sorts"),
        (
            lambda indices, n: [(indices == e).nonzero()[0] for e in range(n)],
            "first and the last have no rows, it raised IndexError",
        ),
    ],
)
def test_wrong_places_are_named(answer, words):
    rejected(check_places, answer, words)
