"""A browser for what accumviz shows outside the book: pages from files, alone, watched for complaints and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


@dataclass
class Watched:
    """A page, and everything it did that a reader's browser would show or send."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(("file://", "data:", "blob:", "about:"))]


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Open new pages, each with a memory of its own, with `mode` light or dark and a `width`."""
    contexts = []

    def open_page(mode: str = "light", width: int = 1000, **options: object) -> Watched:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=mode, **options)
        contexts.append(context)
        watched = Watched(context.new_page())
        page = watched.page
        page.on("request", lambda request: watched.requests.append(request.url))
        page.on("pageerror", lambda error: watched.complaints.append(f"page error: {error}"))
        page.on(
            "console",
            lambda message: (
                message.type in {"error", "warning"} and watched.complaints.append(f"{message.type}: {message.text}")
            ),
        )
        return watched

    yield open_page
    for context in contexts:
        context.close()
