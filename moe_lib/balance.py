"""How evenly experts are used, how evenly chance alone would use them, and two ways to make it even."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Float32, Int64, Integer
from torch import Tensor

from moe_lib.router import Router, Routing


def load(
    indices: Int64[Tensor, "tokens k"], n_experts: int, mask: Bool[Tensor, "*batch"] | None = None
) -> Int64[Tensor, " experts"]:
    """How many tokens each expert serves. `mask` is False where a token is padding, which loads nobody.

    Raises ValueError when the mask does not hold one entry for each token.
    """
    if mask is not None:
        if mask.numel() != len(indices):
            raise ValueError(f"mask has shape {tuple(mask.shape)} for {len(indices)} tokens; expected one entry for each token")
        indices = indices[mask.flatten()]
    return torch.bincount(indices.flatten(), minlength=n_experts)


def load_by_kind(
    indices: Int64[Tensor, "tokens k"],
    kinds: Int64[Tensor, "*batch"],
    n_experts: int,
    n_kinds: int,
    mask: Bool[Tensor, "*batch"] | None = None,
) -> Int64[Tensor, "experts kinds"]:
    """load, told apart by the kind of each token. Raises ValueError when kinds or mask do not hold one entry for each token."""
    if kinds.numel() != len(indices):
        raise ValueError(f"kinds has shape {tuple(kinds.shape)} for {len(indices)} tokens; expected one entry for each token")
    pairs = indices * n_kinds + kinds.flatten().unsqueeze(1)
    return load(pairs, n_experts * n_kinds, mask).view(n_experts, n_kinds)


def max_violation(loads: Integer[Tensor, "*some experts"] | Float[Tensor, "*some experts"]) -> Float[Tensor, "*some"]:
    """MaxVio = max / mean - 1: how far the busiest expert is above its fair share. 0 is perfect balance; one expert doing all the
    work gives experts - 1. Of one batch's loads it is MaxVio_batch, of loads summed over a whole run's batches MaxVio_global.

    Raises ValueError where nobody has any load. Source: arXiv 2408.15664, section 4.1.
    """
    mean = loads.double().mean(-1)
    if (mean <= 0).any():
        raise ValueError("max_violation of loads that are all 0: there is no mean to be above")
    return (loads.max(-1).values / mean - 1).float()


def sampling_floor(tokens: int, n_experts: int, k: int) -> float:
    """The MaxVio to expect when every token picks its k experts by lot: nobody is preferred, yet somebody is busiest.

    The load of one expert is binomial (tokens, k / experts); the expected maximum of `experts` such loads follows from the
    chance that all stay at or below n. Loads are taken as independent; that they sum to tokens * k lifts the floor by
    a factor of sqrt(experts / (experts - 1)), which is put in. Raises ValueError when k is not in 1..n_experts or tokens < 1.
    """
    if tokens < 1 or not 1 <= k <= n_experts:
        raise ValueError(f"tokens={tokens}, n_experts={n_experts}, k={k}; expected tokens of at least 1, and k from 1 to n_experts")
    if k == n_experts:
        return 0.0
    n, p = torch.arange(tokens + 1, dtype=torch.float64), k / n_experts
    choose = math.lgamma(tokens + 1) - torch.lgamma(n + 1) - torch.lgamma(tokens - n + 1)
    at_most = (choose + n * math.log(p) + (tokens - n) * math.log1p(-p)).exp().cumsum(0).clamp(max=1)
    expected_max = (1 - at_most**n_experts).sum().item()
    return (expected_max / (tokens * p) - 1) * (n_experts / (n_experts - 1)) ** 0.5


def document_floor(
    loads: Integer[Tensor, "documents experts"], batch: int, times: int = 500, generator: torch.Generator | None = None
) -> float:
    """The MaxVio to expect of batches of `batch` documents when every expert is used evenly in the long run.

    sampling_floor takes tokens as drawn one by one. The tokens of a document come together and want the same experts, so batches
    differ by more than that. Here batches are drawn from real documents' loads, after each expert's loads were scaled to the
    same mean: what is left is the luck of which documents meet. Experts that serve nobody are left out.
    """
    used = loads[:, loads.sum(0) > 0].double()
    even = used / used.mean(0)
    rows = torch.randint(len(loads), (times, batch), generator=generator).to(loads.device)
    return max_violation(even[rows].mean(1)).mean().item()


def bias_update(loads: Integer[Tensor, " experts"] | Float[Tensor, " experts"], gamma: float) -> Float32[Tensor, " experts"]:
    """What loss-free balancing adds to e_score_correction_bias: gamma * sign(mean - load), less its own mean.

    Underloaded experts go up, overloaded ones down, all by the same step, however far off they are. Only differences between
    biases choose, so the common part is taken out: it would drift, and a large bias has coarser steps.
    `loads` are those of one whole optimiser step, summed over its micro-batches (and over ranks). gamma is the update speed; 0.001
    in DeepSeek-V3. Source: arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    loads = loads.double()
    step = gamma * (loads.mean() - loads).sign()
    return (step - step.mean()).float()


