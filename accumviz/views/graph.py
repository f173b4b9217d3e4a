"""Draw a graph: Graphviz places the boxes, fonts and colours are those of the page."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from accumviz.graph.graph import FOLDED, Graph, Node
from accumviz.show import counted, escape, literal
from accumviz.views.style import CSS, CYCLE, MONO, number, size, static
from accumviz.views.words import shorten

TITLE, SMALL = 14.0, 12.5  # px
SHRINK = 0.88  # the smallest text stays 11 px

STYLE = CSS + Template("""
.av-graph { margin: 0.75rem 0; --av-leaf: $leaf; --av-root: $root; }
html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: $leaf_dark; }
.av-graph .av-scroll { overflow: auto; max-height: 75rem; }
.av-graph svg { display: block; height: auto; margin: 0 auto;
  width: var(--av-width); max-width: 100%; min-width: calc(var(--av-width) * $shrink); }
:where(.av-graph:not(.av-drawn)) text { font: ${small}px $mono; fill: var(--av-text); unicode-bidi: isolate; }
.av-graph .av-title { font-size: ${title}px; font-weight: 600; }
.av-graph .av-quiet { fill: var(--av-muted); }
.av-graph .av-card { fill: var(--av-surface); stroke: var(--av-line); stroke-width: 1.2; }
.av-graph .av-rule { stroke: var(--av-line); }
.av-graph .av-accumulate .av-card { fill: var(--av-leaf); fill-opacity: 0.13; stroke: var(--av-leaf); }
.av-graph .av-root .av-card { fill: var(--av-root); fill-opacity: 0.13; stroke: var(--av-root); stroke-width: 2.2; }
.av-graph .av-freed .av-card { fill: none; stroke-dasharray: 5 4; }
.av-graph .av-freed:not(.av-root) .av-card { stroke: var(--av-muted); }
.av-graph .av-freed text { fill: var(--av-muted); }
.av-graph .av-outside .av-card { fill: none; stroke: var(--av-muted); stroke-dasharray: 1.5 3; }
.av-graph .av-outside text { fill: var(--av-muted); }
.av-graph .av-edge { fill: none; stroke: var(--av-muted); stroke-width: 1.4; }
.av-graph .av-tip { fill: var(--av-muted); stroke: none; }
.av-graph figcaption { color: var(--av-muted); font-size: 0.8125rem; margin-top: 0.5rem; text-align: left; }
.av-graph .av-key { display: inline-block; margin-right: 1.2em; }
.av-graph .av-key i { display: inline-block; width: 1.1em; height: 0.8em; margin-right: 0.4em;
  border: 1.5px solid var(--av-muted); background: var(--av-surface); border-radius: 3px; vertical-align: -0.05em; }
