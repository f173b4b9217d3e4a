"""Graph -> DOT -> SVG: Graphviz only places boxes, so fonts, colours and themes are the page's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accumviz.graph.graph import Graph, Node
from accumviz.show import counted, escape, literal
from accumviz.views.graphviz import SMALL, STYLE, TITLE, graphviz
from accumviz.views.style import number, size

NODES_LIMIT = 150
_OVERVIEW = (12, 60)  # once folded, a reader wants neither a single box nor a hundred
_TOP, _LINE, _PAD, _LABEL = 20, 17, 11, 48  # px
_EM = 0.625  # a monospace advance, with room for fonts wider than the common 0.60
_LONGEST, _LONGEST_NUMBERS = 30, 36  # characters in a row


@dataclass
class Card:
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
        widths = [
            _width(self.title, TITLE) + _width(self.shape and f"  {self.shape}", SMALL)
        ]
        widths += [
            _width(label and f"{label} ", SMALL) + _width(text, SMALL)
            for label, text in self.rows
        ]
        widths += [_LABEL + _width(text, SMALL) for _, text in self.numbers]
        self.width = round(max([*widths, 70.0]) + 2 * _PAD + 4)
        self.height = (
            _LINE * (1 + len(self.rows) + len(self.numbers))
            + 2 * 6
            + (7 if self.numbers else 0)
        )


def to_dot(graph: Graph) -> str:
    """Write the graph as DOT source, for any Graphviz: data flows along the arrows, leaves to roots.

    >>> print(to_dot(Graph((Node(0, "MulBackward0", "c"),), (), (0,))))
    digraph {
      node [shape=box, style=rounded, fontname=monospace]
      n0 [label="c\\nMulBackward0"]
    }
    """
    boxes = [
        f"  n{i} [label={_quoted([card.title, *(' '.join(filter(None, row)) for row in card.rows + card.numbers)])}]"
        for i, card in enumerate(cards_of(graph))
    ]
    return "\n".join(
        [
            "digraph {",
            "  node [shape=box, style=rounded, fontname=monospace]",
            *boxes,
            *_arrows(graph),
            "}",
        ]
    )


def to_svg(graph: Graph) -> str:
    """Draw the graph as one self-contained SVG that takes its colours from the page around it.

    More than 150 nodes are folded first (see `simplify`). Raises LayoutError without Graphviz.
    """
    shown = simplify(graph)
    return _svg(shown, cards_of(shown), style=STYLE)


def graph_html(graph: Graph) -> str:
    """Draw the graph as a self-contained HTML figure with a legend and the same content as text.

    A graph with modules folds and unfolds on the page, with no script.
    """
    shown = simplify(graph)
    cards, other = cards_of(shown), other_form(graph, shown)
    others = [] if other is None else cards_of(other)
    kinds = {kind for card in (*cards, *others) for kind in card.kinds}
    keys = [
        f'<span class="av-key"><i class="av-{k}"></i>{text}</span>'
        for k, text in _KEYS
        if k in kinds
    ]
    flow = "↓ data flows down from the leaves; ↑ gradients flow back up"
    notes = "".join(f"<br>{escape(note)}" for note in shown.notes)
    if any(node.grad is not None for node in shown):
        notes = (
            "<br>grad: derivative of the root with respect to the value above it"
            + notes
        )
    items = "\n".join(f"<li>{line}</li>" for line in lines_of(shown, cards))
    return (
        f'<figure class="accumviz av-graph"><style>{STYLE}</style>\n'
        f"{'' if other is None else _folds(other, others, shown)}{_scrolled(shown, cards)}\n"
        f'<figcaption><span class="av-key">{flow}</span> {" ".join(keys)}{notes}</figcaption>\n'
        f"<details><summary>The graph as text ({counted(len(shown), 'node')})</summary>\n"
        f"<ol>\n{items}\n</ol></details></figure>"
    )


def _scrolled(graph: Graph, cards: list[Card]) -> str:
    label = "Autograd graph, scrollable"
    return f'<div class="av-scroll" tabindex="0" role="group" aria-label="{label}">{_svg(graph, cards)}</div>'


def _folds(other: Graph, cards: list[Card], shown: Graph) -> str:
    """The other form in a fold: while it is open, what follows it is not shown."""
    how = "Folded by module" if len(other) < len(shown) else "Unfolded further"
    return f'<details class="av-form"><summary>{how}: {len(other)} nodes</summary>{_scrolled(other, cards)}</details>\n'


def other_form(graph: Graph, shown: Graph) -> Graph | None:
    """What a graph is seen as beside the form shown first: by module, or of a folded one, as much more as fits.

    Nothing where that is hardly another picture.
    """
    for depth in _depths(graph):
        form = graph.collapse_modules(depth)
        wanted = (
            len(form) - len(shown)
            if len(shown) < len(graph)
            else len(shown) - len(form)
        )
        if wanted > 2 and len(form) <= NODES_LIMIT:
            return form
    return None


def _depths(graph: Graph) -> range:
    """Of its modules, from the innermost to the outermost."""
    known = [node.module for node in graph if node.module and node.kind != "accumulate"]
    return range(max((path.count(".") + 1 for path in known), default=0), 0, -1)


def simplify(graph: Graph, limit: int = NODES_LIMIT) -> Graph:
    """Fold a graph until it has at most `limit` nodes, and add a note that says how.

    By module, as deep as fits; then runs of operations; then equal slices.
    """
    if len(graph) <= limit:
        return graph
    was, how, shown = len(graph), "", graph
    for depth in _depths(graph):
        folded = graph.collapse_modules(depth)
        if len(shown) > limit or _OVERVIEW[0] <= len(folded):
            shown, how = folded, f"modules folded at depth {depth}"
        if len(shown) <= _OVERVIEW[1]:
            break
    if len(shown) > limit:
        shown, how = (
            shown.collapse_runs(),
            f"{how}, runs of operations folded".strip(", "),
        )
    if len(shown) > limit:
        shown, how = (
            shown.collapse_slices(limit),
            f"{how}, then equal slices".strip(", "),
        )
    notes = [*shown.notes, f"{was:,} nodes drawn as {len(shown):,}: {how}"]
    return Graph(shown.nodes, shown.edges, shown.roots, {**shown.meta, "notes": notes})


_KEYS = (
    ("operation", "operation"),
    ("fold", "several operations"),
    ("accumulate", "leaf: adds to its .grad"),
    ("root", "root: backward starts here"),
    ("freed", "freed by backward"),
)


def cards_of(graph: Graph, leaf: str = "grad") -> list[Card]:
    """What stands on each node, where `leaf` is what the gradient of a leaf is called."""
    return [
        _card(
            node, node.id in graph.roots, leaf if node.kind == "accumulate" else "grad"
        )
        for node in graph
    ]


def _card(node: Node, root: bool, grad: str) -> Card:
    rows: list[tuple[str, str]] = []
    title = node.name or node.op
    if node.kind == "fold":
        title = node.module or node.op
        rows += [("", node.op)] if node.module else []
        counts = [(node.operations, "operation"), (node.parameters, "parameter")]
        rows.append((", ".join(counted(n, noun) for n, noun in counts if n), ""))
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
        attrs = ", ".join(
            dict.fromkeys(
                s.attr.partition("[")[0] for s in node.saved if s.storage >= 0
            )
        )
        rows.append(
            (
                f"saves {size(node.saved_bytes)}",
                "" if node.kind == "fold" else _clip(attrs, 20),
            )
        )
    numbers = [*_numbers("value", node.value), *_numbers(grad, node.grad)]
    shape = (
        ""
        if node.shape is None
        else f"[{' × '.join(map(str, node.shape))}]"
        if node.shape
        else "scalar"
    )
    kinds = [node.kind, *(["root"] if root else []), *([] if node.alive else ["freed"])]
    rows = [(label, literal(text)) for label, text in rows]
    return Card(
        _clip(literal(title)), shape, rows, numbers, kinds, node.name or node.module
    )


def _numbers(label: str, value: Any) -> list[tuple[str, str]]:
    """Write a matrix row under row, anything else in one line."""
    if value is None:
        return []
    rows = [value]
    if (
        isinstance(value, list)
        and 1 < len(value) <= 4
        and all(isinstance(r, list) and r for r in value)
    ):
        rows = value if not any(isinstance(x, list) for r in value for x in r) else rows
    return [(label if i == 0 else "", _value(row)) for i, row in enumerate(rows)]


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(_value, value)) + "]"
        return (
            text
            if len(text) <= _LONGEST_NUMBERS
            else text[: _LONGEST_NUMBERS - 2].rstrip(", ") + " …]"
        )
    return number(float(value))


class Placed(NamedTuple):
    """A drawing's size, its cards with their centres, and its edges: (source, target, curve, arrowhead)."""

    width: float
    height: float
    cards: list[tuple[Card, float, float]]
    edges: list[tuple[int, int, str, str]]


