"""Fp8Experts and Int4Experts keep the contract: equal to the plain experts with the weights that theirs stand for."""

import copy
import warnings

import pytest
import torch

from moe_lib import KIMI_K2, MoEBlock
from moe_lib.experts import Fp8Experts, GroupedExperts, Int4Experts, LoopExperts, native
from moe_lib.experts.contract import hf_keys

KINDS = (Fp8Experts, Int4Experts)
CONFIG = KIMI_K2.replace(hidden_size=160, moe_intermediate_size=96, n_routed_experts=12, num_experts_per_tok=3)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def block_of(kind, dtype=torch.float32, config=CONFIG) -> tuple[MoEBlock, MoEBlock]:
    """A block with quantised experts, and the plain float64 block it must equal."""
    quantised = kind.from_weights(config, GroupedExperts(config).to_hf())
    block = MoEBlock(config, quantised, dtype=dtype)
    plain = MoEBlock(config, dtype=torch.float64)
    plain.gate.load_state_dict(block.gate.state_dict())
    plain.shared_experts.load_state_dict(block.shared_experts.state_dict())
    weights = {f"{e}.{p}.weight": quantised.weight(e, p, torch.float64) for e in range(12) for p in quantised.shapes}
    plain.experts.load_hf(weights)
    return block, plain


def near(got, want, tolerance):
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
    assert error <= tolerance, f"relative error {error:.2g}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 5, 64])