.av-graph .av-key .av-accumulate { border-color: var(--av-leaf); border-radius: 0.4em; }
.av-graph .av-key .av-root { border-color: var(--av-root); border-width: 2px; }
.av-graph .av-key .av-freed { border: 1.5px dashed var(--av-muted); background: none; }
.av-graph .av-key .av-outside { border-style: dotted; background: none; }
.av-graph .av-key .av-fold { box-shadow: 3px 3px 0 -1px var(--av-line); }
.av-graph details { font-size: 0.8125rem; margin-top: 0.25rem; text-align: left; }
.av-graph summary { cursor: pointer; color: var(--av-muted); width: max-content; }
@media print {
  .av-graph .av-scroll { overflow: visible; max-height: none; }
  .av-graph svg { min-width: 0; }
}
""").substitute(
    leaf=CYCLE[0],
    leaf_dark=CYCLE[4],
    root=CYCLE[2],
    shrink=SHRINK,
    small=SMALL,
    title=TITLE,
    mono=MONO,
)
NODES_LIMIT = 150
# Characters of the drawings of what is inside modules: when there are as many, no more are made.
_INSIDES = 1_000_000
# Pixels.
_TOP = 20
_LINE = 17
_PAD = 11
_LABEL = 48
_MARGIN = 6
_RULE = 7
_TIP = 4.2
# A monospace advance, with room for fonts wider than the common 0.60.
_EM = 0.625
# Characters in a row.
_LONGEST = 30
_LONGEST_NUMBERS = 36
_KEYS = {
    "operation": "operation",
    "fold": "several operations",
    "accumulate": "leaf: adds to its .grad",
    "root": "root: backward starts here",
    "freed": "freed by backward",
    "outside": "outside the module that is open",
}
# An element of a card: its name and looks (`text.av-title`), its attributes, and its text if it has one.
Element = list[Any]
# A drawn edge: its source, its target, its curve and its arrowhead.
Way = tuple[int, int, str, str]


@dataclass
class Card:
    """One node as rows of text and numbers with their labels, and the box they need."""

    title: str
    shape: str
    rows: list[str]
    numbers: list[tuple[str, str]]
    kinds: list[str]
    full: str
    width: float = field(init=False)
    height: float = field(init=False)

    def __post_init__(self) -> None:
        shape = f"  {self.shape}" if self.shape else ""
        widths = [_width(self.title, TITLE) + _width(shape, SMALL), 70.0]
        widths += [_width(row, SMALL) for row in self.rows]
        widths += [_LABEL + _width(text, SMALL) for _, text in self.numbers]
        self.width = round(max(widths) + 2 * _PAD + 4)
        lines = 1 + len(self.rows) + len(self.numbers)
        self.height = _LINE * lines + 2 * _MARGIN + _RULE * bool(self.numbers)

    @property
    def half(self) -> complex:
        """From its corner to its centre, x + iy."""
        return complex(self.width, self.height) / 2

    @property
    def top_of_numbers(self) -> float:
        """The height at which the first number is written, below the rows and a rule."""
        return _TOP + _LINE * (len(self.rows) + 1) + _RULE

    def elements(self) -> Iterator[Element]:
        """Yield what the card shows but for its numbers, which a player fills in."""
        box = {"width": self.width, "height": self.height, "rx": 7}
        if "accumulate" in self.kinds:
            box["rx"] = 15
        yield ["title", {}, self.full]
        if "fold" in self.kinds:
            yield ["rect.av-card", {"x": 4, "y": 4, **box}]
        yield ["rect.av-card", box]
        yield ["text.av-title", {"x": _PAD, "y": _TOP}, self.title]
        if self.shape:
            end = {"x": self.width - _PAD, "y": _TOP, "text-anchor": "end"}
            yield ["text.av-quiet", end, self.shape]
        for i, row in enumerate(self.rows, 1):
            looks = ".av-saves" if row.startswith("saves") else ""
            yield [f"text.av-quiet{looks}", {"x": _PAD, "y": _TOP + _LINE * i}, row]
        if self.numbers:
            line = self.top_of_numbers - _LINE
            # Without a value nothing stands below the rule until the gradient comes.
            is_late = self.numbers[0][0] == "grad"
            ends = {"x2": self.width, "y1": line, "y2": line}
            yield ["line.av-rule.av-late" if is_late else "line.av-rule", ends]

    def numbers_drawn(self) -> Iterator[Element]:
        """Yield the numbers and their labels."""
        for i, (label, text) in enumerate(self.numbers):
            y = self.top_of_numbers + _LINE * i
            yield ["text.av-quiet", {"x": _PAD, "y": y}, label]
            yield ["text", {"x": _PAD + _LABEL, "y": y}, text]


def graph_html(graph: Graph) -> str:
    """Draw the graph as a self-contained HTML figure with a legend and the same content as text.

    A large graph is folded by module; on the page, a script unfolds a module in place, and zooms.
    Raises LayoutError without Graphviz.
    """
    form = readable(graph)
    cards = cards_of(form)
    legend = list(cards)
    notes = list(form.notes)
    kind = ""
    more = ""
    if len(graph) > FOLDED:
        insides, are_all = _insides(graph, form, legend)
        sheet = static("unfold.css")
        script = static("unfold.js")
        kind = " av-large"
        more = f'<style data-accumviz>{sheet}</style>\n{insides}<script type="module" data-accumviz>{script}</script>\n'
        if not are_all:
            notes.append(
                "some modules do not unfold here: their drawings are too large"
            )
    items = "\n".join(f"<li>{line}</li>" for line in lines_of(form, cards))
    return (
        f'<figure class="accumviz av-graph{kind}"><style>{STYLE}</style>\n'
        f"{_scrolled(form, cards)}\n"
        f"<figcaption>{_legend(legend)}{_notes(form, notes)}</figcaption>\n"
        f"<details><summary>The graph as text ({counted(len(form), 'node')})</summary>\n"
        f"<ol>\n{items}\n</ol></details>\n{more}</figure>"
    )


def _insides(graph: Graph, form: Graph, legend: list[Card]) -> tuple[str, bool]:
    """Draw the inside of each folded module, those outside before those in them, and tell whether all are there.

    The page's script opens them in place; without it, they are below the graph.
    """
    modules = {node.module: None for node in form if node.kind == "fold"}
    todo = list(modules)
    pictures: list[str] = []
    for module in todo:
        inside = graph.inside(module)
        if len(inside) > NODES_LIMIT or sum(map(len, pictures)) > _INSIDES:
            continue
        cards = cards_of(inside)
        for node, card in zip(inside, cards, strict=True):
            if not node.is_in(module):
                card.kinds.append("outside")
            elif node.kind == "fold" and node.module not in modules:
                modules[node.module] = None
                todo.append(node.module)
        legend += cards
        name = escape(module)
        label = f"Inside {module}: {counted(len(inside), 'node')}"
        drawing = _svg(inside, cards, label)
        pictures.append(
            f'<div data-inside="{name}"><p><code>{name}</code></p>{drawing}</div>\n'
        )
    if not pictures:
        return "", not todo
    summary = f"<summary>Inside {counted(len(pictures), 'module')}</summary>"
    together = f'<details class="av-insides">{summary}\n{"".join(pictures)}</details>\n'
    return together, len(pictures) == len(todo)


def _legend(cards: list[Card]) -> str:
    """Explain the looks of these cards."""
    flow = "↓ data flows down from the leaves; ↑ gradients flow back up"
    keys = [f'<span class="av-key">{flow}</span>']
    for kind, text in _KEYS.items():
        if any(kind in card.kinds for card in cards):
            keys.append(f'<span class="av-key"><i class="av-{kind}"></i>{text}</span>')
    return " ".join(keys)


def _notes(graph: Graph, notes: list[str]) -> str:
    if any(node.grad is not None for node in graph):
        grad = "grad: derivative of the root with respect to the value above it"
        notes = [grad, *notes]
    return "".join(f"<br>{escape(note)}" for note in notes)


def _scrolled(graph: Graph, cards: list[Card]) -> str:
    label = "Autograd graph, scrollable"
    drawing = _svg(graph, cards, _summary(graph))
    return f'<div class="av-scroll" tabindex="0" role="group" aria-label="{label}">{drawing}</div>'


def readable(graph: Graph) -> Graph:
    """Return the graph as it is drawn: whole, or with its modules folded, so far that it can be read.

    Where not even the modules fit, those nearest the loss. A note says what is not drawn.
    """
    form = graph
    for depth in _depths(graph):
        folded = graph.collapse_modules(depth)
        # Of one or two boxes nothing is read.
        if len(form) > FOLDED and len(folded) > 2:
            form = folded
    note = f"{len(graph):,} nodes drawn as {len(form):,}"
    if len(form) > NODES_LIMIT:
        form = form.subgraph(range(NODES_LIMIT))
        note = f"{len(graph):,} nodes drawn as {len(form):,}, those nearest the loss"
    return form if len(form) == len(graph) else replace(form, notes=(*form.notes, note))


def _depths(graph: Graph) -> range:
    """Return the depths of its modules, from the innermost to the outermost."""
    deepest = 0
    for node in graph:
        if node.module and node.kind != "accumulate":
            deepest = max(deepest, node.module.count(".") + 1)
    return range(deepest, 0, -1)


def cards_of(graph: Graph, leaf: str = "grad") -> list[Card]:
    """Return the card of each node, where `leaf` is what the gradient of a leaf is called."""
    return [_card(node, node.id in graph.roots, leaf) for node in graph]


def _shape(node: Node) -> str:
    if node.shape is None:
        return ""
    return f"[{' × '.join(map(str, node.shape))}]" if node.shape else "scalar"


def _card(node: Node, is_root: bool, leaf: str) -> Card:
    kinds = [node.kind]
    if is_root:
        kinds.append("root")
    if not node.alive:
        kinds.append("freed")
    grad = leaf if node.kind == "accumulate" else "grad"
    numbers = []
    for label, value in (("value", node.value), (grad, node.grad)):
        if value is not None:
            numbers.append((label, _written(value)))
    full = literal(node.title)
    rows = list(map(literal, _rows(node)))
    return Card(
        shorten(full, _LONGEST if node.title != node.op else 2 * _LONGEST),
        _shape(node),
        rows,
        numbers,
        kinds,
        full,
    )


def _rows(node: Node) -> list[str]:
    """Return what is written below a node's title."""
    rows = []
    if node.title != node.op:
        rows.append(node.op)
    if node.kind == "fold":
        rows.append(_counts(node))
    elif node.module and node.kind == "operation":
        rows.append(f"in {shorten(node.module, _LONGEST)}")
    if node.dtype not in ("", "float32"):
        rows.append(node.dtype)
    if not node.alive:
        rows.append("freed")
    elif node.saved_bytes > 0:
        held = "" if node.kind == "fold" else ", ".join(one.attr for one in node.saved)
        rows.append(f"saves {size(node.saved_bytes)} {shorten(held, 20)}".rstrip())
    return rows


