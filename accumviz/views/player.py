"""Build the player: one page element that needs no kernel, no network and no second file."""

from __future__ import annotations

import html
import inspect
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from accumviz import arguments
from accumviz.checks.report import Report
from accumviz.graph.graph import Graph, Node, in_order
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.show import Displayed, counted, escape, literal
from accumviz.views import style, words
from accumviz.views.graph import Card, LayoutError, cards_of, place, readable
from accumviz.views.layout import SCALED
from accumviz.views.payload import encode, identity, ledger_data
from accumviz.views.tables import report_data
from accumviz.views.weights import Field, Loss, field

# Laying out takes a tenth of a second each: more are counted, not drawn.
_MOST_LAYOUTS = 40
# To be raised, here and in `page.js`, when what a page is told is told otherwise: a notebook keeps outputs of several
# versions, and each script takes what its own has written.
FORMAT = 4
_LEFT_OUT = f"The graph of this backward was not kept, or not drawn: only {_MOST_LAYOUTS} of different form are."

Data = dict[str, Any]


class Player(Displayed):
    """A recording one can scrub: code, graph, `.grad`, weights, timeline and shares, at one moment.

    `graphs` are those of its backwards, by event; `ground` is what its weight is drawn on, where it has a single one.
    """

    def __init__(
        self,
        ledger: Ledger,
        graphs: Mapping[int, Graph],
        ground: Field | None = None,
    ) -> None:
        self.ledger = ledger
        self.graphs = dict(graphs)
        self.ground = ground
        # The levels of its heat map, where it shares them with other runs.
        self.levels: tuple[float, float] | None = None
        # With a report, it opens with that; `about` says whose.
        self.report: Report | None = None
        self.about = ""

    @cached_property
    def content(self) -> Data:
        """What the page is told."""
        data = ledger_data(self.ledger, self.ground, self.levels)
        chosen = data["e"].get("i", range(len(self.ledger)))
        data |= scenes(self.graphs)
        of = data["of"]
        data["of"] = {str(i): of[e] for i, e in enumerate(chosen) if e in of}
        if not self.graphs:
            data["missing"] = ""
        data["about"] = self.words[0]
        data["before"] = words.before(built=self._is_built_before())
        data["bars"] = SCALED if any("k" in row for row in data["p"]) else ""
        if self.report is not None:
            data["report"] = self._judged(self.report, data["code"], chosen)
        return data

    def _is_built_before(self) -> bool:
        """Return whether the graph of the first backward is known before it runs."""
        backwards = self.ledger.of("backward")
        first = self.graphs.get(backwards[0].index) if backwards else None
        return first is not None and first.before

    def _judged(
        self,
        report: Report,
        files: list[Data],
        chosen: Sequence[int],
    ) -> Data:
        """Return what the page is told of a report: with the places of its events and of its lines."""
        data = report_data(report)
        lines = []
        for file in files:
            lines += [(file["name"], number) for number, *_ in file["lines"]]
        for finding, shown in zip(report.findings, data["findings"], strict=True):
            shown["event"] = max(bisect_right(chosen, finding.event) - 1, 0)
            if (finding.file, finding.line) in lines:
                shown["mark"] = lines.index((finding.file, finding.line))
        data["about"] = self.about
        return data

    @cached_property
    def id(self) -> str:
        """Return the name by which a permalink finds this player on a page."""
        return identity(self.content)

    @cached_property
    def words(self) -> list[str]:
        """Return the text alternative: what is there, then event by event."""
        events = range(len(self.ledger))
        return words.story(
            self.ledger,
            events,
            range(len(self.ledger.parameters)),
        )

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; with its scripts stripped, a list remains."""
        css, script = assets()
        about, *events = map(html.escape, self.words)
        items = "".join(f"<li>{event}</li>" for event in events)
        text = f'<details class="av-words" open><summary>In words</summary><p>{about}</p><ol>{items}</ol></details>\n'
        sheets = [css]
        if self.report is not None:
            sheets.append(style.static("report.css"))
        return fragment(
            "player",
            self.id,
            text,
            encode(self.content),
            sheets,
            script,
        )

    def __repr__(self) -> str:
        parts = [counted(len(self.ledger), "event")]
        parts.append(counted(len(self.ledger.parameters), "parameter"))
        if self.graphs:
            parts.append(counted(len(self.graphs), "graph"))
        return f"Player: {', '.join(parts)}; a notebook shows it, .save('run.html') writes a page"


def play(
    ledger: Ledger | Recorded,
    graphs: Mapping[int, Graph] | None = None,
    *,
    loss: Loss | None = None,
) -> Player:
    """Show code, graphs, `.grad`, weights, timeline and shares under one scrubber, with no kernel.

    `ledger` may be the recording, whose own graphs are shown where none are given. `graphs` holds
    graphs of backwards, by the index of the event. A single weight
    is drawn on its way; `loss`, a function of it, puts its curve below.
    Raises `TypeError` for anything else, `ValueError` for the graph of an event that is no backward.

    >>> play(Ledger.build([], []))
    Player: 0 events, 0 parameters; a notebook shows it, .save('run.html') writes a page
    """
    if graphs is None:
        graphs = getattr(ledger, "graphs", {})
    ledger = recorded(ledger, "play")
    if not isinstance(graphs, Mapping):
        raise TypeError(
            f"graphs is {arguments.a(graphs)}; expected graphs by event, as in recording.graphs"
        )
    backwards = [event.index for event in ledger.of("backward")]
    for event, graph in graphs.items():
        if not isinstance(graph, Graph):
            raise TypeError(
                f"graphs[{event!r}] is {arguments.a(graph)}; expected a Graph, as in recording.graphs: leave it out"
            )
        if event not in backwards:
            some = ", ".join(map(str, backwards[:8])) or "none"
            raise ValueError(
                f"graphs has the event {event!r}, which is no backward of this ledger; its backwards are: {some}"
            )
    return Player(ledger, graphs, field([ledger], loss))


class _Form(NamedTuple):
    """A graph as it is drawn."""

    graph: Graph
    cards: list[Card]

    def look(self) -> str:
        """Return everything but the numbers: what is alike is laid out once."""
        cards = []
        for card in self.cards:
            labels = [label for label, _ in card.numbers]
            cards.append((card.full, card.shape, card.rows, labels, card.kinds))
        return repr((cards, self.graph.edges, self.graph.notes))


def scenes(graphs: Mapping[int, Graph]) -> Data:
    """Lay out graphs, those of one look once, since a loop builds the same one again.

    `layouts`, `graphs` (which layout, and the numbers on its cards), and `of`: event -> graph.
    `missing` says why an event has none.
    """
    alike: dict[str, dict[int, _Form]] = {}
    for event, graph in graphs.items():
        drawn = readable(graph)
        form = _Form(drawn, cards_of(drawn, "adds"))
        alike.setdefault(form.look(), {})[event] = form
    layouts: list[Data] = []
    shown: list[Data] = []
    of = {}
    missing = _LEFT_OUT
    for same in list(alike.values())[:_MOST_LAYOUTS]:
        try:
            layout = _layout(list(same.values()))
        except LayoutError as error:
            missing = str(error)
            break
        for event, form in same.items():
            of[event] = len(shown)
            shown.append(_data(form, len(layouts), layout["e"]))
        layouts.append(layout)
    return {"layouts": layouts, "graphs": shown, "of": of, "missing": missing}


def _data(
    form: _Form,
    layout: int,
    edges: Sequence[Sequence[Any]],
) -> Data:
    """Return what a page is told of one graph: its layout, the numbers on its cards, the order of its nodes."""
    values = [[text for _, text in card.numbers] for card in form.cards]
    data = {
        "l": layout,
        "v": values,
        "order": order(form.graph),
    }
    if form.graph.before:
        data["made"] = 1
    by = factors(form.graph, edges)
    if any(by):
        data["x"] = by
    return data


def order(graph: Graph) -> list[int]:
    """Return the nodes in the order in which the engine ran them, or could have where that was not recorded."""
    if graph.order:
        return list(dict.fromkeys(graph.order))
    edges = [(edge.source, edge.target) for edge in graph.edges]
    return in_order(len(graph), edges)


def factors(graph: Graph, edges: Sequence[Sequence[Any]]) -> list[str]:
    """Return what each edge multiplies a gradient by: known between single numbers, where nothing else is added.

    >>> from accumviz.graph.graph import Edge, Node
    >>> mul, leaf = Node(0, "MulBackward0", grad=-4.0), Node(1, "AccumulateGrad", "w", grad=[-16.0])
    >>> factors(Graph((mul, leaf), (Edge(0, 1),), (0,)), [(0, 1)])
    ['× 4']
    """
    reached = Counter(target for _, target, *_ in edges)
    grads = [_single(node.grad) for node in graph]
    texts = []
    for source, target, *_ in edges:
        came = grads[source]
        left = grads[target]
        text = ""
        if came and left is not None and reached[target] == 1:
            factor = left / came
            text = f"× {style.number(factor)}" if math.isfinite(factor) else ""
        texts.append(text)
    return texts


def _single(value: Any) -> float | None:
    """Return the number in nested lists that hold only one."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, (int, float)) else None


