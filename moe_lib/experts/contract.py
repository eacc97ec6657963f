"""What every implementation of the experts shares: the contract, and the checks that keep it.

    experts(rows, counts) -> rows

`rows` [N, hidden] are token copies sorted by expert, `counts[i]` of them for expert `experts.local[i]`, and what comes back
is in the same order. An implementation is a module with that forward, the attribute `local` (a range of global expert
numbers) and the pair `load_hf` / `to_hf`, which take and give the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product

from torch import Tensor

from moe_lib.config import MoEConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def local_experts(config: MoEConfig, local: range | None) -> range:
    """The experts that live here: all, or the given range. Raises ValueError when the range leaves the config's experts."""
    everything = range(config.n_routed_experts)
    if local is None:
        return everything
    if local.step != 1 or not local or local[0] not in everything or local[-1] not in everything:
        raise ValueError(f"local is {local}; expected a range of neighbouring experts within 0..{config.n_routed_experts - 1}")
    return local


def row_ends(rows: Tensor, counts: Tensor, n_experts: int) -> list[int]:
    """Where each expert's rows end. Reads the counts on the host. Raises ValueError when they do not fit the rows."""
    ends = list(accumulate(counts.tolist()))
    if len(ends) != n_experts or ends[-1] != len(rows) or min(counts.tolist()) < 0:
        raise ValueError(
            f"{len(ends)} counts that sum to {sum(counts.tolist())} for {len(rows)} rows and {n_experts} local experts; "
            "expected one count, 0 or more, for each local expert, with sum equal to the rows"
        )
    return ends


def hf_keys(experts: Iterable[int]) -> list[str]:
    """The checkpoint's names of these experts' weights, below "experts."."""
    return [f"{e}.{p}.weight" for e, p in product(experts, PROJECTIONS)]
