"""What ranks do in tests of faults: one of them dies, raises, sleeps or differs, at a chosen moment."""

import os
import signal
import threading
import time

import torch
from torch import nn

import rank_work
from moe_lib import MoEConfig
from moe_lib.expert_parallel import sharded_block
from moe_lib.rollcall import sign_in
from rank_work import sharded


class Trouble(nn.Module):
    """Local experts that get into trouble between the way out and the way back."""

    def __init__(self, inner: nn.Module, trouble) -> None:
        super().__init__()
        self.inner, self.local, self.trouble = inner, inner.local, trouble

    def forward(self, rows, counts):
        self.trouble()
        return self.inner(rows, counts)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def step(group, config: MoEConfig, bad: int, what: str, when: str, seconds: float = 0.0):
    """One forward and backward; rank `bad` gets into trouble `when`: before, between, after (the forward) or in (a transfer)."""

    def trouble():
        if what == "die":
            die()
        if what == "raise":
            raise ZeroDivisionError("trouble of rank's own")
        if what == "sleep":
            time.sleep(seconds)

    block = sharded(group, config, "loop")
    here = group.rank() == bad
    if here and when == "between":
        block.experts.local_experts = Trouble(block.experts.local_experts, trouble)
    x = torch.randn(8, config.hidden_size, requires_grad=True)
    if here and when == "before":
        trouble()
    y = block(x)
    if here and when == "after":
        trouble()
    if not (here and what == "skip backward"):
        y.sum().backward()
    return tuple(y.shape)


def die_in_transfer(group, bad: int, megabytes: int, after: float):
    """All ranks exchange large rows again and again; a timer ends one of them while bytes are on their way."""
    if group.rank() == bad:
        threading.Timer(after, die).start()
    sign_in(group)
    rows = torch.zeros(group.size() * megabytes, 1 << 18)
    for _ in range(1000):
        rank_work.all_to_all(rows, [megabytes] * group.size(), [megabytes] * group.size(), group)


def build(group, configs: list[MoEConfig]):
    return len(sharded_block(configs[group.rank()], group).experts.local_experts.local)
