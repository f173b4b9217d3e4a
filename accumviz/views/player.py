"""Build the player: one page element that needs no kernel, no network and no second file."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.graph.graph import Graph, Node, in_order
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.show import Displayed, check_page_name, counted, literal, save_page
from accumviz.views import style, words
from accumviz.views.graph import (
    Card,
    cards_of,
    drawn,
    lines_of,
    numbers_from,
    other_form,
    place,
    simplify,
)
from accumviz.views.graphviz import LayoutError
from accumviz.views.payload import Ground, encode, identity, ledger_data

# Laying out takes a tenth of a second each: more forms than these are counted, not drawn.
_MOST_FORMS = 40
# What the looks of a graph mean.
# To be raised, here and in `page.js`, when what a page is told is told otherwise: a notebook keeps outputs of several
# versions, and each script takes what its own has written.
FORMAT = 2
_MARKS = "Thick: the root. Faint: not built yet. Filled: runs now. Dashed: freed."
# What the marks of bars mean, what hatched ones do, and how to learn more of a few.
_BARS = "Bars grow from the thin line, zero, the oldest part first. Heavy line: .grad. Dotted line: .grad is None."
_HATCHED = " Hatched: of other ranks, or unrecorded."
_ASK = "Select a parameter to see what its .grad is made of. "
_LEFT_OUT = "The graph of this backward was not kept."
_LEAVES = "Tinted: a leaf. "
_FACTORS = " ×: what an edge multiplies the gradient by."
_ADDS = " adds: what this backward adds to .grad."


class Player(Displayed):
    """A recording one can scrub: code, graph, `.grad`, weights, timeline and shares, at one moment.

    `ground` is what its weights are drawn on, where they are one or two.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        graphs: Mapping[int, Graph],
        note: str = "",
        ground: Ground | None = None,
    ) -> None:
        self.ledger, self.graphs, self.note = ledger, dict(graphs), note
        self.ground = ground
        # The levels of its heat map, where it shares them with other runs.
        self.levels: tuple[float, float] | None = None

    @cached_property
    def content(self) -> tuple[dict[str, Any], bytes]:
        """What the page is told: data for JSON, and the bytes of its packed columns."""
        told, blob = ledger_data(
            Ledger.build([], []) if self.ledger is None else self.ledger,
            self.ground,
            self.levels,
        )
        data = dict(told)
        if self.ledger is not None:
            data["about"] = self.words[0]
        found = scenes(self.graphs, *([] if self.ledger is None else ["adds"]))
        at = data["e"].get("i")
        where = (
            {event: i for i, event in enumerate(at)}
            if at
            else {event: event for event in self.graphs}
        )
        data |= {
            "layouts": found["layouts"],
            "graphs": found["graphs"],
            "of": {
                str(where[event]): i
                for event, i in found["of"].items()
                if event in where
            },
            "undrawn": {
                str(where[event]): note
                for event, note in found["notes"].items()
                if event in where
            },
            "remark": self.note,
            "before": words.before(built=self._is_built()),
            "bars": [
                _BARS,
                _HATCHED,
                _ASK if len(data["p"]) == data["count"] else "",
                _LEFT_OUT,
            ],
            "marks": _marks(found),
        }
        return data, blob

    def _is_built(self) -> bool:
        """Return whether the graph that is shown before the first event was there before the recording."""
        backwards = self.ledger.of("backward") if self.ledger is not None else []
        first = self.graphs.get(backwards[0].index) if backwards else None
        return first is not None and first.meta.get("before") is True

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this player on a page."""
        return identity(*self.content)

    @cached_property
    def words(self) -> list[str]:
        """The text alternative: what is there, then event by event."""
        if self.ledger is not None:
            return words.story(
                self.ledger, range(len(self.ledger)), range(len(self.ledger.parameters))
            )
        return [f"{repr(graph).splitlines()[0]}." for graph in self.graphs.values()]

    def to_html(self) -> str:
        """A fragment of HTML that needs nothing else; with its scripts stripped, a list remains."""
        css, script = assets()
        return fragment(
            "player", self.id, self._text(), encode(*self.content), [css], script
        )

    def _text(self) -> str:
        if self.ledger is None:
            shown = [simplify(graph) for graph in [*self.graphs.values()][:1]]
            lines = [
                line for graph in shown for line in lines_of(graph, cards_of(graph))
            ]
        else:
            lines = [html.escape(line) for line in self.words[1:]]
        items = "".join(f"<li>{line}</li>" for line in lines)
        about = html.escape(self.words[0] if self.words else "Nothing to play.")
        return f'<details class="av-words" open><summary>In words</summary><p>{about}</p><ol>{items}</ol></details>\n'

    def save(self, path: str | Path) -> None:
        """Write one self-contained page that any browser opens.

        Raises `ValueError` for a name that does not end in `.html`.
        """
        check_page_name(path)
        save_page(path, "accumviz player", self.to_html())

    def live(self) -> Any:
        """The same view as a widget, whose moment (`.at`) Python can read and set.

        Raises `ImportError` when anywidget is not installed.
        """
        return widget(
            style.static("live.js"), assets()[0], "player", encode(*self.content)
        )

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(include, exclude)
        bundle["text/plain"] = "\n".join([bundle["text/plain"], *self.words])
        return bundle

    def __repr__(self) -> str:
        parts = []
        if self.ledger is not None:
            parameters = counted(len(self.ledger.parameters), "parameter")
            parts = [counted(len(self.ledger), "event"), parameters]
        parts += [counted(len(self.graphs), "graph")] if self.graphs else []
        return f"Player: {', '.join(parts) or 'nothing'}; a notebook shows it, .save('run.html') writes a page"


def play(
    ledger: Ledger | Recorded | Graph | None,
    graph: Graph | Mapping[int, Graph] | None = None,
) -> Player:
    """Show code, graph, `.grad`, timeline and shares under one scrubber, with no kernel.

    `ledger` may be the recording, whose own graphs are shown where none are given. `graph` is one
    graph for all backwards, or each backward's own by its event's index. Either of the two may be
    missing: `play(ledger)` has no graph pane, `play(graph)` nothing else.
    Raises `TypeError` for anything else, `ValueError` for the graph of an event that is no backward.

    >>> play(Ledger.build([], []))
    Player: 0 events, 0 parameters; a notebook shows it, .save('run.html') writes a page
    """
    if isinstance(ledger, Graph) and graph is None:
        ledger, graph = None, ledger
    if isinstance(ledger, Graph) or (graph is None and ledger is None):
        given = "nothing" if ledger is None else "two graphs"
        raise TypeError(
            f"play() was given {given}; expected a recording or a ledger, a graph, or both: play(ledger, graph)"
        )
    if ledger is None:
        return Player(None, {0: graph} if isinstance(graph, Graph) else _graphs(graph))
    graph = getattr(ledger, "graphs", None) or {} if graph is None else graph
    ledger = recorded(ledger, "play")
    backwards = [event.index for event in ledger.of("backward")]
    if isinstance(graph, Graph):
        note = "One graph was given; every backward shows it."
        shown = dict.fromkeys(backwards, graph)
        return Player(ledger, shown, note if len(backwards) > 1 else "")
    return Player(ledger, _graphs(graph, backwards))


def _graphs(graphs: Any, backwards: list[int] | None = None) -> dict[int, Graph]:
    """Each event's graph, checked; those of a ledger are of its backwards."""
    if not isinstance(graphs, Mapping):
        raise TypeError(
            f"graph is {arguments.a(graphs)}; expected a Graph as from av.trace, or a dict of them by event"
        )
    for event, one in graphs.items():
        if not isinstance(one, Graph):
            raise TypeError(
                f"graph[{event!r}] is {arguments.a(one)}; expected a Graph, as from av.trace: leave it out"
            )
        if backwards is not None and event not in backwards:
            known = ", ".join(map(str, backwards[:8])) or "none"
            raise ValueError(
                f"graph has the event {event!r}, which is no backward of this ledger; its backwards are: {known}"
            )
    return dict(graphs)


