"""Each checker of notebook 04 takes the right answer, says so of an empty one, and names the fault of every plausible wrong one."""

import copy

import pytest
import torch

from moe_lib.balance import bias_update, load, update_bias
from moe_lib.checks.balance import check_bias_update, check_load, check_step
from verdicts import rejected, stub


@pytest.mark.parametrize("check", [check_load, check_bias_update, check_step])
def test_an_empty_answer_is_not_attempted_and_the_random_state_is_left_alone(check):
    state = torch.random.get_rng_state()
    for answer in (stub, lambda *_: None):
        verdict = check(answer)
        assert verdict.passed is None and repr(verdict) == "… not attempted yet"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("check", [check_load, check_bias_update, check_step])
def test_an_answer_that_raises_or_returns_another_thing_is_told_so(check):
    rejected(check, lambda *_: [1, 2], "should be a tensor; you returned a list")
    rejected(check, lambda *_: torch.zeros(1, 1, 1), "should have shape")
    rejected(check, lambda *_: 1 / 0, "ZeroDivisionError")


# --- loads -----------------------------------------------------------------------------------------------------------


def test_the_right_loads_pass():
    by_hand = lambda i, n, mask: torch.stack([(i[mask.flatten()] == e).sum() for e in range(n)])  # noqa: E731
    for _ in range(5):
        assert check_load(load).passed and check_load(by_hand).passed
    assert "padding alone" in check_load(load).message


def last_token_lost(indices, n, mask):
    mask = mask.clone()
    for row in mask:
        row[row.nonzero()[-1:]] = False
    return load(indices, n, mask)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda i, n, _: load(i, n), "padding is counted as load"),
        (lambda i, n, mask: load(i, n, ~mask), "the wrong way round"),
        (lambda i, n, mask: load(i[:, :1], n, mask), ""),
        (lambda i, n, mask: i[mask.flatten()].flatten().bincount(), "need a 0 too"),
        (lambda i, n, mask: load(i, n, mask) / max(1, load(i, n, mask).sum()), "shares that sum to 1"),
        (lambda i, n, mask: load(i, n, mask) / load(i, n, mask).float().mean().clamp(min=1e-9), "multiples of the mean"),
        (lambda i, n, mask: load(i, n, mask) + 1, "real tokens; you count"),
        (last_token_lost, "so is the last real token"),
        (lambda i, n, mask: torch.zeros(n).index_fill_(0, i[mask.flatten()].flatten(), 1.0), ""),
    ],
)
def test_wrong_loads_are_named(answer, words):
    rejected(check_load, answer, words)


def test_one_expert_a_token_is_named():
    verdicts = {check_load(lambda i, n, mask: load(i[:, :1], n, mask)).message for _ in range(5)}
    assert any("all k of them work" in v for v in verdicts)


# --- the bias --------------------------------------------------------------------------------------------------------


def sign_of(loads):
    return (loads.double().mean() - loads).sign().float()


def step_by_hand(bias, loads, gamma):
    step = gamma * sign_of(loads)
    return bias + step - step.mean()


def in_place(bias, loads, gamma):
    bias += bias_update(loads, gamma)
    return bias


def proportional(bias, loads, gamma):
    away = ((loads.double().mean() - loads) / loads.double().mean()).float()
    return bias + gamma * (away - away.mean())


def from_the_median(bias, loads, gamma):
    sign = (loads.double().median() - loads).sign().float()
    return bias + gamma * (sign - sign.mean())


def test_the_right_update_passes():
    for _ in range(5):
        assert check_bias_update(step_by_hand).passed
        assert check_bias_update(lambda b, n, g: (b.double() + bias_update(n, g)).float()).passed


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda b, n, g: b - bias_update(n, g), "the sign is flipped: who has too much"),
        (lambda b, n, g: b + g * sign_of(n), "the mean drifts"),
        (lambda b, n, g: b - g * sign_of(n), "the sign is flipped, and the mean drifts"),
        (lambda b, n, g: b.bfloat16() + bias_update(n, g).bfloat16(), "bfloat16"),
        (lambda b, n, g: (b + bias_update(n, g)).bfloat16().float(), "bfloat16"),
        (lambda b, n, g: b + bias_update(n, 1.0), "missing gamma"),
        (lambda b, n, g: bias_update(n, g), "the step alone"),
        (lambda b, n, g: b.clone(), "nothing moved"),
        (proportional, "every expert moves as far"),
        (lambda b, n, g: b + g * (n.double().mean() - n).float(), "take its sign alone"),
        (from_the_median, "compared with their median"),
        (in_place, "changed in place"),
        (lambda b, n, g: b + bias_update(n, g) - (b + bias_update(n, g)).mean(), "the whole bias was centred"),
        (lambda b, n, g: step_by_hand(b, n, g) + 3 * g * torch.eye(len(b))[0], "the new bias of expert 0"),
    ],
)
def test_wrong_updates_are_named(answer, words):
    rejected(check_bias_update, answer, words)


# --- an optimiser step -----------------------------------------------------------------------------------------------


def step(gate, micro_batches, gamma, *, padding=False, each=False, frozen=False, parts=slice(None), sign=1):
    gate = copy.deepcopy(gate)
    with torch.no_grad():
        loads = []
        for x, mask in micro_batches[parts]:
            loads.append(load(gate(x).indices, 12, None if padding else mask))
            if each:
                update_bias(gate, loads[-1], gamma)
        if frozen:
            return gate.e_score_correction_bias + sum(bias_update(n, gamma) for n in loads)
        if not each:
            update_bias(gate, sum(loads), sign * gamma)
    return gate.e_score_correction_bias


def variant(**changes):
    return lambda *args: step(*args, **changes)


def updated_in_place(gate, micro_batches, gamma):
    update_bias(gate, sum(load(gate(x).indices, 12, mask) for x, mask in micro_batches), gamma)
    return gate.e_score_correction_bias


def test_the_right_step_passes():
    for _ in range(5):
        assert check_step(step).passed and check_step(updated_in_place).passed


def in_bfloat16(gate, micro_batches, gamma):
    return step(gate, micro_batches, gamma).bfloat16().float()


def drifting(gate, micro_batches, gamma):
    total = sum(load(gate(x).indices, 12, mask) for x, mask in micro_batches)
    return gate.e_score_correction_bias + gamma * sign_of(total)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (variant(each=True), "once for every micro-batch"),
        (variant(frozen=True), "once for every micro-batch"),
        (variant(padding=True), "padding is counted as load"),
        (variant(sign=-1), "the sign is flipped"),
        (variant(parts=slice(-1, None)), "only the last micro-batch"),
        (variant(parts=slice(0, 1)), "only the first micro-batch"),
        (in_bfloat16, "bfloat16"),
        (drifting, "the mean drifts"),
        (lambda gate, *_: gate.e_score_correction_bias.clone(), "nothing moved"),
    ],
)
def test_wrong_steps_are_named(answer, words):
    rejected(check_step, answer, words)
