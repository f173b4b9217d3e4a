"""What a player weighs, how soon its page stands and how smoothly it is scrubbed, in a headless browser."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from accumviz.graph.graph import Edge, Graph, Node, Saved
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.views.player import Player, play
from tests.book.pace import clocked, pace, worked

ROOT = Path(__file__).resolve().parents[1]
# From frame to frame a slider goes on; what a step costs the page's thread is asked of the browser.
_SCRUB = """async ([name, steps, stride]) => {
    const slider = document.querySelector(name), took = [];
    let before = await new Promise(requestAnimationFrame);
    for (let i = 0; i < steps; i++) {
        slider.value = String((i * stride) % (Number(slider.max) + 1));
        slider.dispatchEvent(new Event('input'));
        const now = await new Promise(requestAnimationFrame);
        await new Promise(done => setTimeout(done));
        took.push(now - before);
        before = now;
    }
    return took.slice(1).sort((a, b) => a - b);
}"""
# Go to a backward whose graph is drawn, and say whether there is one.
# What waits for a prediction is opened first: a page's fullest graph may be such an answer.
WALKABLE = """async () => {
    for (const shut of document.querySelectorAll('[data-answers]')) shut.setAttribute('data-given', '');
    for (const fold of document.querySelectorAll('details')) fold.open = true;
    dispatchEvent(new Event('resize'));
    for (const frame of document.querySelectorAll('.av-frame')) {
        const scrub = frame.querySelector('.av-scrub'), nodes = frame.querySelector('.av-sub input');
        for (let e = 0; nodes && e <= Math.min(Number(scrub.max), 8); e++) {
            scrub.value = String(e);
            scrub.dispatchEvent(new Event('input'));
            await new Promise(requestAnimationFrame);
            await new Promise(done => setTimeout(done));
            if (nodes.checkVisibility()) {
                nodes.id = 'walked';
                frame.scrollIntoView({behavior: 'instant'});
                return true;
            }
        }
    }
    return false;
}"""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds."""
    from tests.book import chromium

    package = ROOT / "accumviz"
    scripts, sheets = (
        sum(len(gzip.compress((package / name).read_bytes())) / 1024 for name in names)
        for names in (["book/static/explore.js"], ["views/static/player.css", "book/static/explore.css"])
    )
    teaching = play(*_toy())
    carried = len(_payload(teaching)) / 1024
    rows = [
        _row("module of player and explorer, gzip", scripts, "KiB", "<= 22", scripts <= 22),
        _row("style sheets of player and explorer, gzip", sheets, "KiB", "<= 5", sheets <= 5),
        _row("payload of a teaching player", carried, "KiB", "<= 15", carried <= 15),
    ]
    events = 1000 if quick else 10_000
    start = time.perf_counter()
    large = play(_large(events, 150))
    rows += [
        _row(f"payload of {events:,} events × 150 parameters", len(_payload(large)) / 2**20, "MiB"),
        _row(f"write {events:,} events × 150 parameters", time.perf_counter() - start, "s"),
    ]
    steps = 60 if quick else 300
    with chromium.opened() as browser:
        rows.append(_row("pace of this machine's browser: by it times of pages are divided", pace(browser), "times"))
        rows += _opened(browser, large, steps, f"{events:,} events × 150 parameters")
        return rows + _walked(browser, steps)


