"""What is known of each operation of the block, read from data/evidence.toml: shape, equation, source, and the evidence for it."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache

from moe_lib.config import MoEConfig
from moe_lib.paths import DATA

# Names of dimensions in a shape, and the config field that fixes them; None where the batch decides.
DIMS = {
    "hidden": "hidden_size",
    "inter": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "k": "num_experts_per_tok",
    "batch": None,
    "tokens": None,
    "rows": None,
    "...": None,
}
KINDS = {"direct": "direct evidence", "copy": "line numbers read in a copy", "derived": "derived from config.json"}


@dataclass(frozen=True)
class Symbol:
    """One symbol of an equation. `mark`: the text it stands for in the code shown; `shape`: names of DIMS, "" for no tensor."""

    s: str
    mark: str
    role: str
    means: str
    shape: str = ""

    def dims(self, config: MoEConfig) -> list[str]:
        """The shape in words: ["...", "2048 inter"]."""
        fixed = {name: getattr(config, field) for name, field in DIMS.items() if field}
        return [f"{fixed[name]} {name}" if name in fixed else name for name in self.shape.split()]


@dataclass(frozen=True)
class Evidence:
    """A claim, the lines of the reference it rests on (None when derived), and how they are known: a key of KINDS."""

    kind: str
    claim: str
    lines: tuple[int, int] | None = None


@dataclass(frozen=True)
class Node:
    """One operation of the block; the fields are explained at the top of data/evidence.toml."""

    id: str
    title: str
    label: str
    box: tuple[int, int, int, int]
    trail: tuple[str, ...]
    notebook: str
    code: tuple[str, str]
    equation: str
    says: str
    symbols: tuple[Symbol, ...]
    evidence: tuple[Evidence, ...]
    params: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def n_params(self, config: MoEConfig) -> int:
        return math.prod(getattr(config, factor) for factor in self.params) if self.params else 0

    @property
    def source(self) -> str:
        return cut(*self.code)

    @property
    def source_file(self) -> str:
        module, _ = _resolve(self.code[0])
        return module.__name__.replace(".", "/") + ".py"

    @property
    def source_name(self) -> str:
        module, _ = _resolve(self.code[0])
        return self.code[0].removeprefix(module.__name__ + ".")


def _resolve(symbol: str) -> tuple[object, object]:
    """The module and the object that a dotted name means. Raises LookupError when there is none."""
    names = symbol.split(".")
    for cut_at in range(len(names), 0, -1):
        try:
            module = importlib.import_module(".".join(names[:cut_at]))
        except ModuleNotFoundError:
            continue
        found = module
        for name in names[cut_at:]:
            if not hasattr(found, name):
                raise LookupError(f"{symbol}: {module.__name__} has no {'.'.join(names[cut_at:])}; correct data/evidence.toml")
            found = getattr(found, name)
        return module, found
    raise LookupError(f"{symbol}: no such module; correct data/evidence.toml")


@cache
def cut(symbol: str, part: str) -> str:
    """The smallest statement or expression in the source of `symbol` that contains `part`.

    Raises LookupError when no piece contains it, or more than one and neither within the other.
    """
    source = textwrap.dedent(inspect.getsource(_resolve(symbol)[1]))
    pieces = []
    for node in ast.walk(ast.parse(source)):
        simple = isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not hasattr(node, "body"))
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if simple and not docstring and not isinstance(node, ast.Constant):
            text = ast.get_source_segment(source, node)
            if part in text:
                pieces.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text))
    inner = [p for p in pieces if not any(q != p and p[0] <= q[0] and q[1] <= p[1] for q in pieces)]
    if len({p[:2] for p in inner}) != 1:
        raise LookupError(f"{part!r} is in {len(inner)} separate pieces of {symbol}; data/evidence.toml must name exactly one")
    first, *rest = inner[0][2].splitlines()
    return "\n".join([first, *textwrap.dedent("\n".join(rest)).splitlines()])


def _filled(value, config: MoEConfig):
    """Every {field} of the config, in every string below value, replaced with its number."""
    if isinstance(value, str):
        return value.format_map({name: getattr(config, name) for name in dir(config) if f"{{{name}}}" in value})
    if isinstance(value, dict):
        return {key: item if key == "equation" else _filled(item, config) for key, item in value.items()}
    return [_filled(item, config) for item in value] if isinstance(value, list) else value


@cache
def nodes(config: MoEConfig) -> dict[str, Node]:
    """All operations by id, in the order of data/evidence.toml, with this config's numbers in their words."""
    data = _filled(_read(), config)
    out = {}
    for raw in data["node"]:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        fields["trail"] = tuple(data["trails"][raw["trail"]])
        fields["symbols"] = tuple(Symbol(**symbol) for symbol in raw["symbols"])
        fields["evidence"] = tuple(Evidence(**{**e, "lines": tuple(e["lines"]) if "lines" in e else None}) for e in raw["evidence"])
        out[raw["id"]] = Node(**fields)
    return out


def reference(lines: tuple[int, int]) -> tuple[str, str]:
    """How lines of the reference are named, and their address at the pinned revision."""
    ref = _read()["reference"]
    first, last = lines
    words = f"{ref['file']} {first}" + (f"–{last}" if last != first else "")
    anchor = f"L{first}" + (f"-L{last}" if last != first else "")
    return words, f"https://huggingface.co/{ref['repository']}/blob/{ref['revision']}/{ref['file']}#{anchor}"


@cache
def _read() -> dict:
    with open(DATA / "evidence.toml", "rb") as file:
        return tomllib.load(file)
