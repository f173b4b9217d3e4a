"""Which view shows which data in a notebook: the data modules know no view, so the pairing stands here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# class name -> (view module, function): html and text of one object; resolved only when a notebook asks.
VIEWS = {
    "Ledger": ("accumviz.views.table", "ledger_html"),
    "Graph": ("accumviz.views.dot", "graph_html"),
}


class Displayed:
    """Something a notebook shows as static, self-contained HTML, with its `repr` as the text fallback."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        module, function = VIEWS[type(self).__name__]
        bundle = {"text/plain": repr(self)}
        try:
            bundle["text/html"] = getattr(import_module(module), function)(self)
        except ImportError as missing:  # a view's own library is not there: the text still says everything
            bundle["text/plain"] += f"\n({missing})"
        return bundle
