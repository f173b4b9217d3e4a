"""Graphs -> scenes of a player: one layout for all graphs of one form, since a loop builds the same one again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accumviz.graph import Graph
from accumviz.nodes import in_order
from accumviz.show import literal
from accumviz.views.graph import Card, cards_of, drawn, numbers_from, place, simplify
from accumviz.views.graphviz import LayoutError

# Laying out takes a tenth of a second each: more forms than these are counted, not drawn.
_MOST_FORMS = 40


def scenes(graphs: Mapping[int, Graph]) -> dict[str, Any]:
    """`layouts`, `graphs` (which layout, and the numbers on its cards), and `of`: event -> graph.

    What could not be drawn stands in `notes`, by event.
    """
    forms: dict[Any, list[tuple[list[int], Graph, list[Card]]]] = {}
    shown: dict[Any, Graph] = {}
    notes: dict[int, str] = {}
    done: dict[int, list[int]] = {}  # one object given for many events is one graph
    for event, graph in graphs.items():
        if id(graph) in done:
            done[id(graph)].append(event)
            continue
        small = simplify(graph)
        if small is not graph:  # the engine's order names nodes that are folded now
            small = replace(small, meta={k: v for k, v in small.meta.items() if k != "order"})
        cards = cards_of(small)
        form = _form(small, cards)
        if form not in forms and len(forms) == _MOST_FORMS:
            notes[event] = f"Not drawn: only {_MOST_FORMS} graphs of different form are."
            continue
        done[id(graph)] = [event]
        forms.setdefault(form, []).append((done[id(graph)], small, cards))
        shown.setdefault(form, small)
    layouts: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    of: dict[int, int] = {}
    for form, members in forms.items():
        try:
            layouts.append(_layout(shown[form], members))
        except LayoutError as missing:
            notes |= {event: str(missing) for events, _, _ in members for event in events}
            continue
        for events, graph, cards in members:
            of |= dict.fromkeys(events, len(drawn))
            numbers = [[text for _, text in card.numbers] for card in cards]
            drawn.append({"l": len(layouts) - 1, "v": numbers, "order": order(graph)})
    return {"layouts": layouts, "graphs": drawn, "of": of, "notes": notes}


def order(graph: Graph) -> list[int]:
    """The nodes in the order in which the engine ran them, when it was recorded, else in one it could have used."""
    told = graph.meta.get("order")
    if isinstance(told, (list, tuple)) and told and all(isinstance(i, int) and 0 <= i < len(graph) for i in told):
        return list(dict.fromkeys(told))
    return in_order(len(graph), ((edge.source, edge.target) for edge in graph.edges))


def _form(graph: Graph, cards: list[Card]) -> Any:
    """What two graphs must share to share a drawing: everything but the numbers."""
    return (
        tuple(
            (c.title, c.shape, tuple(c.rows), tuple(label for label, _ in c.numbers), tuple(c.kinds), c.full)
            for c in cards
        ),
        tuple((edge.source, edge.target) for edge in graph.edges),
        graph.notes,
    )


def _layout(graph: Graph, members: list[tuple[list[int], Graph, list[Card]]]) -> dict[str, Any]:
    cards = [max(same, key=lambda card: card.width) for same in zip(*(cards for _, _, cards in members), strict=True)]
    width, height, placed, edges = place(graph, cards)
    keeps = [node.saved_bytes > 0 for node in graph]
    nodes = [
        {
            "b": [round(x - card.width / 2), round(y - card.height / 2), round(card.width), round(card.height)],
            "t": card.title,
            "n": [label for label, _ in card.numbers],
            "y": numbers_from(card),
            "k": card.kinds,
            "m": list(_elements(card)),
            "s": int(keeps[i]),
            **({"leaf": literal(graph.nodes[i].name)} if graph.nodes[i].kind == "accumulate" else {}),
            **({"in": literal(graph.nodes[i].module)} if graph.nodes[i].kind == "fold" else {}),
        }
        for i, (card, x, y) in enumerate(placed)
    ]
    return {
        "w": round(width),
        "h": round(height),
        "n": nodes,
        "e": [[source, target, curve, tip] for source, target, curve, tip in edges],
        "notes": [literal(note) for note in graph.notes],
    }


def _elements(card: Card) -> Iterator[list[Any]]:
    """What a card shows but for its numbers: elements as a player makes them, with their attributes and text."""
    for name, look, at, parts in drawn(card):
        text = "".join(part for _, part in parts)
        # A player has one look for both rectangles, and for all texts of a row.
        looks = look.replace("av-mono ", "").replace("av-box", "av-card").replace("av-behind", "av-card").split()
        if name == "text" and not looks:
            looks = ["av-quiet", *(["av-saves"] if text.startswith("saves") else [])]
        yield [".".join([name, *looks]), {k: v for k, v in at.items() if v}, *([literal(text)] if text else [])]
