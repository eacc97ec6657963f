"""Count what a computation asks of the machine, rather than guess it: matrix products, other operations, FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Work(TorchDispatchMode):
    """Counts while it is on: `with Work() as work: …`. Needs no_grad or a forward alone: a backward would be counted with it.

    names      how often each operation ran that starts a kernel. Left out: views, which move no data, and casts and reads on
               the host, which differ between a CPU and a GPU
    products   how many of them were matrix products (a grouped product is one)
    flops      floating-point operations of the matrix products: two for each pair of numbers multiplied
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.products = self.flops = 0

    @property
    def others(self) -> int:
        """Operations that are not matrix products: gathers, sorts, activations, sums."""
        return self.names.total() - self.products

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if not func.is_view and operation.__name__ not in ("_to_copy", "_local_scalar_dense"):
            self.names[operation.__name__] += 1
        if operation is torch.ops.aten._grouped_mm:  # [rows, m] with [experts, m, n]: each row meets one expert's matrix
            self.products += 1
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif operation in flop_registry:
            self.products += 1
            self.flops += flop_registry[operation](*args, **(kwargs or {}), out_val=out)
        return out


def work_of(f: Callable, *args) -> Work:
    """What one call of f(*args) takes, counted without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations run sooner without a second thread to wait for, and the counts are the same
    try:
        with torch.no_grad(), Work() as work:
            f(*args)
    finally:
        torch.set_num_threads(threads)
    return work