def place(graph: Graph, cards: list[Card]) -> Placed:
    """Let Graphviz give each card its place. Raises LayoutError without Graphviz."""
    layout = json.loads(graphviz(_layout_source(graph, cards), "json"))
    margin = 6.0
    _, _, wide, tall = (float(part) for part in layout["bb"].split(","))

    def at(point: str) -> tuple[float, float]:
        x, y = point.split(",")
        return float(x) + margin, tall - float(y) + margin

    boxes = layout.get("objects", ())
    which = [int(box["name"][1:]) for box in boxes]
    return Placed(
        max(wide, 40) + 2 * margin,
        max(tall, 20) + 2 * margin,
        [
            (cards[i], *at(box["pos"]))
            for i, box in sorted(
                zip(which, boxes, strict=True), key=lambda pair: pair[0]
            )
        ],
        [
            (
                which[edge["head"]],
                which[edge["tail"]],
                *_paths([*edge["pos"].split()], at),
            )
            for edge in layout.get("edges", ())
        ],
    )


def _svg(graph: Graph, cards: list[Card], style: str = "") -> str:
    width, height, placed, edges = place(graph, cards)
    parts = [
        f'<path class="av-edge" d="{curve}"/>'
        + (f'\n<path class="av-tip" d="{tip}"/>' if tip else "")
        for _, _, curve, tip in edges
    ]
    for card, x, y in placed:
        parts += _card_svg(card, x, y)
    root = "accumviz av-graph" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg"{f" class={chr(34)}{root}{chr(34)}" if root else ""} role="img" '
        f'aria-label="{escape(_summary(graph))}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="--av-width:{width:.0f}px">'
        + (f"<style>{style}</style>" if style else "")
        + "\n".join(parts)
        + "</svg>"
    )


