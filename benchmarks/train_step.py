"""How long a training step of notebook 04's model takes with each way to run its experts, and that of the dense models beside it.

    python benchmarks/train_step.py [--rounds N]

loop            a module an expert
one by one      GroupedExperts, each expert over views of the stacks
grouped         GroupedExperts, grouped matrix products
dense einsum    every expert for every token, masked by the gate's weights: no sort, but experts / k times the work

All start from the same weights and see the same batches, turn by turn; the best of many turns counts, so that a busy machine
slows none more than another. Exits with 1 when the way that the model takes by itself is not the fastest, within a tenth.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import moe_lib.experts.grouped as grouped
from moe_lib import MoEBlock, swiglu
from moe_lib.corpus import make_corpus
from moe_lib.toy import TOY, Recipe, ToyModel, train_step

WAYS = ("loop", "one by one", "grouped", "dense einsum")


class EinsumBlock(MoEBlock):
    """The same block, computed for all experts at once: [tokens, experts, inter] in the middle."""

    def forward(self, x: Tensor, return_routing: bool = False):
        routing, flat, e = self.gate(x), x.flatten(0, -2), self.experts
        gate, up = (torch.einsum("th,eih->tei", flat, w) for w in (e.gate_proj, e.up_proj))
        share = torch.zeros_like(routing.scores).scatter(1, routing.indices, routing.weights)
        y = torch.einsum("tei,ehi->th", swiglu(gate, up) * share.unsqueeze(-1), e.down_proj).view(x.shape)
        return (y + self.shared_experts(x), routing) if return_routing else y + self.shared_experts(x)


def model_of(way: str, weights: list[dict[str, Tensor]], rest: dict[str, Tensor]) -> nn.Module:
    model = ToyModel(experts="loop" if way == "loop" else "grouped")
    model.load_state_dict(rest, strict=False)
    for layer, tensors in zip(model.layers, weights):
        layer.mlp.load_hf(tensors)
        if way == "dense einsum":
            layer.mlp.__class__ = EinsumBlock
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    documents, _ = make_corpus(train=2000, held_out=1)
    first = ToyModel()
    weights = [layer.mlp.to_hf() for layer in first.layers]
    rest = {key: value for key, value in first.state_dict().items() if ".mlp." not in key}
    models = {way: model_of(way, weights, rest) for way in WAYS}
    models |= {f"dense model, equal {dense}": ToyModel(dense=dense) for dense in ("active", "total")}
    border = {"one by one": 0, "grouped": 2**62}
    optimisers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    own = grouped.SMALL
    for step in range(rounds + 3):
        batch = documents[torch.randint(len(documents), (32,))]
        for name, model in models.items():
            grouped.SMALL = border.get(name, own)
            start = time.perf_counter()
            loss, _ = train_step(model, optimisers[name], batch, Recipe())
            losses[name].append(loss.item())
            times[name] += [time.perf_counter() - start] if step >= 3 else []
    grouped.SMALL = own

    for way in WAYS:  # a wrong way would be a meaningless time
        torch.testing.assert_close(losses[way][:5], losses["loop"][:5], rtol=1e-3, atol=1e-3)
    taken = "grouped" if models["grouped"].layers[0].mlp.experts.down_proj[0].numel() <= grouped.SMALL else "one by one"
    best = {name: 1000 * min(found) for name, found in times.items()}
    fastest = min(WAYS, key=best.get)
    c = TOY
    print(f"A training step: {batch.tokens.numel()} places, hidden {c.hidden_size}, {c.n_routed_experts} experts of width", end=" ")
    print(f"{c.moe_intermediate_size}, top {c.num_experts_per_tok}, {torch.get_num_threads()} threads, best of {rounds}")
    for name, ms in best.items():
        note = "   what the model takes" if name == taken else ""
        print(f"{name:26} {ms:7.1f} ms   {ms / best[fastest]:5.2f} × the fastest mixture{note}")
    slow = best[taken] > 1.1 * best[fastest]
    if slow:
        print(f"{fastest!r} is faster here than {taken!r}, which the model takes: look at SMALL in moe_lib/experts/grouped.py")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
