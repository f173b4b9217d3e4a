"""A browser for what accumviz shows outside the book: pages from files, alone, watched for complaints and requests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests come first: one process can run one Playwright at a time, and the book's tests keep theirs open."""
    items.sort(key=lambda item: HERE not in item.path.parents)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["light", "dark"])


def load_chromium() -> ModuleType:
    spec = importlib.util.spec_from_file_location("book_chromium", HERE.parent / "book" / "chromium.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")  # closed before the book's tests open theirs
def browser() -> Iterator[Browser]:
    chromium = load_chromium()
    path = chromium.find()
    if path is None:
        pytest.fail(chromium.HELP, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(chromium.FLAGS))
        yield browser
        browser.close()


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