def _marks(found: Mapping[str, Any]) -> str:
    """What the looks of some graphs mean, of those that are there."""
    nodes = [node for layout in found["layouts"] for node in layout["n"]]
    leaves = _LEAVES * any("leaf" in node for node in nodes)
    adds = _ADDS * any("adds" in node["n"] for node in nodes)
    return (
        leaves
        + _MARKS
        + adds
        + _FACTORS * any("x" in graph for graph in found["graphs"])
    )


def scenes(graphs: Mapping[int, Graph], leaf: str = "grad") -> dict[str, Any]:
    """One layout for all graphs of one form, since a loop builds the same one again; `leaf` names a leaf's gradient.

    `layouts`, `graphs` (which layout, and the numbers on its cards), and `of`: event -> graph.
    A graph with modules names its `other` form, folded or unfolded. What could not be drawn stands in
    `notes`, by event.
    """
    forms = _Forms(leaf)
    events: dict[int, list[int]] = {}
    for event, graph in graphs.items():
        events.setdefault(id(graph), []).append(event)
    for same in events.values():
        forms.add(same, graphs[same[0]])
    return forms.drawn()


@dataclass
class _Member:
    """A graph as it is drawn, its cards, and the events that show it; `folded` of the other form."""

    events: list[int]
    graph: Graph
    cards: list[Card]
    other: _Member | None = None
    place: int = -1


