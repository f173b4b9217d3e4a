"""The explorer in a browser: every control switches runs, one stands behind, and a permalink brings them back."""

from pathlib import Path
from typing import Any

import pytest

from accumviz.book.explore import Explorer, explore
from accumviz.ledger.ledger import Ledger, Parameter
from tests.browser.frames import drawn
from tests.toys import CODE, window

EVIL = '</script><script>window.ran=1</script><img src=x onerror="window.ran=2">\u202e'


def experiment(way: str, k: int, divide: bool) -> tuple[Ledger, dict[str, float]]:
    """A window of k backwards of 1 (or 1/k), and a step; one choice raises, one way rounds, one tells of evil."""
    if k == 8 and not divide:
        raise ValueError(f"too large {EVIL}")
    part = (1 / k if divide else 1.0) * (1 + 1e-7 * (way == "rounded"))
    return window([part] * k, label=way), {"weight": 1 - 0.01 * part * k}


def make(**changes: Any) -> Explorer:
    return explore(experiment, way=["exact", "rounded", EVIL], k=[1, 2, 4, 8], divide=[True, False], **changes)


class Explored:
    """An explorer on a page, as a reader meets it."""

    def __init__(self, page: Any, index: int = 0) -> None:
        self.page, self.root = page, page.locator(".av-explorer").nth(index)
        self.root.locator(".av-xframe").wait_for()

    @property
    def side(self) -> Any:
        return self.root.get_by_role("group", name="Run", exact=True)

    def total(self) -> str:
        drawn(self.page)
        return str(self.root.locator(".av-total").first.inner_text())

    def figure(self, name: str) -> list[str]:
        row = self.root.locator(".av-figures div", has=self.page.get_by_text(name, exact=True))
        return list(row.locator("dd").all_inner_texts())

    def length(self) -> float:
        """How long the bar of `.grad` is, in percent of its room."""
        drawn(self.page)
        end, zero = (
            self.root.locator(place).first.evaluate("el => parseFloat(el.style.left)")
            for place in (".av-end", ".av-zero")
        )
        return float(end - zero)

    @property
    def verdict(self) -> str:
        return str(self.root.locator(".av-verdict").inner_text())


@pytest.fixture
def show(show: Any) -> Any:
    def open_page(explorer: Explorer, **options: Any) -> Any:
        watched = show(explorer, wait=".av-xframe", **options)
        watched.explored = Explored(watched.page)
        return watched

    return open_page


def test_a_slider_a_switch_and_a_select_change_the_run(show: Any, mode: str) -> None:
    watched = show(make(), mode=mode)
    explored = watched.explored
    assert (explored.total(), explored.figure("backwards")) == ("1", ["1"])
    slider = explored.side.get_by_role("slider", name="k")
    slider.fill("2")
    assert (explored.total(), explored.figure("backwards")) == ("1", ["4"])
    assert slider.get_attribute("aria-valuetext") == "4"
    explored.side.get_by_role("switch", name="divide").click()
    assert (explored.total(), explored.figure("weight")) == ("4", ["0.96"])
    explored.side.get_by_role("combobox", name="way").select_option("rounded")
    assert explored.figure("gradient of the last step") == ["4"]
    explored.root.get_by_role("button", name="previous event").click()
    drawn(explored.page)
    assert "backward of rounded" in explored.root.locator(".av-say").inner_text()
    assert (watched.foreign, watched.complaints) == ([], [])


@pytest.mark.parametrize(("loss", "seen"), [(None, "Timeline"), (lambda w: (w - 2) ** 2, "Weights")])
def test_a_weight_on_its_loss_stands_beside_the_code(show: Any, loss: Any, seen: str) -> None:
    runs = {"low": window([1.0], after=1.2), "high": window([1.0], after=3.0)}
    root = show(explore(runs, loss=loss)).explored.root
    assert root.locator(".av-pane.av-lead").evaluate_all("all => all.map(one => one.ariaLabel)") == ["Code", seen]


