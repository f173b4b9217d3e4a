"""What a page of the book costs on a first visit."""

import gzip
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.book.pace import clocked, worked
from tests.windows import Watched

# What moved without being asked, by the rule of web vitals: the worst run of shifts less than a second apart.
SHIFTS = """() => {
    window.shifts = [];
    new PerformanceObserver(list => { for (const one of list.getEntries()) if (!one.hadRecentInput) shifts.push({
        at: one.startTime, value: one.value,
        what: one.sources.map(({node}) => node && (node.id || node.className || node.nodeName)).join(", ")}); })
        .observe({type: "layout-shift", buffered: true});
}"""
WORST = """() => {
    let worst = 0, sum = 0, begin = 0, last = 0;
    for (const {at, value} of shifts) {
        if (at - last > 1000 || at - begin > 5000) { sum = 0; begin = at; }
        last = at; sum += value; worst = Math.max(worst, sum);
    }
    return worst;
}"""
# A page is ready when it has loaded and every figure on it has started, or says that it could not.
READY = """() => document.readyState === "complete" && document.querySelector("h1")
    && [...document.querySelectorAll("[data-accumviz-player], [data-accumviz-explorer]")]
        .every(one => one.querySelector(".av-frame, .av-note"))"""


@dataclass
class Cost:
    requests: int
    kilobytes: float  # gzip
    shift: float
    worked: float  # seconds of the page's own thread, slowed
    shifts: list[dict[str, Any]]
    complaints: list[str]  # of the page, and what it asked of other hosts


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """A request per line would bury what pytest says."""


def cost(browser: Any, address: str) -> Cost:
    """Visit a page as somebody who has never been there: nothing is kept from an earlier visit."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    responses: list[Any] = []
    page.on("response", lambda response: responses.append(response))  # Playwright marks its listeners
    watched = Watched(page, ("http://127.0.0.1:", "data:", "blob:"))
    watched.listen()
    page.add_init_script(f"({SHIFTS})()")
    tab = clocked(page)
    page.goto(address, wait_until="commit")
    page.wait_for_function(READY, timeout=60_000)
    took = 4 * worked(tab)
    page.wait_for_timeout(500)
    for _ in range(12):
        page.mouse.wheel(0, 800)
        page.wait_for_timeout(30)
    page.wait_for_timeout(300)
    shift, shifts = page.evaluate(WORST), page.evaluate("shifts")
    fetched = [response for response in responses if response.url.startswith("http")]
    weight = sum(len(gzip.compress(response.body(), 6)) for response in fetched) / 1000
    context.close()
    complaints = [*watched.foreign, *watched.complaints]
    return Cost(len(fetched), weight, shift, took, shifts, complaints)


def noise(length: int, seed: str) -> bytes:
    """Letters that cannot be packed."""
    return random.Random(seed).randbytes(length // 2).hex().encode()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
