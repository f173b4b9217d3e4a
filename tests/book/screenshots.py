"""Pictures of the built book, to be looked at: every page in light, in dark and at 375 px, into screenshots/.

With --readme PAGE#ID: the one picture that README.md shows, assets/book.png, ending at that element.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent))
import chromium

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "375": {"viewport": {"width": 375, "height": 812}, "color_scheme": "light", "has_touch": True},
    "375-dark": {"viewport": {"width": 375, "height": 812}, "color_scheme": "dark", "has_touch": True},
}


def main(target: Path = ROOT / "screenshots") -> None:
    target.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=list(chromium.FLAGS))
        for view, options in VIEWS.items():
            context = browser.new_context(**options)
            page = context.new_page()
            for path in sorted(SITE.rglob("*.html")):
                if "_static" in path.parts:
                    continue
                name = path.relative_to(SITE).with_suffix("").as_posix().replace("/", ".")
                page.goto(path.as_uri())
                page.wait_for_timeout(300)  # the theme sets its mode and heights after load
                page.screenshot(path=target / f"{name}.{view}.png", full_page=True)
            context.close()
        browser.close()
    print(f"{len(list(target.glob('*.png')))} pictures in {target}")


def readme(place: str) -> None:
    page_name, _, anchor = place.partition("#")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=list(chromium.FLAGS))
        page = browser.new_page(viewport={"width": 1200, "height": 960}, device_scale_factor=1.5)
        page.goto((SITE / page_name).as_uri())
        page.wait_for_timeout(500)
        page.evaluate("id => document.getElementById(id)?.scrollIntoView({block: 'end', behavior: 'instant'})", anchor)
        page.mouse.wheel(0, 24)  # room below the last line
        page.wait_for_timeout(300)
        page.screenshot(path=ROOT / "assets" / "book.png")
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--readme"]:
        readme(sys.argv[2])
    else:
        main(*map(Path, sys.argv[1:]))