def _counts(node: Node) -> str:
    """Return how many operations and parameters a module has."""
    counts = [counted(node.operations, "operation")]
    if node.parameters:
        counts.append(counted(node.parameters, "parameter"))
    return ", ".join(counts)


def _written(value: Any) -> str:
    if not isinstance(value, list):
        return number(float(value))
    text = "[" + ", ".join(map(_written, value)) + "]"
    if len(text) <= _LONGEST_NUMBERS:
        return text
    return text[: _LONGEST_NUMBERS - 2].rstrip(", ") + " …]"


class LayoutError(ImportError):
    """No layout engine is there, or it refused; the message says what to do."""


def graphviz(source: str, form: str) -> str:
    """Lay out DOT source with Graphviz's `dot` and return it as `json`, `svg`, ...

    Uses `pygraphviz`, whose wheel carries Graphviz, else the program on the PATH, which hosted notebooks have.
    Raises LayoutError where neither is there, or where the source is not DOT.
    """
    try:
        from pygraphviz import AGraph
    except ImportError:
        return _on_path(source, form)
    try:
        # pygraphviz warns about every graph of more than 1,000 nodes
        with redirect_stderr(StringIO()), _silent():
            drawn: bytes = AGraph(string=source).draw(format=form, prog="dot")
    except Exception as error:  # its C layer raises several unrelated types
        raise LayoutError(f"Graphviz could not draw this: {error}") from error
    return drawn.decode("utf-8", "replace")


