"""The block: route -> dispatch -> experts -> combine -> + shared expert. Written once, for every kind of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from moe_lib.config import MoEConfig
from moe_lib.expert import SwiGLUExpert
from moe_lib.experts import GroupedExperts, LoopExperts
from moe_lib.experts.formats import Below, Opened, all_finite, castable, of_all_experts
from moe_lib.router import Router, Routing

EXPERTS = {"grouped": GroupedExperts, "loop": LoopExperts}
IN_CACHE = 2**21  # float32 values: of K2's 2,048 tokens the sum then takes a sixth of the time


def dispatch(
    x: Float[Tensor, "tokens hidden"], routing: Routing, n_experts: int
) -> tuple[Float[Tensor, "rows hidden"], Int64[Tensor, " experts"], Int64[Tensor, " rows"]]:
    """Copy each token once for each of its experts, sorted by expert: (rows, counts, order).

    rows = tokens * k. Row r is a copy of token order[r] // k, in that token's slot order[r] % k. The sort is stable, so an
    expert sees its tokens in their own order. Source: modeling_deepseek.py lines 535-542.
    """
    k = routing.indices.shape[1]
    flat = routing.indices.flatten()
    order = flat.argsort(stable=True)
    # not bincount, which looks at the numbers first: on a GPU the host would wait for them
    counts = flat.new_zeros(n_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return x[order // k], counts, order


def combine(rows: Float[Tensor, "rows hidden"], routing: Routing, order: Int64[Tensor, " rows"]) -> Float[Tensor, "tokens hidden"]:
    """Undo the sort of dispatch, weight each copy, and sum the k copies of a token.

    Weighted and summed in the routing's float32 (float64), rounded once to the rows' dtype. Source: lines 600-609.
    """
    k, hidden = routing.weights.shape[1], rows.shape[1]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    # the copies are widened some tokens at a time: on a CPU as many as its caches hold, on a GPU all
    some = max(1, IN_CACHE // (k * hidden) if rows.device.type == "cpu" else len(routing.weights))
    out = []
    for of, weights in zip(back.split(k * some), routing.weights.split(some)):
        copies = rows[of].view(-1, k, hidden)
        out.append((copies * weights.unsqueeze(-1)).sum(1).to(rows.dtype))
    return torch.cat(out)


class MoEBlock(nn.Module):
    """Kimi K2's feed-forward: a gate, routed experts of which each token visits k, and a shared expert that all visit.

    `experts` is "grouped" (stacked weights, the fast one), "loop" (a list of modules, the reference's shape) or any module with
    the contract of moe_lib.experts. The block keeps no state between calls and knows nothing of the kind of its experts.
    Source: modeling_deepseek.py lines 477-609.
    """

    def __init__(
        self,
        config: MoEConfig,
        experts: str | nn.Module = "grouped",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(experts, str):
            if experts not in EXPERTS:
                raise ValueError(f"experts is {experts!r}; expected one of {', '.join(EXPERTS)}, or a module with the contract")
            experts = EXPERTS[experts](config, device=device, dtype=dtype)
        self.config = config
        self.gate = Router(config, device, dtype)
        self.experts = experts
        self.shared_experts = None
        if config.n_shared_experts:
            inter = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = SwiGLUExpert(config.hidden_size, inter, device, dtype)

    def forward(
        self, x: Float[Tensor, "*batch hidden"], return_routing: bool = False
    ) -> Float[Tensor, "*batch hidden"] | tuple[Float[Tensor, "*batch hidden"], Routing]:
        """Raises ValueError when the last dimension is not the config's hidden_size. No tokens are a batch too."""
        routing = self.gate(x)
        rows, counts, order = dispatch(x.reshape(-1, x.shape[-1]), routing, self.config.n_routed_experts)
        y = combine(self.experts(rows, counts), routing, order).view(x.shape)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return (y, routing) if return_routing else y

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in one layer of a checkpoint: K2's names (one tensor an expert and projection) or transformers' stacked ones
        (experts.gate_up_proj, experts.down_proj), with or without a prefix such as `model.layers.3.mlp.`. Weights stored as fp8
        or int4 go as they are to experts that hold them so, and are dequantised for any other part.

        Nothing is changed unless everything fits. Raises KeyError naming missing and unknown keys, ValueError naming a
        tensor of the wrong shape or dtype, a non-finite one, or a block on the meta device.
        """
        own = self.to_hf()
        given = Opened(_per_expert(_without_prefix(tensors)), own)
        known = own.keys() | of_all_experts(own, self.config.n_routed_experts)  # some may live elsewhere
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - known)
        if missing or unknown:
            raise KeyError(
                f"{_some('missing', missing)}{_some('unknown', unknown)}expected exactly the {len(known)} tensors of one block"
            )
        for key, mine in own.items():
            if mine.is_meta:
                raise ValueError(f"{key} is on the meta device and cannot be filled; build the block on a real device first")
            tensor = given[key]
            if tensor.shape != mine.shape:
                raise ValueError(f"{key} has shape {list(tensor.shape)}; this block needs {list(mine.shape)}")
            if not castable(tensor.dtype, mine.dtype):
                raise ValueError(f"{key} is {tensor.dtype}; this block holds {mine.dtype}, and a cast would lose the scale")
            if not all_finite(tensor):
                raise ValueError(f"{key} holds a value that is not finite; the file is damaged or the download broke off")
        self.experts.load_hf(Below(given, "experts."))  # first: they may refuse what only they understand
        for name in ("gate", "shared_experts"):
            if part := {key.removeprefix(f"{name}."): given[key] for key in own if key.startswith(f"{name}.")}:
                getattr(self, name).load_state_dict(part)

    def to_hf(self) -> dict[str, Tensor]:
        """This block's tensors under the checkpoint's names, without a layer's prefix; they share memory with the block."""
        out = {f"experts.{key}": tensor for key, tensor in self.experts.to_hf().items()}
        for name in ("gate", "shared_experts"):
            if (part := getattr(self, name)) is not None:
                out |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
        return out


def _some(what: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    return f"{what}: {', '.join(keys[:4])}{more}; "


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip `….mlp.` from every name. Raises KeyError when names come from more than one layer."""
    prefixes = {match.group() if (match := re.match(r".*\bmlp\.", key)) else "" for key in tensors}
    if len(prefixes) > 1:
        raise KeyError(
            f"names from more than one place: {', '.join(sorted(repr(p) for p in prefixes)[:4])}; give one layer at a time"
        )
    return {re.sub(r"^.*\bmlp\.", "", key): tensor for key, tensor in tensors.items()}


def _per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers stacks all experts and puts gate over up; give each expert its own names. Views, no copies."""
    out = dict(tensors)
    if "experts.gate_up_proj" in out:
        for e, both in enumerate(out.pop("experts.gate_up_proj")):
            gate, up = both.chunk(2)
            out |= {f"experts.{e}.gate_proj.weight": gate, f"experts.{e}.up_proj.weight": up}
    if "experts.down_proj" in out:
        out |= {f"experts.{e}.down_proj.weight": down for e, down in enumerate(out.pop("experts.down_proj"))}
    return out
