"""Draw a graph: Graphviz places the boxes, fonts and colours are those of the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from accumviz.graph.graph import Graph, Node
from accumviz.show import counted, escape, literal
from accumviz.views.graphviz import SMALL, STYLE, TITLE, graphviz
from accumviz.views.style import number, size

NODES_LIMIT = 150
_OVERVIEW = (12, 60)  # once folded, a reader wants neither a single box nor a hundred
_TOP, _LINE, _PAD, _LABEL, _MARGIN, _RULE = 20, 17, 11, 48, 6, 7  # px
_EM = 0.625  # a monospace advance, with room for fonts wider than the common 0.60
_LONGEST, _LONGEST_NUMBERS, _LONGEST_ATTRIBUTES = 30, 36, 20  # characters in a row
_KEYS = (
    ("operation", "operation"),
    ("fold", "several operations"),
    ("accumulate", "leaf: adds to its .grad"),
    ("root", "root: backward starts here"),
    ("freed", "freed by backward"),
)


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
        shape = _width(self.shape and f"  {self.shape}", SMALL)
        widths = [_width(self.title, TITLE) + shape, 70.0]
        for label, text in self.rows:
            widths.append(_width(f"{label} {text}".lstrip(), SMALL))
        widths += [_LABEL + _width(text, SMALL) for _, text in self.numbers]
        self.width = round(max(widths) + 2 * _PAD + 4)
        lines = 1 + len(self.rows) + len(self.numbers)
        self.height = _LINE * lines + 2 * _MARGIN + _RULE * bool(self.numbers)


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
    cards, others, folds = cards_of(shown), [], ""
    other = other_form(graph, shown)
    if other is not None:
        others = cards_of(other)
        how = "Folded by module" if len(other) < len(shown) else "Unfolded further"
        folds = (
            f'<details class="av-form"><summary>{how}: {len(other)} nodes</summary>'
            f"{_scrolled(other, others)}</details>\n"
        )
    items = "\n".join(f"<li>{line}</li>" for line in lines_of(shown, cards))
    return (
        f'<figure class="accumviz av-graph"><style>{STYLE}</style>\n'
        f"{folds}{_scrolled(shown, cards)}\n"
        f"<figcaption>{_legend([*cards, *others])}{_notes(shown)}</figcaption>\n"
        f"<details><summary>The graph as text ({counted(len(shown), 'node')})</summary>\n"
        f"<ol>\n{items}\n</ol></details></figure>"
    )


def _legend(cards: list[Card]) -> str:
    """Explain the looks of these cards."""
    flow = "↓ data flows down from the leaves; ↑ gradients flow back up"
    keys = [f'<span class="av-key">{flow}</span>']
    for kind, text in _KEYS:
        if any(kind in card.kinds for card in cards):
            keys.append(f'<span class="av-key"><i class="av-{kind}"></i>{text}</span>')
    return " ".join(keys)


def _notes(graph: Graph) -> str:
    notes = list(graph.notes)
    if any(node.grad is not None for node in graph):
        grad = "grad: derivative of the root with respect to the value above it"
        notes.insert(0, grad)
    return "".join(f"<br>{escape(note)}" for note in notes)


def _scrolled(graph: Graph, cards: list[Card]) -> str:
    label = "Autograd graph, scrollable"
    return f'<div class="av-scroll" tabindex="0" role="group" aria-label="{label}">{_svg(graph, cards)}</div>'


def other_form(graph: Graph, shown: Graph) -> Graph | None:
    """Return a second form of a graph: by module, or of a folded one, as much more as fits.

    None where that is hardly another picture.
    """
    for depth in _depths(graph):
        form = graph.collapse_modules(depth)
        more = len(form) - len(shown)
        if len(shown) == len(graph):
            more = -more
        if more > 2 and len(form) <= NODES_LIMIT:
            return form
    return None


def _depths(graph: Graph) -> range:
    """Return the depths of its modules, from the innermost to the outermost."""
    deepest = 0
    for node in graph:
        if node.module and node.kind != "accumulate":
            deepest = max(deepest, node.module.count(".") + 1)
    return range(deepest, 0, -1)


def simplify(graph: Graph, limit: int = NODES_LIMIT) -> Graph:
    """Fold a graph by module until it has at most `limit` nodes; where that is not enough, draw those nearest the loss.

    A note says so.
    """
    if len(graph) <= limit:
        return graph
    shown, how = graph, ""
    for depth in _depths(graph):
        folded = graph.collapse_modules(depth)
        if len(shown) > limit or _OVERVIEW[0] <= len(folded):
            shown, how = folded, f": modules folded at depth {depth}"
        if len(shown) <= _OVERVIEW[1]:
            break
    if len(shown) > limit:
        how += f"{', ' if how else ': '}only the {limit} nearest the loss"
        shown = _nearest_the_loss(shown, limit)
    note = f"{len(graph):,} nodes drawn as {len(shown):,}{how}"
    return replace(shown, meta={**shown.meta, "notes": [*shown.notes, note]})


def _nearest_the_loss(graph: Graph, count: int) -> Graph:
    edges = [e for e in graph.edges if max(e.source, e.target) < count]
    roots = tuple(root for root in graph.roots if root < count)
    return Graph(graph.nodes[:count], tuple(edges), roots, dict(graph.meta))


def cards_of(graph: Graph, leaf: str = "grad") -> list[Card]:
    """Return the card of each node, where `leaf` is what the gradient of a leaf is called."""
    return [_card(node, node.id in graph.roots, leaf) for node in graph]


def _card(node: Node, root: bool, leaf: str) -> Card:
    title, rows = _title(node)
    if node.dtype not in ("", "float32"):
        rows.append(("", node.dtype))
    if not node.alive:
        rows.append(("freed", ""))
    elif node.saved_bytes:
        rows.append((f"saves {size(node.saved_bytes)}", _attributes(node)))
    grad = leaf if node.kind == "accumulate" else "grad"
    shape = ""
    if node.shape is not None:
        shape = f"[{' × '.join(map(str, node.shape))}]" if node.shape else "scalar"
    kinds = [node.kind] + ["root"] * root + ["freed"] * (not node.alive)
    return Card(
        _clip(literal(title)),
        shape,
        [(label, literal(text)) for label, text in rows],
        [*_numbers("value", node.value), *_numbers(grad, node.grad)],
        kinds,
        node.name or node.module,
    )


def _title(node: Node) -> tuple[str, list[tuple[str, str]]]:
    """Return a node's title, and below it its operation and its module."""
    if node.kind == "fold":
        counts = []
        if node.operations:
            counts.append(counted(node.operations, "operation"))
        if node.parameters:
            counts.append(counted(node.parameters, "parameter"))
        named = [("", node.op)] if node.module else []
        return node.title, [*named, (", ".join(counts), "")]
    title, module = node.title, node.module
    if len(title) > _LONGEST and "." in title:
        module, _, title = title.rpartition(".")
    elif node.kind == "accumulate":
        module = ""
    rows = [("", node.op)] if node.name else []
    if module:
        rows.append(("in", _clip(module)))
    return title, rows


