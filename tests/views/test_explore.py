"""The explorer without a browser: each choice is recorded once, what runs share stands once, errors stay in place."""

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
from tests.toys import window

EVIL = '</script><script>window.ran=1</script><img src=x onerror="window.ran=2">'


def toy(k: int, divide: bool = True) -> Ledger:
    """A window of k backwards of 1 (or 1/k), and a step."""
    return window([1 / k if divide else 1.0] * k)


def shown(explorer: Explorer) -> dict[str, Any]:
    return explorer.content


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
    data = shown(explore(toy, k=[1, 2, 4], divide=[True, False]))
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


def test_a_widget_records_values_outside_the_grid_and_shows_what_they_raise() -> None:
    def experiment(k: int, lr: float) -> Ledger:
        if k == 3:
            raise ValueError("three")
        return toy(k)

    live: Any = explore(experiment, k=[1, 2, 4], lr=[0.1]).live()
    live.ask = {"choice": ["5", 0], "n": 1}
    assert live.told["choice"] == ["5", 0]
    assert json.loads(live.told["run"])["figures"][0] == ["backwards", "5"]
    live.ask = {"choice": ["3", 0], "n": 2}
    assert json.loads(live.told["run"])["error"].startswith("ValueError: three")


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
    data = shown(explore(recorded, k=[1, 2, 8], divide=[True, False]))
    rows = part_of_runs(data, "p")
    assert {tuple(row["r"]) for (row,) in rows} == {(-3.0, 0.0)}, "undivided, eight micro-batches come to -8"
    shares = part_of_runs(data, "shares.r")
    assert all(one == shares[0] for one in shares)
    assert 3 <= shares[0][1] < 3.5, "and their shares to 8"


def test_without_a_right_run_the_scale_holds_all_of_them() -> None:
    data = shown(explore(recorded, k=[2, 8], divide=[False]))
    assert [row["r"] for (row,) in part_of_runs(data, "p")] == [[-8.0, 0.0]] * 2