def test_the_keyboard_alone_does_all_of_it(show: Any) -> None:
    explored = show(make()).explored
    press = explored.page.keyboard.press
    press("Tab")
    press("ArrowDown")
    for _ in range(2):
        press("Tab") if _ == 0 else press("ArrowRight")
    press("Tab")
    press("Space")
    assert explored.figure("gradient of the last step") == ["2"]
    press("Tab")
    press("Enter")
    press("Shift+Tab")
    press("Space")
    assert explored.figure("gradient of the last step") == ["1", "2"]
    assert "differ: 1 here, 2 in the outline" in explored.verdict


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ({"k": 4}, "The gradients at the step are equal, bit for bit."),
        ({"k": 4, "way": "rounded"}, "are equal up to rounding (relative difference 1e−7)."),
        ({"k": 4, "divide": False}, "differ: 1 here, 4 in the outline."),
    ],
)
def test_what_is_said_tells_equal_from_rounding_from_different(show: Any, against: Any, said: str) -> None:
    assert said in show(make(against=against)).explored.verdict


def test_all_runs_are_drawn_to_one_scale_and_the_one_behind_is_an_outline(show: Any) -> None:
    explored = show(make(start={"k": 4}, against={"k": 4, "divide": False})).explored
    length = explored.length()
    outline = explored.root.locator(".av-row .av-ghost")
    assert outline.evaluate("el => parseFloat(el.style.width)") == pytest.approx(4 * length)
    assert "divide no" in explored.side.locator(".av-key").inner_text()
    explored.side.get_by_role("switch", name="divide").click()
    assert explored.length() == pytest.approx(4 * length)
    assert not outline.is_visible(), "it is the run that is shown"
    explored.side.get_by_role("button", name="Drop the outline").click()
    assert not explored.side.locator(".av-key").is_visible(), "no run is known to be right"


def test_what_was_raised_stands_at_its_choice_and_the_rest_goes_on(show: Any) -> None:
    watched = show(make(start={"divide": False}))
    explored = watched.explored
    slider = explored.side.get_by_role("slider", name="k")
    slider.fill("3")
    raised = explored.root.locator(".av-raised")
    assert raised.inner_text().startswith("ValueError: too large </script>")
    slider.fill("2")
    assert not raised.is_visible()
    assert explored.total() == "4"
    assert watched.page.evaluate("window.ran") is None
    assert watched.complaints == []


def test_a_permalink_restores_both_runs_and_the_moment(show: Any, watch: Any, tmp_path: Path) -> None:
    explorer = make(against={"k": 4, "divide": False})
    explored = show(explorer).explored
    explored.side.get_by_role("slider", name="k").fill("1")
    drawn(explored.page)
    explored.root.get_by_role("button", name="previous event").click()
    drawn(explored.page)
    link = explored.root.get_by_label("link to this moment").get_attribute("href")
    before = [explored.root.locator(".av-say").inner_text(), explored.figure("backwards"), explored.total()]
    again = Explored(show(explorer, fragment=link).page)
    drawn(again.page)
    assert [again.root.locator(".av-say").inner_text(), again.figure("backwards"), again.total()] == before
    assert before[1] == ["2", "4"]
    for broken in ("&a=9.9.9.9", "&a=x", "&a=0.0.0&b=1", "&a=99.99.99&e=1e9"):
        odd = show(explorer, fragment=f"#{explorer.id}{broken}")
        drawn(odd.page)
        assert odd.explored.root.inner_text().strip()
        assert odd.complaints == []


def test_switching_keeps_the_end_at_the_end_and_else_the_event(show: Any) -> None:
    explored = show(make(start={"k": 2})).explored
    slider, count = explored.side.get_by_role("slider", name="k"), explored.root.locator(".av-player .av-count")
    explored.total()
    assert count.inner_text() == "event 2 / 2"
    slider.fill("2")
    explored.total()
    assert count.inner_text() == "event 4 / 4"
    explored.root.get_by_role("slider", name="event").fill("1")
    slider.fill("3")
    explored.total()
    assert count.inner_text() == "event 1 / 8"


def test_where_all_choices_lead_to_one_run_of_one_event_the_link_names_the_choice_and_nothing_offers_to_move(
    shown: Any,
) -> None:
    row = {"kind": "backward", "contribution": {"w": 1.0}, "grad": {"w": 1.0}, "line": 3, "file": "a.py"}
    ledger = Ledger.build([Parameter("w", (1,))], [row], sources={"a.py": CODE})
    explored = Explored(shown(explore(lambda k: ledger, k=[1, 2, 4])))
    explored.side.get_by_role("slider", name="k").fill("1")
    drawn(explored.page)
    assert "&a=1" in explored.root.locator(".av-top a").get_attribute("href")
    for name in ("previous event", "play", "next event"):
        assert not explored.root.get_by_role("button", name=name).is_visible()
    assert not explored.root.get_by_role("slider", name="event").is_visible()