def _attributes(node: Node) -> str:
    """Name the attributes that hold a storage."""
    if node.kind == "fold":
        return ""
    kept = [saved.attr.partition("[")[0] for saved in node.saved if saved.storage >= 0]
    return _clip(", ".join(dict.fromkeys(kept)), _LONGEST_ATTRIBUTES)


def _numbers(label: str, value: Any) -> list[tuple[str, str]]:
    """Write a small matrix row under row, anything else in one line."""
    if value is None:
        return []
    rows = [value]
    if isinstance(value, list) and 1 < len(value) <= 4 and all(map(_is_row, value)):
        rows = value
    labels = [label, *[""] * (len(rows) - 1)]
    return [(one, _written(row)) for one, row in zip(labels, rows, strict=True)]


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list)


def _written(value: Any) -> str:
    if not isinstance(value, (list, tuple)):
        return number(float(value))
    text = "[" + ", ".join(map(_written, value)) + "]"
    if len(text) <= _LONGEST_NUMBERS:
        return text
    return text[: _LONGEST_NUMBERS - 2].rstrip(", ") + " …]"


class Placed(NamedTuple):
    """A drawing's size, its cards with their centres, and its edges: (source, target, curve, arrowhead)."""

    width: float
    height: float
    cards: list[tuple[Card, float, float]]
    edges: list[tuple[int, int, str, str]]


