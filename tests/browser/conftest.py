"""A browser for what accumviz shows outside the book: pages from files, alone, watched for complaints and requests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.frames import drawn, opened
from tests.browser.written import written
from tests.windows import Watched, Windows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


@pytest.fixture
def watch(windows: Windows) -> Iterator[Callable[..., Watched]]:
    """Open new pages, each with a memory of its own, with `mode` light or dark and a `width`."""
    with windows.lent(1000, ("file://", "data:", "blob:", "about:")) as open_page:
        yield open_page


@pytest.fixture
def show(watch: Callable[..., Watched], tmp_path: Path) -> Callable[..., Watched]:
    """Open views in one page, the first one `again` times over, and wait until they are drawn, all panes open."""

    def open_page(
        *views: Any, wait: str = ".av-frame", fragment: str = "", again: int = 1, panes: bool = True, **options: Any
    ) -> Watched:
        watched = watch(**options)
        watched.page.goto(written(tmp_path / "page.html", *views, again=again) + fragment)
        watched.page.locator(wait).first.wait_for()
        if panes:
            opened(watched.page)
        else:
            drawn(watched.page)
        return watched

    return open_page


@pytest.fixture
def shown(show: Callable[..., Watched]) -> Callable[..., Any]:
    """The same page without what it complained of, its panes as they are at first."""
    return lambda *views, **options: show(*views, panes=False, **options).page