def _layout(same: Sequence[_Form]) -> Data:
    """Lay out what some graphs have in common, with room for the widest of each card."""
    graph = same[0].graph
    cards = []
    for alike in zip(*(form.cards for form in same), strict=True):
        cards.append(max(alike, key=lambda card: card.width))
    placed = place(graph, cards)
    nodes = []
    for node, card, centre in zip(graph, cards, placed.centres, strict=True):
        nodes.append(_node(node, card, centre - card.half))
    return {
        "w": round(placed.width),
        "h": round(placed.height),
        "n": nodes,
        "e": [list(edge) for edge in placed.edges],
        "notes": list(map(literal, graph.notes)),
    }


def _node(node: Node, card: Card, corner: complex) -> Data:
    sides = corner.real, corner.imag, card.width, card.height
    data = {
        "b": list(map(round, sides)),
        "t": card.title,
        "n": [label for label, _ in card.numbers],
        "y": card.top_of_numbers,
        "k": card.kinds,
        "m": list(card.elements()),
        "s": int(node.saved_bytes > 0),
    }
    if node.kind == "accumulate":
        data["leaf"] = literal(node.name)
    if node.kind == "fold":
        data["in"] = literal(node.module)
    return data


def assets() -> tuple[str, str]:
    """Return the style sheet, with the names of accumviz's colours before, and the module, which explorers share."""
    return style.CSS + style.static("player.css"), style.static("accumviz.js")


