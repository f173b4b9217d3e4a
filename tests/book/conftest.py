"""The built book in a browser, as files and from a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from wherebook import moved

from tests.windows import Watched, Windows

SITE = Path(__file__).resolve().parents[2] / "_build" / "html"


def built_pages() -> list[str]:
    """Every page that a reader meets: none that leads on, and none of the theme's templates under _static."""
    return sorted(
        path.relative_to(SITE).as_posix()
        for path in SITE.rglob("*.html")
        if "_static" not in path.relative_to(SITE).parts and path.stem not in moved.PAGES
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", built_pages() or ["index.html"])
    if "scheme" in metafunc.fixturenames:
        metafunc.parametrize("scheme", ["file", "http"])
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """A request per line would bury what pytest says."""


@pytest.fixture(scope="session")
def server(site: Path) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


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
