"""A rank that dies, raises, sleeps or differs: every other rank raises in time and, where it can know, says which it was."""

import time

import pytest

import fault_work as work
import live  # noqa: F401
from moe_lib import KIMI_K2
from moe_lib.ranks import RankError, RankGone, Ranks
from moe_lib.rollcall import GRACE

CONFIG = KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=8, num_experts_per_tok=2)
LIMIT = 4.0
SLACK = 10.0  # for a busy machine; a hang would be the far longer wait of a sleeping rank, or for ever


def trouble(bad: int, *args, limit: float = LIMIT):
    """The answers of four ranks, of which `bad` gets into trouble, in the time that the limit allows."""
    with Ranks(4, limit=limit) as ranks:
        start = time.monotonic()
        answers = ranks.answers(work.step, CONFIG, bad, *args)
        took = time.monotonic() - start
        assert all(process.is_alive() for rank, process in enumerate(ranks.processes) if not isinstance(answers[rank], RankGone))
    assert not any(process.is_alive() for process in ranks.processes)
    return answers, took


@pytest.mark.parametrize(("bad", "when"), [(2, "before"), (2, "between"), (2, "after"), (0, "between")])
def test_a_rank_that_dies_before_during_or_after_the_exchange(bad, when):
    answers, took = trouble(bad, "die", when)
    assert isinstance(answers[bad], RankGone) and "exit code -9" in str(answers[bad])
    for rank, answer in enumerate(answers):
        if rank != bad:
            assert isinstance(answer, RankError) and answer.kind == "RankLost", (rank, answer)
            assert f"rank {bad} is gone: no process is left" in answer.said and f"rank {rank}: " in answer.said
    assert took < LIMIT + GRACE + SLACK


def test_a_rank_that_dies_while_bytes_are_on_their_way():
    with Ranks(4, limit=LIMIT) as ranks:
        start = time.monotonic()
        answers = ranks.answers(work.die_in_transfer, 1, 4, 1.0)
        assert time.monotonic() - start < 1.0 + LIMIT + GRACE + SLACK
    assert isinstance(answers[1], RankGone)
    for rank in (0, 2, 3):
        assert answers[rank].kind == "RankLost" and "rank 1 is gone" in answers[rank].said


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_raises(when):
    answers, took = trouble(3, "raise", when)
    assert answers[3].kind == "ZeroDivisionError"
    for rank in range(3):
        assert answers[rank].kind == "RankLost" and "rank 3 is not answering" in answers[rank].said
    assert took < LIMIT + GRACE + SLACK


def test_a_rank_slower_than_the_limit():
    answers, took = trouble(1, "sleep", "between", LIMIT + GRACE + 2)
    assert took < LIMIT + GRACE + SLACK
    for rank in (0, 2, 3):
        assert answers[rank].kind == "RankLost" and "rank 1 is not answering" in answers[rank].said
        assert "slower than the time limit" in answers[rank].said


def test_a_rank_slower_than_the_others_but_not_than_the_limit():
    answers, _ = trouble(1, "sleep", "between", 0.5, limit=30.0)
    assert answers == [(8, CONFIG.hidden_size)] * 4


def test_the_cause_comes_first_when_work_is_run():
    with Ranks(3, limit=LIMIT) as ranks:
        with pytest.raises(RankError, match="^rank 1: ZeroDivisionError: trouble of rank's own") as caught:
            ranks.run(work.step, CONFIG.replace(n_routed_experts=9), 1, "raise", "between")
        assert caught.value.kind == "ZeroDivisionError"
        assert str(caught.value).count("RankLost: ") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_intermediate_size": 4}, "moe_intermediate_size: rank 0 8, rank 1 8, rank 2 4, rank 3 8"),
        (
            {"num_experts_per_tok": 3, "routed_scaling_factor": 1.0},
            "num_experts_per_tok: rank 0 2, rank 1 2, rank 2 3, rank 3 2; routed_",
        ),
        ({"n_routed_experts": 12}, "n_routed_experts: rank 0 8"),
    ],
)
def test_configs_that_differ_between_ranks(changes, words):
    with Ranks(4, limit=LIMIT) as ranks:
        start = time.monotonic()
        for answer in ranks.answers(work.build, [CONFIG, CONFIG, CONFIG.replace(**changes), CONFIG]):
            assert answer.kind == "ValueError" and words in answer.said
        assert time.monotonic() - start < LIMIT
        assert ranks.run(work.build, [CONFIG] * 4) == [2] * 4  # the group still works


def test_a_gradient_that_some_ranks_never_ask_for():
    """Rank 1 does not call backward: the others do not wait for ever."""
    answers, took = trouble(1, "skip backward", "after")
    assert answers[1] == (8, CONFIG.hidden_size) and took < LIMIT + GRACE + SLACK
    for rank in (0, 2, 3):
        assert answers[rank].kind == "RankLost" and "rank 1 is not answering" in answers[rank].said
