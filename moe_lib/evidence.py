"""What is known of each operation of the block, read from data/evidence.toml: equation, shapes, code, and how one knows."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache

from moe_lib.config import KIMI_K2
from moe_lib.paths import DATA

# Names of dimensions in a shape, and the config field that fixes them; None where the input decides.
DIMS = {
    "hidden": "hidden_size",
    "inter": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "k": "num_experts_per_tok",
    "tokens": None,
    "rows": None,
    "...": None,
}
KINDS = {"direct": "Direct evidence", "copy": "Line numbers read in a copy", "derived": "Derived from config.json"}


@dataclass(frozen=True)
class Symbol:
    """One symbol of an equation. `mark`: the text it stands for in the code shown; `shape`: names of DIMS, "" for no tensor."""

    s: str
    mark: str
    role: str
    means: str
    shape: str = ""

    @property
    def dims(self) -> str:
        """The shape in words, with K2's numbers: "[…, 2048 inter]"."""
        words = (f"{getattr(KIMI_K2, DIMS[name])} {name}" if DIMS[name] else name for name in self.shape.split())
        return f"[{', '.join(words)}]".replace("...", "…") if self.shape else ""


@dataclass(frozen=True)
class Evidence:
    """A claim, how it is known (a key of KINDS), and the lines of the reference it rests on: None when derived."""

    kind: str
    claim: str
    lines: tuple[int, int] | None = None


@dataclass(frozen=True)
class Code:
    """Pieces of our own source, and where they stand: "moe_lib/expert.py" and "swiglu"."""

    text: str
    file: str
    name: str


@dataclass(frozen=True)
class Node:
    """One operation of the block; the fields are explained at the top of data/evidence.toml."""

    id: str
    title: str
    label: str
    box: tuple[int, ...]
    trail: tuple[str, ...]
    notebook: tuple[str, str] | None
    code: tuple[Code, ...]
    equation: str
    says: str
    symbols: tuple[Symbol, ...]
    evidence: tuple[Evidence, ...]
    params: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    @property
    def param_factors(self) -> list[int]:
        return [getattr(KIMI_K2, factor) for factor in self.params]

    @property
    def n_params(self) -> int:
        return math.prod(self.param_factors) if self.params else 0


@cache
def nodes() -> dict[str, Node]:
    """All operations by id, in the order in which data flows."""
    data = _filled(_read())
    out = {}
    for raw in data["node"]:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        fields["trail"] = tuple(data["trails"][raw["trail"]])
        fields["notebook"] = tuple(data["notebooks"][raw["notebook"]]) if raw["notebook"] in data["notebooks"] else None
        fields["code"] = tuple(_code(*where) for where in raw["code"])
        fields["symbols"] = tuple(Symbol(**symbol) for symbol in raw["symbols"])
        fields["evidence"] = tuple(Evidence(**{**e, "lines": tuple(e["lines"]) if "lines" in e else None}) for e in raw["evidence"])
        out[raw["id"]] = Node(**fields)
    return out


def reference(lines: tuple[int, int] | None = None) -> tuple[str, str]:
    """What lines of the reference are called, and their address at the pinned revision; without lines, the whole file."""
    ref = _read()["reference"]
    address = f"https://huggingface.co/{ref['repository']}/blob/{ref['revision']}/{ref['file']}"
    if lines is None:
        return f"{ref['repository']}, {ref['file']} at revision {ref['revision']}", address
    first, last = lines
    one = first == last
    return f"line {first}" if one else f"lines {first}–{last}", f"{address}#L{first}" + ("" if one else f"-L{last}")


def cut(symbol: str, part: str) -> str:
    """The smallest statement or expression in the source of `symbol` (a dotted name) that contains `part`.

    Raises LookupError when there is no such symbol, when no piece contains the part, and when several do of which none lies
    within all others.
    """
    return _cut(_resolve(symbol)[1], symbol, part)


def _cut(found: object, symbol: str, part: str) -> str:
    source = textwrap.dedent(inspect.getsource(found))
    pieces = []
    for node in ast.walk(ast.parse(source)):
        simple = isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not hasattr(node, "body"))
        words = isinstance(node, ast.Constant) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        if simple and not words and part in (text := ast.get_source_segment(source, node)):
            pieces.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text))
    inner = {p for p in pieces if all(p == q or not (p[0] <= q[0] and q[1] <= p[1]) for q in pieces)}
    if len(inner) != 1:
        raise LookupError(f"{part!r} is in {len(inner)} separate pieces of {symbol}; name exactly one in data/evidence.toml")
    first, *rest = inner.pop()[2].splitlines()
    return "\n".join([first, *textwrap.dedent("\n".join(rest)).splitlines()])


def _code(symbol: str, *parts: str) -> Code:
    module, found = _resolve(symbol)
    text = "\n".join(_cut(found, symbol, part) for part in parts)
    return Code(text, module.__name__.replace(".", "/") + ".py", symbol.removeprefix(module.__name__ + "."))


def _resolve(symbol: str) -> tuple[object, object]:
    """The module and the object that a dotted name means."""
    names = symbol.split(".")
    for end in range(len(names) - 1, 0, -1):
        path = ".".join(names[:end])
        try:
            module = found = importlib.import_module(path)
        except ModuleNotFoundError as missing:
            if missing.name != path and not path.startswith(f"{missing.name}."):
                raise  # the module is there; something that it needs is not
            continue
        for name in names[end:]:
            if not hasattr(found, name):
                raise LookupError(f"{symbol}: {path} has no {'.'.join(names[end:])}; correct data/evidence.toml")
            found = getattr(found, name)
        return module, found
    raise LookupError(f"{symbol}: no such module; correct data/evidence.toml")


def _filled(value):
    """Every {field} of the config, in every string below value but an equation, replaced with K2's number."""
    if isinstance(value, str):
        return value.format_map({name: getattr(KIMI_K2, name) for name in dir(KIMI_K2) if f"{{{name}}}" in value})
    if isinstance(value, dict):
        return {key: item if key == "equation" else _filled(item) for key, item in value.items()}
    return [_filled(item) for item in value] if isinstance(value, list) else value


@cache
def _read() -> dict:
    with open(DATA / "evidence.toml", "rb") as file:
        return tomllib.load(file)
