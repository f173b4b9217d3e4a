"""Every page opens from a folder as from a server: no script that throws, no request that a file may not make."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# sphinx-thebe comes with Jupyter Book, is not used, and declares its constants twice on every page.
UNUSED = re.compile(r"thebe", re.IGNORECASE)

# A page opened as a file may not fetch its neighbours, so search results there come without excerpts.
SEARCH_AS_FILE = 'if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;'


def drop_unused_scripts(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if pagename == "search":
        app.add_js_file(None, body=SEARCH_AS_FILE)  # before the lists are copied below
    for kind in ("script_files", "css_files"):
        context[kind] = [file for file in context[kind] if not UNUSED.search(described(file))]


def described(file: Any) -> str:
    """The address and inline text of a script or style, by which it is known."""
    return f"{getattr(file, 'filename', file)} {getattr(file, 'attributes', {}).get('body', '')}"


def no_widget_state(app: Sphinx, env: Any) -> None:
    """Static pages have no kernel: stored widget state would only add weight and scripts from elsewhere."""
    for data in getattr(env, "nb_metadata", {}).values():
        for key in [key for key in data.get("js_files", {}) if key.startswith("ipywidgets")]:
            del data["js_files"][key]


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", drop_unused_scripts, priority=900)
    app.connect("env-check-consistency", no_widget_state)
