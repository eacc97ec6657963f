"""Training runs kept in data/runs/, so that a notebook compares many seeds without training them. `make runs` makes them anew."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from moe_lib.corpus import Documents
from moe_lib.paths import DATA
from moe_lib.toy import Recipe, Run

FOLDER = DATA / "runs"
SEEDS = (0, 1, 2)
SETTINGS: Mapping[str, Recipe] = {
    "no help": Recipe(),
    "bias 0.0001": Recipe(gamma=1e-4),
    "bias 0.001": Recipe(gamma=1e-3),
    "bias 0.01": Recipe(gamma=1e-2),
    "bias 0.1": Recipe(gamma=1e-1),
    "auxiliary loss": Recipe(aux_loss_alpha=0.1, seq_aux=False),
    "sequence-wise loss": Recipe(aux_loss_alpha=0.1),
    "sequence-wise loss, K2's alpha": Recipe(aux_loss_alpha=0.001),
    "dense, equal active": Recipe(dense="active"),
    "dense, equal total": Recipe(dense="total"),
}
"""What was trained: every recipe with every seed."""

SMALL = {"losses": np.float32, "loads": np.uint16, "by_kind": np.uint16, "held_out_loads": np.uint8}


def path_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / (re.sub("[^a-z0-9.]+", "-", name.lower()) + ".npz")


def fingerprint(corpus: tuple[Documents, Documents]) -> str:
    """SHA-256 over all tokens and kinds: the same text has the same on every machine."""
    digest = hashlib.sha256()
    for part in corpus:
        for tensor in (part.tokens, part.kinds):
            digest.update(tensor.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def save_runs(path: Path, recipe: Recipe, seeds: Sequence[int], runs: Sequence[Run], corpus: tuple[Documents, Documents]) -> None:
    """Write the runs of one recipe, a seed each. Raises OverflowError when a count does not fit its small type."""
    arrays = {}
    for name, dtype in SMALL.items():
        full = torch.stack([getattr(run, name) for run in runs]).numpy()
        arrays[name] = full.astype(dtype)
        if not np.array_equal(arrays[name], full):
            raise OverflowError(f"{name} reaches {full.max()}, which {np.dtype(dtype)} does not hold")
    arrays["held_out_loss"] = np.array([run.held_out_loss for run in runs])
    about = {"recipe": dataclasses.asdict(recipe), "seeds": list(seeds), "corpus": fingerprint(corpus), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)


def about(path: Path) -> dict:
    """Of a stored file: the recipe, the seeds, the corpus's fingerprint and the torch that trained."""
    with np.load(path, allow_pickle=False) as stored:
        return json.loads(str(stored["about"]))


def load_runs(name: str, folder: Path = FOLDER) -> list[Run]:
    """The stored runs of one of SETTINGS, in the order of their seeds.

    Raises KeyError for an unknown name, ValueError when the file was made by another recipe than SETTINGS now holds.
    """
    if name not in SETTINGS:
        raise KeyError(f"no setting {name!r}; there are {', '.join(map(repr, SETTINGS))}")
    path = path_of(name, folder)
    if about(path)["recipe"] != dataclasses.asdict(SETTINGS[name]):
        raise ValueError(f"{path.name} was made by another recipe than SETTINGS[{name!r}] holds now; train again with: make runs")
    with np.load(path, allow_pickle=False) as stored:
        arrays = {key: torch.from_numpy(stored[key].astype(np.float32 if key == "losses" else np.int64)) for key in SMALL}
        losses = stored["held_out_loss"].tolist()
    return [Run(held_out_loss=loss, **{key: arrays[key][i] for key in SMALL}) for i, loss in enumerate(losses)]