def _layout_source(graph: Graph, cards: list[Card]) -> str:
    boxes = [
        f"n{i} [width={c.width / 72:.3f}, height={c.height / 72:.3f}]"
        for i, c in enumerate(cards)
    ]
    head = [
        "digraph {",
        "graph [nodesep=0.3, ranksep=0.3]",
        'node [shape=box, fixedsize=true, label=""]',
    ]
    return "\n".join([*head, *boxes, *_arrows(graph), "}"])


def _arrows(graph: Graph) -> list[str]:
    return [f"  n{edge.target} -> n{edge.source}" for edge in graph.edges]


def _paths(pos: list[str], at: Any) -> tuple[str, str]:
    """The curve of an edge and its arrowhead, as SVG paths."""
    tips = [point[2:] for point in pos if point.startswith("e,")]
    (x0, y0), *curve = [
        at(point) for point in pos if "e," not in point and "s," not in point
    ]
    path = f"M{x0:.1f} {y0:.1f}C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in curve)
    heads = ""
    for tip in tips:
        (x, y), (bx, by) = at(tip), curve[-1]
        length = max(((x - bx) ** 2 + (y - by) ** 2) ** 0.5, 0.1)
        ux, uy = 4.2 * (x - bx) / length, 4.2 * (y - by) / length
        heads += (
            f"M{x:.1f} {y:.1f}L{bx - uy:.1f} {by + ux:.1f} {bx + uy:.1f} {by - ux:.1f}Z"
        )
    return path, heads


class Shape(NamedTuple):
    """One element of a drawn card, placed from the card's corner on; a text is parts, each with a look of its own."""

    name: str
    look: str
    at: dict[str, Any]
    parts: tuple[tuple[str, str], ...] = ()


