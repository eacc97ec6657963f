"""Evidence cards and the map: what an operation of the block is, where it stands, and how one knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

from torch import Tensor

from moe_lib.block_drawing import HEIGHT, WIDTH, Drawing, describe, drawing
from moe_lib.config import KIMI_K2, MoEConfig
from moe_lib.evidence import KINDS, Node, Symbol, nodes, reference

# Colours by theme: text on paper, quiet text on paper, links on paper, code on its own ground, lit symbols.
LIGHT = {"ink": "#1f2328", "quiet": "#57606a", "link": "#0550ae", "paper": "#ffffff", "ground": "#f3f4f6", "rule": "#8c959f"}
DARK = {"ink": "#e6edf3", "quiet": "#a9b4c0", "link": "#79b8ff", "paper": "#1c2128", "ground": "#2b323b", "rule": "#768390"}
LIT = {"ink": "#1f2328", "paper": "#ffd866"}
MOST_SYMBOLS = 6
DARK_PAGES = ('[data-jp-theme-light="false"]', '[data-theme="dark"]', ".vscode-dark")  # JupyterLab and nbconvert, Sphinx, VS Code
ROLES = {"in": "in", "out": "out", "weight": "with"}


@dataclass(frozen=True, repr=False)
class Card:
    """What card() shows: HTML in a notebook, the same words as plain text in a terminal."""

    node: Node
    config: MoEConfig
    live: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> str:
        count = self.node.n_params(self.config)
        if not count:
            return "no parameters"
        factors = [getattr(self.config, name) for name in self.node.params]
        product = " = " + " × ".join(f"{n:,}" for n in factors) if len(factors) > 1 else ""
        return f"{count:,}{product} parameters"

    def shape(self, symbol: Symbol) -> str:
        dims = f"[{', '.join(symbol.dims(self.config))}]".replace("...", "…") if symbol.shape else ""
        return dims + (f", here {self.live[symbol.s]}" if symbol.s in self.live else "")

    @property
    def footnote(self) -> str:
        if not any("..." in symbol.shape for symbol in self.node.symbols):
            return ""
        in_block = "; inside the block: rows, one for each copy of a token" if "experts" in self.node.trail[-1] else ""
        return f"…: B batch, T positions, or whatever stands before the last dimension{in_block}."

    def __repr__(self) -> str:
        node = self.node
        lines = [" › ".join(("Kimi K2", *node.trail)), node.title, self.params, ""]
        lines += ["    " + line for line in node.source.splitlines()]
        lines += [f"    ({node.source_file}, {node.source_name})", "", node.says, "", f"    {_plain(node.equation)}", ""]
        lines += [f"{ROLES[s.role]:>4} {s.s} {self.shape(s)}".rstrip() + f": {s.means}" for s in node.symbols]
        lines += [self.footnote] if self.footnote else []
        lines.append("")
        for e in node.evidence:
            lines.append(f"{reference(e.lines)[0] + ', ' if e.lines else ''}{KINDS[e.kind]}: {e.claim}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<style>{CSS}</style>{self.html()}"

    def html(self) -> str:
        """The card without its style sheet."""
        node = self.node
        trail = " › ".join(escape(step) for step in ("Kimi K2", *node.trail))
        rows = "".join(self._symbol_row(i, symbol) for i, symbol in enumerate(node.symbols))
        foot = f'<p class="moe-quiet">{escape(self.footnote)}</p>' if self.footnote else ""
        tensors = f' <span class="moe-quiet">{escape(", ".join(node.tensors))}</span>' if node.tensors else ""
        return (
            f'<div class="moe-card" role="group" aria-label="{escape(node.title)}">'
            f'<p class="moe-quiet">{trail}</p>'
            f'<p class="moe-title" role="heading" aria-level="4"><b>{escape(node.title)}</b></p>'
            f"<p>{escape(self.params)}{tensors}</p>"
            f'<pre class="moe-code"><code>{self._code()}</code></pre>'
            f'<p class="moe-quiet">{escape(node.source_file)} · {escape(node.source_name)}</p>'
            f'<p class="moe-says">{escape(node.says)}</p>'
            f'<p class="moe-equation">{self._equation()}</p>'
            f'<ul class="moe-shapes">{rows}</ul>{foot}'
            f'<ul class="moe-evidence">{"".join(map(_evidence_row, node.evidence))}</ul></div>'
        )

    def _equation(self) -> str:
        order = {symbol.s: i for i, symbol in enumerate(self.node.symbols)}
        parts = re.split(r"\{([^}]*)\}", self.node.equation)  # text, symbol, text, symbol, …
        return "".join(_lit(order[part], part, focus=True) if i % 2 else escape(part) for i, part in enumerate(parts))

    def _code(self) -> str:
        """The source with a span around every mark; marks may lie within each other."""
        source, spans = self.node.source, []
        for i, symbol in sorted(enumerate(self.node.symbols), key=lambda item: -len(item[1].mark)):
            taken = [span for span in spans if span[3] == symbol.mark]
            for start, end in find_marks(source, symbol.mark):
                crossing = any(s < start < e < end or start < s < end < e for s, e, *_ in spans)
                inside_target = any(s <= start and end <= e and mark.endswith("=") for s, e, _, mark in spans)
                if not crossing and not inside_target and not taken:
                    spans.append((start, end, i, symbol.mark))
        opens = sorted(spans, key=lambda span: (span[0], -span[1]))
        out, position, stack = [], 0, []
        for at in range(len(source) + 1):
            while stack and stack[-1] == at:
                out.append(escape(source[position:at]) + "</span>")
                position = at
                stack.pop()
            for start, end, i, _ in opens:
                if start == at:
                    out.append(escape(source[position:at]) + f'<span class="moe-s moe-s{i}">')
                    position = at
                    stack.append(end)
        return "".join(out) + escape(source[position:])

    def _symbol_row(self, i: int, symbol: Symbol) -> str:
        shape = f" <span>{escape(self.shape(symbol))}</span>" if self.shape(symbol) else ""
        return (
            f'<li><span class="moe-quiet">{ROLES[symbol.role]}</span> '
            f'<span class="moe-s moe-s{i}" tabindex="0"><i>{escape(symbol.s)}</i>{shape}</span> '
            f'<span class="moe-means">{escape(symbol.means)}</span></li>'
        )


def card(node: str, tensor: Tensor | None = None, *, config: MoEConfig = KIMI_K2, **tensors: Tensor) -> Card:
    """The card of one operation, by its id in data/evidence.toml.

    A tensor given is the operation's (first) output, and the card shows its live shape; others are given by symbol:
    `card("product", a=a, u=u, h=h)`. Raises KeyError for an unknown node or symbol, ValueError for a tensor whose shape cannot be
    the symbol's.
    """
    known = nodes(config)
    if node not in known:
        raise KeyError(f"no card {node!r}; there are {', '.join(known)}")
    symbols = {symbol.s: symbol for symbol in known[node].symbols if symbol.shape}
    if tensor is not None:
        outputs = [s for s, symbol in symbols.items() if symbol.role == "out"]
        if not outputs:
            raise ValueError(f"card {node!r} has no tensor as output; give tensors by symbol: {', '.join(symbols) or 'it has none'}")
        tensors = {outputs[0]: tensor, **tensors}
    if unknown := tensors.keys() - symbols.keys():
        raise KeyError(f"card {node!r} has no tensor {', '.join(sorted(unknown))}; it has {', '.join(symbols) or 'none'}")
    sizes: dict[str, tuple[int, str]] = {}
    for s, value in tensors.items():
        _bind(node, symbols[s], value, sizes)
    live = {s: f"[{', '.join(map(str, value.shape))}] {str(value.dtype).removeprefix('torch.')}" for s, value in tensors.items()}
    return Card(known[node], config, live)


def _bind(node: str, symbol: Symbol, tensor: Tensor, sizes: dict[str, tuple[int, str]]) -> None:
    names = symbol.shape.split()
    got = list(tensor.shape)
    where = f"card {node!r}: {symbol.s} is [{symbol.shape.replace(' ', ', ')}]"
    fixed = [name for name in names if name != "..."]
    if len(got) < len(fixed) or (len(got) > len(fixed) and "..." not in names):
        raise ValueError(f"{where}, and a tensor of shape {got} cannot be that")
    for name, size in zip(reversed(fixed), reversed(got)):
        before, other = sizes.setdefault(name, (size, symbol.s))
        if before != size:
            raise ValueError(f"{where}, with {name} = {size} here and {before} in {other}; they must agree")


def find_marks(source: str, mark: str) -> list[tuple[int, int]]:
    """Where a mark stands in a piece of code, as whole words."""
    left, right = (r"(?<![\w.])" if mark[0].isalnum() else ""), (r"(?!\w)" if mark[-1].isalnum() else "")
    return [match.span() for match in re.finditer(left + re.escape(mark) + right, source)]


def _plain(equation: str) -> str:
    return equation.replace("{", "").replace("}", "")


def _lit(i: int, words: str, focus: bool = False) -> str:
    return f'<span class="moe-s moe-s{i}"{" tabindex=0" if focus else ""}><i>{escape(words)}</i></span>'


def _evidence_row(e) -> str:
    if e.lines is None:
        return f"<li>{escape(e.claim)} <b>{escape(KINDS[e.kind])}</b></li>"
    words, link = reference(e.lines)
    return f'<li>{escape(e.claim)} <b>{escape(KINDS[e.kind])}</b>: <a href="{link}" target="_blank" rel="noopener">{escape(words)}</a></li>'


def _css() -> str:
    def variables(theme: Mapping[str, str]) -> str:
        return ";".join(f"--moe-{name}:{colour}" for name, colour in theme.items())

    dark = ",".join(f"{page} .moe-card,{page} .moe-map" for page in DARK_PAGES)
    lights = "".join(
        f".moe-card:has(.moe-s{i}:is(:hover,:focus):not(:has(.moe-s:hover))) .moe-s{i}{{color:{LIT['ink']};background:{LIT['paper']}}}"
        if False
        else f".moe-card:has(.moe-s{i}:is(:hover,:focus)) .moe-s{i}{{color:{LIT['ink']};background:{LIT['paper']}}}"
        for i in range(MOST_SYMBOLS)
    )
    return (
        f".moe-card,.moe-map{{{variables(LIGHT)}}}{dark}{{{variables(DARK)}}}"
        ".moe-card{color:var(--moe-ink);background:var(--moe-paper);border:1px solid var(--moe-rule);border-radius:8px;"
        "padding:10px 16px;max-width:760px;font-size:14px;line-height:1.45}"
        ".moe-card p,.moe-card ul,.moe-card pre{margin:4px 0;padding:0;color:inherit}.moe-card ul{list-style:none}"
        ".moe-card .moe-title{font-size:18px}.moe-card .moe-quiet{color:var(--moe-quiet);font-size:12.5px}"
        ".moe-card a{color:var(--moe-link);text-decoration:underline}"
        ".moe-card .moe-code{background:var(--moe-ground);padding:6px 10px;border-radius:4px;white-space:pre-wrap;overflow-wrap:anywhere}"
        ".moe-card .moe-code code{background:none;color:inherit;font-size:13px}"
        ".moe-card .moe-equation{font-size:19px;font-family:Georgia,'Times New Roman',serif;margin:8px 0}"
        ".moe-card .moe-s{border-bottom:1px dotted var(--moe-rule);border-radius:3px}"
        ".moe-card .moe-shapes li{display:grid;grid-template-columns:36px minmax(150px,max-content) 1fr;gap:8px;align-items:baseline}"
        ".moe-card .moe-evidence{border-top:1px solid var(--moe-rule);padding-top:6px;margin-top:8px;font-size:13px}" + lights
    )


CSS = _css()


def block_map(lit: Iterable[str] | None = None, interactive: bool = False, config: MoEConfig = KIMI_K2) -> Drawing | BlockMap:
    """The block as the data flows through it.

    With `lit`, a still drawing in which those operations stand out. Without, the map: clicking an operation, or Enter on it, opens
    its card below. Raises KeyError for an unknown operation.
    """
    if lit is None or interactive:
        return BlockMap(config)
    return drawing(list(lit), config)


@dataclass(frozen=True, repr=False)
class BlockMap:
    """The drawing, with a disclosure over each of its boxes that opens the operation's card. Plain HTML: it works with no kernel."""

    config: MoEConfig

    def __repr__(self) -> str:
        return describe([], self.config) + " The map opens the card of each."

    def _repr_html_(self) -> str:
        parts = "".join(self._part(node) for node in nodes(self.config).values())
        picture = drawing([], self.config).html(decorative=True)
        return f'<style>{CSS}{MAP_CSS}</style><div class="moe-map"><div class="moe-stage">{picture}{parts}</div></div>'

    def _part(self, node: Node) -> str:
        x, y, width, height = (f"{100 * n / WIDTH:.4g}cqw" for n in node.box)
        return (
            f'<details name="moe-map"{" open" if node.id == "block" else ""}>'
            f'<summary style="left:{x};top:{y};width:{width};height:{height}"><span>{escape(node.title)}</span></summary>'
            f"{Card(node, self.config).html()}</details>"
        )


MAP_CSS = (
    f".moe-map{{container-type:inline-size;max-width:{WIDTH}px}}"
    f".moe-stage{{position:relative;padding-top:{100 * (HEIGHT + 12) / WIDTH:.4g}cqw}}"
    ".moe-stage>img{position:absolute;left:0;top:0;width:100%}"
    ".moe-stage summary{position:absolute;box-sizing:border-box;border-radius:5px;cursor:pointer;list-style:none;overflow:hidden}"
    ".moe-stage summary::-webkit-details-marker{display:none}"
    ".moe-stage summary span{position:absolute;clip-path:inset(50%);white-space:nowrap}"
    ".moe-stage summary:hover{background:#0072b233}"
    ".moe-stage summary:focus-visible{outline:3px solid #d55e00;outline-offset:1px}"
    ".moe-stage details[open]>summary{border:3px solid #0072b2}"
)
