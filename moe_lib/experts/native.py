"""kernels.c, compiled for this processor the first time it is wanted and kept in the user's cache; None where it cannot be."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FORMATS = {torch.bfloat16: 0, torch.int32: 1, torch.float8_e4m3fn: 2}  # as kernels.c numbers them
# The first that the compiler takes: some want -mcpu for -march, and some have no OpenMP, which costs all threads but one.
FLAGS = (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-march=native"], ["-mcpu=native"], [])


@functools.cache
def kernels() -> tuple[ctypes.CDLL | None, str]:
    """The compiled library, or None and the reason in words. Takes a second or two once per machine."""
    compiler = next(
        (path for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang, or the one that CC names)"
    try:
        return ctypes.CDLL(str(_build(compiler))), ""
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{compiler} could not build it ({error})"


def _build(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    key = hashlib.sha256("\n".join([SOURCE.read_text(), version, str(FLAGS), _processor()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_lib"
    built = folder / f"kernels-{key}.so"
    if built.exists():
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder))
    except OSError:  # a home that cannot be written to: build for this process alone
        work = Path(tempfile.mkdtemp())
        built = work / built.name
    target = work / "building.so"
    command = [compiler, "-O3", "-shared", "-fPIC", str(SOURCE), "-o", str(target), "-lm"]
    for flags in FLAGS:
        done = subprocess.run(command[:1] + flags + command[1:], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
    else:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}")
    os.replace(target, built)  # at once, so that another process sees all of it or nothing
    if work != built.parent:
        work.rmdir()
    return built


def _processor() -> str:
    """What -march=native depends on: a home may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])


def wide(hidden: int, inter: int) -> bool:
    """Whether the library multiplies pairs of bfloat16 (AVX-512 BF16) for experts of these sizes."""
    library, _ = kernels()
    return library is not None and all(library.takes_wide(ctypes.c_long(size)) for size in (hidden, inter))


def serves(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether `experts` can take these: rows in bfloat16 on a CPU, weights as they lie, no gradient wanted, a C compiler."""
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (rows, *weights))
    fit = rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and all(tensor.is_contiguous() for tensor in weights)
    return fit and len(rows) > 0 and not wants_gradient and kernels()[0] is not None


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 [n, k] of one fp8 or int4 weight, each product with its scale rounded once."""
    library, _ = kernels()
    n, k = weight.shape[0], weight.shape[1] * (8 if FORMATS[weight.dtype] == 1 else 1)
    out = torch.empty(n, k, dtype=torch.bfloat16)
    library.dequantise(FORMATS[weight.dtype], *map(_at, (weight, scale, out)), *map(ctypes.c_long, (n, k)), torch.get_num_threads())
    return out


def experts(rows: Tensor, ends: list[int], projections: list[tuple[Tensor, Tensor | None]], allow_wide: bool = True) -> Tensor:
    """All experts on their rows, bfloat16 and sorted by expert; `projections`: gate, up, down, stacked (weight, scale or None)."""
    library, _ = kernels()
    rows = rows.contiguous()
    n, hidden, inter = len(rows), rows.shape[1], projections[0][0].shape[1]
    y = torch.empty_like(rows)
    work = rows.new_empty(2 * n, hidden), rows.new_empty(2 * n, inter)
    sizes = (ctypes.c_long(size) for size in (len(ends), hidden, inter))
    weights = [_at(tensor) for pair in projections for tensor in pair]
    ends, kind = (ctypes.c_long * len(ends))(*ends), FORMATS[projections[0][0].dtype]
    library.experts_forward(_at(rows), _at(y), *map(_at, work), ends, *sizes, kind, *weights, allow_wide, torch.get_num_threads())
    return y


def _at(tensor: Tensor | None) -> ctypes.c_void_p | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "the kernels read plain memory"
    return ctypes.c_void_p(tensor.data_ptr())
