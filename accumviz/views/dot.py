"""Graph -> DOT -> SVG: Graphviz only places boxes, so fonts, colours and themes are the page's own."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accumviz.graph import Graph, Node
from accumviz.views.layout import LayoutError, graphviz
from accumviz.views.style import CSS, CYCLE, MONO, number, size

__all__ = ["Drawing", "LayoutError", "graph_html", "simplify", "svg_from_dot", "to_dot", "to_svg"]

NODES_LIMIT = 150
_READABLE = 60  # once folded, a reader wants an overview
_TITLE, _SMALL = 14.0, 12.5  # px
_SHRINK = 0.88  # the smallest text stays 11 px
_LINE, _PAD, _LABEL = 19.0, 11.0, 48.0  # px
_EM = 0.625  # a monospace advance, with room for fonts wider than the common 0.60
_LONGEST, _LONGEST_NUMBERS = 30, 36  # characters in a row

_STYLE = (
    CSS
    + """
.av-graph { margin: 0.75rem 0; --av-leaf: %(leaf)s; --av-root: %(root)s; }
html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: %(leaf_dark)s; }
.av-graph .av-scroll { overflow: auto; max-height: 75rem; }
.av-graph svg { display: block; height: auto; margin: 0 auto;
  width: var(--av-width); max-width: 100%%; min-width: calc(var(--av-width) * %(shrink)s); }
:where(.av-graph:not(.av-drawn)) text { font-size: %(small)spx; fill: var(--av-text); unicode-bidi: isolate; }
.av-graph .av-mono { font-family: %(mono)s; }
.av-graph .av-title { font-family: %(mono)s; font-size: %(title)spx; font-weight: 600; }
.av-graph .av-quiet { fill: var(--av-muted); }
.av-graph .av-box { fill: var(--av-surface); stroke: var(--av-line); stroke-width: 1.2; }
.av-graph .av-behind { fill: var(--av-surface); stroke: var(--av-line); opacity: 0.75; }
.av-graph .av-rule { stroke: var(--av-line); }
.av-graph .av-accumulate .av-box { fill: var(--av-leaf); fill-opacity: 0.13; stroke: var(--av-leaf); }
.av-graph .av-root .av-box { fill: var(--av-root); fill-opacity: 0.13; stroke: var(--av-root); stroke-width: 2.2; }
.av-graph .av-freed .av-box { fill: none; stroke-dasharray: 5 4; }
.av-graph .av-freed:not(.av-root) .av-box { stroke: var(--av-muted); }
.av-graph .av-freed text { fill: var(--av-muted); }
.av-graph .av-edge { fill: none; stroke: var(--av-muted); stroke-width: 1.4; }
.av-graph .av-tip { fill: var(--av-muted); stroke: none; }
.av-graph figcaption { color: var(--av-muted); font-size: 0.8125rem; text-align: center; margin-top: 0.5rem; }
.av-graph .av-key { display: inline-block; margin: 0 0.6em; }
.av-graph .av-key i { display: inline-block; width: 1.1em; height: 0.8em; margin-right: 0.4em;
  border: 1.5px solid var(--av-line); border-radius: 3px; vertical-align: -0.05em; }
.av-graph .av-key .av-accumulate { border-color: var(--av-leaf); border-radius: 0.4em; }
.av-graph .av-key .av-root { border-color: var(--av-root); border-width: 2px; }
.av-graph .av-key .av-freed { border: 1.5px dashed var(--av-muted); }
.av-graph .av-key .av-fold { box-shadow: 3px 3px 0 -1px var(--av-line); }
.av-graph details { font-size: 0.8125rem; margin-top: 0.25rem; text-align: left; }
.av-graph summary { cursor: pointer; color: var(--av-muted); text-align: center; }
@media print {
  html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: %(leaf_dark)s; }
