"""Waiting for what a page draws, instead of for a time in which it might have."""

from typing import Any

# A view draws in the next frame, and some of what it draws is measured in the one after.
_DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"


def drawn(page: Any) -> None:
    """Return once everything that has happened to the page is drawn."""
    page.evaluate(_DRAWN)


def opened(page: Any, tab: str = "") -> None:
    """Open all panes of each view, or, on a phone, one of them."""
    if tab:
        page.get_by_role("group", name="Panes", exact=True).get_by_role("button", name=tab, exact=True).click()
    else:
        page.evaluate("for (const one of document.querySelectorAll('.av-b-panes:not([hidden])')) one.click()")
    drawn(page)


def middle(place: Any) -> tuple[float, float]:
    """Return where the middle of an element is."""
    box = place.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag(page: Any, start: tuple[float, float], right: float, down: float) -> None:
    """Take what is there with a mouse, and let it go so far from there."""
    x, y = start
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + right, y + down, steps=4)
    page.mouse.up()


# Long enough for a movement that has begun and is not yet seen, on a machine that draws few frames, too.
_STILL = """() => new Promise(done => {
    let at = scrollY, frames = 0;
    const look = () => {
        if (scrollY !== at) [at, frames] = [scrollY, 0];
        ++frames < 20 ? requestAnimationFrame(look) : done();
    };
    look();
})"""


def still(page: Any) -> None:
    """Return once the page has come to rest where something has moved it."""
    page.evaluate(_STILL)


def stopped(page: Any) -> None:
    """Stop the page's clock: from now on its time passes in `page.clock.run_for`, whatever else the machine does."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


# In a sandboxed frame, to name the storage is an exception already.
_STORED = "(() => { try { return JSON.stringify(Object.entries(localStorage).sort()); } catch { return null; } })()"
# When a browser passes on what a page has stored is its own matter: a load may come too soon for it, and the next too.
_LOADS = 20


def reload(page: Any) -> None:
    """Load the page again until it finds what it had stored; what it does with that is for the test to say."""
    stored = page.evaluate(_STORED)
    page.add_init_script(f"window.found = {_STORED};")
    for _ in range(_LOADS):
        page.reload()
        if page.evaluate("window.found") == stored:
            return