def _on_path(source: str, form: str) -> str:
    command = ["dot", f"-T{form}"]
    try:
        # The user's own Graphviz, given text on its standard input
        drawn = subprocess.run(  # noqa: S603
            command, input=source, capture_output=True, encoding="utf-8", check=True
        )
    except OSError as missing:
        raise LayoutError(
            "drawing a graph needs Graphviz, which comes with pygraphviz: pip install pygraphviz"
        ) from missing
    except subprocess.CalledProcessError as error:
        raise LayoutError(f"Graphviz could not draw this: {error.stderr}") from error
    return drawn.stdout


@contextmanager
def _silent() -> Iterator[None]:
    """Show nothing of what C code says: the wheel's fontconfig complains about a system's newer settings."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Placed(NamedTuple):
    """A drawing's size, the centres of its cards (x + iy), and its edges."""

    width: float
    height: float
    centres: list[complex]
    edges: list[Way]


def place(graph: Graph, cards: Sequence[Card]) -> Placed:
    """Let Graphviz give each card its place. Raises LayoutError without Graphviz."""
    dot = ["digraph {", "graph [nodesep=0.3, ranksep=0.3]"]
    dot.append('node [shape=box, fixedsize=true, label=""]')
    for i, card in enumerate(cards):
        inches = f"width={card.width / 72:.3f}, height={card.height / 72:.3f}"
        dot.append(f"n{i} [{inches}]")
    # Data flows along the arrows, from leaves to roots.
    dot += [f"n{edge.target} -> n{edge.source}" for edge in graph.edges]
    dot.append("}")
    layout = json.loads(graphviz("\n".join(dot), "json"))
    _, _, wide, tall = map(float, layout["bb"].split(","))

    def at(point: str) -> complex:
        x, y = map(float, point.split(","))
        return complex(x + _MARGIN, tall - y + _MARGIN)

    # Both are numbered as they were named.
    centres = [at(box["pos"]) for box in layout.get("objects", ())]
    edges = []
    for edge in layout.get("edges", ()):
        curve, tip = _paths(edge["pos"].split(), at)
        edges.append((edge["head"], edge["tail"], curve, tip))
    width = max(wide, 40) + 2 * _MARGIN
    height = max(tall, 20) + 2 * _MARGIN
    return Placed(width, height, centres, edges)


