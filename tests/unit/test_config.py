import json

import pytest
import torch

from moe_lib import DEEPSEEK_V3, KIMI_K2, MoEBlock, MoEConfig, SwiGLUExpert


def test_counts_of_kimi_k2():
    c = KIMI_K2
    assert c.params_per_expert == 44_040_192
    assert c.routed_params == 16_911_433_728
    assert c.routed_params * c.n_moe_layers == 1_014_686_023_680
    assert c.total_params == 1_026_408_232_448
    assert [round(c.active_params(embeddings=n) / 1e9, 2) for n in (0, 1, 2)] == [30.51, 31.69, 32.86]
    assert c.dense_ffn_params == 396_361_728 == 9 * c.params_per_expert
    assert c.flops_per_token // 10**6 == 798
    assert c.ep_sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 384]
    assert [round(c.expected_distinct_experts(t), 1) for t in (1, 8, 64, 512)] == [8.0, 59.5, 284.2, 384.0]


@pytest.mark.parametrize(
    ("precision", "megabytes", "gigabytes"), [("bf16", 88.08, 33.8), ("fp8", 44.05, 16.9), ("int4", 24.77, 9.5)]
)
def test_bytes_of_kimi_k2(precision, megabytes, gigabytes):
    assert round(KIMI_K2.expert_bytes(precision) / 1e6, 2) == megabytes
    assert round(384 * KIMI_K2.expert_bytes(precision) / 1e9, 1) == gigabytes


def test_partial_blocks_take_whole_scales():
    c = KIMI_K2.replace(hidden_size=130, moe_intermediate_size=33)
    assert c.expert_bytes("fp8") == 3 * 130 * 33 + 4 * 3 * 2 * 1
    assert c.expert_bytes("int4") == 2 * 33 * (65 + 2 * 5) + 130 * (17 + 2 * 2)


def test_unknown_precision_is_named():
    with pytest.raises(ValueError, match="'fp4'.*fp32, bf16, fp8 or int4"):
        KIMI_K2.expert_bytes("fp4")


@pytest.mark.parametrize("config", [KIMI_K2, DEEPSEEK_V3])
def test_counts_are_those_of_modules(config):
    with torch.device("meta"):
        block = MoEBlock(config)
        dense = SwiGLUExpert(config.hidden_size, config.intermediate_size)
    # the bias is a buffer here and a parameter in the checkpoint; the config counts it
    assert sum(p.numel() for p in block.parameters()) + block.gate.e_score_correction_bias.numel() == config.block_params
    assert sum(p.numel() for p in dense.parameters()) == config.dense_ffn_params
    assert sum(p.numel() for p in block.shared_experts.parameters()) == config.shared_params


def test_read_from_a_path_and_a_mapping(tmp_path):
    values = {
        "hidden_size": 8,
        "moe_intermediate_size": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert MoEConfig.from_json(path) == MoEConfig.from_json(values) == MoEConfig(8, 4, 6, 2)


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match="lacks hidden_size, n_routed_experts"):
        MoEConfig.from_json({"moe_intermediate_size": 4, "num_experts_per_tok": 2})


def test_a_file_that_holds_no_object_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="config.json: expected a JSON object"):
        MoEConfig.from_json(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1"),
        ({"n_shared_experts": True}, "n_shared_experts is True; expected int"),
        ({"n_group": 5}, "n_group=5 does not divide n_routed_experts=384"),
        ({"topk_group": 2}, "topk_group=2 groups cannot be kept of n_group=1"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok=385.*leave only 384"),
        (
            {"n_group": 96, "topk_group": 1},
            "num_experts_per_tok=8.*topk_group=1 of n_group=96 groups leave only 4 of n_routed_experts=384",
        ),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace=62 exceeds num_hidden_layers=61"),
    ],
)
def test_absurd_values_are_refused_with_their_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        KIMI_K2.replace(**change)


def test_active_params_refuses_other_counts():
    with pytest.raises(ValueError, match="embeddings is 3"):
        KIMI_K2.active_params(embeddings=3)
