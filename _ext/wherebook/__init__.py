"""The book's own Sphinx extension: what the theme does not do, in one small module per concern."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from wherebook import mathml, notebooks, outputs, pages


def setup(app: Sphinx) -> dict[str, Any]:
    for concern in (mathml, notebooks, outputs, pages):
        concern.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