def _paths(points: list[str], at: Callable[[str], complex]) -> tuple[str, str]:
    """Return the curve of an edge and its arrowhead, as SVG paths."""
    start, *curve = [at(point) for point in points if point[0] not in "es"]
    path = f"M{_xy(start)}C" + " ".join(map(_xy, curve))
    head = ""
    for point in points:
        if point.startswith("e,"):
            tip = at(point[2:])
            base = curve[-1]
            side = 1j * _TIP * (tip - base) / max(abs(tip - base), 0.1)
            head += f"M{_xy(tip)}L{_xy(base + side)} {_xy(base - side)}Z"
    return path, head


def _xy(point: complex) -> str:
    return f"{point.real:.1f} {point.imag:.1f}"


def _svg(graph: Graph, cards: list[Card], label: str) -> str:
    width, height, centres, edges = place(graph, cards)
    parts = []
    for _, _, curve, tip in edges:
        parts.append(f'<path class="av-edge" d="{curve}"/>')
        if tip:
            parts.append(f'<path class="av-tip" d="{tip}"/>')
    drawn = zip(centres, graph, cards, strict=True)
    # From the top down: so a key walks through what opens.
    for centre, node, card in sorted(drawn, key=lambda one: (one[0].imag, one[0].real)):
        kinds = " ".join(f"av-{kind}" for kind in card.kinds)
        corner = _xy(centre - card.half)
        folded = f' data-module="{escape(node.module)}"' if node.kind == "fold" else ""
        parts.append(f'<g class="{kinds}"{folded} transform="translate({corner})">')
        for element in (*card.elements(), *card.numbers_drawn()):
            parts.append(_tag(*element))
        parts.append("</g>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="--av-width:{width:.0f}px">'
        + "\n".join([*parts, "</svg>"])
    )


def _tag(
    looks: str,
    attributes: dict[str, Any],
    text: str = "",
) -> str:
    name, *classes = looks.split(".")
    given = f' class="{" ".join(classes)}"' if classes else ""
    for key, value in attributes.items():
        given += f' {key}="{value}"'
    return f"<{name}{given}>{escape(text)}</{name}>"


def _summary(graph: Graph) -> str:
    roots = ", ".join(graph.nodes[root].title for root in graph.roots)
    text = f"Autograd graph of {roots or 'no root'}: {counted(len(graph), 'node')}"
    return ". ".join([text, *graph.notes])


def lines_of(graph: Graph, cards: list[Card]) -> Iterator[str]:
    """Write each node in one line, with the numbers of the nodes that its data came from."""
    sources: dict[int, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.source, []).append(str(edge.target + 1))
    for node, card in zip(graph, cards, strict=True):
        parts = [f"shape {card.shape}"] if card.shape else []
        parts += card.rows
        parts += [f"{label} {text}" for label, text in card.numbers]
        if node.id in sources:
            parts.append(f"from {', '.join(sources[node.id])}")
        yield f"<code><bdi>{escape(card.full)}</bdi></code> " + escape("; ".join(parts))


def _width(text: str, px: float) -> float:
    wide = sum(ord(char) > 0x1100 and char not in "−×…" for char in text)
    return _EM * (len(text) + wide) * px
