"""A browser for what accumviz shows outside the book: pages from files, alone, none of which may complain or ask."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.frames import drawn, opened
from tests.windows import Watched, Windows


def written(path: Path, *views: Any, again: int = 1) -> str:
    """Save the first view, `again` times over, and the others after it; returns the page's address."""
    views[0].save(path)
    text = path.read_text("utf-8")
    body = text.partition("<body>")[2].partition("</body>")[0]
    more = body * (again - 1) + "".join(view.to_html() for view in views[1:])
    path.write_text(text.replace("</body></html>", f"{more}</body></html>"), "utf-8")
    return path.as_uri()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


@pytest.fixture
def new_page(windows: Windows) -> Iterator[Callable[..., Any]]:
    """Open new pages, each with a memory of its own, with `mode` light or dark and a `width`; none may complain."""
    found: list[Watched] = []

    def open_page(**options: Any) -> Any:
        found.append(watched(**options))
        return found[-1].page

    with windows.lent(1000, ("file://", "data:", "blob:", "about:")) as watched:
        yield open_page
    assert [[*one.complaints, *one.foreign] for one in found] == [[] for _ in found]


@pytest.fixture
def show(new_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Open views in one page, the first one `again` times over, and wait until they are drawn, all panes open."""

    def open_page(
        *views: Any, wait: str = ".av-frame", fragment: str = "", again: int = 1, panes: bool = True, **options: Any
    ) -> Any:
        page = new_page(**options)
        page.goto(written(tmp_path / "page.html", *views, again=again) + fragment)
        if options.get("java_script_enabled", True):
            page.locator(wait).first.wait_for()
            (opened if panes else drawn)(page)
        return page

    return open_page


@pytest.fixture
def shown(show: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with panes as they are at first."""
    return lambda *views, **options: show(*views, panes=False, **options)
