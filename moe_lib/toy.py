"""A language model small enough to train while one watches: attention is torch's own, the feed-forward layers are MoEBlocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from moe_lib.balance import auxiliary_loss, load_by_kind, update_bias
from moe_lib.block import MoEBlock
from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.corpus import KINDS, LENGTH, PAD, VOCABULARY, Documents
from moe_lib.expert import SwiGLUExpert
from moe_lib.router import Routing

TOY = KIMI_K2.replace(
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=32,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
)
"""Kimi K2's gate, shared expert and scale at a size for two cores; every layer is a mixture of experts."""

DENSE = {
    "active": lambda config: config.num_experts_per_tok + config.n_shared_experts,
    "total": lambda config: config.n_routed_experts + config.n_shared_experts,
}
"""How many experts wide the feed-forward of a dense model must be to have as many weights as a token uses, or as there are."""


@dataclass(frozen=True)
class Recipe:
    """How to train. `gamma` and `aux_loss_alpha` are the two cures; both 0 is no help at all.

    dense: None for the mixture, or a name in DENSE for a plain feed-forward instead of it.
    batch: documents of one optimiser step, in `micro_batches` parts whose gradients and loads are summed.
    """

    dense: str | None = None
    gamma: float = 0.0
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    steps: int = 300
    batch: int = 32
    micro_batches: int = 1
    checkpointing: bool = False
    lr: float = 5e-3

    def __post_init__(self) -> None:
        if self.dense is not None and self.dense not in DENSE:
            raise ValueError(f"dense is {self.dense!r}; expected None, {' or '.join(map(repr, DENSE))}")
        if self.dense is not None and (self.gamma or self.aux_loss_alpha):
            raise ValueError(f"dense={self.dense!r} has no experts to balance; leave gamma and aux_loss_alpha at 0")
        if min(self.steps, self.batch, self.micro_batches) < 1 or self.batch % self.micro_batches:
            raise ValueError(
                f"steps={self.steps}, batch={self.batch}, micro_batches={self.micro_batches}; "
                "expected 1 or more of each, and a batch that splits into equal micro-batches"
            )

    def lr_at(self, step: int) -> float:
        """Rises over the first tenth, falls to a tenth over the last two fifths."""
        rise = (step + 1) / (0.1 * self.steps)
        fall = 1 - 0.9 * (step / self.steps - 0.6) / 0.4
        return self.lr * min(1.0, rise, fall)


class Layer(nn.Module):
    """Attention, then a feed-forward; each reads what came in normalised and adds to it."""

    def __init__(self, config: MoEConfig, mlp: nn.Module) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv_proj, self.o_proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.mlp = mlp

    def forward(self, x: Float[Tensor, "batch tokens hidden"]) -> tuple[Float[Tensor, "batch tokens hidden"], Routing | None]:
        q, k, v = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # padding is on the right, so no token sees any
        x = x + self.o_proj(seen.transpose(1, 2).flatten(2))
        if isinstance(self.mlp, MoEBlock):
            y, routing = self.mlp(self.post_attention_layernorm(x), return_routing=True)
            return x + y, routing
        return x + self.mlp(self.post_attention_layernorm(x)), None


class ToyModel(nn.Module):
    """Decoder over characters. `dense`: None, or a name in DENSE. `experts`: as MoEBlock takes them, by name.

    What the gates decided is returned, not kept, so a recomputed forward (activation checkpointing) cannot count a token twice.
    """

    def __init__(self, config: MoEConfig = TOY, dense: str | None = None, experts: str = "grouped") -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.embed_tokens, self.embed_positions = nn.Embedding(config.vocab_size, hidden), nn.Embedding(LENGTH, hidden)
        nn.init.normal_(self.embed_positions.weight, std=0.1)
        width = 0 if dense is None else DENSE[dense](config) * config.moe_intermediate_size
        self.layers = nn.ModuleList(
            Layer(config, SwiGLUExpert(hidden, width) if width else MoEBlock(config, experts))
            for _ in range(config.num_hidden_layers)
        )
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(
        self, tokens: Int64[Tensor, "batch tokens"], checkpointing: bool = False
    ) -> tuple[Float[Tensor, "batch tokens vocab"], list[Routing]]:
        """(logits of the next character, one Routing a mixture layer)."""
        x, routings = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]], []
        for layer in self.layers:
            x, routing = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
            routings += [routing] if routing is not None else []
        return self.lm_head(self.norm(x)), routings


