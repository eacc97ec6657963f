"""Runs of a made-up model, small and of known tastes, for the tests of what draws runs."""

from itertools import product

import torch

from moe_lib.toy import Run

KINDS = ("sums", "dates", "genes")
STEPS, LAYERS, EXPERTS, TOKENS, K = 23, 2, 6, 300, 2


def made_run(seed, steps=STEPS):
    generator = torch.Generator().manual_seed(seed)
    taste = torch.rand(LAYERS, EXPERTS, 3, generator=generator) ** 3 + 1e-3
    taste[0, 4] = 0  # an expert that idles
    each = torch.zeros(steps, LAYERS, EXPERTS, 3, dtype=torch.int64)
    for step, layer in product(range(steps), range(LAYERS)):
        places = torch.multinomial(taste[layer].flatten(), TOKENS * K, replacement=True, generator=generator)
        each[step, layer] = torch.bincount(places, minlength=3 * EXPERTS).view(EXPERTS, 3)
    windows = torch.stack([window.sum(0) for window in each.split(10)])
    return Run(torch.zeros(steps), each.sum(-1), windows, 1.0, each[:1].sum(-1))


RUNS = {"no help": made_run(0), "bias 0.01": made_run(1)}