def drawn(card: Card) -> Iterator[Shape]:
    """What a card shows but for its numbers, which a player fills in."""
    wide = round(card.width)
    box = {
        "width": wide,
        "height": round(card.height),
        "rx": 15 if "accumulate" in card.kinds else 7,
    }
    if card.full not in (card.title, ""):
        yield Shape("title", "", {}, (("", card.full),))
    if "fold" in card.kinds:
        yield Shape("rect", "av-behind", {"x": 4, "y": 4, **box})
    yield Shape("rect", "av-box", {"x": 0, "y": 0, **box})
    yield Shape("text", "av-title", {"x": _PAD, "y": _TOP}, (("", card.title),))
    if card.shape:
        yield Shape(
            "text",
            "av-mono av-quiet",
            {"x": wide - _PAD, "y": _TOP, "text-anchor": "end"},
            (("", card.shape),),
        )
    for i, (label, text) in enumerate(card.rows, 1):
        parts = (
            ("av-quiet", label + " " * bool(label and text)),
            ("av-mono av-quiet", text),
        )
        yield Shape("text", "", {"x": _PAD, "y": _TOP + _LINE * i}, parts)
    if card.numbers:
        line = numbers_from(card) - 17
        # Where a value was not kept nothing stands below it until the gradient comes.
        late = " av-late" * (card.numbers[0][0] == "grad")
        yield Shape(
            "line", f"av-rule{late}", {"x1": 0, "x2": wide, "y1": line, "y2": line}
        )


def numbers_from(card: Card) -> int:
    """Where the first of a card's numbers stands, below its rows and a rule."""
    return _TOP + _LINE * (len(card.rows) + 1) + 7


def _card_svg(card: Card, x: float, y: float) -> list[str]:
    left, top = x - card.width / 2, y - card.height / 2
    parts = [f'<g class="{" ".join(f"av-{kind}" for kind in card.kinds)}">']
    for shape in drawn(card):
        at = {
            k: f"{v + (left if k[0] == 'x' else top):.1f}" if k[0] in "xy" else v
            for k, v in shape.at.items()
        }
        first = {"class": shape.look or None, "text-anchor": at.get("text-anchor")}
        given = "".join(
            f' {name}="{value}"'
            for name, value in {**first, **at}.items()
            if value is not None
        )
        if shape.name in ("rect", "line"):
            parts.append(f"<{shape.name}{given}/>")
            continue
        texts = [(look, text) for look, text in shape.parts if text]
        spans = [
            f'<tspan class="{look}">{escape(text)}</tspan>' if look else escape(text)
            for look, text in texts
        ]
        parts.append(f"<{shape.name}{given}>{''.join(spans)}</{shape.name}>")
    for i, (label, text) in enumerate(card.numbers):
        line = top + numbers_from(card) + _LINE * i
        parts.append(
            (
                f'<text class="av-quiet" x="{left + _PAD:.1f}" y="{line:.1f}">{label}</text>'
                if label
                else ""
            )
            + f'<text class="av-mono" x="{left + _PAD + _LABEL:.1f}" y="{line:.1f}">{escape(text)}</text>'
        )
    return [*parts, "</g>"]


def _summary(graph: Graph) -> str:
    def name(node: Node) -> str:
        if node.name:
            return f"{node.name} ({node.op})"
        return (node.module if node.kind == "fold" else "") or node.op

    roots = ", ".join(name(graph.nodes[root]) for root in graph.roots)
    text = f"Autograd graph of {roots or 'no root'}: {counted(len(graph), 'node')}"
    leaves = [node.name for node in graph if node.kind == "accumulate" and node.name][
        :6
    ]
    text += f", from the leaves {', '.join(leaves)}" if leaves else ""
    return ". ".join([text, *graph.notes])


def lines_of(graph: Graph, cards: list[Card]) -> Iterator[str]:
    """Say each node in one line, with the nodes its data came from by number."""
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.source, []).append(edge.target)
    for node, card in zip(graph, cards, strict=True):
        rows = [" ".join(filter(None, row)) for row in [*card.rows, *card.numbers]]
        rows = [f"shape {card.shape}", *rows] if card.shape else rows
        came = ", ".join(str(i + 1) for i in sources.get(node.id, ()))
        text = f"<code><bdi>{escape(card.full or card.title)}</bdi></code> "
        text += escape("; ".join([*rows, *([f"from {came}"] if came else [])]))
        yield text


def _clip(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[-half:]}"


def _quoted(lines: list[str]) -> str:
    # Graphviz reads entities and backslash escapes inside a label
    safe = [
        literal(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
        for line in lines
    ]
    return '"' + "\\n".join(safe) + '"'


def _width(text: str, px: float) -> float:
    return (
        sum(
            _EM * (2 if ord(char) > 0x1100 and char not in "−×…" else 1)
            for char in text
        )
        * px
    )