def summed_loss(logits: Float[Tensor, "batch tokens vocab"], documents: Documents) -> Float[Tensor, ""]:
    """Cross-entropy of each next character in nats, summed over the characters that have a next one."""
    wanted = documents.tokens[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum")


def predictions(documents: Documents) -> int:
    """How many characters summed_loss sums over: all but the first of each document."""
    return int(documents.mask[:, 1:].sum())


@dataclass(frozen=True)
class Run:
    """What happened while a model trained, and what it can do in the end. Loads count tokens, padding never."""

    losses: Float32[Tensor, " steps"]
    """Training loss of each step, in nats a character, auxiliary loss not included."""
    loads: Int64[Tensor, "steps layers experts"]
    by_kind: Int64[Tensor, "windows layers experts kinds"]
    """Loads by kind of text, summed over the steps of a window."""
    held_out_loss: float
    held_out_loads: Int64[Tensor, "documents layers experts"]
    """Loads on documents that it was not trained on, each by itself."""


WINDOW = 10
"""Steps over which a Run sums its loads by kind."""


def train(
    recipe: Recipe, corpus: tuple[Documents, Documents], model: ToyModel | None = None, seed: int = 0, progress: bool = True
) -> tuple[ToyModel, Run]:
    """Train a model (default: a new one, drawn from `seed`) on batches drawn from `seed`; the model and its Run.

    The global random state is left as it was. On a CPU one thread works: the products are too small to share (on a busy machine a
    second thread made a step ten times as long), and sums come out alike whatever the number of cores.
    """
    documents, held_out = corpus
    if model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ToyModel(dense=recipe.dense).to(documents.tokens.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    with _one_thread():
        losses, counts = _steps(model, optimiser, documents, recipe, generator, progress)
        return model, _run(model, losses, counts, held_out)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _steps(
    model: ToyModel,
    optimiser: torch.optim.Optimizer,
    documents: Documents,
    recipe: Recipe,
    generator: torch.Generator,
    progress: bool,
) -> tuple[Float[Tensor, " steps"], Int64[Tensor, "steps layers experts kinds"]]:
    losses, counts = [], []
    for step in tqdm(range(recipe.steps), desc="training", unit="step", disable=not progress, leave=False):
        rows = torch.randint(len(documents), (recipe.batch,), generator=generator).to(documents.tokens.device)
        for group in optimiser.param_groups:
            group["lr"] = recipe.lr_at(step)
        loss, by_kind = train_step(model, optimiser, documents[rows], recipe)
        losses.append(loss)
        counts.append(by_kind)
    return torch.stack(losses), torch.stack(counts)


def train_step(
    model: ToyModel, optimiser: torch.optim.Optimizer, batch: Documents, recipe: Recipe
) -> tuple[Float[Tensor, ""], Int64[Tensor, "layers experts kinds"]]:
    """One optimiser step, then one step of the balancing bias; (loss, loads by kind) of the batch."""
    optimiser.zero_grad()
    total, loss, by_kind = predictions(batch), 0.0, 0
    for rows in torch.arange(len(batch), device=batch.tokens.device).chunk(recipe.micro_batches):
        part = batch[rows]
        logits, routings = model(part.tokens, recipe.checkpointing)
        part_loss = summed_loss(logits, part) / total
        auxiliary = [auxiliary_loss(r, part.mask, recipe.aux_loss_alpha, recipe.seq_aux) for r in routings if recipe.aux_loss_alpha]
        (part_loss + sum(auxiliary) / recipe.micro_batches).backward()
        loss, by_kind = loss + part_loss.detach(), by_kind + kinds_served(routings, part, model.config)
    optimiser.step()
    if recipe.gamma:
        for layer, counts in zip(model.layers, by_kind):
            update_bias(layer.mlp.gate, counts.sum(-1), recipe.gamma)
    return loss, by_kind


def kinds_served(routings: list[Routing], documents: Documents, config: MoEConfig) -> Int64[Tensor, "layers experts kinds"]:
    """How many tokens of each kind every expert of every mixture layer serves. A dense model has no layers here."""
    sizes = config.n_routed_experts, len(KINDS)
    tables = [load_by_kind(r.indices, documents.token_kinds, *sizes, documents.mask) for r in routings]
    return torch.stack(tables) if tables else torch.zeros(0, *sizes, dtype=torch.int64)


@torch.no_grad()
def evaluate(model: ToyModel, documents: Documents) -> tuple[float, Int64[Tensor, "documents layers experts"]]:
    """(loss in nats a character, loads of each document) on documents that are not trained on."""
    loss, loads = 0.0, []
    experts, which = model.config.n_routed_experts, torch.arange(len(documents), device=documents.tokens.device)
    for rows in which.split(64):
        part = documents[rows]
        logits, routings = model(part.tokens)
        number = torch.arange(len(part), device=rows.device).unsqueeze(1).expand_as(part.tokens)
        tables = [load_by_kind(r.indices, number, experts, len(part), part.mask).T for r in routings]
        loads.append(torch.stack(tables, 1) if tables else torch.zeros(len(part), 0, experts, dtype=torch.int64))
        loss += summed_loss(logits, part).item()
    return loss / predictions(documents), torch.cat(loads)


def _run(model: ToyModel, losses: Tensor, counts: Tensor, held_out: Documents) -> Run:
    held_out_loss, held_out_loads = evaluate(model, held_out)
    windows = torch.stack([window.sum(0) for window in counts.split(WINDOW)])
    return Run(losses.float().cpu(), counts.sum(-1).cpu(), windows.cpu(), held_out_loss, held_out_loads.cpu())
