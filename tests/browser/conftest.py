"""A browser for what accumviz shows outside the book: pages from files, alone, watched for complaints and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.frames import drawn
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
def shown(watch: Callable[..., Watched], tmp_path: Path) -> Callable[..., Any]:
    """Open views in one page, and return it once they are drawn."""

    def open_page(*views: Any, wait: str = ".av-frame", **options: Any) -> Any:
        page = watch(**options).page
        page.goto(written(tmp_path / "page.html", *views))
        page.locator(wait).first.wait_for()
        drawn(page)
        return page

    return open_page
