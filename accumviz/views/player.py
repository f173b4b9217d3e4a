"""Ledger + Graph -> Player: one page element that needs no kernel, no network and no second file, and is text first."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from accumviz.graph import Graph
from accumviz.ledger import Ledger
from accumviz.show import Displayed, check_page_name, save_page
from accumviz.views import style, words
from accumviz.views.graph import lines_of, simplify
from accumviz.views.payload import encode, identity, ledger_data
from accumviz.views.scene import scenes


class Player(Displayed):
    """A recording one can scrub: code, graph, `.grad` and timeline, at one moment."""

    def __init__(self, ledger: Ledger | None, graphs: Mapping[int, Graph], note: str = "") -> None:
        self.ledger, self.graphs, self.note = ledger, dict(graphs), note

    @cached_property
    def content(self) -> tuple[dict[str, Any], bytes]:
        """What the page is told: data for JSON, and the bytes of its packed columns."""
        data: dict[str, Any] = {"v": 1}
        blob = b""
        if self.ledger is not None:
            told, blob = ledger_data(self.ledger)
            data |= told | {"about": self.words[0]}
        drawn = scenes(self.graphs)
        at = data.get("e", {}).get("i")
        where = {event: i for i, event in enumerate(at)} if at else {event: event for event in self.graphs}
        data |= {
            "layouts": drawn["layouts"],
            "graphs": drawn["graphs"],
            "of": {str(where[event]): i for event, i in drawn["of"].items() if event in where},
            "undrawn": {str(where[event]): note for event, note in drawn["notes"].items() if event in where},
            "remark": self.note,
        }
        return data, blob

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this player on a page."""
        return identity(*self.content)

    @cached_property
    def words(self) -> list[str]:
        """The text alternative: what is there, then event by event."""
        if self.ledger is not None:
            return words.story(self.ledger, range(len(self.ledger)), range(len(self.ledger.parameters)))
        return [f"{repr(graph).splitlines()[0]}." for graph in self.graphs.values()]

    def to_html(self) -> str:
        """A fragment of HTML that needs nothing else; with its scripts stripped, a list remains."""
        style_sheet, script = assets()
        return (
            f'<div class="accumviz av-player" data-accumviz-player="{self.id}"><style>{style_sheet}</style>\n'
            f'{self._text()}<script type="application/json">{encode(*self.content)}</script></div>\n'
            f'<script type="module">{script}</script>'
        )

    def _text(self) -> str:
        if self.ledger is None:
            graph = next(iter(self.graphs.values()), None)
            lines = list(lines_of(simplify(graph))) if graph is not None else []
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
        css, script = assets()
        return widget(script, css, "player", encode(*self.content))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(include, exclude)
        bundle["text/plain"] = "\n".join([bundle["text/plain"], *self.words])
        return bundle

    def __repr__(self) -> str:
        parts = []
        if self.ledger is not None:
            counted = words.counted(len(self.ledger.parameters), "parameter")
            parts = [words.counted(len(self.ledger), "event"), counted]
        parts += [words.counted(len(self.graphs), "graph")] if self.graphs else []
        return f"Player: {', '.join(parts) or 'nothing'}; a notebook shows it, .save('run.html') writes a page"


def play(ledger: Ledger | Graph | None, graph: Graph | Mapping[int, Graph] | None = None) -> Player:
    """Show code, graph, `.grad` and timeline under one scrubber, with no kernel.

    `graph` is one graph for all backwards, or each backward's own by its event's index. Either
    of the two may be missing: `play(ledger)` has no graph pane, `play(graph)` nothing else.
    Raises `TypeError` for anything else.

    >>> play(Ledger.build([], []))
    Player: 0 events, 0 parameters; a notebook shows it, .save('run.html') writes a page
    """
    if isinstance(ledger, Graph) and graph is None:
        ledger, graph = None, ledger
    if not isinstance(ledger, Ledger | None) or (graph is None and ledger is None):
        given = "nothing" if ledger is None else f"a {type(ledger).__name__}"
        hint = "; a recording's ledger is `recording.ledger`" if hasattr(ledger, "ledger") else ""
        raise TypeError(f"play() was given {given}; expected a ledger, a graph, or both{hint}")
    if graph is None:
        return Player(ledger, {})
    if isinstance(graph, Graph):
        if ledger is None:
            return Player(None, {0: graph})
        backwards = [event.index for event in ledger.of("backward")]
        note = "One graph was given; every backward shows it." if len(backwards) > 1 else ""
        return Player(ledger, dict.fromkeys(backwards, graph), note)
    if not isinstance(graph, Mapping) or not all(isinstance(g, Graph) for g in graph.values()):
        raise TypeError(f"graph is a {type(graph).__name__}; expected a Graph, or a mapping event -> Graph")
    if ledger is not None:
        alien = [event for event in graph if event not in range(len(ledger)) or ledger[event].kind != "backward"]
        if alien:
            raise ValueError(f"graph has the event {alien[0]!r}, which is no backward of this ledger")
    return Player(ledger, {int(event): one for event, one in graph.items()})


def assets() -> tuple[str, str]:
    """The style sheet, with the names of accumviz's colours before, and the module, which explorers share."""
    return style.CSS + style.static("player.css"), style.static("accumviz.js")


def widget(script: str, css: str, kind: str, data: str, **more: Any) -> Any:
    """A widget that carries this module and style sheet: what a page does without a kernel, with one that answers.

    Raises `ImportError` when anywidget is not installed.
    """
    return _host(script, css)(kind=kind, data=data, **more)


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
        live = traitlets.Bool(False).tag(sync=True)
        at = traitlets.Dict().tag(sync=True)
        ask = traitlets.Dict().tag(sync=True)
        told = traitlets.Dict().tag(sync=True)

    return Live
