"""Evidence cards and the map: what an operation of the block is, where it stands, and how one knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from torch import Tensor

from moe_lib.block_drawing import WIDTH, Drawing, drawing
from moe_lib.evidence import KINDS, Code, Evidence, Node, Symbol, nodes, reference

ROLES = {"in": "in", "out": "out", "weight": "with"}
BELOW = dict(zip("ᵢⱼₑ₀₁", "ije01"))  # the letters that equations use as indices


@dataclass(frozen=True, repr=False)
class Card:
    """What card() returns: HTML in a notebook, the same words as plain text in a terminal.

    A symbol lights up in the equation, the code and the shapes when the pointer or the keyboard's focus is on it. Style sheet
    alone does that, within the card: it needs no kernel, no script and no ids, so a card may stand twice on a page.
    """

    node: Node
    live: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> str:
        count, factors = self.node.n_params, [f"{n:,}" for n in self.node.param_factors]
        if not count:
            return "no parameters"
        return f"{count:,} parameters" + (f" = {' × '.join(factors)}" if len(factors) > 1 else "")

    @property
    def footnote(self) -> str:
        """What the … of a shape stands for."""
        if not any("..." in symbol.shape for symbol in self.node.symbols):
            return ""
        alone = "B batch, T positions"
        if "routed experts" in self.node.trail[-1]:
            return f"…: {alone}, for an expert on its own; inside the block: its rows, one for each token that chose it."
        return f"…: {alone}, or whatever stands before the last dimension."

    def shape(self, symbol: Symbol) -> str:
        return symbol.dims + (f", here {self.live[symbol.s]}" if symbol.s in self.live else "")

    def __repr__(self) -> str:
        node = self.node
        lines = [" › ".join(("Kimi K2", *node.trail)), node.title, self.params, ""]
        for code in node.code:
            lines += ["    " + line for line in code.text.splitlines()] + [f"    ({code.file}, {code.name})", ""]
        lines += [node.says, "", f"    {re.sub('[{}]', '', node.equation)}", ""]
        lines += [f"{ROLES[s.role]:>4} {s.s} {self.shape(s)}".rstrip() + f": {s.means}" for s in node.symbols]
        lines += [self.footnote, ""] if self.footnote else [""]
        lines.append(f"Evidence: {reference()[0]}")
        lines += [f"  {KINDS[e.kind]}{', ' + reference(e.lines)[0] if e.lines else ''}: {e.claim}" for e in node.evidence]
        lines += [f"Notebook: {node.notebook[1]}"] if node.notebook else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return style() + self.html()

    def html(self) -> str:
        """The card without its style sheet."""
        node = self.node
        lit = {symbol.s: i for i, symbol in enumerate(node.symbols)}
        quiet = '<p class="moe-quiet">{}</p>'.format
        return "".join(
            (
                f'<div class="moe-card" role="group" aria-label="{escape(node.title)}">',
                quiet(" › ".join(escape(step) for step in ("Kimi K2", *node.trail))),
                f'<p class="moe-title" role="heading" aria-level="4"><b>{escape(node.title)}</b></p>',
                f"<p>{escape(self.params)}</p>",
                quiet("In a checkpoint: " + escape(", ".join(node.tensors))) if node.tensors else "",
                *(_code(code, node.symbols) + quiet(f"{escape(code.file)} · {escape(code.name)}") for code in node.code),
                f'<p class="moe-sentence">{escape(node.says)}</p>',
                f'<p class="moe-equation">{_equation(node.equation, lit)}</p>',
                f'<ul class="moe-shapes">{"".join(self._shape_row(symbol, lit[symbol.s]) for symbol in node.symbols)}</ul>',
                quiet(escape(self.footnote)) if self.footnote else "",
                f'<ul class="moe-evidence">{"".join(map(_evidence_row, node.evidence))}</ul>',
                quiet("Notebook: {}".format('<a href="{}">{}</a>'.format(*node.notebook))) if node.notebook else "",
                quiet("Reference: {}".format('<a href="{1}" target="_blank" rel="noopener">{0}</a>'.format(*reference()))),
                "</div>",
            )
        )

    def _shape_row(self, symbol: Symbol, i: int) -> str:
        words = " ".join(filter(None, (f"<i>{escape(symbol.s)}</i>", escape(self.shape(symbol)))))
        return (
            f'<li><span class="moe-quiet">{ROLES[symbol.role]}</span> <span class="moe-s-{i}" tabindex="0">{words}</span> '
            f"<span>{escape(symbol.means)}</span></li>"
        )


def card(node: str, tensor: Tensor | None = None, **tensors: Tensor) -> Card:
    """The card of one operation, by its id in data/evidence.toml.

    A tensor given is the operation's (first) output, and the card shows its shape beside the symbolic one; others are given by
    symbol: `card("product", a=a, u=u, h=h)`. Raises KeyError for an unknown operation or symbol, ValueError for a tensor whose
    shape cannot be the symbol's, or does not agree with the other tensors.
    """
    known = nodes()
    if node not in known:
        raise KeyError(f"no card {node!r}; there are {', '.join(known)}")
    symbols = {symbol.s: symbol for symbol in known[node].symbols if symbol.shape}
    having = ", ".join(symbols) or "none"
    if tensor is not None:
        outputs = [s for s, symbol in symbols.items() if symbol.role == "out"]
        if not outputs:
            raise KeyError(f"card {node!r} has no tensor as its output; its tensors by symbol: {having}")
        tensors = {outputs[0]: tensor, **tensors}
    if unknown := tensors.keys() - symbols.keys():
        raise KeyError(f"card {node!r} has no tensor {', '.join(sorted(unknown))}; its tensors by symbol: {having}")
    sizes: dict[str, tuple[int, str]] = {}
    for s, value in tensors.items():
        _bind(f"card {node!r}", symbols[s], list(value.shape), sizes)
    return Card(known[node], {s: f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}" for s, value in tensors.items()})


def block_map(lit: Iterable[str] | None = None, interactive: bool = False) -> Drawing | BlockMap:
    """The block as data flows through it.

    With `lit`, ids of operations, a still drawing in which those stand out. Without, the map: clicking an operation, or Enter on
    it, opens its card. Raises KeyError naming an unknown operation.
    """
    return BlockMap() if lit is None or interactive else drawing(list(lit))


class BlockMap:
    """The drawing with a disclosure over each of its boxes that opens the operation's card below. Plain HTML: needs no kernel."""

    def __repr__(self) -> str:
        return f"{drawing([]).alt} Run this cell in JupyterLab to open the card of each."

    def _repr_html_(self) -> str:
        parts = "".join(map(self._part, nodes().values()))
        return f'{style()}<div class="moe-map"><div class="moe-stage">{drawing([])._repr_html_()}{parts}</div></div>'

    def _part(self, node: Node) -> str:
        x, y, width, height = (f"{100 * n / WIDTH:.2f}cqw" for n in node.box)
        return (
            f'<details name="moe-map"{" open" if node.id == "block" else ""}>'
            f'<summary style="left:{x};top:{y};width:{width};height:{height}" title="{escape(node.title)}">'
            f"<span>{escape(node.title)}</span></summary>{Card(node).html()}</details>"
        )