class _Forms:
    """Graphs by their form, and why some are not drawn, by event."""

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf
        self.members: dict[Any, list[_Member]] = {}
        self.notes: dict[int, str] = {}

    def add(self, events: list[int], graph: Graph) -> None:
        """Add a graph that these events show, and its other form, folded or unfolded, if it has one."""
        first = simplify(graph)
        shown = self._add(events, graph, first)
        other = other_form(graph, first) if shown else None
        if shown and other is not None:
            shown.other = self._add([], graph, other)

    def _add(self, events: list[int], graph: Graph, shown: Graph) -> _Member | None:
        # The engine's order names nodes that are folded now.
        meta = {k: v for k, v in shown.meta.items() if k != "order" or shown is graph}
        small = replace(shown, meta=meta)
        cards = cards_of(small, self.leaf)
        form = _form(small, cards)
        if form not in self.members and len(self.members) == _MOST_FORMS:
            why = f"Not drawn: only {_MOST_FORMS} graphs of different form are."
            self.notes |= dict.fromkeys(events, why)
            return None
        member = _Member(events, small, cards)
        self.members.setdefault(form, []).append(member)
        return member

    def drawn(self) -> dict[str, Any]:
        """Lay out each form once, and tell each graph's numbers."""
        layouts: list[dict[str, Any]] = []
        told: list[tuple[_Member, dict[str, Any]]] = []
        for members in self.members.values():
            try:
                layouts.append(_layout(members))
            except LayoutError as missing:
                for member in members:
                    self.notes |= dict.fromkeys(member.events, str(missing))
                continue
            for member in members:
                member.place = len(told)
                told.append((member, _told(member, len(layouts) - 1, layouts[-1])))
        for member, one in told:
            if member.other and member.other.place >= 0:
                one["other"] = member.other.place
        of = {e: member.place for member, _ in told for e in member.events}
        graphs = [one for _, one in told]
        return {"layouts": layouts, "graphs": graphs, "of": of, "notes": self.notes}


def _told(member: _Member, place: int, layout: Mapping[str, Any]) -> dict[str, Any]:
    """What a page is told of one graph: its layout, the numbers on its cards, in which order its nodes ran."""
    graph = member.graph
    values = [[text for _, text in card.numbers] for card in member.cards]
    one: dict[str, Any] = {"l": place, "v": values, "order": order(graph)}
    if graph.meta.get("before"):
        one["made"] = 1
    by = factors(graph, layout["e"])
    return one | ({"x": by} if any(by) else {})


def order(graph: Graph) -> list[int]:
    """The nodes in the order in which the engine ran them, when it was recorded, else in one it could have used."""
    told = graph.meta.get("order")
    if (
        isinstance(told, (list, tuple))
        and told
        and all(isinstance(i, int) and 0 <= i < len(graph) for i in told)
    ):
        return list(dict.fromkeys(told))
    return in_order(len(graph), ((edge.source, edge.target) for edge in graph.edges))


def factors(graph: Graph, edges: Sequence[Sequence[Any]]) -> list[str]:
    """What each edge multiplies a gradient by: known between single numbers, where nothing else is added.

    >>> from accumviz.graph.graph import Edge, Node
    >>> mul, leaf = Node(0, "MulBackward0", grad=-4.0), Node(1, "AccumulateGrad", "w", grad=[-16.0])
    >>> factors(Graph((mul, leaf), (Edge(0, 1),), (0,)), [(0, 1)])
    ['× 4']
    """
    reached = Counter(target for _, target, *_ in edges)
    grads = [_single(node.grad) for node in graph]
    texts = []
    for source, target, *_ in edges:
        came, left = grads[source], grads[target]
        factor = math.nan
        if came and left is not None and reached[target] == 1:
            factor = left / came
        texts.append(f"× {style.number(factor)}" if math.isfinite(factor) else "")
    return texts


