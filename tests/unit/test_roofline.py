"""The roofline: equal to published figures, to sums written out by hand, and to simulated routing."""

import pytest
import torch

from moe_lib import DEEPSEEK_V3, KIMI_K2
from moe_lib.roofline import H200, PRECISIONS, Machine, crossing, exchange_bytes, floor, seconds, this_machine

# Milliseconds of K2's block on an H200, worked out once apart from this code and rounded to three digits.
TOKENS = (1, 8, 64, 512, 4096, 16384)
TABLE = {
    "bf16": (0.166, 1.11, 5.24, 7.07, 7.09, 16.6),
    "fp8": (0.084, 0.56, 2.62, 3.54, 3.56, 9.69),
    "int4": (0.048, 0.31, 1.47, 1.99, 4.14, 16.6),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_table(precision):
    for tokens, milliseconds in zip(TOKENS, TABLE[precision]):
        got = 1e3 * floor(KIMI_K2, tokens, precision, H200).seconds
        digit = 10 ** -len(str(milliseconds).split(".")[1])
        # half of the last digit, and a little: one entry, 5.24, is 5.2349 here
        assert abs(got - milliseconds) <= 0.52 * digit, (tokens, got)


def test_one_token_by_hand():
    f = floor(KIMI_K2, 1, "bf16", H200)
    assert f.hit == pytest.approx(8)
    assert f.bytes == pytest.approx(9 * 3 * 7168 * 2048 * 2 + 384 * 7168 * 2 + 384 * 4 + 2 * 7168 * 2)
    assert f.flops == 2 * (9 * 3 * 7168 * 2048 + 384 * 7168)
    assert f.bound == "memory" and f.seconds == f.bytes / 4.8e12


def test_bytes_follow_a_simulated_routing():
    """Floors count the experts that are hit: draw choices, count them, and add the bytes up."""
    for tokens in (4, 64, 300):
        drawn = torch.rand(200, tokens, 384).topk(8).indices.flatten(1)
        hit = torch.stack([d.bincount(minlength=384) > 0 for d in drawn]).sum(1).double().mean().item()
        f = floor(KIMI_K2, tokens, "int4", H200)
        assert f.hit == pytest.approx(hit, rel=0.01)
        rest = f.bytes - f.hit * KIMI_K2.expert_bytes("int4")
        assert rest < 1.1 * KIMI_K2.expert_bytes("int4") + 6e6 + tokens * 4 * 7168


def test_memory_bound_to_about_seven_thousand_tokens():
    at = crossing(KIMI_K2, "bf16", H200)
    assert 6_500 < at < 7_500
    before, after = floor(KIMI_K2, at - 1, "bf16", H200), floor(KIMI_K2, at, "bf16", H200)
    assert before.bound == "memory" and after.bound == "compute"
    assert crossing(KIMI_K2, "int4", H200) < crossing(KIMI_K2, "fp8", H200)


def test_a_processor_that_computes_slowly_is_bound_at_once():
    assert crossing(KIMI_K2, "bf16", Machine("slow", 1e12, {"bf16": 1e9})) == 1


def test_more_ranks_read_less_each_and_add_up():
    for ranks in (8, 16, 32, 64, 128):
        one, many = floor(KIMI_K2, 4096, "fp8", H200), floor(KIMI_K2, 4096, "fp8", H200, ranks)
        assert many.hit * ranks == pytest.approx(one.hit) and many.flops * ranks == pytest.approx(one.flops)
        assert many.memory < one.memory and many.exchange > 0 == one.exchange


def test_exchange_equals_the_published_model():
    """128 tokens a rank at 64 ranks and 50 GB/s: 149 us out, 289 us back."""
    out, back = exchange_bytes(KIMI_K2, 128, 64)
    assert round(out / 50e9 * 1e6) == 149 and round(back / 50e9 * 1e6) == 289
    assert exchange_bytes(KIMI_K2, 128, 1) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"precision": "int8"}, "precision is 'int8'; H200 has rates for bf16, fp8, int4"),
        ({"ranks": 7}, "384 experts cannot be shared equally among 7 ranks"),
        ({"ranks": 8, "machine": Machine("a laptop", 1e9, {"bf16": 1e9})}, "a laptop has no link"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ValueError, match=words):
        floor(**({"config": KIMI_K2, "tokens": 1, "precision": "bf16", "machine": H200} | changes))


def test_other_models_have_floors_too():
    f = floor(DEEPSEEK_V3, 64, "fp8", H200)
    assert f.hit == pytest.approx(256 * (1 - (1 - 8 / 256) ** 64))


def test_this_machine_is_measured():
    here = this_machine()
    assert 1e8 < here.read < 1e14 and all(1e8 < here.rates[p] < 1e17 for p in PRECISIONS)


def test_the_first_call_is_not_counted():
    calls = []
    assert len(seconds(lambda: calls.append(1), times=3)) == 3 and len(calls) == 4