def _opened(browser: Any, player: Player, steps: int, name: str) -> list[dict[str, Any]]:
    """How soon the page of a player stands, and what it takes to scrub, at the pace at which the bars were set."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.html"
        player.save(path)
        opened = []
        for _ in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri(), wait_until="commit")
            page.wait_for_selector(".av-row .av-part")
            opened.append(page.evaluate("performance.now()") / 1000)
        took, each = frames(page, ".av-scrub", steps, 167), work(page, ".av-scrub", steps, 167)
    soonest = min(opened) / pace(browser)
    return [
        _row(f"open {name}", soonest, "s", "<= 0.5", soonest <= 0.5),
        _row(f"scrub {name}, work in a frame", each, "ms", "<= 16", each <= 16),
        _row(f"scrub {name}, median frame", took[len(took) // 2], "ms"),
        _row(f"scrub {name}, longest frame", took[-1], "ms"),
    ]


def _walked(browser: Any, steps: int) -> list[dict[str, Any]]:
    """What it takes to walk a graph edge by edge, on the chapter on which that takes most, on half the processor."""
    from tests.book.weight import READY

    found = []
    for path in sorted((ROOT / "_build" / "html" / "chapters").glob("*.html")):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_function(READY, timeout=60_000)
        if page.locator(".av-sub").count() and page.evaluate(WALKABLE):
            twice = 2 * work(page, "#walked", steps, 1)
            found.append((twice, frames(page, "#walked", steps, 1, slowed=2), path.stem))
        page.close()
    if not found:
        print("walking an edge is left out: the book is not built", file=sys.stderr)
        return []
    twice, took, name = max(found)
    return [
        _row(f"walk an edge in {name}, processor halved, work in a frame", twice, "ms", "<= 16.7", twice <= 16.7),
        _row(f"walk an edge in {name}, processor halved, median frame", took[len(took) // 2], "ms"),
        _row(f"walk an edge in {name}, processor halved, 19 of 20 frames", took[int(0.95 * len(took))], "ms"),
    ]


def work(page: Any, name: str, steps: int, stride: int) -> float:
    """Mean milliseconds of the page's thread in a frame, at the pace at which their bars were set.

    Nothing is slowed meanwhile: a slowed thread waits by working, the longer the more others are at work.
    """
    tab = clocked(page)
    before = worked(tab)
    page.evaluate(_SCRUB, [name, steps, stride])
    return 1000 * (worked(tab) - before) / steps / pace(page.context.browser)


def frames(page: Any, name: str, steps: int, stride: int, slowed: int = 1) -> list[float]:
    """Milliseconds of frames by the clock, in order of length, on a processor that is slowed so many times."""
    tab = clocked(page)
    tab.send("Emulation.setCPUThrottlingRate", {"rate": slowed})
    took: list[float] = page.evaluate(_SCRUB, [name, steps, stride])
    tab.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    return took


def _payload(player: Player) -> bytes:
    found = re.search(r'<script type="application/json">(.*?)</script>', player.to_html(), re.DOTALL)
    assert found
    return found[1].encode()


def _toy() -> tuple[Ledger, dict[int, Graph]]:
    rows: list[dict[str, Any]] = [
        {"kind": "backward", "label": "loss", "line": 3, "contribution": {"w": -16}, "grad": {"w": -16}},
        {"kind": "backward", "label": "loss", "line": 3, "contribution": {"w": -4}, "grad": {"w": -20}},
        {"kind": "step", "line": 4, "grad": {"w": -20}},
        {"kind": "zero_grad", "line": 5},
    ]
    kept = (Saved("_saved_self", (1,), "float32", 4, 1),)
    names = ("DivBackward0", "PowBackward0", "SubBackward0", "MulBackward0", "AccumulateGrad")
    nodes = tuple(Node(i, name, shape=(1,), saved=kept, value=[1.0], grad=[2.0]) for i, name in enumerate(names))
    graph = Graph(nodes, tuple(Edge(i, i + 1) for i in range(4)), (0,))
    return Ledger.build([Parameter("w", (1,), optimizers=(0,))], rows), {0: graph, 1: graph}


def _large(events: int, parameters: int) -> Ledger:
    """Windows of four backwards, a step and a zero_grad; norms that no compression can guess."""
    rng = np.random.default_rng(0)
    kinds = ["backward"] * 4 + ["step", "zero_grad"]
    rows = tuple(
        Event(e, kinds[e % 6], "loss" if e % 6 < 4 else "AdamW", loss=1.0 / (e + 1), saved_before=1e6, saved_after=0.0)
        for e in range(events)
    )
    backward, held = (np.array([e % 6 < most for e in range(events)])[:, None] for most in (4, 5))
    added = np.where(backward, np.exp(rng.normal(-2, 1, (events, parameters))), np.nan)
    grad = np.where(held, np.exp(rng.normal(-1, 1, (events, parameters))), np.nan)
    state = np.where(backward, CONTRIBUTED, 0) + np.where(held, PRESENT, 0) + np.zeros((1, parameters), int)
    names = tuple(Parameter(f"layers.{p // 12}.{p % 12}.weight", (8, 8), optimizers=(0,)) for p in range(parameters))
    return Ledger(names, rows, added, grad, state)


def _row(name: str, value: float, unit: str, bar: str = "", holds: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": holds}


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(json.dumps(row, ensure_ascii=False))
