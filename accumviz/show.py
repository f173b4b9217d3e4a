"""How anything shows itself: which view shows which data, what a notebook gets of it, and the page it is saved as."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

# class name -> module of the view, and its function for each form; resolved only when somebody asks.
VIEWS = {
    "Ledger": ("accumviz.views.table", {"html": "ledger_html"}),
    "Graph": ("accumviz.views.dot", {"html": "graph_html", "svg": "to_svg"}),
    "Measured": ("accumviz.views.measured", {"html": "measured_html"}),
    "Prediction": ("accumviz.views.predict", {"html": "prediction_html"}),
    "Provenance": ("accumviz.views.table", {"html": "provenance_html"}),
}


def shown(what: Any, form: str) -> str:
    """What the view of some data makes of it: the data modules know no view, so the pairing stands here."""
    # What somebody derived from one of our classes is shown as ours is, whatever its own name.
    ours = (kind.__name__ for kind in type(what).__mro__ if kind.__module__.startswith("accumviz."))
    module, functions = VIEWS[next(name for name in ours if name in VIEWS)]
    text: str = getattr(import_module(module), functions[form])(what)
    return text


class Displayed:
    """Something a notebook shows as static, self-contained HTML, with its `repr` as the text fallback."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = {"text/plain": repr(self)}
        try:
            bundle["text/html"] = self.to_html()
        except ImportError as missing:  # a view's own library is not there: the text still says everything
            bundle["text/plain"] += f"\n({missing})"
        return bundle

    def to_html(self) -> str:
        """What a notebook shows: a fragment of HTML that needs no other file and no kernel.

        Raises `ImportError` when the view lacks a library; the message says which.
        """
        return shown(self, "html")

    def save_page(self, path: str | Path, title: str) -> None:
        """Write `to_html` as a page that any browser opens."""
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        head += '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        Path(path).write_text(f"{head}<body>{self.to_html()}</body></html>", "utf-8")
