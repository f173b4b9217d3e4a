"""Pages of one view or of several, written as a reader saves them."""

from pathlib import Path
from typing import Any


def written(path: Path, *views: Any, again: int = 1) -> str:
    """Save the first view, `again` times over, and the others after it; returns the page's address."""
    views[0].save(path)
    text = path.read_text("utf-8")
    body = text.partition("<body>")[2].partition("</body>")[0]
    more = body * (again - 1) + "".join(view.to_html() for view in views[1:])
    path.write_text(text.replace("</body></html>", f"{more}</body></html>"), "utf-8")
    return path.as_uri()