@torch.no_grad()
def update_bias(router: Router, loads: Integer[Tensor, " experts"] | Float[Tensor, " experts"], gamma: float) -> None:
    """Move the router's bias by one bias_update, in place and in float32. Call it once an optimiser step, after it."""
    router.e_score_correction_bias += bias_update(loads, gamma)


def auxiliary_loss(
    routing: Routing, mask: Bool[Tensor, "batch tokens"], aux_loss_alpha: float, seq_aux: bool = True
) -> Float[Tensor, ""]:
    """alpha * sum over experts of f * P: f the share of tokens that chose the expert, times experts / k, so that an even load is 1;
    P the mean of its score, each token's scores first divided by their sum. Even use gives alpha.

    f counts and has no gradient; P carries it, and pushes down the scores of those experts that f says are busy.
    With `seq_aux` f and P are taken for each sequence and the losses averaged (DeepSeek-V3's complementary sequence-wise loss, K2's
    setting), otherwise once over the batch. Padding, where mask is False, counts in neither; a sequence of padding is left out.
    Raises ValueError when the mask does not fit the routing, or holds no token. Source: arXiv 2412.19437, equations 17 to 20.
    """
    if mask.numel() != len(routing.indices):
        raise ValueError(f"mask has shape {tuple(mask.shape)} for {len(routing.indices)} tokens; expected [batch, tokens]")
    if not mask.any():
        raise ValueError("the mask holds no token: there is no load to balance")
    n_experts, k = routing.scores.shape[1], routing.indices.shape[1]
    sequences = mask if seq_aux else mask.reshape(1, -1)
    here, shape = sequences.unsqueeze(-1).to(routing.scores.dtype), (*sequences.shape, n_experts)
    tokens = here.sum(1)
    chosen = torch.zeros_like(routing.scores).scatter_(1, routing.indices, 1.0).view(shape)
    scores = (routing.scores / routing.scores.sum(-1, keepdim=True)).view(shape)
    f = (chosen * here).sum(1) / tokens.clamp(min=1) * n_experts / k
    p = (scores * here).sum(1) / tokens.clamp(min=1)
    return aux_loss_alpha * (f * p).sum() / (tokens > 0).sum()


def by_kind(
    loads: Integer[Tensor, "documents experts"], kinds: Int64[Tensor, " documents"], n_kinds: int
) -> Integer[Tensor, "experts kinds"]:
    """Sum the loads of documents by the documents' kinds."""
    return torch.zeros(n_kinds, loads.shape[1], dtype=loads.dtype, device=loads.device).index_add_(0, kinds, loads).T


def mutual_information(table: Integer[Tensor, "experts kinds"] | Float[Tensor, "experts kinds"]) -> float:
    """Bits that knowing the expert tells about the kind of a token (and the other way round), from a table of counts.

    0 when experts do not care for kinds, at most log2(kinds) when every expert serves one. A table of few counts shows
    some information by chance alone: compare with one whose kinds were shuffled. Raises ValueError for an empty table.
    """
    if table.sum() <= 0:
        raise ValueError("mutual_information of a table without counts")
    p = table.double() / table.sum()
    independent = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return (p * (p / independent).log2()).nan_to_num(0.0).sum().item()
