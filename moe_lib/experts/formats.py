"""A layer stored in one precision for a block that holds another: quantised tensors opened under their plain names, one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from moe_lib.experts import fp8, int4


class Opened(Mapping):
    """`tensors`, in which a weight stored as fp8 or int4 appears as one plain weight, unless `wanted` names its stored parts.

    It is dequantised each time it is asked for and never kept, so a whole layer can pass through. `wanted` holds a block's own
    names; what it wants of one expert it wants of all.
    """

    def __init__(self, tensors: Mapping[str, Tensor], wanted: Iterable[str], dtype: torch.dtype = torch.float32) -> None:
        self.tensors, self.dtype = tensors, dtype
        kinds = {_any_expert(name) for name in wanted}
        ends = (".weight_scale_inv", ".weight_packed")
        stored = {name: end for name in tensors for end in ends if name.endswith(end) and _any_expert(name) not in kinds}
        self.closed = {name.removesuffix(end) + ".weight": end for name, end in stored.items()}
        parts = {key + part for key in self.closed for part in ("", "_scale_inv", "_packed", "_scale", "_shape")}
        self.names = dict.fromkeys([*(name for name in tensors if name not in parts), *self.closed])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.closed:
            if name not in self.names:
                raise KeyError(name)
            return self.tensors[name]
        if self.closed[name] == ".weight_packed":
            return int4.dequantise(self._part(name, "_packed"), self._part(name, "_scale"), self.dtype)
        return fp8.dequantise(self._part(name, ""), self._part(name, "_scale_inv"), dtype=self.dtype)

    def _part(self, name: str, part: str) -> Tensor:
        if name + part not in self.tensors:
            raise KeyError(f"missing: {name + part}, without which {name + self.closed[name].removeprefix('.weight')} says nothing")
        return self.tensors[name + part]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Below(Mapping):
    """The part of `tensors` whose names start with `prefix`, without it."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.tensors if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def of_all_experts(names: Iterable[str], n_experts: int) -> set[str]:
    """The same names for every expert of the config, whichever the given ones are of."""
    ends = {name.split(".", 2)[2] for name in names if re.match(r"experts\.\d+\.", name)}
    return {f"experts.{e}.{end}" for e in range(n_experts) for end in ends}


def _any_expert(name: str) -> str:
    return re.sub(r"^experts\.\d+\.", "experts.*.", name)


def castable(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether copying keeps the meaning: the same dtype, or two floating ones that need no scale."""
    return given == own or all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (given, own))


def all_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # has NaN, as all ones behind the sign, and no infinity; torch cannot tell
        return not (tensor.contiguous().view(torch.uint8) & 0x7F == 0x7F).any().item()
    return bool((tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor).isfinite().all())
