"""Each checker of notebook 07 takes the right answer and names the fault of every plausible wrong one."""

import pytest

from moe_lib.checks.roofline import check_crossing, check_floor


def rejected(check, answer, words):
    for _ in range(5):  # the cases are drawn afresh each time: none may let it through
        verdict = check(answer)
        assert verdict.passed is False and words in verdict.message, verdict


def hit(t, e, k):
    return e * (1 - (1 - k / e) ** t)


FLOOR = {
    "bytes of all experts": lambda t, e, k, b, r: e * b / r,
    "read once": lambda t, e, k, b, r: t * k * b / r,
    "one token's share": lambda t, e, k, b, r: k * b / r,
    "*missed*": lambda t, e, k, b, r: (e - hit(t, e, k)) * b / r,
    "a token makes k": lambda t, e, k, b, r: hit(t, e, 1) * b / r,
    "no factor of 8": lambda t, e, k, b, r: 8 * hit(t, e, k) * b / r,
    "their inverse": lambda t, e, k, b, r: r / (hit(t, e, k) * b),
    "read, not written": lambda t, e, k, b, r: 2 * hit(t, e, k) * b / r,
    "expected": lambda t, e, k, b, r: hit(t, e, k) * b / r + 1,
    "it raised ZeroDivisionError": lambda t, e, k, b, r: 1 / 0,
    "expected one number": lambda t, e, k, b, r: [hit(t, e, k)],
}
CROSSING = {
    "divide by 2": lambda read, rate, bits: rate / read * bits / 8,
    "divide by 8": lambda read, rate, bits: rate / read * bits / 2,
    "upside down": lambda read, rate, bits: read / rate * 8 / bits * 2,
    "the bytes of a weight are missing": lambda read, rate, bits: rate / read / 2,
    "since reading takes longer": lambda read, rate, bits: rate / read / bits * 8 / 2,
}


@pytest.mark.parametrize("check", [check_floor, check_crossing])
def test_an_empty_answer_is_not_attempted(check):
    def stub(*_):
        raise NotImplementedError

    assert repr(check(stub)) == repr(check(lambda *_: None)) == "… not attempted yet"


def test_right_answers_pass():
    for _ in range(20):
        assert check_floor(lambda t, e, k, b, r: hit(t, e, k) * b / r).passed
        assert check_crossing(lambda read, rate, bits: rate / (2 * read / (bits / 8))).passed


@pytest.mark.parametrize("words", FLOOR)
def test_floor_names_the_fault(words):
    rejected(check_floor, FLOOR[words], words)


@pytest.mark.parametrize("words", CROSSING)
def test_crossing_names_the_fault(words):
    rejected(check_crossing, CROSSING[words], words)


def test_choices_that_never_collide_are_refused():
    verdict = check_floor(lambda t, e, k, b, r: min(t * k, e) * b / r)
    assert verdict.passed is False
