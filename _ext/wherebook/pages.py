"""Every page opens from a folder as from a server, and says to a screen reader what it shows."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# sphinx-thebe comes with Jupyter Book, is not used, and declares its constants twice on every page.
UNUSED = re.compile(r"thebe", re.IGNORECASE)

# A page opened as a file may not fetch its neighbours, so search results there come without excerpts.
SEARCH_AS_FILE = 'if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;'

# What axe finds in the theme's own pages. tests/book/test_axe.py tells when one of these is no longer needed.
MENDS = (
    # all of a page's content stands in a landmark
    (re.compile(r'(<a class="navbar-brand logo".*?</a>)', re.DOTALL), r'<nav aria-label="Home">\1</nav>'),
    # a name that differs from what can be read on the button: who speaks to the browser says what is written there
    (re.compile(r'(<button class="btn search-button-field[^>]*?) aria-label="[^"]*"'), r"\1"),
    (re.compile(r'(<i class="theme-switch [^>]*?)\s+title="[^"]*"'), r"\1"),
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # a server may say that a notebook is text, which a browser shows unless it is asked to keep it
    (re.compile(r'target="_blank"(?=\s+class="[^"]*\bbtn-download-notebook\b)'), 'target="_blank" download'),
    # a page in another tab gets no handle on this one
    (re.compile(r'target="_blank"(?![^>]*\brel=)'), 'target="_blank" rel="noopener"'),
    # deprecated in ARIA 1.3, and no item of the list that it stands in
    (re.compile(r'role="doc-biblioentry"'), 'role="listitem"'),
)


def mend(html: str) -> str:
    """A page as the theme wrote it, with what its markup gets wrong put right.

    >>> mend('<summary aria-label="Toggle hidden content"> Show')
    '<summary> Show'
    """
    for pattern, replacement in MENDS:
        html = pattern.sub(replacement, html)
    return html


def mend_every_page(app: Sphinx) -> None:
    """The theme's templates are rendered after the last event that could change them."""
    templates = app.builder.templates  # type: ignore[attr-defined]
    render = templates.render
    templates.render = lambda *arguments: mend(render(*arguments))


# Paper is light, and the theme would print its dark colours without their dark ground.
PRINT_LIGHT = """(() => {
  const { dataset } = document.documentElement;
  let theme;
  addEventListener("beforeprint", () => { theme = dataset.theme; dataset.theme = "light"; });
  addEventListener("afterprint", () => { dataset.theme = theme; });
})();"""


def drop_unused_scripts(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    app.add_js_file(None, body=PRINT_LIGHT)
    if pagename == "search":
        app.add_js_file(None, body=SEARCH_AS_FILE)  # all before the lists are copied below
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
    app.connect("builder-inited", mend_every_page)
    app.connect("html-page-context", drop_unused_scripts, priority=900)
    app.connect("env-check-consistency", no_widget_state)
