"""The explorer: each choice is recorded once, what runs share stands once; and as a reader switches between runs."""

import html
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accumviz.book import explore as module
from accumviz.book.explore import Explorer, explore
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.recorder.recording import record
from accumviz.views import payload
from accumviz.views.player import play
from tests.browser.frames import drawn
from tests.toys import CODE, EVIL, window


def toy(k: int, divide: bool = True) -> Ledger:
    """A window of k backwards of 1 (or 1/k), and a step."""
    return window([1 / k if divide else 1.0] * k)


def part_of_runs(data: dict[str, Any], name: str) -> list[Any]:
    """A part of each run, by its name, as the page puts it together."""
    column, different = list(data["parts"]).index(name), data["parts"][name]
    return [different[run["data"][column]] for run in data["runs"]]


def test_every_combination_is_recorded_once_and_found_again() -> None:
    asked = []

    def experiment(k: int, divide: bool) -> Ledger:
        asked.append((k, divide))
        return toy(k, divide)

    explorer = explore(experiment, k=[1, 2, 4], divide=[True, False])
    assert asked == [(k, divide) for k in (1, 2, 4) for divide in (True, False)]
    for k, divide in asked:
        ledger = explorer.run(k=k, divide=divide)
        assert len(ledger.of("backward")) == k
        assert ledger.values("w")[-1].tolist() == [1.0 if divide else float(k)]


def test_equal_runs_and_equal_parts_of_runs_stand_once() -> None:
    data = explore(toy, k=[1, 2, 4], divide=[True, False]).content
    assert data["grid"] == [0, 0, 1, 2, 3, 4], "with one micro-batch, dividing changes nothing"
    (code,) = data["parts"]["code"]
    assert code == json.loads(json.dumps(payload.ledger_data(toy(2))["code"]))
    alone = sum(len(payload.encode(run.player.content)) for run in explore(toy, k=[*range(1, 17)]).runs if run.player)
    assert len(payload.encode(explore(toy, k=[*range(1, 17)]).content)) < alone / 3


def test_an_experiment_that_raises_is_shown_at_its_choice_and_the_others_work() -> None:
    def experiment(k: int) -> Ledger:
        if k == 2:
            raise ValueError(f"no {EVIL}")
        return toy(k)

    explorer = explore(experiment, k=[1, 2, 4])
    assert [run.failure is not None for run in explorer.runs] == [False, True, False]
    assert explorer.runs[1].error.startswith("ValueError: no </script>")
    assert "raised by: raise ValueError" in explorer.runs[1].error
    assert "1 of which raised" in repr(explorer)
    page = explorer.to_html()
    assert html.escape(explorer.runs[1].error) in page
    assert EVIL not in page
    with pytest.raises(ValueError, match="no <"):
        explorer.run(k=2)
    assert len(explorer.run(k=4)) == 5


def test_when_every_run_raises_so_does_explore() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        explore(lambda k: k / 0, k=[1, 2])
    assert caught.traceback[-1].name == "<lambda>"


def test_what_an_experiment_may_return() -> None:
    recording = SimpleNamespace(ledger=toy(2), graphs={})
    for given in (recording, toy(2), (toy(2), {}), (recording, {"weight": 1.25})):
        run = explore(lambda k, given=given: given, k=[1]).runs[0]
        assert run.player is not None
        assert run.player.ledger is not None
        assert len(run.player.ledger) == 3
        last = given[-1] if isinstance(given, tuple) else {}
        assert [list(pair) for pair in run.figures[3:]] == [[name, "1.25"] for name in last]


def test_controls_follow_the_kind_of_the_values() -> None:
    kinds: dict[str, list[Any]] = {"slider": [1, 2, 4], "select": [1, 2], "switch": [True, False], "fixed": ["only"]}
    for kind, values in kinds.items():
        assert module.control("c", values)["kind"] == kind
    assert module.control("way", [toy, explore])["labels"] == ["toy", "explore"]


def test_against_begins_where_start_does_but_for_what_it_names() -> None:
    explorer = explore(toy, k=[1, 2, 4], divide=[True, False], start={"k": 4}, against={"divide": False})
    assert (explorer.start, explorer.against) == ([2, 0], [2, 1])


