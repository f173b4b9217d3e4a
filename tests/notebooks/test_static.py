"""A notebook where nothing runs it: the page that a viewer makes of it."""

from pathlib import Path
from typing import Any

from nbconvert import HTMLExporter
from playwright.sync_api import Browser

ENDS = "places => places.map(place => document.querySelector(place)?.getBoundingClientRect().bottom)"


def test_the_first_screen_of_a_viewer_holds_title_text_and_picture(
    notebook: Any, browser: Browser, tmp_path: Path
) -> None:
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells = notebook.cells[: first + 1]
    path = tmp_path / "notebook.html"
    path.write_text(HTMLExporter().from_notebook_node(notebook)[0])
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.route("http**", lambda route: route.abort())  # its style is in the file; formulas are not looked at
    page.goto(path.as_uri(), wait_until="load")
    title, text, picture = page.evaluate(ENDS, ["h1", "h1 + p", "img"])
    assert page.evaluate("document.querySelector('img').naturalHeight") > 200
    page.close()
    assert title < text < picture <= 900, "a picture comes after the title and its first paragraph"
