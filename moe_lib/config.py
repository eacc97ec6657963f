"""The numbers that fix a mixture-of-experts model, named as in its Hugging Face config, and the counts that follow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from moe_lib.paths import DATA

# What this package computes; another value would be silently computed as if it were this one, so it is refused.
ONLY = {"scoring_func": "sigmoid", "hidden_act": "silu", "topk_method": "noaux_tc", "moe_layer_freq": 1}


@dataclass(frozen=True)
class MoEConfig:
    """Field names are those of config.json, so that a checkpoint's own file is a config.

    The first four fields make a block. The rest have the values of a plain block (one group, no scale) or, from
    `num_hidden_layers` on, zero: they only serve the counts of a whole model.
    Raises ValueError in the constructor, naming field and value, for sizes no block can have.
    """

    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    hidden_act: str = "silu"
    topk_method: str = "noaux_tc"
    num_hidden_layers: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    intermediate_size: int = 0
    vocab_size: int = 0
    num_attention_heads: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, field.type, getattr(self, field.name))
        at_least_one = "hidden_size moe_intermediate_size n_routed_experts num_experts_per_tok n_group topk_group".split()
        for name in (f.name for f in dataclasses.fields(self) if f.type == "int"):
            least = 1 if name in at_least_one else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name, value in ONLY.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} is {getattr(self, name)!r}; only {value!r} is implemented here")
        if not 0 < self.routed_scaling_factor < float("inf"):
            raise ValueError(f"routed_scaling_factor is {self.routed_scaling_factor}; it must be positive and finite")
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}; every group must hold as many experts")
        if self.topk_group > groups:
            raise ValueError(f"topk_group={self.topk_group} groups cannot be kept of n_group={groups}")
        left = experts // groups * self.topk_group
        if self.num_experts_per_tok > left:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok}, but topk_group={self.topk_group} of n_group={groups} groups "
                f"leave only {left} of n_routed_experts={experts} to choose from; keep more groups or choose fewer experts"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} exceeds num_hidden_layers={self.num_hidden_layers}"
            )

    @classmethod
    def from_json(cls, source: str | PathLike | Mapping) -> MoEConfig:
        """Read a config.json (a path, or the mapping already parsed). Fields unknown here are ignored.

        Raises ValueError naming what is missing or absurd.
        """
        values = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
        if not isinstance(values, Mapping):
            raise ValueError(f"{source}: expected a JSON object of config fields, got {type(values).__name__}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}; is this the config.json of a DeepSeek-V3 or Kimi K2 style model?")
        return cls(**{name: values[name] for name in fields if name in values})

    def replace(self, **changes) -> MoEConfig:
        """A copy with some fields changed, checked like any other config."""
        return dataclasses.replace(self, **changes)

    # --- one layer ---------------------------------------------------------------------------------------------------

    @property
    def params_per_expert(self) -> int:
        """gate_proj, up_proj and down_proj: three matrices of hidden x inter."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def routed_params(self) -> int:
        """All routed experts of one layer."""
        return self.n_routed_experts * self.params_per_expert

    @property
    def shared_params(self) -> int:
        """The shared expert of one layer; it is n_shared_experts times as wide as a routed one."""
        return self.n_shared_experts * self.params_per_expert

    @property
    def router_params(self) -> int:
        """gate.weight and e_score_correction_bias of one layer."""
        return self.n_routed_experts * self.hidden_size + self.n_routed_experts

    @property
    def block_params(self) -> int:
        """One whole MoE block."""
        return self.routed_params + self.shared_params + self.router_params

    @property
    def active_block_params(self) -> int:
        """What one token uses of one MoE block: the chosen experts, the shared one and the router."""
        return self.num_experts_per_tok * self.params_per_expert + self.shared_params + self.router_params

    @property
    def dense_ffn_params(self) -> int:
        """The feed-forward of a dense layer: three matrices of hidden x intermediate_size."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def flops_per_token(self) -> int:
        """Forward of one block for one token: two operations a weight, matrix products only (the bias is not one)."""
        return 2 * (self.active_block_params - self.n_routed_experts)

    # --- the whole model ---------------------------------------------------------------------------------------------

    @property
    def n_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def attention_params(self) -> int:
        """Multi-head latent attention of one layer: q and kv through their low-rank waists, two norms, the output."""
        heads, nope, rope = self.num_attention_heads, self.qk_nope_head_dim, self.qk_rope_head_dim
        q = self.hidden_size * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * heads * (nope + rope)
        kv = (
            self.hidden_size * (self.kv_lora_rank + rope) + self.kv_lora_rank + self.kv_lora_rank * heads * (nope + self.v_head_dim)
        )
        return q + kv + heads * self.v_head_dim * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """The token embedding; the output head, not tied to it, is as large."""
        return self.vocab_size * self.hidden_size

    def _model_params(self, per_moe_block: int, embeddings: int) -> int:
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        dense = self.first_k_dense_replace * self.dense_ffn_params
        return (
            self.num_hidden_layers * self.attention_params
            + norms
            + dense
            + self.n_moe_layers * per_moe_block
            + embeddings * self.embedding_params
        )

    @property
    def total_params(self) -> int:
        """Every weight of the model, quantisation scales not counted."""
        return self._model_params(self.block_params, embeddings=2)

    def active_params(self, *, embeddings: int = 1) -> int:
        """Weights that one token uses. `embeddings`: 0 counts neither embedding nor head, 1 the head, 2 both.

        Raises ValueError for any other number.
        """
        if embeddings not in (0, 1, 2):
            raise ValueError(f"embeddings is {embeddings!r}; expected 0 (neither), 1 (the head) or 2 (head and embedding)")
        return self._model_params(self.active_block_params, embeddings)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def expert_bytes(self, precision: str = "bf16") -> int:
        """Bytes that one expert takes: fp32, bf16, fp8 (a float32 scale for each 128 x 128 block) or int4 (a bf16 scale for each
        32 weights of a row). Raises ValueError for another name."""
        inter, hidden, weights = self.moe_intermediate_size, self.hidden_size, self.params_per_expert
        if precision in ("fp32", "bf16"):
            return weights * (4 if precision == "fp32" else 2)
        if precision == "fp8":
            return weights + 4 * 3 * -(-inter // 128) * -(-hidden // 128)
        if precision == "int4":
            return 2 * (inter * _int4_row_bytes(hidden)) + hidden * _int4_row_bytes(inter)
        raise ValueError(f"precision is {precision!r}; expected fp32, bf16, fp8 or int4")

    # --- experts on ranks --------------------------------------------------------------------------------------------

    @property
    def ep_sizes(self) -> list[int]:
        """The numbers of ranks that hold equally many experts each."""
        return [n for n in range(1, self.n_routed_experts + 1) if self.n_routed_experts % n == 0]

    def expected_distinct_experts(self, tokens: int) -> float:
        """How many experts `tokens` tokens reach together, when each picks its k uniformly: E(1 - (1 - k/E)^T)."""
        miss = 1 - self.num_experts_per_tok / self.n_routed_experts
        return self.n_routed_experts * (1 - miss**tokens)


def _int4_row_bytes(columns: int) -> int:
    return -(-columns // 2) + 2 * -(-columns // 32)


def _check_type(name: str, wanted: str, value: object) -> None:
    kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}[wanted]
    if not isinstance(value, kinds) or (wanted != "bool" and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r}; expected {wanted}")


KIMI_K2 = MoEConfig.from_json(DATA / "kimi_k2.json")
DEEPSEEK_V3 = MoEConfig.from_json(DATA / "deepseek_v3.json")
