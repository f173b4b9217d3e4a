"""Graphviz in process or on PATH, whichever is there; nothing else knows which one it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

_TIMEOUT = 300  # seconds; the largest drawing anyone should wait for


class LayoutError(ImportError):
    """No layout engine is there, or it refused; the message says what to do."""


def graphviz(source: str, form: str) -> str:
    """Lay out DOT source with Graphviz's `dot` and return it as `json`, `svg`, ...

    Uses `pygraphviz`, whose wheel carries Graphviz, else a `dot` on PATH. Raises LayoutError
    when neither is there or the source is not DOT.
    """
    try:
        from pygraphviz import AGraph
    except ImportError:
        return _on_path(source, form)
    try:
        # pygraphviz warns about every graph of more than 1,000 nodes
        with redirect_stderr(StringIO()), _without_font_warnings():
            drawn: bytes = AGraph(string=source).draw(format=form, prog="dot")
    except Exception as error:  # its C layer raises several unrelated types
        raise LayoutError(f"Graphviz could not draw this: {error}") from error
    return drawn.decode("utf-8", "replace")


@contextmanager
def _without_font_warnings() -> Iterator[None]:
    """The wheel's fontconfig complains, from C, about settings of the system's newer one; pass on the rest."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            rest = [line for line in caught.read().splitlines(keepends=True) if b"Fontconfig" not in line]
            os.write(2, b"".join(rest))


def _on_path(source: str, form: str) -> str:
    dot = shutil.which("dot")
    if dot is None:
        raise LayoutError(
            "drawing a graph needs a layout engine, and there is neither pygraphviz nor a `dot` on PATH; "
            "install one: `pip install pygraphviz` (its wheel carries Graphviz), "
            "or Graphviz itself: `apt install graphviz`, `brew install graphviz`"
        )
    done = subprocess.run(  # noqa: S603 - the user's own Graphviz, given text on its standard input
        [dot, f"-T{form}"], input=source.encode(), capture_output=True, timeout=_TIMEOUT, check=False
    )
    if done.returncode or not done.stdout:
        raise LayoutError(f"`dot` could not draw this: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")
    return done.stdout.decode("utf-8", "replace")
