"""int4 weights: held to compressed-tensors, which writes the checkpoints, and the compiled products to float64 sums."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2
from moe_lib.experts import Int4Experts, int4, native

ARGS = QuantizationArgs(num_bits=4, type="int", strategy=QuantizationStrategy.GROUP, group_size=32, symmetric=True)
compiled = pytest.mark.skipif(native.kernels()[0] is None, reason="no C compiler: nothing compiled to test")
rows, groups = st.integers(1, 70), st.integers(1, 9)


def theirs(w):
    """The same weight as compressed-tensors quantises and packs it."""
    grouped = w.unflatten(1, (-1, 32))
    scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), ARGS)
    scale = scale.to(torch.bfloat16)
    numbers = quantize(w, scale.float(), zero, ARGS, dtype=torch.int8)
    return numbers, pack_to_int32(numbers, 4), scale


def random_parts(out_size, in_size):
    packed = torch.randint(-(2**31), 2**31, (out_size, in_size // 8)).to(torch.int32)
    return packed, (torch.rand(out_size, in_size // 32) + 0.1).to(torch.bfloat16)


@given(rows, groups, st.floats(-20, 20))
def test_quantises_and_packs_as_compressed_tensors_does(n, g, exponent):
    w = torch.randn(n, 32 * g) * 2.0**exponent
    numbers, packed, scale = theirs(w)
    ours, our_scale = int4.quantise(w)
    assert torch.equal(our_scale, scale) and torch.equal(int4.unpack(ours), numbers) and torch.equal(ours, packed)


@given(rows, groups)
def test_opens_what_compressed_tensors_packed(n, g):
    packed, scale = random_parts(n, 32 * g)
    numbers = unpack_from_int32(packed, 4, torch.Size([n, 32 * g]))
    assert torch.equal(int4.unpack(packed), numbers) and torch.equal(int4.pack(numbers), packed)
    assert torch.equal(int4.dequantise(packed, scale), dequantize(numbers, scale.float(), args=ARGS, dtype=torch.float32))


def test_the_layout_by_hand():
    """Value i of eight sits at bits 4i of an int32; a nibble n stands for n - 8."""
    packed = torch.tensor([[0x76543210, 0] + [-1] * 2], dtype=torch.int32)  # -1 is fifteen in every nibble
    scale = torch.tensor([[0.5]], dtype=torch.bfloat16)
    assert int4.dequantise(packed, scale)[0].tolist() == [(n - 8) / 2 for n in range(8)] + [-4.0] * 8 + [3.5] * 16


def test_no_weight_is_off_by_more_than_half_a_step():
    w = torch.randn(64, 320)
    packed, scale = int4.quantise(w)
    off = (int4.dequantise(packed, scale) - w).abs() / scale.float().repeat_interleave(32, 1)
    assert off.max() <= 0.5 + 7.5 * 2**-8  # half a step; the scale was rounded to 8 bits, which the largest feels 7.5 times


def test_a_group_of_zeros_stays_zero():
    w = torch.randn(2, 64)
    w[:, 32:] = 0
    opened = int4.dequantise(*int4.quantise(w))
    assert (opened[:, 32:] == 0).all() and opened.isfinite().all()


@pytest.mark.parametrize(("columns", "words"), [(40, "multiple of the group of 32"), (16, "multiple of the group of 32")])
def test_groups_that_do_not_fill_a_row_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        int4.quantise(torch.randn(4, columns))


def test_a_nan_is_refused():
    w = torch.randn(4, 32)
    w[1, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        int4.quantise(w)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (8, 1)])
def test_scales_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="scales"):
        int4.dequantise(torch.zeros(4, 16, dtype=torch.int32), torch.ones(shape))


def test_sizes_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match="moe_intermediate_size is 48; int4 shares a scale among 32"):
        Int4Experts(KIMI_K2.replace(hidden_size=64, moe_intermediate_size=48))


@compiled
@given(rows, groups)
def test_the_compiled_code_opens_to_the_same_bits(n, g):
    packed, scale = random_parts(n, 32 * g)
    assert torch.equal(native.dequantise(packed, scale), int4.dequantise(packed, scale, torch.float64).to(torch.bfloat16))