.av-graph .av-scroll { overflow: visible; max-height: none; }
  .av-graph svg { min-width: 0; }
}
"""
    % {
        "leaf": CYCLE[0],
        "leaf_dark": CYCLE[4],
        "root": CYCLE[2],
        "shrink": _SHRINK,
        "small": _SMALL,
        "title": _TITLE,
        "mono": MONO,
    }
)


@dataclass
class _Card:
    """One node as rows of text, and the box they need."""

    title: str
    shape: str
    rows: list[tuple[str, str]]
    numbers: list[tuple[str, str]]
    kinds: list[str]
    full: str = ""
    width: float = field(init=False)
    height: float = field(init=False)

    def __post_init__(self) -> None:
        widths = [_width(self.title, _TITLE) + _width(self.shape and f"  {self.shape}", _SMALL)]
        widths += [_width(label and f"{label} ", _SMALL) + _width(text, _SMALL) for label, text in self.rows]
        widths += [_LABEL + _width(text, _SMALL) for _, text in self.numbers]
        self.width = round(max([*widths, 70.0]) + 2 * _PAD + 4)
        self.height = _LINE * (1 + len(self.rows) + len(self.numbers)) + 2 * 8 + (7 if self.numbers else 0)


def to_dot(graph: Graph) -> str:
    """Write the graph as DOT source, for any Graphviz: data flows along the arrows, leaves to roots.

    >>> print(to_dot(Graph((Node(0, "MulBackward0", "c"),), (), (0,))))
    digraph {
      node [shape=box, style=rounded, fontname=monospace]
      n0 [label="c\\nMulBackward0"]
    }
    """
    boxes = [
        f"  n{node.id} [label={_quoted([card.title, *(' '.join(filter(None, row)) for row in card.rows + card.numbers)])}]"
        for node, card in zip(graph, _cards(graph), strict=True)
    ]
    return "\n".join(
        ["digraph {", "  node [shape=box, style=rounded, fontname=monospace]", *boxes, *_arrows(graph), "}"]
    )


def to_svg(graph: Graph) -> str:
    """Draw the graph as one self-contained SVG that takes its colours from the page around it.

    More than 150 nodes are folded first (see `simplify`). Raises LayoutError without Graphviz.
    """
    return _svg(simplify(graph), style=_STYLE)


def graph_html(graph: Graph) -> str:
    """Draw the graph as a self-contained HTML figure with a legend and the same content as text."""
    shown = simplify(graph)
    cards = _cards(shown)
    drawing = _svg(shown)
    kinds = {kind for card in cards for kind in card.kinds}
    keys = [f'<span class="av-key"><i class="av-{k}"></i>{text}</span>' for k, text in _KEYS if k in kinds]
    flow = "↓ data flows down from the leaves; ↑ gradients flow back up"
    notes = "".join(f"<br>{_escape(note)}" for note in shown.notes)
    if any(node.grad is not None for node in shown):
        notes = "<br>grad: derivative of the root with respect to the value above it" + notes
    items = "\n".join(f"<li>{line}</li>" for line in _lines(shown))
    return (
        f'<figure class="accumviz av-graph"><style>{_STYLE}</style>\n'
        f'<div class="av-scroll" tabindex="0" role="group" aria-label="Autograd graph, scrollable">{drawing}</div>\n'
        f'<figcaption><span class="av-key">{flow}</span> {" ".join(keys)}{notes}</figcaption>\n'
        f"<details><summary>The graph as text ({len(shown)} node{'s' * (len(shown) != 1)})</summary>\n"
        f"<ol>\n{items}\n</ol></details></figure>"
    )


def simplify(graph: Graph, limit: int = NODES_LIMIT) -> Graph:
    """Fold a graph until it has at most `limit` nodes, and add a note that says how.

    By module, as deep as fits; then runs of operations; then equal slices.
    """
    if len(graph) <= limit:
        return graph
    was, how, shown = len(graph), "", graph
    known = [node.module for node in graph if node.module and node.kind != "accumulate"]
    for depth in range(max((path.count(".") + 1 for path in known), default=0), 0, -1):
        shown, how = graph.collapse_modules(depth), f"modules folded at depth {depth}"
        if len(shown) <= min(limit, _READABLE):
            break
    if len(shown) > limit:
        shown, how = shown.collapse_runs(), f"{how}, runs of operations folded".strip(", ")
    if len(shown) > limit:
        shown, how = shown.collapse_slices(limit), f"{how}, then equal slices".strip(", ")
    notes = [*shown.notes, f"{was:,} nodes drawn as {len(shown):,}: {how}"]
    return Graph(shown.nodes, shown.edges, shown.roots, {**shown.meta, "notes": notes})


_KEYS = (
    ("operation", "operation"),
    ("fold", "several operations"),
    ("accumulate", "leaf: adds to its .grad"),
    ("root", "root: backward starts here"),
    ("freed", "freed by backward"),
)


def _cards(graph: Graph) -> list[_Card]:
    return [_card(node, node.id in graph.roots) for node in graph]


def _card(node: Node, root: bool) -> _Card:
    rows: list[tuple[str, str]] = []
    title = node.name or node.op
    if node.kind == "fold":
        title = node.module or node.op
        rows += [("", node.op)] if node.module else []
        counts = [(node.operations, "operation"), (node.parameters, "parameter")]
        rows.append((", ".join(f"{n:,} {noun}{'s' * (n != 1)}" for n, noun in counts if n), ""))
    else:
        rows += [("", node.op)] if node.name else []
        if len(title) > _LONGEST and "." in title:
            rows.insert(0, ("in", _clip(title.rpartition(".")[0])))
            title = title.rpartition(".")[2]
        elif node.module and node.kind != "accumulate":
            rows.append(("in", _clip(node.module)))
    if node.dtype not in ("", "float32"):
        rows.append(("", node.dtype))
    if not node.alive:
        rows.append(("freed", ""))
    elif node.saved_bytes:
        attrs = ", ".join(dict.fromkeys(s.attr.partition("[")[0] for s in node.saved if s.storage >= 0))
        rows.append((f"saves {size(node.saved_bytes)}", "" if node.kind == "fold" else _clip(attrs, 20)))
    numbers = [*_numbers("value", node.value), *_numbers("grad", node.grad)]
    shape = "" if node.shape is None else f"[{' × '.join(map(str, node.shape))}]" if node.shape else "scalar"
    kinds = [node.kind, *(["root"] if root else []), *([] if node.alive else ["freed"])]
    return _Card(_clip(_clean(title)), shape, [(a, _clean(b)) for a, b in rows], numbers, kinds, node.name or node.module)


def _numbers(label: str, value: Any) -> list[tuple[str, str]]:
    """Write a matrix row under row, anything else in one line."""
    if value is None:
        return []
    rows = [value]
    if isinstance(value, list) and 1 < len(value) <= 4 and all(isinstance(r, list) and r for r in value):
        rows = value if not any(isinstance(x, list) for r in value for x in r) else rows
    return [(label if i == 0 else "", _value(row)) for i, row in enumerate(rows)]


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(_value, value)) + "]"
        return text if len(text) <= _LONGEST_NUMBERS else text[: _LONGEST_NUMBERS - 2].rstrip(", ") + " …]"
    return number(float(value))


def _svg(graph: Graph, style: str = "") -> str:
    cards = _cards(graph)
    layout = json.loads(graphviz(_layout_source(graph, cards), "json"))
    margin = 6.0
    _, _, wide, tall = (float(part) for part in layout["bb"].split(","))
    width, height = max(wide, 40) + 2 * margin, max(tall, 20) + 2 * margin

    def at(point: str) -> tuple[float, float]:
        x, y = point.split(",")
        return float(x) + margin, tall - float(y) + margin

    parts = [line for edge in layout.get("edges", ()) for line in _edge_svg([*edge["pos"].split()], at)]
    for box in layout.get("objects", ()):
        x, y = at(box["pos"])
        parts += _card_svg(cards[int(box["name"][1:])], x, y)
    root = "accumviz av-graph" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg"{f" class={chr(34)}{root}{chr(34)}" if root else ""} role="img" '
        f'aria-label="{_escape(_summary(graph))}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="--av-width:{width:.0f}px">'
        + (f"<style>{style}</style>" if style else "")
        + "\n".join(parts)
        + "</svg>"
    )


def _layout_source(graph: Graph, cards: list[_Card]) -> str:
    boxes = [f"n{i} [width={c.width / 72:.3f}, height={c.height / 72:.3f}]" for i, c in enumerate(cards)]
    head = ["digraph {", "graph [nodesep=0.3, ranksep=0.36]", 'node [shape=box, fixedsize=true, label=""]']
    return "\n".join([*head, *boxes, *_arrows(graph), "}"])


def _arrows(graph: Graph) -> list[str]:
    return [f"  n{edge.target} -> n{edge.source}" for edge in graph.edges]


def _edge_svg(pos: list[str], at: Any) -> Iterator[str]:
    tips = [point[2:] for point in pos if point.startswith("e,")]
    (x0, y0), *curve = [at(point) for point in pos if "e," not in point and "s," not in point]
    path = f"M{x0:.1f} {y0:.1f}C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in curve)
    yield f'<path class="av-edge" d="{path}"/>'
    for tip in tips:
        (x, y), (bx, by) = at(tip), curve[-1]
        length = max(((x - bx) ** 2 + (y - by) ** 2) ** 0.5, 0.1)
        ux, uy = 4.2 * (x - bx) / length, 4.2 * (y - by) / length
        yield f'<path class="av-tip" d="M{x:.1f} {y:.1f}L{bx - uy:.1f} {by + ux:.1f} {bx + uy:.1f} {by - ux:.1f}Z"/>'


def _card_svg(card: _Card, x: float, y: float) -> list[str]:
    left, top = x - card.width / 2, y - card.height / 2
    radius = 15 if "accumulate" in card.kinds else 7
    rect = f'width="{card.width:.0f}" height="{card.height:.0f}" rx="{radius}"'
    parts = [f'<g class="{" ".join(f"av-{kind}" for kind in card.kinds)}">']
    if card.full and card.full not in (card.title, ""):
        parts.append(f"<title>{_escape(card.full)}</title>")
    if "fold" in card.kinds:
        parts.append(f'<rect class="av-behind" x="{left + 4:.1f}" y="{top + 4:.1f}" {rect}/>')
    parts.append(f'<rect class="av-box" x="{left:.1f}" y="{top:.1f}" {rect}/>')
    line = top + 8 + 14
    inner = left + _PAD
    parts.append(f'<text class="av-title" x="{inner:.1f}" y="{line:.1f}">{_escape(card.title)}</text>')
    if card.shape:
        right = left + card.width - _PAD
        parts.append(
            f'<text class="av-mono av-quiet" text-anchor="end" x="{right:.1f}" y="{line:.1f}">{card.shape}</text>'
        )
    for label, text in card.rows:
        line += _LINE
        quiet = f'<tspan class="av-quiet">{_escape(label)}{" " * bool(label and text)}</tspan>' if label else ""
        mono = f'<tspan class="av-mono av-quiet">{_escape(text)}</tspan>' if text else ""
        parts.append(f'<text x="{inner:.1f}" y="{line:.1f}">{quiet}{mono}</text>')
    if card.numbers:
        line += 7
        rule = line + 2
        parts.append(
            f'<line class="av-rule" x1="{left:.1f}" x2="{left + card.width:.1f}" y1="{rule:.1f}" y2="{rule:.1f}"/>'
        )
    for label, text in card.numbers:
        line += _LINE
        parts.append(
            (f'<text class="av-quiet" x="{inner:.1f}" y="{line:.1f}">{label}</text>' if label else "")
            + f'<text class="av-mono" x="{inner + _LABEL:.1f}" y="{line:.1f}">{_escape(text)}</text>'
        )
    return [*parts, "</g>"]


def _summary(graph: Graph) -> str:
    def name(node: Node) -> str:
        return f"{node.name} ({node.op})" if node.name else node.module if node.kind == "fold" and node.module else node.op

    roots = ", ".join(name(graph.nodes[root]) for root in graph.roots)
    text = f"Autograd graph of {roots or 'no root'}: {len(graph)} node{'s' * (len(graph) != 1)}"
    leaves = [node.name for node in graph if node.kind == "accumulate" and node.name][:6]
    text += f", from the leaves {', '.join(leaves)}" if leaves else ""
    return ". ".join([text, *graph.notes])


def _lines(graph: Graph) -> Iterator[str]:
    """Say each node in one line, with the nodes its data came from by number."""
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.source, []).append(edge.target)
    for node, card in zip(graph, _cards(graph), strict=True):
        rows = [" ".join(filter(None, row)) for row in [*card.rows, *card.numbers]]
        rows = [f"shape {card.shape}", *rows] if card.shape else rows
        came = ", ".join(str(i + 1) for i in sources.get(node.id, ()))
        text = f"<code><bdi>{_escape(card.full or card.title)}</bdi></code> "
        text += _escape("; ".join([*rows, *([f"from {came}"] if came else [])]))
        yield text


def _clip(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[-half:]}"


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def _clean(text: str) -> str:
    """Show what XML forbids and what would turn the line around as a visible mark."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def _escape(text: str) -> str:
    return html.escape(_clean(text))


