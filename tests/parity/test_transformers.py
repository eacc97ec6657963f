"""Equal to transformers' DeepseekV3 classes on the same weights."""

import dataclasses

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from moe_lib import DEEPSEEK_V3, KIMI_K2, MoEBlock, MoEConfig, Router, SwiGLUExpert

# Narrow, but with every expert, group and choice of the real ones.
CONFIGS = {
    "kimi_k2": KIMI_K2.replace(hidden_size=48, moe_intermediate_size=24),
    "deepseek_v3": DEEPSEEK_V3.replace(hidden_size=48, moe_intermediate_size=24),
}


def hf_config(config: MoEConfig) -> DeepseekV3Config:
    ours_only = {"scoring_func", "topk_method", "moe_layer_freq"}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ours_only}
    made = DeepseekV3Config(**fields)
    made._experts_implementation = "eager"
    return made


def moe(config: MoEConfig, dtype=torch.float32):
    """A transformers MoE with random weights and signed random biases, and our block with the same."""
    theirs = hf.DeepseekV3MoE(hf_config(config))
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
        theirs.gate.e_score_correction_bias.normal_(std=0.3)
    for module in (theirs.experts, theirs.shared_experts):
        module.to(dtype)
    ours = MoEBlock(config, dtype=dtype)
    ours.gate.to(torch.float32)
    ours.load_hf(theirs.state_dict())
    return theirs, ours


def test_expert_in_float64():
    config = KIMI_K2.replace(hidden_size=96, moe_intermediate_size=40)
    theirs = hf.DeepseekV3MLP(hf_config(config), intermediate_size=40).double()
    ours = SwiGLUExpert(96, 40, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 96, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_gate_on_ten_thousand_tokens(name):
    config = CONFIGS[name]
    theirs, ours = hf.DeepseekV3TopkRouter(hf_config(config)), Router(config)
    with torch.no_grad():
        theirs.weight.normal_(std=config.hidden_size**-0.5)
        theirs.e_score_correction_bias.normal_(std=0.1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(10_000, config.hidden_size)
    _, weights, indices = theirs(x)
    routing = ours(x)
    order = indices.sort(1).indices  # they leave the chosen unsorted
    mine = routing.indices.sort(1)
    assert torch.equal(mine.values, indices.gather(1, order))
    torch.testing.assert_close(routing.weights.gather(1, mine.indices), weights.gather(1, order), atol=1e-5, rtol=0)
    assert (ours.e_score_correction_bias < 0).any() and len(indices.unique()) > 0.6 * config.n_routed_experts


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_block_in_float32(name, implementation):
    theirs, ours = moe(CONFIGS[name])
    theirs.experts.config._experts_implementation = implementation
    x = torch.randn(4, 16, 48)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_block_in_bfloat16_is_within_rounding_of_the_output(name):
    theirs, ours = moe(CONFIGS[name], torch.bfloat16)
    x = torch.randn(4, 16, 48, dtype=torch.bfloat16)
    # The judge is the same block in float64: ours may not be further from it than theirs, nor than a few roundings.
    exact = MoEBlock(CONFIGS[name], dtype=torch.float64)
    exact.load_hf(ours.to_hf())
    want = exact(x.double())
    scale = want.abs().max()
    ours_off, theirs_off = ((y.double() - want).abs().max() / scale for y in (ours(x), theirs(x)))
    assert ours_off <= 4 * 2**-8 and ours_off <= 1.2 * theirs_off, (ours_off, theirs_off)


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_gradients_in_float32(kind):
    theirs, _ = moe(CONFIGS["kimi_k2"])
    ours = MoEBlock(CONFIGS["kimi_k2"], kind)
    ours.load_hf(theirs.state_dict())
    x = torch.randn(16, 48, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    sent = torch.randn(16, 48)
    ours(x).backward(sent), theirs(twin).backward(sent)
    torch.testing.assert_close(x.grad, twin.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.gate.weight.grad, theirs.gate.weight.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        ours.shared_experts.up_proj.weight.grad, theirs.shared_experts.up_proj.weight.grad, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3"])
def test_total_parameters_of_the_whole_model(name):
    config = {"kimi_k2": KIMI_K2, "deepseek_v3": DEEPSEEK_V3}[name]
    with torch.device("meta"):
        model = hf.DeepseekV3ForCausalLM(hf_config(config))
    bias = config.n_moe_layers * config.n_routed_experts  # a buffer there, a parameter of the checkpoint
    assert sum(p.numel() for p in model.parameters()) + bias == config.total_params