def test_without_scripts_a_table_of_all_runs_remains() -> None:
    explorer = explore(toy, k=[1, 2], divide=[True, False])
    page = re.sub(r"<(script|style)\b.*?</\1>", "", explorer.to_html(), flags=re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert len(rows) == 5
    assert "<td>2</td><td>no</td><td>2</td><td>1</td><td>2</td>" in rows[-1]
    text = explorer._repr_mimebundle_()["text/plain"].splitlines()
    assert text[-1].split() == ["2", "no", "2", "1", "2"]


def test_gradients_are_compared_at_steps_and_none_is_not_zero() -> None:
    rows = [
        {"kind": "backward", "contribution": {"w": 1}, "grad": {"w": 1}},
        {"kind": "step", "grad": {"w": 1}},
        {"kind": "step", "grad": {"w": 1}, "details": {"skipped": True}},
        {"kind": "zero_grad"},
        {"kind": "step"},
    ]
    ledger = Ledger.build([Parameter("w", (1,), optimizers=(0,))], rows)
    said = {"of": ["w", 1], "exact": True, "end": False, "steps": 2, "rows": [[1.0], [None]]}
    assert module.gradients(ledger) == said
    assert module.gradients(Ledger.build([], []))["rows"] == []


def test_what_another_optimizer_owns_is_no_part_of_a_step() -> None:
    rows = [{"kind": "step", "details": {"optimizer_index": i}, "grad": {"g": 1.0, "d": 2.0}} for i in (0, 1)]
    ledger = Ledger.build([Parameter("g", (1,), optimizers=(0,)), Parameter("d", (1,), optimizers=(1,))], rows)
    assert module.gradients(ledger)["rows"] == [[1.0, None], [None, 2.0]]
    assert module.key_figures(ledger)[-1] == ("gradient of the last step", "‖·‖ 2")


def test_no_bit_is_lost_before_two_gradients_are_called_equal() -> None:
    near = [float(np.float32(1.1)), float(np.nextafter(np.float32(1.1), np.float32(2)))]
    ledgers = [Ledger.build([Parameter("w", (1,))], [{"kind": "step", "grad": {"w": value}}]) for value in near]
    assert [json.loads(json.dumps(module.gradients(ledger)))["rows"] for ledger in ledgers] == [[[x]] for x in near]


def test_of_larger_models_the_norms_are_compared_and_of_long_runs_the_first_steps() -> None:
    sizes = {"a": 200, "b": 100, "c": 3}
    rows = [{"kind": "step", "grad": {name: np.full(n, 2.0) for name, n in sizes.items()}} for _ in range(400)]
    ledger = Ledger.build([Parameter(name, (n,)) for name, n in sizes.items()], rows)
    told = module.gradients(ledger)
    assert (told["of"], told["exact"], told["steps"]) == (["a", 200, "b", 100, "c", 3], False, 400)
    assert [len(row) for row in told["rows"]] == [3] * 341
    assert told["rows"][0][0] == pytest.approx(2 * 200**0.5)


def test_runs_of_few_and_of_many_parameters_are_as_tall_as_the_tallest() -> None:
    def ranks(count: int) -> Ledger:
        names = [f"rank {rank}" for rank in range(count)]
        row = {"kind": "backward", "contribution": dict.fromkeys(names, 1.0), "grad": dict.fromkeys(names, 1.0)}
        return Ledger.build([Parameter(name, (1,)) for name in names], [row])

    explorer = explore(ranks, count=[1, 2, 4])
    assert part_of_runs(explorer.content, "lane") == [240, 120, 60]


def test_on_a_page_of_several_views_each_style_sheet_and_each_module_stands_once() -> None:
    from wherebook.outputs import one_module, share_assets

    player, *explorers = play(toy(1)), explore(toy, k=[1, 2]), explore(toy, k=[1, 4])
    both = one_module(share_assets("".join(view.to_html() for view in (player, *explorers))))
    assert both.count("<style") == 2, "that of players, and that of explorers"
    assert both.count('<script type="module"') == 1
    assert both.count('<script type="application/json"') == 3


def recorded(k: int, divide: bool) -> Ledger:
    """Windows of k micro-batches of one weight, as PyTorch trains it."""
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with record({"w": w}, optimizer) as recording:
        for _ in range(2):
            for _ in range(k):
                ((2 - w).mean() / (k if divide else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording.ledger


def test_all_runs_share_one_scale_that_ends_at_three_times_the_right_one() -> None:
    data = explore(recorded, k=[1, 2, 8], divide=[True, False]).content
    rows = part_of_runs(data, "p")
    assert {tuple(row["r"]) for (row,) in rows} == {(-3.0, 0.0)}, "undivided, eight micro-batches come to -8"
    shares = part_of_runs(data, "shares.r")
    assert all(one == shares[0] for one in shares)
    assert 3 <= shares[0][1] < 3.5, "and their shares to 8"


def test_without_a_right_run_the_scale_holds_all_of_them() -> None:
    data = explore(recorded, k=[2, 8], divide=[False]).content
    assert [row["r"] for (row,) in part_of_runs(data, "p")] == [[-8.0, 0.0]] * 2


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
    def open_page(explorer: Explorer, **options: Any) -> Explored:
        return Explored(show(explorer, wait=".av-xframe", **options))

    return open_page


def test_a_slider_a_switch_and_a_select_change_the_run(show: Any, mode: str) -> None:
    explored = show(make(), mode=mode)
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


@pytest.mark.parametrize(("loss", "seen"), [(None, "Timeline"), (lambda w: (w - 2) ** 2, "Weights")])
def test_a_weight_on_its_loss_stands_beside_the_code(show: Any, loss: Any, seen: str) -> None:
    runs = {"low": window([1.0], after=1.2), "high": window([1.0], after=3.0)}
    root = show(explore(runs, loss=loss)).root
    assert root.locator(".av-pane.av-lead").evaluate_all("all => all.map(one => one.ariaLabel)") == ["Code", seen]


def test_the_keyboard_alone_does_all_of_it(show: Any) -> None:
    explored = show(make())
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
    assert said in show(make(against=against)).verdict


def test_all_runs_are_drawn_to_one_scale_and_the_one_behind_is_an_outline(show: Any) -> None:
    explored = show(make(start={"k": 4}, against={"k": 4, "divide": False}))
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
    explored = show(make(start={"divide": False}))
    slider = explored.side.get_by_role("slider", name="k")
    slider.fill("3")
    raised = explored.root.locator(".av-raised")
    assert raised.inner_text().startswith("ValueError: too large </script>")
    slider.fill("2")
    assert not raised.is_visible()
    assert explored.total() == "4"
    assert explored.page.evaluate("window.ran") is None


def test_a_permalink_restores_both_runs_and_the_moment(show: Any) -> None:
    explorer = make(against={"k": 4, "divide": False})
    explored = show(explorer)
    explored.side.get_by_role("slider", name="k").fill("1")
    drawn(explored.page)
    explored.root.get_by_role("button", name="previous event").click()
    drawn(explored.page)
    link = explored.root.get_by_label("link to this moment").get_attribute("href")
    before = [explored.root.locator(".av-say").inner_text(), explored.figure("backwards"), explored.total()]
    again = show(explorer, fragment=link)
    assert [again.root.locator(".av-say").inner_text(), again.figure("backwards"), again.total()] == before
    assert before[1] == ["2", "4"]
    for broken in ("&a=9.9.9.9", "&a=x", "&a=0.0.0&b=1", "&a=99.99.99&e=1e9"):
        odd = show(explorer, fragment=f"#{explorer.id}{broken}")
        assert odd.root.inner_text().strip()


def test_switching_keeps_the_end_at_the_end_and_else_the_event(show: Any) -> None:
    explored = show(make(start={"k": 2}))
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
    explored = shown(explore(lambda k: ledger, k=[1, 2, 4]))
    explored.side.get_by_role("slider", name="k").fill("1")
    drawn(explored.page)
    assert "&a=1" in explored.root.locator(".av-top a").get_attribute("href")
    for name in ("previous event", "play", "next event"):
        assert not explored.root.get_by_role("button", name=name).is_visible()
    assert not explored.root.get_by_role("slider", name="event").is_visible()