def fragment(
    kind: str,
    name: str,
    text: str,
    data: str,
    sheets: Iterable[str],
    script: str,
) -> str:
    """Return what a page carries of a view: its data, the text that stands there without it, its styles, its module.

    Sheets that several kinds of view share are given apart: a page needs each of them once.
    """
    styles = "".join(f"<style data-accumviz>{css}</style>" for css in sheets)
    return (
        f'<div class="accumviz av-{kind}" data-accumviz-{kind}="{name}" data-v="{FORMAT}">{styles}\n{text}'
        f'<script type="application/json">{data}</script></div>\n<script type="module">{script}</script>'
    )


class _Drawing(Template):
    """An SVG with holes, such as `${width of a pipe}`."""

    braceidpattern = "[^}]+"


class Picture(Displayed):
    """A view that a script draws; kind, script and sheet go by the name of its class, beside whose module they are."""

    def drawn(self, name: str, holes: Mapping[str, Any]) -> str:
        """Return a drawing, which is in the folder `drawings` beside the module, with its holes filled."""
        folder = Path(inspect.getfile(type(self))).with_name("drawings")
        lines = (folder / f"{name}.svg").read_text("utf-8").splitlines()
        return _Drawing("".join(lines)).substitute(holes)

    @property
    def content(self) -> Any:
        """What the script is told."""
        raise NotImplementedError

    @property
    def still(self) -> str:
        """What stands there before the script runs, and moves once it does."""
        return ""

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; without scripts, what it shows remains in words."""
        kind = type(self).__name__.lower()
        beside = inspect.getfile(type(self))
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.words)
        text = f'{self.still}<ul class="av-words">{items}</ul>'
        sheets = [style.CSS, style.static(f"{kind}.css", beside)]
        script = style.static(f"{kind}.js", beside)
        name = identity(self.content)
        return fragment(kind, name, text, encode(self.content), sheets, script)

    def __repr__(self) -> str:
        return type(self).__name__
