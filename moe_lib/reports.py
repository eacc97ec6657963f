"""Dated measurements of other machines, from data/measured/: what `python benchmarks/block.py --save` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass

from moe_lib.paths import DATA


@dataclass(frozen=True)
class Report:
    """One measured forward of the experts' part, by moe_lib."""

    date: str
    machine: str
    gpu: bool
    precision: str
    experts: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        """A row of a Markdown table."""
        return f"| {self.machine} | {self.date} | {self.precision} | {self.experts} | {self.tokens:,} | {1e3 * self.seconds:,.1f} |"


def reports() -> list[Report]:
    """All of them, oldest first; an empty list where there are none."""
    found = []
    for path in sorted((DATA / "measured").glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        if "runs" not in told:  # measurements of other things may lie beside these
            continue
        hardware = told["hardware"]
        gpu = "gpu" in hardware
        machine = f"{hardware['gpus']} × {hardware['gpu']}" if gpu else f"{hardware['cpu']}, {hardware['cores']} cores"
        for run in told["runs"]:
            ours = run["results"].get("moe_lib", {}).get("seconds", {})
            found += [Report(told["date"], machine, gpu, run["precision"], run["experts"], int(t), s) for t, s in ours.items()]
    return found
