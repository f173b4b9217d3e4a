"""The book's own Sphinx extension: what the theme does not do, in one small module per concern."""

from __future__ import annotations

import os
from typing import Any

from sphinx.application import Sphinx

from wherebook import at, claims, gate, launch, mathml, moved, notebooks, outputs, pages, reference, search, styles


def setup(app: Sphinx) -> dict[str, Any]:
    os.environ["TQDM_DISABLE"] = "1"  # kernels inherit it; a bar that has come to its end is no output of a page
    for concern in (at, claims, gate, launch, mathml, moved, notebooks, outputs, pages, reference, search, styles):
        concern.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
