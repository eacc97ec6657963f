"""How fast the block could be: bytes and FLOPs of a batch, a machine's two ceilings, and the floor that follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from moe_lib.config import MoEConfig

PRECISIONS = ("bf16", "fp8", "int4")


@dataclass(frozen=True)
class Machine:
    """Two ceilings, and a third between ranks. Bytes and operations per second."""

    name: str
    read: float
    """Bytes of weights that the processor reads from its memory in a second."""
    rates: Mapping[str, float] = field(hash=False)
    """FLOP/s of large matrix products, by the weights' precision: int4 weights are multiplied as bfloat16."""
    link: float | None = None
    """Bytes that one rank sends to the others in a second."""


# The read is the data sheet's; 790 TFLOP/s is measured in bfloat16, 1350 what DeepGEMM reaches in fp8 at Kimi K2's shapes; the link
# is what DeepEP's published times amount to.
H200 = Machine("H200", 4.8e12, {"bf16": 790e12, "fp8": 1350e12, "int4": 790e12}, 50e9)


@dataclass(frozen=True)
class Floor:
    """What one forward of the block takes at the least, on each rank. Seconds, bytes and operations."""

    hit: float
    """Different routed experts whose weights a rank reads, expected."""
    bytes: float
    flops: float
    memory: float
    """Seconds to read and write the bytes."""
    compute: float
    """Seconds to do the operations."""
    exchange: float
    """Seconds of the two all-to-alls; 0 on one rank."""

    @property
    def seconds(self) -> float:
        """Reading and computing overlap, so the longer of the two; the exchange comes before and after."""
        return max(self.memory, self.compute) + self.exchange

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "compute" or "exchange"."""
        return max(("memory", "compute", "exchange"), key=lambda name: getattr(self, name))


def floor(config: MoEConfig, tokens: int, precision: str, machine: Machine, ranks: int = 1) -> Floor:
    """The floor for a batch of `tokens`, over all ranks together, each token routed uniformly.

    Bytes: the weights of the experts *hit*, not of all; the shared expert and the router (bfloat16, its bias float32), which every
    rank holds; the input and the output in bfloat16. What moves between caches is not counted.
    Raises ValueError for no tokens, an unknown precision, ranks that do not divide the experts, several ranks without a link.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; expected at least 1")
    if precision not in machine.rates:
        raise ValueError(f"precision is {precision!r}; {machine.name} has rates for {', '.join(machine.rates)}")
    if ranks not in config.ep_sizes:
        raise ValueError(f"{config.n_routed_experts} experts cannot be shared equally among {ranks} ranks; see config.ep_sizes")
    hit = config.expected_distinct_experts(tokens) / ranks
    shared = config.n_shared_experts
    router = 2 * config.n_routed_experts * config.hidden_size + 4 * config.n_routed_experts
    rows = tokens / ranks * config.hidden_size * 2 * 2
    read = (hit + shared) * config.expert_bytes(precision) + router + rows
    flops = tokens / ranks * config.flops_per_token
    exchange = 0.0
    if ranks > 1:
        if machine.link is None:
            raise ValueError(f"{machine.name} has no link; give Machine one to share the experts among {ranks} ranks")
        exchange = sum(exchange_bytes(config, tokens / ranks, ranks)) / machine.link
    return Floor(hit, read, flops, read / machine.read, flops / machine.rates[precision], exchange)


def exchange_bytes(config: MoEConfig, tokens: float | int, ranks: int) -> tuple[float, float]:
    """Bytes that one rank with `tokens` tokens sends, out and back: a row for each choice whose expert lives elsewhere.

    Out in fp8 with a float32 scale for every 128 values, back in bfloat16, as DeepEP does.
    """
    away = tokens * config.num_experts_per_tok * (1 - 1 / ranks)
    out = config.hidden_size + 4 * -(-config.hidden_size // 128)
    return away * out, away * 2 * config.hidden_size


def crossing(config: MoEConfig, precision: str, machine: Machine) -> int:
    """The fewest tokens at which computing takes longer than reading."""
    low, high = 1, 1
    while (f := floor(config, high, precision, machine)).compute <= f.memory:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        f = floor(config, middle, precision, machine)
        low, high = (middle + 1, high) if f.compute <= f.memory else (low, middle)
    return low


# --- this machine's own ceilings -----------------------------------------------------------------------------------------


def this_machine(device: torch.device | str = "cpu") -> Machine:
    """Measure both ceilings here, in a few seconds: the best of several reads of 1 GiB and of bfloat16 matrix products."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this CPU, {torch.get_num_threads()} threads"
    rate = matmul_rate(device)
    return Machine(name, read_rate(device), dict.fromkeys(PRECISIONS, rate))


def read_rate(device: torch.device | str = "cpu", gib: float = 1.0) -> float:
    """Bytes per second at which a sum reads a tensor too large for any cache."""
    numbers = torch.ones(int(gib * 2**28), device=device)
    return numbers.nbytes / min(seconds(numbers.sum, device, times=5))


def matmul_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, size: int | None = None) -> float:
    """FLOP/s of a square matrix product; by default one that keeps the device busy for about a tenth of a second or less."""
    size = size or (8192 if torch.device(device).type == "cuda" else 2560)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: a @ b, device, times=5))


def seconds(f: Callable[[], object], device: torch.device | str = "cpu", times: int = 5) -> list[float]:
    """How long each of `times` calls took, after one that is not counted; waits for a GPU to finish."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)
    took = []
    for i in range(times + 1):
        wait()
        start = time.perf_counter()
        f()
        wait()
        if i:
            took.append(time.perf_counter() - start)
    return took


def typical(f: Callable[[], object], device: torch.device | str = "cpu", times: int = 5) -> float:
    """The median of `seconds`."""
    return median(seconds(f, device, times))
