"""Windows of the one browser: pages that are watched, in contexts that serve again where nothing was stored in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

STORED = "() => location.protocol === 'about:' ? {} : {...localStorage}"
# A clock that a test has taken over stays so for every page to come.
TIMED = "() => '__pwClock' in globalThis"


@dataclass
class Watched:
    """A page, and everything it did that a reader's browser would show or send."""

    page: Page
    own: tuple[str, ...]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(self.own)]

    def listen(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("requestfailed", self.miss)
        self.page.on("console", self.hear)

    def miss(self, request: Any) -> None:
        # What is under way when a page is left was given up, and did not fail.
        if request.failure != "net::ERR_ABORTED":
            self.complaints.append(f"failed: {request.url}")

    def hear(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")


class Windows:
    """A context costs more than most pages in it: one that a page left as it was is lent again."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._free: dict[str, list[BrowserContext]] = defaultdict(list)

    @contextmanager
    def lent(self, width: int, own: tuple[str, ...]) -> Iterator[Callable[..., Watched]]:
        """What opens new pages, each with a memory of its own, with `mode` light or dark and a `width`."""
        lent: list[tuple[str, dict[str, str], Watched]] = []

        def open_page(mode: str = "light", width: int = width, **options: Any) -> Watched:
            options |= {"viewport": {"width": width, "height": 900}, "color_scheme": mode}
            key = repr(sorted(options.items()))
            context = self._free[key].pop() if self._free[key] else self.browser.new_context(**options)
            watched = Watched(context.new_page(), own)
            watched.listen()
            # What the book's theme stores at every visit.
            lent.append((key, {"mode": "auto", "theme": mode}, watched))
            return watched

        yield open_page
        for key, usual, watched in lent:
            context = watched.page.context
            if clean(context, watched, usual):
                watched.page.close()
                self._free[key].append(context)
            else:
                context.close()


def clean(context: BrowserContext, watched: Watched, usual: dict[str, str]) -> bool:
    """Whether the next page in this context meets what a first one would."""
    from playwright.sync_api import Error

    page = watched.page
    if context.pages != [page] or context.cookies() or (page.url == "about:blank" and watched.requests):
        return False
    try:
        stored, timed = page.evaluate(STORED), page.evaluate(TIMED)
    except Error:  # a page that may not store, or that is gone
        return False
    return bool(stored.items() <= usual.items()) and not timed
