"""Ledger + Graph -> Player: one page element that needs no kernel, no network and no second file, and is text first."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from accumviz.graph import Graph
from accumviz.ledger import Ledger
from accumviz.show import Displayed
from accumviz.views import style, words
from accumviz.views.dot import lines_of, simplify
from accumviz.views.payload import encode, identity, ledger_data
from accumviz.views.scene import scenes

STATIC = Path(__file__).parent / "static"
# On a page of its own, a player brings the two grounds that a book or a notebook has anyway.
_PAGE = """
:root { color-scheme: light dark; }
@media print { :root { color-scheme: light; } }
body { margin: 0 auto; padding: clamp(0.5rem, 2vw, 1.5rem); max-width: 84rem;
  background: light-dark(#fff, #14181d); color: light-dark(#1f262d, #e6e9ec); }
body .accumviz { --av-accent: light-dark(#0072b2, #6cb8e6); --av-ground: light-dark(#fff, #14181d);
  --av-muted: light-dark(#5a6570, #a4afba); --av-line: light-dark(#d3dbe1, #38424c);
  --av-surface: light-dark(#f3f5f7, #20262d); }
h1 { font: 600 1rem system-ui, sans-serif; margin: 0 0 0.5rem; }
"""


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
        save_alone(self, path, "accumviz player")

    def live(self) -> Any:
        """The same view as a widget, whose moment (`.at`) Python can read and set.

        Raises `ImportError` when anywidget is not installed.
        """
        from accumviz.views.widget import live_player

        return live_player(self)

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


def save_alone(shown: Displayed, path: str | Path, title: str) -> None:
    """Write a page of its own, with the two grounds that a book or a notebook has anyway."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"save({str(path)!r}); this is saved as a page: expected a name that ends in .html")
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_PAGE}</style></head>"
    )
    Path(path).write_text(
        f"{head}<body><main><h1>{title}</h1>{shown.to_html()}</main></body></html>", "utf-8", "replace"
    )


@cache
def assets() -> tuple[str, str]:
    """The style sheet, with the names of accumviz's colours before, and the module, which explorers share."""
    sheet = (STATIC / "player.css").read_text("utf-8")
    return style.CSS + sheet, (STATIC / "accumviz.js").read_text("utf-8")
