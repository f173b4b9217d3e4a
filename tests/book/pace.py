"""How fast the browser of this machine is, beside the one on which the bars of seconds were set."""

from typing import Any

# What pages do: make elements, give them a look, ask where they are, and read a recording.
_WORK = """() => {
    const box = document.createElement("div"), numbers = Array.from({length: 20_000}, (_, i) => i / 7);
    document.documentElement.append(box);
    for (let turn = 0; turn < 4; turn++) {
        box.replaceChildren(...numbers.slice(0, 1500).map(x => {
            const one = document.createElement("span");
            one.style.cssText = `display: inline-block; opacity: ${x % 1}`;
            one.textContent = x.toFixed(3);
            return one;
        }));
        box.offsetHeight;
        JSON.parse(JSON.stringify(numbers));
    }
    box.remove();
}"""
# Seconds that it took there.
_THERE = 0.06


def clocked(page: Any) -> Any:
    """A session with a page's tab that counts its thread's own time, in which others at work have no part."""
    tab = page.context.new_cdp_session(page)
    tab.send("Performance.enable", {"timeDomain": "threadTicks"})
    return tab


def worked(tab: Any) -> float:
    """Seconds that the thread of a clocked tab has worked."""
    numbers = tab.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in numbers if one["name"] == "TaskDuration"))


def pace(browser: Any) -> float:
    """How many times as long this machine takes just now: seconds of a page's thread are divided by it."""
    page, took = browser.new_page(), []
    tab = clocked(page)
    for _ in range(5):
        before = worked(tab)
        page.evaluate(_WORK)
        took.append(worked(tab) - before)
    page.close()
    return sorted(took)[1] / _THERE
