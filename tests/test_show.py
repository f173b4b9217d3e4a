"""What everything that shows itself has in common: one page, one way to write a text and a number."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accumviz as av
from accumviz.graph.graph import Graph, Node
from accumviz.show import encoded, escape, literal, marked
from tests.toys import toy

SAVED: dict[str, Callable[[], Any]] = {
    "Ledger": toy,
    "Timeline": lambda: av.timeline(toy()),
    "accumviz prediction": lambda: av.predict("What is `w.grad`?", -16),
    "accumviz player": lambda: av.play(toy()),
    "accumviz explorer": lambda: av.explore(lambda k: toy(), k=[1, 2]),
    "accumviz graph": lambda: Graph((Node(0, "MulBackward0"),), (), (0,)),
}


@pytest.mark.parametrize("title", SAVED)
def test_whatever_is_saved_is_one_page_with_a_title_for_wide_and_narrow_light_and_dark(
    title: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.html"
    thing = SAVED[title]()
    thing.save(path)
    page = path.read_text("utf-8")
    assert page.startswith('<!doctype html><html lang="en"><head><meta charset="utf-8">')
    assert f"<title>{title}</title>" in page
    assert f"<main><h1>{title}</h1>" in page
    assert 'name="viewport"' in page
    assert ":root { color-scheme: light dark; }" in page
    assert "background: light-dark(#fff, #14181d)" in page
    assert page.endswith("</main></body></html>")


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_comes_back_from_json(value: float) -> None:
    back = float(json.loads(json.dumps(encoded(value), allow_nan=False)))
    assert back == value or (math.isnan(back) and math.isnan(value))


@given(st.text())
def test_a_text_is_drawn_in_one_line_that_turns_nothing_around(text: str) -> None:
    assert literal(text).isprintable()
    assert "<" not in escape(text)
    assert marked(text, veiled=True).replace("<code>", "").replace("</code>", "").count("<") == 0