def place(graph: Graph, cards: list[Card]) -> Placed:
    """Let Graphviz give each card its place. Raises LayoutError without Graphviz."""
    source = ["digraph {", "graph [nodesep=0.3, ranksep=0.3]"]
    source.append('node [shape=box, fixedsize=true, label=""]')
    for i, card in enumerate(cards):
        inches = card.width / 72, card.height / 72
        source.append("n{} [width={:.3f}, height={:.3f}]".format(i, *inches))
    # Data flows along the arrows, from leaves to roots.
    source += [f"n{edge.target} -> n{edge.source}" for edge in graph.edges]
    layout = json.loads(graphviz("\n".join([*source, "}"]), "json"))
    _, _, wide, tall = map(float, layout["bb"].split(","))

    def at(point: str) -> tuple[float, float]:
        x, y = map(float, point.split(","))
        return x + _MARGIN, tall - y + _MARGIN

    boxes = layout.get("objects", ())
    which = [int(box["name"][1:]) for box in boxes]
    centres = {i: at(box["pos"]) for i, box in zip(which, boxes, strict=True)}
    edges = []
    for edge in layout.get("edges", ()):
        ends = which[edge["head"]], which[edge["tail"]]
        edges.append((*ends, *_paths(edge["pos"].split(), at)))
    placed = [(card, *centres[i]) for i, card in enumerate(cards)]
    return Placed(
        max(wide, 40) + 2 * _MARGIN, max(tall, 20) + 2 * _MARGIN, placed, edges
    )


def _paths(points: list[str], at: Any) -> tuple[str, str]:
    """Return the curve of an edge and its arrowhead, as SVG paths."""
    start, *curve = [at(point) for point in points if point[0] not in "es"]
    bends = " ".join(f"{x:.1f} {y:.1f}" for x, y in curve)
    path = "M{:.1f} {:.1f}C".format(*start) + bends
    head = ""
    for tip in points:
        if tip.startswith("e,"):
            (x, y), (bx, by) = at(tip[2:]), curve[-1]
            length = max(((x - bx) ** 2 + (y - by) ** 2) ** 0.5, 0.1)
            ux, uy = 4.2 * (x - bx) / length, 4.2 * (y - by) / length
            corners = f"L{bx - uy:.1f} {by + ux:.1f} {bx + uy:.1f} {by - ux:.1f}"
            head += f"M{x:.1f} {y:.1f}{corners}Z"
    return path, head


def _svg(graph: Graph, cards: list[Card], style: str = "") -> str:
    width, height, placed, edges = place(graph, cards)
    parts = [f"<style>{style}</style>"] if style else []
    for _, _, curve, tip in edges:
        parts.append(f'<path class="av-edge" d="{curve}"/>')
        if tip:
            parts.append(f'<path class="av-tip" d="{tip}"/>')
    for card, x, y in placed:
        parts += _card_svg(card, x - card.width / 2, y - card.height / 2)
    looks = ' class="accumviz av-graph"' if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg"{looks} role="img" '
        f'aria-label="{escape(_summary(graph))}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="--av-width:{width:.0f}px">'
        + "\n".join([*parts, "</svg>"])
    )


class Shape(NamedTuple):
    """One element of a drawn card, placed from the card's corner on; a text is parts, each with a look of its own."""

    name: str
    look: str
    at: dict[str, Any]
    parts: tuple[tuple[str, str], ...] = ()