def style() -> str:
    """The style sheet of cards and map, with one rule for each symbol that a card can have."""
    most = max(len(node.symbols) for node in nodes().values())
    rules = (
        f".moe-card:has(.moe-s-{i}:is(:hover, :focus)) :is(.moe-s-{i}, .moe-t-{i})"
        " { color: var(--moe-on-lit); background: var(--moe-lit); }"
        for i in range(most)
    )
    return f"<style>\n{Path(__file__).with_name('cards.css').read_text(encoding='utf-8')}{chr(10).join(rules)}\n</style>"


def find_marks(text: str, mark: str, marks: Iterable[str]) -> list[tuple[int, int]]:
    """Where a symbol's mark stands in a piece of code, as whole words; … is all of it. When `weights =` is a mark too, `weights`
    skips it."""
    if mark == "…":
        return [(0, len(text))]
    left = r"(?<!\w)" if mark[0].isalnum() else ""
    right = r"(?!\w)" if mark[-1].isalnum() else ""
    target = "(?! =)" if f"{mark} =" in marks else ""
    return [match.span() for match in re.finditer(left + re.escape(mark) + right + target, text)]


def _code(code: Code, symbols: tuple[Symbol, ...]) -> str:
    """The code with a span around every mark. One that holds others lights up with them but is not itself sensitive (moe-t):
    a pointer on x in f(x) means x."""
    marks = [symbol.mark for symbol in symbols]
    spans = [(*span, i) for i, mark in enumerate(marks) for span in find_marks(code.text, mark, marks)]
    tags = []
    for start, end, i in spans:
        holds = any(start <= s and e <= end and j != i for s, e, j in spans)
        tags += [(start, 1, -end, f'<span class="moe-{"t" if holds else "s"}-{i}">'), (end, 0, -start, "</span>")]
    out, done = [], 0
    for at, _, _, tag in sorted(tags):
        out += [escape(code.text[done:at]), tag]
        done = at
    return f'<pre class="moe-code"><code>{"".join(out)}{escape(code.text[done:])}</code></pre>'


def _equation(equation: str, lit: Mapping[str, int]) -> str:
    pieces = re.split(r"\{([^}]*)\}", equation)  # words, symbol, words, symbol, …
    html = (f'<i class="moe-s-{lit[p]}">{escape(p)}</i>' if i % 2 else escape(p) for i, p in enumerate(pieces))
    return re.sub(f"[{''.join(BELOW)}]", lambda index: f"<sub>{BELOW[index.group()]}</sub>", "".join(html))


def _evidence_row(e: Evidence) -> str:
    words, link = reference(e.lines)
    where = f' <a href="{link}" target="_blank" rel="noopener">{words}</a>' if e.lines else ""
    return f"<li><b>{KINDS[e.kind]}.</b> {escape(e.claim)}{where}</li>"


def _bind(where: str, symbol: Symbol, shape: list[int], sizes: dict[str, tuple[int, str]]) -> None:
    """Hold a tensor's shape against its symbol's, from the last dimension backwards, and against what was bound before."""
    names = symbol.shape.split()
    fixed = [name for name in names if name != "..."]
    if len(shape) < len(fixed) or (len(shape) > len(fixed) and "..." not in names):
        raise ValueError(f"{where}: {symbol.s} is [{', '.join(names)}]; a tensor of shape {shape} cannot be that")
    for name, size in zip(reversed(fixed), reversed(shape)):
        before, other = sizes.setdefault(name, (size, symbol.s))
        if before != size:
            raise ValueError(f"{where}: {name} is {before} in {other} and {size} in {symbol.s}; they must be the same")