def _single(value: Any) -> float | None:
    """The number in nested lists that hold only one."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, (int, float)) else None


def _form(graph: Graph, cards: list[Card]) -> Any:
    """What two graphs must share to share a drawing: everything but the numbers."""
    return (
        tuple(
            (
                c.title,
                c.shape,
                tuple(c.rows),
                tuple(label for label, _ in c.numbers),
                tuple(c.kinds),
                c.full,
            )
            for c in cards
        ),
        tuple((edge.source, edge.target) for edge in graph.edges),
        graph.notes,
    )


def _layout(members: Sequence[_Member]) -> dict[str, Any]:
    """Lay out what some graphs have in common, with room for the widest of each card."""
    graph = members[0].graph
    cards = [
        max(same, key=lambda card: card.width)
        for same in zip(*(member.cards for member in members), strict=True)
    ]
    width, height, placed, edges = place(graph, cards)
    nodes = [
        _node(card, x, y, node)
        for (card, x, y), node in zip(placed, graph.nodes, strict=True)
    ]
    return {
        "w": round(width),
        "h": round(height),
        "n": nodes,
        "e": [list(edge) for edge in edges],
        "notes": [literal(note) for note in graph.notes],
    }


def _node(card: Card, x: float, y: float, node: Node) -> dict[str, Any]:
    sides = x - card.width / 2, y - card.height / 2, card.width, card.height
    told = {
        "b": [round(side) for side in sides],
        "t": card.title,
        "n": [label for label, _ in card.numbers],
        "y": numbers_from(card),
        "k": card.kinds,
        "m": list(_elements(card)),
        "s": int(node.saved_bytes > 0),
    }
    if node.kind == "accumulate":
        told["leaf"] = literal(node.name)
    if node.kind == "fold":
        told["in"] = literal(node.module)
    return told


def _elements(card: Card) -> Iterator[list[Any]]:
    """What a card shows but for its numbers: elements as a player makes them, with their attributes and text."""
    for name, look, at, parts in drawn(card):
        text = "".join(part for _, part in parts)
        # A player has one look for both rectangles, and for all texts of a row.
        looks = (
            look.replace("av-mono ", "")
            .replace("av-box", "av-card")
            .replace("av-behind", "av-card")
            .split()
        )
        if name == "text" and not looks:
            looks = ["av-quiet", *(["av-saves"] if text.startswith("saves") else [])]
        yield [
            ".".join([name, *looks]),
            {k: v for k, v in at.items() if v},
            *([literal(text)] if text else []),
        ]


def assets() -> tuple[str, str]:
    """The style sheet, with the names of accumviz's colours before, and the module, which explorers share."""
    return style.CSS + style.static("player.css"), style.static("accumviz.js")


def fragment(
    kind: str, name: str, text: str, data: str, sheets: Iterable[str], script: str
) -> str:
    """What a page carries of a view: its data, the text that stands there without it, its style sheets, its module.

    Sheets that several kinds of view share are given apart: a page needs each of them once.
    """
    styles = "".join(f"<style data-accumviz>{css}</style>" for css in sheets)
    return (
        f'<div class="accumviz av-{kind}" data-accumviz-{kind}="{name}" data-v="{FORMAT}">{styles}\n{text}'
        f'<script type="application/json">{data}</script></div>\n<script type="module">{script}</script>'
    )


def widget(script: str, css: str, kind: str, data: str) -> Any:
    """A widget that carries this module and style sheet: what a page does, and what only a kernel can.

    Raises `ImportError` when anywidget is not installed.
    """
    return _host(script, css)(kind=kind, data=data)


@cache
def _host(module: str, css: str) -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as missing:
        raise ImportError(
            f"live() needs the package anywidget ({missing}): pip install anywidget. "
            "What a notebook shows without live() needs nothing"
        ) from missing

    class Live(anywidget.AnyWidget):
        """The state that page and kernel share."""

        _esm, _css = module, css
        kind = traitlets.Unicode().tag(sync=True)
        data = traitlets.Unicode().tag(sync=True)
        id = traitlets.Unicode().tag(sync=True)
        at = traitlets.Dict().tag(sync=True)
        ask = traitlets.Dict().tag(sync=True)
        told = traitlets.Dict().tag(sync=True)

    return Live
