"""Pictures of the built book, to be looked at one by one, and the picture that README.md shows.

`python tests/book/screenshots.py [PART OF A PAGE'S NAME ...]` writes screenshots/index.html: each widget in each of
its states, and each screenful, at their own size and no taller than 1,200 px; in light, in dark and at 375 px.
With `--readme` it only renews assets/opening-*.webp: the front page's figure as it plays, from the book's recording;
its last moment, _static/opening.png; and of that the weight alone, the notebooks' cover.
"""

import html
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import chromium

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "375": {"viewport": {"width": 375, "height": 812}, "color_scheme": "light", "has_touch": True},
}
TALLEST = 1200
# Of each kind of widget, what is done to it before the next picture; what it does not have is left out.
STATES = {
    "explorer": {"compared": ".av-compare"},
    "player": {"next": ".av-b-next", "whole": ".av-b-more"},
    "predict": {"answered": ".av-check", "shown": ".av-reveal > summary"},
    "lab": {"moved": ".av-radios label:last-child input"},
}
WIDGETS = ".accumviz:not(.accumviz .accumviz)"
# Sticky bars would stand on every picture, and room for them would push the end of a tall one out of it; a question is
# answered by whatever comes first.
STILL = """.book-bar, .book-side { position: static !important; } .book-skip { display: none; }
    * { scroll-margin: 0 !important; scroll-padding: 0 !important; }"""
ANSWER = """root => {
    const field = root.querySelector('input.av-field, .av-choice input');
    if (field?.type === 'radio') field.click(); else if (field) field.value = '7';
}"""
# The moments of the README's picture: whether the loss is divided, an event (0: before the first), how long.
PLAYED = ((True, 0, 1200), *((True, n, 500) for n in range(1, 5)), (True, 16, 2000), (False, 0, 1000))
PLAYED += (*((False, n, 500) for n in range(1, 16)), (False, 16, 3000))


def states(page: Any, widget: Any) -> Iterator[str]:
    """Put a widget into one state after the other, and name each."""
    yield "first"
    kinds = (widget.get_attribute("class") or "").split()
    for kind, steps in STATES.items():
        for name, place in steps.items() if f"av-{kind}" in kinds else ():
            widget.evaluate(ANSWER)
            found = widget.locator(f"{place}:visible")
            if found.count():
                found.first.dispatch_event("click")
                page.wait_for_timeout(200)
                yield name


def cut(picture: bytes, name: str, target: Path) -> None:
    """A picture as files that are no taller than a screen."""
    with Image.open(io.BytesIO(picture)) as image:
        for part, top in enumerate(range(0, image.height, TALLEST)):
            box = (0, top, image.width, min(top + TALLEST, image.height))
            image.crop(box).save(target / f"{name}.{part}.png")


def pictures(page: Any, name: str, target: Path) -> None:
    page.add_style_tag(content=STILL)
    # As a reader scrolls: one picture of a whole page, laid out anew for each of its pieces, runs out of time.
    tall, high = page.evaluate("[document.documentElement.scrollHeight, innerHeight]")
    for n, top in enumerate(range(0, tall, high)):
        page.evaluate("top => scrollTo({top, behavior: 'instant'})", top)
        page.screenshot(path=target / f"{name}.screen{n:02}.png")
    for n, widget in enumerate(page.locator(WIDGETS).all()):
        if widget.is_visible():
            for state in states(page, widget):
                cut(widget.screenshot(), f"{name}.widget{n:02}.{state}", target)


def index(target: Path) -> None:
    names = sorted(path.name for path in target.glob("*.png"))
    figures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption><img src='{html.escape(name)}' loading=lazy></figure>"
        for name in names
    )
    look = "body { display: flex; flex-wrap: wrap; } figure { margin: 1rem; } img { border: 1px solid #888; }"
    page = f"<!doctype html><meta charset=utf-8><title>Pictures of the book</title><style>{look}</style>{figures}"
    (target / "index.html").write_text(page, "utf-8")
    print(f"{len(names)} pictures: {target / 'index.html'}")


def main(parts: list[str], site: Path = SITE, target: Path = ROOT / "screenshots") -> None:
    target.mkdir(exist_ok=True)
    with chromium.opened() as browser:
        for view, options in VIEWS.items():
            context = browser.new_context(reduced_motion="reduce", **options)
            for path in sorted(site.rglob("*.html")):
                name = path.relative_to(site).with_suffix("").as_posix().replace("/", ".")
                if "_static" in path.parts or (parts and not any(part in name for part in parts)):
                    continue
                page = context.new_page()
                page.goto(path.as_uri())
                page.wait_for_timeout(500)  # the theme sets its mode and heights after load
                pictures(page, f"{name}.{view}", target)
                page.close()
            context.close()
    index(target)


def readme(site: Path = SITE, target: Path = ROOT / "assets") -> None:
    """The opening, moment by moment, in both themes; in each picture, what its code and its last sentence were."""
    with chromium.opened() as browser:
        for mode in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1280, "height": 1300},
                color_scheme=mode,
                reduced_motion="reduce",
            )
            page.goto((site / "index.html").as_uri())
            hero = page.locator(".av-hero")
            hero.wait_for()
            page.add_style_tag(content=STILL)
            frames = []
            for divided, event, _ in PLAYED:
                show(page, divided, event)
                frames.append(Image.open(io.BytesIO(hero.screenshot())).convert("RGB"))
            first, *others = frames
            last = [one for _, _, one in PLAYED]
            path = target / f"opening-{mode}.webp"
            kept = json.dumps(told(page)).encode()
            first.save(path, save_all=True, append_images=others, duration=last, loop=0, quality=50, method=6, xmp=kept)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")
            if mode == "light":  # what a link to the front page shows elsewhere
                frames[-1].save(ROOT / "_static" / "opening.png", optimize=True)
                cover = Image.open(io.BytesIO(hero.locator("figure").last.screenshot())).convert("RGB")
                cover.quantize(8).save(ROOT / "_ext" / "wherebook" / "cover.png", optimize=True)
            page.close()


def show(page: Any, divided: bool, event: int) -> None:
    """Put the opening at a moment, with the division in its code or without it."""
    token = page.locator(".av-token")
    if (token.get_attribute("aria-pressed") == "true") != divided:
        token.click()
    page.locator(".av-hero .av-scrub").evaluate(
        "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }", event
    )
    page.wait_for_timeout(100)


def told(page: Any) -> list[str]:
    """What the front page's figure is of, in words: its code, and what it says at the end."""
    return [page.locator(".av-loop").inner_text(), page.locator(".av-says").inner_text()]


if __name__ == "__main__":
    if "--readme" not in sys.argv:
        main(sys.argv[1:])
    readme()
