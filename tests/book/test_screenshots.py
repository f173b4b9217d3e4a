"""The pictures that people judge by: each widget in each state, none too tall; and README's, never stale."""

import json
from typing import Any

from PIL import Image

from tests.book import screenshots
from tests.conftest import ROOT


def test_the_picture_in_the_readme_is_small_and_plays(mode: str) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    path = ROOT / "assets" / f"opening-{mode}.webp"
    assert f"assets/{path.name}" in readme
    assert path.stat().st_size < 300_000
    with Image.open(path) as picture:
        assert picture.n_frames == len(screenshots.PLAYED)  # type: ignore[attr-defined]


def test_the_picture_in_the_readme_shows_the_recording_of_the_front_page(mode: str, visit: Any) -> None:
    with Image.open(ROOT / "assets" / f"opening-{mode}.webp") as picture:
        kept = json.loads(picture.info["xmp"])
    page = visit("index.html", wait=".av-hero", height=1300)
    screenshots.show(page, *screenshots.PLAYED[-1][:2])
    now = screenshots.told(page)
    assert now == kept, "the front page's figure is another one now: run `make screenshots`, and commit assets/"
