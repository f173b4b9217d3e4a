"""accumviz records what every `backward()` does to every `.grad`, and replays it.

>>> import accumviz as av
>>> " ".join(sorted(av.__all__))
'Graph Ledger check compare distribute expect explore lab load play predict record timeline trace'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accumviz import arguments

if TYPE_CHECKING:
    from accumviz.book.distribute import distribute as distribute
    from accumviz.book.explore import explore as explore
    from accumviz.book.lab import lab as lab
    from accumviz.book.predict import predict as predict
    from accumviz.checks.check import check as check
    from accumviz.checks.compare import compare as compare
    from accumviz.expectation import expect as expect
    from accumviz.graph.graph import Graph as Graph
    from accumviz.graph.trace import trace as trace
    from accumviz.ledger.ledger import Ledger as Ledger
    from accumviz.ledger.ledger import load as load
    from accumviz.recorder.recording import record as record
    from accumviz.views.player import play as play
    from accumviz.views.timeline import timeline as timeline

__version__ = "0.1.0"

# verb -> module: loaded on first use, so that looking at a ledger brings in neither torch nor matplotlib
_HOME = {
    "Graph": "accumviz.graph.graph",
    "Ledger": "accumviz.ledger.ledger",
    "check": "accumviz.checks.check",
    "compare": "accumviz.checks.compare",
    "distribute": "accumviz.book.distribute",
    "expect": "accumviz.expectation",
    "explore": "accumviz.book.explore",
    "lab": "accumviz.book.lab",
    "load": "accumviz.ledger.ledger",
    "play": "accumviz.views.player",
    "predict": "accumviz.book.predict",
    "record": "accumviz.recorder.recording",
    "timeline": "accumviz.views.timeline",
    "trace": "accumviz.graph.trace",
}
__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one list of public names


if not TYPE_CHECKING:  # a type checker that saw it would take every name for a verb

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'accumviz' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        try:
            value = getattr(import_module(_HOME[name]), name)
        except ModuleNotFoundError as missing:
            raise arguments.explained(missing, name) from missing
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
