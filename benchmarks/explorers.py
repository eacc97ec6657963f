"""How long each explorer takes to draw, in the kernel: the median and the slowest of many redraws, and the size of what is sent.

    python benchmarks/explorers.py [--redraws N]

Every public function of moe_lib.explorers that returns an Explorer and can be called without arguments is measured. Its controls
are moved in turn, one step a redraw, as a reader would. The aim is a median under 30 ms.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator

import ipywidgets as W

import moe_lib.explorers
from moe_lib.explorers.base import Explorer

AIM_MS = 30


def explorers() -> Iterator[tuple[str, Callable[[], Explorer]]]:
    """Name and maker of every explorer there is."""
    for module in pkgutil.iter_modules(moe_lib.explorers.__path__):
        found = importlib.import_module(f"moe_lib.explorers.{module.name}")
        for name, make in inspect.getmembers(found, inspect.isfunction):
            own = make.__module__ == found.__name__ and not name.startswith("_")
            if own and inspect.signature(make).return_annotation in ("Explorer", Explorer) and _needs_nothing(make):
                yield f"{module.name}.{name}", make


def _needs_nothing(make: Callable) -> bool:
    return all(p.default is not inspect.Parameter.empty for p in inspect.signature(make).parameters.values())


def values_of(control: W.Widget) -> list[object]:
    """Some values that a reader can set on this control, from end to end."""
    if isinstance(control, W.Checkbox | W.ToggleButton):
        return [True, False]
    if hasattr(control, "options"):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    if hasattr(control, "min"):
        steps = [control.min + (control.max - control.min) * i / 12 for i in range(13)]
        return [round(s) if isinstance(control.min, int) else s for s in steps]
    return [control.value]


def states(explorer: Explorer) -> Iterator[dict[str, object]]:
    """The explorer's own values with one control moved, for each of its controls in turn, round and round."""
    start = explorer.values()
    tours = [[{**start, name: value} for value in values_of(control)] for name, control in explorer.controls.items()]
    return itertools.cycle(state for moves in itertools.zip_longest(*tours) for state in moves if state is not None)


def measure(make: Callable[[], Explorer], redraws: int) -> tuple[list[float], float, int]:
    """Milliseconds of each redraw, milliseconds to open, and the largest drawing in bytes."""
    begun = time.perf_counter()
    explorer = make()
    opened = (time.perf_counter() - begun) * 1e3
    if explorer.error:
        raise explorer.error
    took, largest = [], 0
    for state in itertools.islice(states(explorer), redraws):
        begun = time.perf_counter()
        html = explorer.draw(**state)
        took.append((time.perf_counter() - begun) * 1e3)
        largest = max(largest, len(html.encode()))
    return took, opened, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraws", type=int, default=200)
    redraws = parser.parse_args().redraws
    print(f"{'explorer':<28}{'median ms':>11}{'slowest 5%':>12}{'opens in ms':>13}{'largest KB':>12}   aim {AIM_MS} ms")
    for name, make in explorers():
        took, opened, largest = measure(make, redraws)
        median, slow = statistics.median(took), statistics.quantiles(took, n=20)[-1]
        verdict = "met" if median < AIM_MS else "MISSED"
        print(f"{name:<28}{median:>11.1f}{slow:>12.1f}{opened:>13.0f}{largest / 1e3:>12.0f}   {verdict}")


if __name__ == "__main__":
    main()
