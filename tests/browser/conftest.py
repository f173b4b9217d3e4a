"""A browser for what accumviz shows outside the book: pages from files, alone, watched for complaints and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.windows import Watched, Windows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


@pytest.fixture
def watch(windows: Windows) -> Iterator[Callable[..., Watched]]:
    """Open new pages, each with a memory of its own, with `mode` light or dark and a `width`."""
    with windows.lent(1000, ("file://", "data:", "blob:", "about:")) as open_page:
        yield open_page
