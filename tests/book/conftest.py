"""The built book in a browser, as files and from a server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wherebook import moved

from tests.book import weight
from tests.conftest import ROOT
from tests.windows import Watched, Windows

SITE = ROOT / "_build" / "html"
# What the file of a chapter begins with.
HEAD = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""
CHAPTERS = sorted((ROOT / "chapters").glob("*.md"))


def built_pages() -> list[str]:
    """Every page that a reader meets: none that leads on, and none of the theme's templates under _static."""
    return sorted(
        path.relative_to(SITE).as_posix()
        for path in SITE.rglob("*.html")
        if "_static" not in path.relative_to(SITE).parts and path.stem not in moved.PAGES
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chapter" in metafunc.fixturenames:
        metafunc.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", built_pages() or ["index.html"])
    if "scheme" in metafunc.fixturenames:
        metafunc.parametrize("scheme", ["file", "http"])
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


@pytest.fixture(scope="session")
def server(site: Path) -> Iterator[str]:
    with weight.served(site) as address:
        yield address


@pytest.fixture
def address(site: Path, request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """The address of a page, as a file or from the server."""

    def find(page_name: str, scheme: str) -> str:
        return (site / page_name).as_uri() if scheme == "file" else f"{request.getfixturevalue('server')}/{page_name}"

    return find


@pytest.fixture
def watch(windows: Windows, site: Path) -> Iterator[Callable[..., Watched]]:
    """Open new pages, with `mode` light or dark and a `width`."""
    with windows.lent(1280, ("file://", "http://127.0.0.1:", "data:", "blob:")) as open_page:
        yield open_page


@pytest.fixture
def visit(watch: Callable[..., Watched], address: Callable[[str, str], str]) -> Iterator[Callable[..., Any]]:
    """Open pages of the book, as files or from the server, until something that they have is there; none complains."""
    visited: list[Watched] = []

    def open_page(
        page_name: str, scheme: str = "file", query: str = "", wait: str = "h1", height: int = 900, **options: Any
    ) -> Any:
        visited.append(watch(**options))
        page = visited[-1].page
        page.set_viewport_size(page.viewport_size | {"height": height})
        page.goto(address(page_name, scheme) + query)
        page.locator(wait).first.wait_for()
        return page

    yield open_page
    assert [[*one.complaints, *one.foreign] for one in visited] == [[] for _ in visited]
