"""Checkpoint names in and out of a block, and what is refused."""

import pytest
import torch

from moe_lib import KIMI_K2, MoEBlock

KINDS = ("loop", "grouped")
SMALL = KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2)


def tensors(prefix="") -> dict[str, torch.Tensor]:
    block = MoEBlock(SMALL)
    block.gate.e_score_correction_bias.normal_()
    return {prefix + key: t.clone() for key, t in block.to_hf().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "mlp.", "model.layers.7.mlp.", "language_model.model.layers.7.mlp."])
def test_round_trip(kind, prefix):
    given, block = tensors(prefix), MoEBlock(SMALL, kind)
    block.load_hf(given)
    assert all(torch.equal(back, given[prefix + key]) for key, back in block.to_hf().items())
    assert len(block.to_hf()) == len(given) == 3 * 6 + 3 + 2


def test_kinds_exchange_their_weights():
    loop, grouped, x = MoEBlock(SMALL, "loop"), MoEBlock(SMALL), torch.randn(5, 16)
    grouped.load_hf(loop.to_hf())
    torch.testing.assert_close(grouped(x), loop(x))


def test_a_cast_on_the_way_in():
    block = MoEBlock(SMALL, dtype=torch.bfloat16)
    given = tensors()
    block.load_hf(given)
    assert torch.equal(block.gate.weight, given["gate.weight"].bfloat16())
    assert torch.equal(block.gate.e_score_correction_bias, given["gate.e_score_correction_bias"])


def refuse(given, error, match):
    block = MoEBlock(SMALL)
    before = {key: t.clone() for key, t in block.to_hf().items()}
    with pytest.raises(error, match=match):
        block.load_hf(given)
    assert all(torch.equal(t, before[key]) for key, t in block.to_hf().items()), "a refused load must change nothing"


def test_a_renamed_key_is_refused_with_both_names():
    given = tensors()
    given["experts.3.down.weight"] = given.pop("experts.3.down_proj.weight")
    refuse(given, KeyError, r"missing: experts\.3\.down_proj\.weight; unknown: experts\.3\.down\.weight")


def test_an_expert_too_many_is_refused():
    given = tensors()
    given["experts.6.down_proj.weight"] = given["experts.5.down_proj.weight"]
    refuse(given, KeyError, r"unknown: experts\.6\.down_proj\.weight")


def test_two_layers_at_once_are_refused():
    refuse(tensors("model.layers.1.mlp.") | tensors("model.layers.2.mlp."), KeyError, "more than one place")


def test_a_wrong_shape_is_named():
    given = tensors()
    given["experts.2.up_proj.weight"] = given["experts.2.up_proj.weight"].t()
    refuse(given, ValueError, r"experts\.2\.up_proj\.weight has shape \[16, 8\]; this block needs \[8, 16\]")


@pytest.mark.parametrize(
    "key", ["gate.e_score_correction_bias", "gate.weight", "experts.4.gate_proj.weight", "shared_experts.up_proj.weight"]
)
def test_a_nan_is_named(key):
    given = tensors()
    given[key].view(-1)[1] = float("nan")
    refuse(given, ValueError, f"{key} holds")


def test_a_block_on_the_meta_device_cannot_be_filled():
    with torch.device("meta"):
        block = MoEBlock(SMALL)
    with pytest.raises(ValueError, match="meta device"):
        block.load_hf(tensors())


def test_a_shard_takes_its_own_of_a_whole_layer():
    from moe_lib.experts import LoopExperts

    given, block = tensors(), MoEBlock(SMALL, LoopExperts(SMALL, range(2, 4)))
    block.load_hf(given)
    assert torch.equal(block.experts[3].up_proj.weight, given["experts.3.up_proj.weight"])
    given.pop("experts.3.up_proj.weight")
    with pytest.raises(KeyError, match=r"missing: experts\.3\.up_proj\.weight"):
        block.load_hf(given)
