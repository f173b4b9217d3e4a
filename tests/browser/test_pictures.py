"""What every picture does wherever it is: on a phone, in the dark, on paper, without scripts, in a sandbox."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from accumviz.book.explore import explore
from accumviz.book.lab import lab
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.browser.test_overlap import made as overlap
from tests.browser.test_peaks import peaks
from tests.browser.test_plumbing import made as plumbing
from tests.browser.test_sharding import made as sharding
from tests.browser.test_streams import made as streams
from tests.toys import W, backward, chain, toy
from tests.views.test_opening import made as opening

# What makes a picture; what is there once its script has run; its drawing.
PICTURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "the opening": (opening, ".av-hero", ".av-hero svg"),
    "the chain rule": (streams, ".av-keys", "svg.av-wide, svg.av-narrow"),
    "the peaks of memory": (peaks, ".av-tide", "svg"),
    "the pipes of a GAN": (plumbing, ".av-plumbing[data-stands]", ".av-pipes"),
    "the lanes of two ranks": (overlap, ".av-hero", ".av-network .av-reduce"),
    "the stripes of two ranks": (sharding, ".av-sharding [type=range]", ".av-map svg"),
}
# Words of fewer pixels than 13, or than 11 in code; what has no size is said by a title.
SMALL = """all => all.filter(one => {
    const size = parseFloat(getComputedStyle(one).fontSize), least = one.closest("pre, code") ? 11 : 13;
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    return own && one.matches("p, span, b, label, output, td") && size > 0 && size < least;
}).map(one => one.outerHTML.slice(0, 90))"""
CONTROLS = "[type=range]:visible, .av-keys:visible"


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(("width", "look"), [(375, "dark"), (1000, "light")])
def test_a_picture_fits_its_page_quietly_with_letters_that_can_be_read(
    name: str, width: int, look: str, show: Any
) -> None:
    make, ready, _ = PICTURES[name]
    page = show(make(), wait=ready, width=width, mode=look)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".accumviz :visible").evaluate_all(SMALL) == []


@pytest.mark.parametrize("name", PICTURES)
def test_on_paper_a_picture_stands_with_its_words_and_without_controls(name: str, shown: Any) -> None:
    make, ready, drawing = PICTURES[name]
    page = shown(make(), wait=ready)
    page.emulate_media(media="print")
    assert page.locator(drawing).locator("visible=true").count()
    assert page.locator(".av-words").first.is_visible()
    assert page.locator(CONTROLS).count() == 0


def experiment(k: int) -> Ledger:
    return Ledger.build([W], [backward(1.0, n + 1.0) for n in range(k)])


WIDGETS: dict[str, Callable[[], Any]] = {
    "a player": lambda: play(toy(), {0: chain()}),
    "an explorer": lambda: explore(experiment, k=[1, 2, 4]),
    "the loop lab": lambda: lab({"divide": "nothing"}),
}
# What a page without scripts says of each, and how many drawings it has.
SAYS: dict[str, tuple[str, int]] = {
    "a player": ("w receives −4, .grad −20", 0),
    "an explorer": ("gradient at the end", 0),
    "the loop lab": ("add to 3.", 0),
    "the opening": ("learning rate 0.05, undivided: the loss goes from 10 to 90.", 0),
    "the chain rule": ("Sample 2 brings 0.5 × 4 × −1 × 2 = −4.\nTogether: w.grad = −20.", 2),
    "the peaks of memory": ("K = 1: at most 9 MiB are alive, with checkpoints 3 MiB.\nK = 2: at most 5 MiB", 0),
    "the pipes of a GAN": ("freeze: d_loss leaks into G: after 600 rounds, samples fill 3 to 4 of the 8 circles.", 2),
    "the lanes of two ranks": ("with no_sync: 2 all-reduces, 2 MiB of gradients. The window takes 11 ms; in 3 of", 0),
    "the stripes of two ranks": (
        "averages: 4 all-gathers, 1 reduce-scatter. Between the micro-batches, a rank holds 8",
        3,
    ),
}


# What the notes of a pane say beside their keys.
REMARKS = """all => all.map(note => {
    const own = [...note.childNodes].filter(one => one.nodeType === 3).map(one => one.data);
    return own.join(" ").split(/\\s+/).filter(Boolean);
})"""


@pytest.mark.parametrize("name", WIDGETS)
def test_a_pane_has_no_instructions_for_reading_it(name: str, show: Any) -> None:
    """Below each timeline stood: 'Bars grow from the thin line, zero, the oldest part first. Heavy line: …'."""
    page = show(WIDGETS[name](), wait=".av-frame, .av-lframe")
    remarks = page.locator(".av-pane .av-note:has(.av-key)").evaluate_all(REMARKS)
    assert remarks and max(map(len, remarks)) <= 13, remarks


@pytest.mark.parametrize("name", [*PICTURES, *WIDGETS])
def test_without_scripts_there_are_words_and_nothing_that_could_be_moved(name: str, show: Any) -> None:
    page = show((WIDGETS.get(name) or PICTURES[name][0])(), java_script_enabled=False)
    said, drawings = SAYS[name]
    assert said in page.locator(".av-words").inner_text()
    assert page.locator(".accumviz svg").count() == drawings
    assert page.locator("input:visible, button:visible").count() == 0


@pytest.mark.parametrize(
    ("name", "role", "control", "place", "said"),
    [
        ("a player", "button", "next event", ".av-say", "w receives −16"),
        ("an explorer", "slider", "k", ".av-figures dd >> nth=0", "2"),
    ],
)
def test_a_sandboxed_frame_is_enough(
    name: str, role: Any, control: str, place: str, said: str, new_page: Any, tmp_path: Path
) -> None:
    inner = html.escape(f"<!doctype html><meta charset=utf-8><body>{WIDGETS[name]().to_html()}", quote=True)
    outer = f'<iframe sandbox="allow-scripts" width=800 height=1200 srcdoc="{inner}">'
    (tmp_path / "frame.html").write_text(f"<!doctype html><meta charset=utf-8>{outer}", "utf-8")
    page = new_page()
    page.goto((tmp_path / "frame.html").as_uri())
    frame = page.frame_locator("iframe")
    moved = frame.get_by_role(role, name=control, exact=True)
    moved.click() if role == "button" else moved.fill("1")
    expect(frame.locator(place)).to_contain_text(said)
    assert frame.get_by_role("link").count() == 0


@pytest.mark.parametrize("width", [375, 1280])
def test_the_opening_names_parts_and_scale_in_letters_that_can_be_read(width: int, shown: Any) -> None:
    page = shown(opening(), wait=".av-hero", width=width)
    note = page.locator("figcaption").first
    assert note.inner_text().endswith("now −20")
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"
    assert page.locator(".av-hero svg text").evaluate_all(size) >= 11
    ring, ticks = page.locator(".av-goal").bounding_box(), page.locator(".av-tickx")
    assert min(box["y"] for box in (one.bounding_box() for one in ticks.all())) >= ring["y"] + ring["height"] - 2
    page.locator(".av-scrub").fill("2")
    assert page.locator(".av-nth:visible").all_text_contents() == ["1", "2"]
    page.locator(".av-scrub").fill("4")
    assert page.locator(".av-nth:visible").count() == 0
    assert note.inner_text().endswith("now 0")


@pytest.mark.parametrize("width", [375, 1000])
def test_a_small_graph_stands_in_the_middle_of_its_box(width: int, shown: Any) -> None:
    """It stood at the left of a box of which two thirds were blank."""
    page = shown(chain(), wait=".av-scroll svg", width=width)
    left, right = page.locator(".av-scroll svg").first.evaluate(
        """drawing => {
            const own = drawing.getBoundingClientRect(), box = drawing.closest(".av-scroll").getBoundingClientRect();
            return [own.left - box.left, box.right - own.right];
        }"""
    )
    assert left > 24
    assert left == pytest.approx(right, abs=2)


def test_the_name_of_an_operation_is_whole_and_inside_its_box(shown: Any) -> None:
    """A transformer's graph said ScaledDotProduc…orCpuBackward0."""
    name = "ScaledDotProductFlashAttentionForCpuBackward0"
    graph = Graph((Node(0, name), Node(1, "AccumulateGrad", "w")), (Edge(0, 1),), (0,))
    page = shown(graph, wait=".av-scroll svg")
    title = page.locator(".av-scroll svg text", has_text=name)
    text, box = title.bounding_box(), title.locator("xpath=..").locator(".av-card").bounding_box()
    assert box["x"] < text["x"] < text["x"] + text["width"] < box["x"] + box["width"]