def test_equals_the_plain_block_with_the_opened_weights(kind, dtype, tokens):
    block, plain = block_of(kind, dtype)
    x = torch.randn(tokens, 160).to(dtype)
    rows, counts = x.repeat_interleave(2, 0), torch.zeros(12, dtype=torch.int64)
    counts[3], counts[7] = tokens, tokens  # ten experts without rows
    out = block.experts(rows, counts)
    assert out.dtype == dtype and out.shape == rows.shape
    near(out, plain.experts(rows.double(), counts), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_block_and_its_gradients(kind):
    block, plain = block_of(kind, torch.float64)
    x = torch.randn(2, 9, 160, dtype=torch.float64)
    mine, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
    block(mine).sum().backward()  # a gradient without strides
    plain(exact).sum().backward()
    near(block(x), plain(x), 1e-12)
    near(mine.grad, exact.grad, 1e-12)
    near(block.gate.weight.grad, plain.gate.weight.grad, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_bfloat16_rows(kind):
    block, plain = block_of(kind, torch.bfloat16)
    rows, counts = torch.randn(24, 160).to(torch.bfloat16), torch.full((12,), 2)
    mine, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    sent = torch.randn(24, 160).to(torch.bfloat16)
    block.experts(mine, counts).backward(sent)
    plain.experts(exact, counts).backward(sent.double())
    near(mine.grad, exact.grad, 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_that_do_not_fit_are_refused(kind):
    experts = kind(CONFIG)
    for counts in ([1] * 11, [1] * 13, [2] + [1] * 11, [-1, 3] + [1] * 10):
        with pytest.raises(ValueError, match="counts"):
            experts(torch.randn(12, 160), torch.tensor(counts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.half(), lambda m: m.double()])
def test_a_cast_leaves_the_numbers_alone(kind, move):
    block, _ = block_of(kind)
    before = {key: t.clone() for key, t in block.experts.to_hf().items()}
    after = move(block).experts.to_hf()
    for key, t in before.items():
        assert after[key].dtype == t.dtype and torch.equal(after[key].view(torch.uint8), t.view(torch.uint8)), key


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_repeatability(kind):
    block, plain = block_of(kind)
    x = torch.randn(7, 160)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = block.experts(x, torch.tensor([7] + [0] * 11))
        assert out.dtype == torch.bfloat16
    near(out, plain.experts(x.double(), torch.tensor([7] + [0] * 11)), 2e-2)
    assert all(torch.equal(block(x), block(x)) for _ in range(20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_its_own(kind):
    block, _ = block_of(kind)
    other = copy.deepcopy(block)
    for t in other.experts.to_hf().values():
        t.view(torch.uint8).zero_()
    x = torch.randn(3, 160)
    assert not torch.equal(block(x), other(x))


def bytes_of(experts):
    return sum(t.numel() * t.element_size() for t in experts.buffers())


@pytest.mark.parametrize(("kind", "precision"), [(Fp8Experts, "fp8"), (Int4Experts, "int4")])
def test_holds_the_bytes_that_the_config_counts(kind, precision):
    for config in (CONFIG, KIMI_K2.replace(n_routed_experts=8)):
        assert bytes_of(kind(config, device="meta")) == config.n_routed_experts * config.expert_bytes(precision)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "language_model.model.layers.7.mlp."])
def test_round_trip_to_the_bit(kind, prefix):
    block, _ = block_of(kind)
    given = {prefix + key: t.clone() for key, t in block.to_hf().items()}
    other = MoEBlock(CONFIG, kind(CONFIG))
    other.load_hf(given)
    x = torch.randn(5, 160)
    assert torch.equal(other(x), block(x))
    assert all(torch.equal(t.view(torch.uint8), given[prefix + k].view(torch.uint8)) for k, t in other.to_hf().items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into", [LoopExperts, GroupedExperts])
def test_a_plain_block_opens_a_quantised_layer(kind, into):
    block, plain = block_of(kind)
    other = MoEBlock(CONFIG, into(CONFIG, dtype=torch.float64), dtype=torch.float64)
    other.load_hf(block.to_hf())
    x = torch.randn(5, 160, dtype=torch.float64)
    near(other(x), plain(x), 1e-6)  # opened in float32


def test_a_quantised_shared_expert_is_opened():
    """The fp8 checkpoint stores the shared expert as it stores the others."""
    block, _ = block_of(Fp8Experts)
    from moe_lib.experts import fp8

    given = block.to_hf()
    w = given.pop("shared_experts.up_proj.weight")
    given["shared_experts.up_proj.weight"], given["shared_experts.up_proj.weight_scale_inv"] = fp8.quantise(w)
    other = MoEBlock(CONFIG, Fp8Experts(CONFIG))
    other.load_hf(given)
    opened = fp8.dequantise(given["shared_experts.up_proj.weight"], given["shared_experts.up_proj.weight_scale_inv"])
    assert torch.equal(other.shared_experts.up_proj.weight, opened)


@pytest.mark.parametrize("kind", [*KINDS, GroupedExperts])
def test_a_shard_takes_its_own_of_a_quantised_layer(kind):
    layer, _ = block_of(Fp8Experts if kind is GroupedExperts else kind)
    shard = MoEBlock(CONFIG, kind(CONFIG, range(4, 8)))
    shard.load_hf(layer.to_hf())
    rows = torch.randn(8, 160)
    want = layer.experts(rows, torch.tensor([0] * 4 + [2] * 4 + [0] * 4))
    torch.testing.assert_close(shard.experts(rows, torch.full((4,), 2)), want)


def refuse(kind, change, error, match):
    given = {key: t.clone() for key, t in block_of(kind)[0].to_hf().items()}
    change(given)
    block = MoEBlock(CONFIG, kind(CONFIG))
    before = {key: t.clone() for key, t in block.to_hf().items()}
    with pytest.raises(error, match=match):
        block.load_hf(given)
    assert all(torch.equal(t.view(torch.uint8), before[key].view(torch.uint8)) for key, t in block.to_hf().items())


def renamed(old, new):
    return lambda given: given.update({new: given.pop(old)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_scale_is_refused_with_both_names(kind):
    old = "experts.3.up_proj." + ("weight_scale_inv" if kind is Fp8Experts else "weight_scale")
    refuse(kind, renamed(old, old + "s"), KeyError, rf"missing: {old}; unknown: {old}s")


def test_a_scale_that_a_plain_block_needs_is_missed():
    given = block_of(Int4Experts)[0].to_hf()
    given.pop("experts.3.up_proj.weight_scale")
    with pytest.raises(KeyError, match=r"missing: experts\.3\.up_proj\.weight_scale"):
        MoEBlock(CONFIG).load_hf(given)


def test_fp8_numbers_without_their_scales_are_refused():
    given = block_of(Fp8Experts)[0].to_hf()
    for key in [key for key in given if key.endswith("_scale_inv")]:
        given.pop(key)
    with pytest.raises(ValueError, match="a cast would lose the scale"):
        MoEBlock(CONFIG).load_hf(given)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_are_refused_where_quantised_ones_are_held(kind):
    with pytest.raises(KeyError, match="missing"):
        MoEBlock(CONFIG, kind(CONFIG)).load_hf(MoEBlock(CONFIG).to_hf())


def test_a_nan_in_fp8_is_named():
    def spoil(given):
        given["experts.4.gate_proj.weight"].view(torch.uint8)[3, 5] = 0x7F

    refuse(Fp8Experts, spoil, ValueError, r"experts\.4\.gate_proj\.weight holds a value that is not finite")


def test_a_nan_in_a_scale_is_named():
    def spoil(given):
        given["experts.4.gate_proj.weight_scale"][3, 1] = float("nan")

    refuse(Int4Experts, spoil, ValueError, r"experts\.4\.gate_proj\.weight_scale holds")


def test_scales_of_another_block_size_are_named():
    def spoil(given):
        given["experts.0.down_proj.weight_scale_inv"] = torch.ones(2, 2)

    refuse(Fp8Experts, spoil, ValueError, r"down_proj\.weight_scale_inv has shape \[2, 2\]; this block needs \[2, 1\]")


def test_a_weight_shape_that_lies_is_named():
    def spoil(given):
        given["experts.0.down_proj.weight_shape"][1] = 97

    refuse(
        Int4Experts, spoil, ValueError, r"0\.down_proj\.weight_shape says \[160, 97\]; these experts hold weights of \[160, 96\]"
    )


class OneAtATime(dict):
    """Weights made when asked for, that know how many are alive."""

    alive = most = 0

    def __getitem__(self, key):
        weight = super().__getitem__(key).clone()
        OneAtATime.alive += 1
        OneAtATime.most = max(OneAtATime.most, OneAtATime.alive)
        import weakref

        weakref.finalize(weight, self._gone)
        return weight

    @staticmethod
    def _gone():
        OneAtATime.alive -= 1


@pytest.mark.parametrize("kind", KINDS)
def test_building_never_holds_more_than_one_expert_more(kind):
    OneAtATime.alive = OneAtATime.most = 0
    weights = OneAtATime(GroupedExperts(CONFIG).to_hf())
    kind.from_weights(CONFIG, weights)
    assert OneAtATime.most <= 3, "one expert is three weights"


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_another_shape_is_named(kind):
    weights = GroupedExperts(CONFIG).to_hf()
    weights["2.up_proj.weight"] = weights["2.up_proj.weight"].T
    with pytest.raises(ValueError, match=r"2\.up_proj\.weight has shape \[160, 96\]; this config needs \[96, 160\]"):
        kind.from_weights(CONFIG, weights)


# --- without a compiler ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_it_still_runs_and_int4_says_that_it_is_slower(kind, monkeypatch):
    block, plain = block_of(kind, torch.bfloat16)
    monkeypatch.setattr(native, "kernels", lambda: (None, "there is no C compiler"))
    rows, counts = torch.randn(24, 160).to(torch.bfloat16), torch.full((12,), 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = block.experts(rows, counts)
    near(out, plain.experts(rows.double(), counts), 2e-2)
    slower = any("slower: there is no C compiler" in str(w.message) for w in told)
    assert slower == (kind is Int4Experts)


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo fake 1 && exit 0\necho 'no such thing' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, why = native.kernels.__wrapped__()
    assert library is None and "no such thing" in why


def test_the_library_is_built_once_and_kept(monkeypatch, tmp_path):
    if native.kernels()[0] is None:
        pytest.skip("no C compiler: nothing is built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.kernels.__wrapped__()[0] is not None
    (built,) = (tmp_path / "moe_lib").iterdir()
    before = built.stat().st_mtime_ns
    assert native.kernels.__wrapped__()[0] is not None and built.stat().st_mtime_ns == before


def test_keys_are_the_checkpoints():
    assert set(Fp8Experts(CONFIG).to_hf()) == {k + end for k in hf_keys(range(12)) for end in ("", "_scale_inv")}
    assert set(Int4Experts(CONFIG).to_hf()) == {k + end for k in hf_keys(range(12)) for end in ("_packed", "_scale", "_shape")}