def drawn(card: Card) -> Iterator[Shape]:
    """Yield what a card shows but for its numbers, which a player fills in."""
    wide = round(card.width)
    radius = 15 if "accumulate" in card.kinds else 7
    box = {"width": wide, "height": round(card.height), "rx": radius}
    if card.full not in (card.title, ""):
        yield Shape("title", "", {}, (("", card.full),))
    if "fold" in card.kinds:
        yield Shape("rect", "av-behind", {"x": 4, "y": 4, **box})
    yield Shape("rect", "av-box", {"x": 0, "y": 0, **box})
    yield Shape("text", "av-title", {"x": _PAD, "y": _TOP}, (("", card.title),))
    if card.shape:
        right = {"x": wide - _PAD, "y": _TOP, "text-anchor": "end"}
        yield Shape("text", "av-mono av-quiet", right, (("", card.shape),))
    for i, (label, text) in enumerate(card.rows, 1):
        space = " " * bool(label and text)
        parts = ("av-quiet", label + space), ("av-mono av-quiet", text)
        yield Shape("text", "", {"x": _PAD, "y": _TOP + _LINE * i}, parts)
    if card.numbers:
        line = numbers_from(card) - _LINE
        # Where a value was not kept nothing stands below it until the gradient comes.
        late = " av-late" * (card.numbers[0][0] == "grad")
        ends = {"x1": 0, "x2": wide, "y1": line, "y2": line}
        yield Shape("line", f"av-rule{late}", ends)


def numbers_from(card: Card) -> int:
    """Return where the first of a card's numbers stands, below its rows and a rule."""
    return _TOP + _LINE * (len(card.rows) + 1) + _RULE


def _numbers_drawn(card: Card) -> Iterator[Shape]:
    for i, (label, text) in enumerate(card.numbers):
        y = numbers_from(card) + _LINE * i
        if label:
            yield Shape("text", "av-quiet", {"x": _PAD, "y": y}, (("", label),))
        yield Shape("text", "av-mono", {"x": _PAD + _LABEL, "y": y}, (("", text),))


def _card_svg(card: Card, left: float, top: float) -> list[str]:
    parts = [f'<g class="{" ".join(f"av-{kind}" for kind in card.kinds)}">']
    for shape in (*drawn(card), *_numbers_drawn(card)):
        attributes = {"class": shape.look} if shape.look else {}
        for name, value in shape.at.items():
            corner = {"x": left, "y": top}.get(name.rstrip("12"))
            attributes[name] = value if corner is None else f"{value + corner:.1f}"
        text = ""
        for look, part in shape.parts:
            if part:
                span = f'<tspan class="{look}">{escape(part)}</tspan>'
                text += span if look else escape(part)
        given = "".join(f' {name}="{value}"' for name, value in attributes.items())
        parts.append(f"<{shape.name}{given}>{text}</{shape.name}>")
    return [*parts, "</g>"]


def _summary(graph: Graph) -> str:
    roots, leaves = [], []
    for root in graph.roots:
        node = graph.nodes[root]
        roots.append(f"{node.name} ({node.op})" if node.name else node.title)
    for node in graph:
        if node.kind == "accumulate" and node.name:
            leaves.append(node.name)
    text = f"Autograd graph of {', '.join(roots) or 'no root'}: {counted(len(graph), 'node')}"
    if leaves:
        text += f", from the leaves {', '.join(leaves[:6])}"
    return ". ".join([text, *graph.notes])


def lines_of(graph: Graph, cards: list[Card]) -> Iterator[str]:
    """Write each node in one line, with the numbers of the nodes that its data came from."""
    sources: dict[int, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.source, []).append(str(edge.target + 1))
    for node, card in zip(graph, cards, strict=True):
        rows = [f"shape {card.shape}"] if card.shape else []
        for label, text in (*card.rows, *card.numbers):
            rows.append(f"{label} {text}".strip())
        if node.id in sources:
            rows.append(f"from {', '.join(sources[node.id])}")
        name = escape(card.full or card.title)
        yield f"<code><bdi>{name}</bdi></code> " + escape("; ".join(rows))


def _clip(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[-half:]}"


def _width(text: str, px: float) -> float:
    wide = sum(ord(char) > 0x1100 and char not in "−×…" for char in text)
    return _EM * (len(text) + wide) * px
