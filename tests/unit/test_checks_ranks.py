"""Checkers of notebook 05 accept the answer and name what is wrong with each of the answers that look right."""

import pytest
import torch

from moe_lib.block import combine, dispatch
from moe_lib.checks.ranks import check_exchange, check_replicated
from moe_lib.logical_ranks import Lonely, on_logical_ranks


def exchange(comm, rows, counts, local_experts, fault=None):
    each = len(local_experts.local)
    told = comm.all_to_all(counts.split(each))
    if fault == "counts not exchanged":
        told = [counts[each * comm.rank : each * (comm.rank + 1)]] * comm.size
    arriving = torch.stack(told)
    arrived = torch.cat(comm.all_to_all(rows.split(counts.view(comm.size, each).sum(1).tolist())))
    if fault == "counts not exchanged":
        return local_experts(arrived, arriving.sum(0))
    expert = torch.arange(each).repeat(comm.size).repeat_interleave(arriving.flatten())
    order = expert.argsort(stable=True)
    if fault == "arrival order to experts":
        order = torch.arange(len(order))
    if fault == "other order":
        order = order.flip(0)
    out = local_experts(arrived[order], arriving.sum(0))
    if fault == "too many counts":
        local_experts(arrived[order], torch.cat(told))
    back = out.clone()
    if fault == "inverse twice":
        back = out[order]
    elif fault != "missing inverse":
        back[order] = out
    if fault == "not sent back":
        return back
    sizes = arriving.sum(1).tolist()
    if fault == "reversed":
        back = back.flip(0)
    if fault == "a rank without rows stays away" and not len(arrived):
        return rows
    out = torch.cat(comm.all_to_all(back.split(sizes)))
    return out.flip(0) if fault == "rows come back reversed" else out


WRONG_EXCHANGES = {
    "counts not exchanged": "exchange the counts",
    "arrival order to experts": "sort them by expert first",
    "other order": "in a wrong order; expected by expert",
    "missing inverse": "undo the sort by expert",
    "inverse twice": "undo the sort by expert",
    "reversed": "undo the sort by expert",
    "not sent back": "expected its own",
    "rows come back reversed": "back in a wrong order",
    "too many counts": "counts of shape",
    "a rank without rows stays away": "every rank must call",
}


def replicated(comm, x, gate, local_experts, shared_experts, n_experts, fault=None):
    routing = gate(x)
    rows, counts, order = dispatch(x, routing, n_experts)
    local = local_experts.local
    start, stop = counts[: local.start].sum(), counts[: local.stop].sum()
    if fault == "all counts":
        local_experts(rows, counts)
    out = torch.zeros_like(rows)
    out[start:stop] = local_experts(rows[start:stop], counts[local.start : local.stop])
    if fault == "no weights":
        routing = routing._replace(weights=torch.ones_like(routing.weights))
    part, shared = combine(out, routing, order), shared_experts(x)
    if fault == "shared summed":
        return comm.all_reduce(part + shared)
    if fault == "not summed":
        return part + shared
    if fault == "only its part":
        return part
    routed = comm.all_reduce(part)
    if fault == "shared missing":
        return routed
    if fault == "shared divided":
        return routed + shared / comm.size
    return (routed / comm.size if fault == "averaged" else routed) + shared


WRONG_REPLICATED = {
    "shared summed": "the shared expert is summed over the ranks",
    "not summed": "sum the parts over ranks",
    "only its part": "without the shared expert",
    "shared missing": "shared expert is missing",
    "shared divided": "divided by the",
    "averaged": "averaged over",
    "no weights": "never weighted",
    "all counts": "cut out their rows",
}


def as_answer(function, fault):
    return lambda *args: function(*args, fault=fault)


@pytest.mark.parametrize("_again", range(3))
def test_the_answers_pass(_again):
    for verdict in (check_exchange(exchange), check_replicated(replicated)):
        assert verdict.passed, verdict


@pytest.mark.parametrize(("fault", "words"), WRONG_EXCHANGES.items())
def test_wrong_exchanges_are_named(fault, words):
    verdict = check_exchange(as_answer(exchange, fault))
    assert verdict.passed is False and words in verdict.message, verdict


@pytest.mark.parametrize(("fault", "words"), WRONG_REPLICATED.items())
def test_wrong_replicated_blocks_are_named(fault, words):
    verdict = check_replicated(as_answer(replicated, fault))
    assert verdict.passed is False and words in verdict.message, verdict


@pytest.mark.parametrize("check", [check_exchange, check_replicated])
def test_stubs_are_not_attempted_and_errors_are_the_learners(check):
    def stub(*_):
        raise NotImplementedError

    def broken(*_):
        raise KeyError("mine")

    assert check(stub).passed is None and check(lambda *_: None).passed is None
    assert check(broken).passed is False and "KeyError" in check(broken).message


def test_logical_ranks_are_as_live_ones():
    def work(comm, mine):
        out = comm.all_to_all([mine + d for d in range(comm.size)])
        return torch.stack(out).flatten().tolist(), comm.all_reduce(mine).item()

    got = on_logical_ranks(work, 3, [torch.tensor([10.0 * r]) for r in range(3)])
    assert got == [([0.0 + r, 10.0 + r, 20.0 + r], 30.0) for r in range(3)]
    with pytest.raises(ValueError, match="2 pieces; expected one for each of 3"):
        on_logical_ranks(lambda comm: comm.all_to_all([torch.ones(1)] * 2), 3)
    with pytest.raises(Lonely, match="called all_"):
        one = torch.ones(1)
        on_logical_ranks(lambda comm: comm.all_reduce(one) if comm.rank else comm.all_to_all([one] * 2), 2)
    with pytest.raises(ZeroDivisionError):
        on_logical_ranks(lambda comm: comm.all_reduce(torch.ones(1)) if comm.rank else 1 / 0, 2)
