"""fp8 weights: held to the formula at every corner, to transformers' dequantisation, and to the error that e4m3 allows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from moe_lib.experts import fp8, native

E4M3 = torch.float8_e4m3fn


def stored(rows, columns, block=128):
    """Random numbers of every exponent, subnormal ones too, and random scales."""
    bits = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0  # not NaN
    return bits.view(E4M3), torch.rand(-(-rows // block), -(-columns // block)) + 0.1


def test_partial_blocks_at_every_corner():
    weight, scale = stored(576, 7168)  # the shape of kv_a, whose last row of blocks is half a block
    assert list(scale.shape) == [5, 56]
    opened = fp8.dequantise(weight, scale)
    for r in (0, 127, 128, 511, 512, 575):
        for c in (0, 127, 128, 7039, 7040, 7167):
            assert opened[r, c].item() == (weight[r, c].float() * scale[r // 128, c // 128]).item()


sizes = st.integers(1, 300)


@given(sizes, sizes, st.sampled_from([1, 7, 32, 128]), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_equals_transformers_to_the_bit(rows, columns, block, dtype):
    weight, scale = stored(rows, columns, block)
    theirs = _dequantize_fp8_weight(weight, scale, [block, block], torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(fp8.dequantise(weight, scale, block, dtype), theirs.to(dtype))


@given(sizes, sizes, st.sampled_from([1, 7, 32, 128]), st.floats(-30, 30))
def test_quantising_is_as_near_as_e4m3_allows(rows, columns, block, exponent):
    w = torch.randn(rows, columns) * 2.0**exponent
    numbers, scale = fp8.quantise(w, block)
    assert numbers.dtype == E4M3 and scale.dtype == torch.float32 and not numbers.float().isnan().any()
    error = (fp8.dequantise(numbers, scale, block, torch.float64) - w.double()).abs()
    # 3 bits behind the point: half a step is 1/16 of the number; below 2^-6 the steps are all 2^-9
    bound = torch.maximum(w.double().abs() / 16, fp8.spread(scale.double(), rows, columns, block) * 2**-10)
    assert (error <= bound * (1 + 1e-6)).all()
    largest = torch.nn.functional.pad(numbers.float().abs(), (0, -columns % block, 0, -rows % block))
    assert (largest.unflatten(1, (-1, block)).amax(2).unflatten(0, (-1, block)).amax(1) == 448).all()


def test_quantising_again_changes_nothing():
    numbers, scale = fp8.quantise(torch.randn(200, 300))
    again, same = fp8.quantise(fp8.dequantise(numbers, scale))
    assert torch.equal(again.float(), numbers.float()) and torch.allclose(same, scale, rtol=1e-6)


def test_a_block_of_zeros_stays_zero():
    w = torch.zeros(256, 128)
    w[:128] = torch.randn(128, 128)
    numbers, scale = fp8.quantise(w)
    assert (fp8.dequantise(numbers, scale)[128:] == 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_without_a_scale_is_refused(value):
    w = torch.randn(4, 4)
    w[2, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        fp8.quantise(w)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 6), (384, 256)])
def test_scales_that_do_not_fit_are_refused(shape):
    weight, scale = stored(300, 200)
    assert scale.shape == (3, 2)
    if shape != (3, 2):
        with pytest.raises(ValueError, match=r"blocks of 128 need \[3, 2\]"):
            fp8.dequantise(weight, torch.ones(shape))


@pytest.mark.skipif(native.kernels()[0] is None, reason="no C compiler: nothing compiled to compare")
@given(sizes, sizes)
def test_the_compiled_code_equals_the_formula_to_the_bit(rows, columns):
    weight, scale = stored(rows, columns)
    weight.view(torch.uint8)[0, 0] = 0xFF  # NaN stays NaN
    out = native.dequantise(weight, scale)
    assert torch.equal(out.nan_to_num(7), fp8.dequantise(weight, scale, dtype=torch.bfloat16).nan_to_num(7))
    assert out[0, 0].isnan()