def _quoted(lines: list[str]) -> str:
    # Graphviz reads entities and backslash escapes inside a label
    safe = [_clean(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(safe) + '"'


def _width(text: str, px: float) -> float:
    return sum(_EM * (2 if ord(char) > 0x1100 and char not in "−×…" else 1) for char in text) * px


@dataclass(frozen=True)
class Drawing:
    """An SVG with a text alternative, shown by a notebook in the page's own colours."""

    svg: str
    alt: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        fragment = f'<figure class="accumviz av-graph av-drawn"><style>{_STYLE}</style>\n<div class="av-scroll">{self.svg}</div></figure>'
        return {"text/plain": self.alt, "text/html": fragment}

    def __repr__(self) -> str:
        return self.alt


def svg_from_dot(source: Any, alt: str = "") -> Drawing:
    """Draw DOT source (text, or an object with `.source` such as torchviz's) for any theme, with no `dot`.

    `alt` is the text alternative; without it, the drawing's own labels are listed.
    Raises LayoutError without Graphviz.
    """
    text = getattr(source, "source", source)
    if not isinstance(text, str):
        raise TypeError(f"source is a {type(source).__name__}; expected DOT text or an object with .source")
    # Graphviz knows how wide Courier is; of "monospace" it knows nothing and leaves too little room
    drawn = graphviz(re.sub(r'fontname="?monospace"?', "fontname=Courier", text), "svg")
    labels = [html.unescape(label) for label in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
    alt = alt or "Graph with the labels " + ", ".join(label.strip() for label in labels if label.strip())
    return Drawing(_themed(drawn, alt), alt)


_BLACK = re.compile(r'(fill|stroke)="(?:black|#000000)"')


def _themed(drawn: str, alt: str) -> str:
    """Keep Graphviz's shapes; give lines and free text the page's colour, text on a coloured box a dark one."""
    head, _, body = drawn[drawn.index("<svg") :].partition(">")
    box = [float(part) for part in re.search(r'viewBox="([^"]*)"', head).group(1).split()]  # type: ignore[union-attr]
    body = re.sub(r"<!--.*?-->|<title>.*?</title>|</?a\b[^>]*>", "", body, flags=re.DOTALL)
    body = re.sub(r' (?:id|xlink:\w+)="[^"]*"', "", body)
    body = re.sub(r'<polygon fill="(?:white|#ffffff|transparent)" stroke="(?:none|transparent)"[^>]*/>\s*', "", body, count=2)

    def node(match: re.Match[str]) -> str:
        group = match.group(0)
        colored = re.search(r'<(?:polygon|ellipse|path) fill="(?!none|transparent|black)', group)
        return re.sub(r"<text ", '<text style="fill:#1a1a1a" ', group) if colored else group

    body = re.sub(r'<g class="node">.*?</g>', node, body, flags=re.DOTALL)
    body = re.sub(r'font-family="Courier[^"]*"', 'class="av-mono"', body)
    body = _BLACK.sub(r'\1="currentColor"', body)
    smallest = min((float(px) for px in re.findall(r'font-size="([\d.]+)', body)), default=14.0)
    scale = re.search(r"scale\(([\d.]+)", body)
    factor = max(1.0, 12.5 / (smallest * (float(scale.group(1)) if scale else 1.0)))
    width, height = box[2] * factor, box[3] * factor
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{_escape(alt)}" '
        f'viewBox="{" ".join(f"{part:g}" for part in box)}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}'
    )
