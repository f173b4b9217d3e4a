"""What a loop lab weighs, how long its arrangements take to record, and how soon its page answers a change."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accumviz as av
from accumviz.views.payload import encode

# From a click to a page that is laid out anew; what is painted comes with the next frame.
_CHANGE = """async (rounds) => {
    const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    const radios = [...document.querySelectorAll('.av-radios input')], took = [];
    for (let round = 0; round < rounds; round++) for (const radio of radios) {
        await frame();
        const from = performance.now();
        radio.click();
        document.body.getBoundingClientRect();
        took.push(performance.now() - from);
    }
    return took.sort((a, b) => a - b);
}"""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds."""
    from tests.book import chromium

    start = time.process_time()
    lab = av.lab()
    took = time.process_time() - start
    weighs = _weighs(lab)
    with tempfile.TemporaryDirectory() as folder, chromium.opened() as browser:
        path = Path(folder) / "lab.html"
        lab.save(path)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector(".av-radios")
        changes = page.evaluate(_CHANGE, 2 if quick else 10)
    median, late = changes[len(changes) // 2], changes[int(0.95 * len(changes))]
    return [
        _row(f"record and judge {len(lab.recorded)} arrangements", took, "s"),
        _row("data of a lab, gzip", weighs, "KB", "<= 60", weighs <= 60),
        _row("a lab answers a change, median", median, "ms", "<= 50", median <= 50),
        _row("a lab answers a change, 19 of 20", late, "ms"),
    ]


def _weighs(lab: Any) -> float:
    return len(gzip.compress(encode(lab.content).encode())) / 1000


def _row(name: str, value: float, unit: str, bar: str = "", holds: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": holds}


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(json.dumps(row, ensure_ascii=False))
