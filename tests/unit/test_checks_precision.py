"""Each checker of notebook 06 takes the right answer, says so of an empty one, and names the fault of every plausible wrong one."""

import pytest
import torch

from moe_lib.checks.precision import check_fp8, check_int4, check_quantise
from moe_lib.experts import fp8, int4

CHECKS = [check_fp8, check_int4, check_quantise]


def stub(*_):
    raise NotImplementedError


def rejected(check, answer, words):
    for _ in range(3):  # the cases are drawn afresh each time: none may let it through
        verdict = check(answer)
        assert verdict.passed is False and words in verdict.message, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_an_empty_answer_is_not_attempted(check):
    for answer in (stub, lambda *_: None):
        assert repr(check(answer)) == "… not attempted yet"


@pytest.mark.parametrize("check", CHECKS)
def test_the_callers_random_state_is_left_alone(check):
    state = torch.random.get_rng_state()
    check(lambda *_: None)
    assert torch.equal(torch.random.get_rng_state(), state)


def open_fp8(weight, scale_inv):
    rows = torch.arange(weight.shape[0]) // 128
    columns = torch.arange(weight.shape[1]) // 128
    return weight.float() * scale_inv[rows][:, columns]


FP8 = {
    "it divides by scale_inv": lambda w, s: w.float() / open_fp8(torch.ones_like(w.float()), s),
    "scales are transposed": lambda w, s: (
        open_fp8(w, s.T.contiguous()) if s.shape[0] == s.shape[1] and len(s) > 1 else open_fp8(w, s)
    ),
    "scales are left out": lambda w, _: w.float(),
    "applied twice": lambda w, s: open_fp8(open_fp8(w, s), s),
    "the first block's scale": lambda w, s: w.float() * s[0, 0],
    "only the first row of scales": lambda w, s: open_fp8(w, s[:1].expand_as(s)),
    "bfloat16 by the time": lambda w, s: open_fp8(w, s.bfloat16().float()),
    "expected torch.float32": lambda w, s: open_fp8(w, s).bfloat16(),
    "the result has shape": lambda w, s: fp8.spread(s, 128 * len(s), 128 * s.shape[1]) if w.shape[0] % 128 else open_fp8(w, s),
    "it raised": lambda w, s: w.float().view(len(s), 128, s.shape[1], 128).mul(s[:, None, :, None]).view(w.shape),  # ditto
    "in place": lambda w, s: s.mul_(2) and open_fp8(w, s) if s.numel() == 1 else (s.mul_(2), open_fp8(w, s))[1],
    "at row": lambda w, s: open_fp8(w, s) + 1,
}


def test_fp8_takes_right_answers():
    assert check_fp8(open_fp8).passed and check_fp8(fp8.dequantise).passed


@pytest.mark.parametrize("words", FP8)
def test_fp8_names_the_fault(words):
    rejected(check_fp8, FP8[words], words)


def open_int4(packed, scale, order=range(8), zero=8, spread=lambda s: s.float().repeat_interleave(32, 1)):
    nibbles = torch.stack([packed >> 4 * i & 15 for i in order], 2).flatten(1)
    return (nibbles - zero) * spread(scale)


def swapped(packed, scale):
    return open_int4(packed, scale, order=[1, 0, 3, 2, 5, 4, 7, 6])


INT4 = {
    "wrong order: value 0 sits at the lowest bits": lambda p, s: open_int4(p, s, order=range(7, -1, -1)),
    "two nibbles of each byte are swapped": swapped,
    "all first ones, then all second ones": lambda p, s: (
        (torch.cat([p >> 4 * i & 15 for i in range(8)], 1) - 8) * s.float().repeat_interleave(32, 1)
    ),
    "not n - 7": lambda p, s: open_int4(p, s, zero=7),
    "not n - 9": lambda p, s: open_int4(p, s, zero=9),
    "zero point is missing": lambda p, s: open_int4(p, s, zero=0),
    "two's complement": lambda p, s: (
        torch.stack([((p >> 4 * i & 15) ^ 8) - 8 for i in range(8)], 2).flatten(1) * s.float().repeat_interleave(32, 1)
    ),
    "mask with 15": lambda p, s: (
        (torch.stack([p >> 4 * i for i in range(8)], 2).flatten(1) - 8) * s.float().repeat_interleave(32, 1)
    ),
    "divides by the scale": lambda p, s: open_int4(p, s, spread=lambda s: 1 / s.float().repeat_interleave(32, 1)),
    "scales are left out": lambda p, s: open_int4(p, torch.ones_like(s)),
    "repeat, not repeat_interleave": lambda p, s: open_int4(p, s, spread=lambda s: s.float().repeat(1, 32)),
    "the result has shape": lambda p, s: open_int4(p, s).T if len(p) > 1 else open_int4(p, s),
    "expected torch.float32": lambda p, s: open_int4(p, s).bfloat16(),
}


def test_int4_takes_right_answers():
    assert check_int4(open_int4).passed and check_int4(int4.dequantise).passed


@pytest.mark.parametrize("words", INT4)
def test_int4_names_the_fault(words):
    rejected(check_int4, INT4[words], words)


def close(w, over=7.5, largest=lambda g: g.abs().amax(2), round=torch.round, clamp=True, least=1e-9):
    grouped = w.unflatten(1, (-1, 32))
    scale = largest(grouped).clamp_min(least) / over
    numbers = round(grouped / scale[..., None])
    numbers = numbers.clamp(-8, 7) if clamp else numbers
    return numbers.flatten(1).to(torch.int8), scale


QUANTISE = {
    "four bits hold -8 to 7: clamp": lambda w: close(w, clamp=False),
    "some of the sixteen values": lambda w: close(w, over=3.5),
    "take the largest |w|": lambda w: close(w, over=15),
    "0 / 0 is not a number": lambda w: (close(w)[0], 1 / close(w, least=0.0)[1]),
    "rounded down": lambda w: close(w, round=torch.floor),
    "expected one scale for each 32": lambda w: (close(w)[0], close(w)[1][:, :1].repeat(1, 7)),
    "expected whole numbers": lambda w: (close(w)[0].float(), close(w)[1]),
    "expected the pair": lambda w: close(w)[0],
    "off by": lambda w: (torch.cat([close(w)[0][:1], close(w)[0][1:].flip(1)]), close(w)[1]),
}


def test_quantise_takes_right_answers():
    assert check_quantise(close).passed and check_quantise(lambda w: close(w, over=7.0)).passed

    def ours(w):
        packed, scale = int4.quantise(w)
        return int4.unpack(packed), scale

    assert check_quantise(ours).passed


@pytest.mark.parametrize("words", QUANTISE)
def test_quantise_names_the_fault(words):
    rejected(check_quantise, QUANTISE[words], words)


def test_the_largest_positive_alone_is_not_the_largest():
    rejected(check_quantise, lambda w: close(w, largest=lambda g: g.amax(2)), "steps of its scale")


def test_one_scale_for_a_whole_row_is_refused():
    rejected(
        check_quantise, lambda w: close(w, largest=lambda g: g.abs().amax((1, 2), keepdim=True)[..., 0].expand(g.shape[:2])), "0"
    )
