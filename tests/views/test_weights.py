"""The pane of the weight: where it is on its way, on the loss that was given, or from step to step."""

import math
from typing import Any

import pytest

from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views import weights, words
from accumviz.views.player import play


def walked(*stops: list[float], name: str = "w", begins: bool = True) -> Ledger:
    """A loop of steps, after each of which the weights are so; the first stop is where they begin."""
    size = len(stops[0])
    first: dict[str, Any] = {"kind": "backward", "contribution": {name: [1.0] * size}, "grad": {name: [1.0] * size}}
    if begins:
        first["weights"] = {name: stops[0]}
    steps = [{"kind": "step", "weights": {name: stop}} for stop in stops[1:]]
    return Ledger.build([Parameter(name, (size,))], [first, *steps])


def told(ledger: Ledger, loss: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = play(ledger, loss=loss).content.get("weights", {})
    return found


def texts(found: dict[str, Any], look: str) -> list[str]:
    """What elements of this look say, in the ground below a path."""
    return [told for name, _, *text in found["m"] if name == look for told in text]


def lines(found: dict[str, Any]) -> list[str]:
    return [at["d"] for name, at, *_ in found["m"] if name == "path.av-loss"]


def bowl(w: float) -> float:
    return (w - 2) ** 2


def test_one_weight_walks_down_its_curve_from_where_it_was_before_anything_ran() -> None:
    found = told(walked([1.0], [1.2], [1.4]), bowl)
    assert texts(found, "text.av-axisname") == ["w", "loss"]
    assert [(place, text) for place, _, _, text, _ in found["p"]] == [
        (-1, "w 1, loss 1"),
        (1, "w 1.2, loss 0.64"),
        (2, "w 1.4, loss 0.36"),
    ]
    xs, ys = [p[1] for p in found["p"]], [p[2] for p in found["p"]]
    assert xs == sorted(xs)
    assert ys == sorted(ys), "a picture's y grows downwards"
    assert "2" in texts(found, "text.av-tickx"), "the valley to which it leads is in the picture"
    assert len(lines(found)) == 1
    assert found["note"] == "Small dots: after each step. Grey: the loss."


def test_ticks_that_are_near_have_the_digits_that_tell_them_apart() -> None:
    """Below a path from 2 to 2.007 stood 2, 2, 2, 2.01 and 2.01."""
    found = told(walked([2.0], [2.0], [2.007]), bowl)
    for look in ("text.av-tickx", "text.av-ticky"):
        marks = texts(found, look)
        assert len(marks) == len(set(marks)) > 2


def test_without_a_loss_there_is_the_way_from_step_to_step() -> None:
    found = told(walked([1.0], [3.0], [2.0]))
    assert texts(found, "text.av-axisname") == ["step", "w"]
    assert lines(found) == []
    assert "Grey" not in found["note"]
    low, high, back = (p[2] for p in found["p"])
    assert high < back < low


@pytest.mark.parametrize("loss", [None, bowl])
def test_what_runs_away_is_an_arrow_with_its_number_and_the_rest_stays_readable(loss: Any) -> None:
    right, wild = walked([1.0], [1.5], [1.9], [2.3]), walked([1.0], [1.8], [-900.0], [1e9])
    ground = weights.field([right, wild], loss, right=[right])
    assert ground is not None
    inside = ground.picture(right, range(4))["p"]
    assert not any(arrow for *_, arrow in inside)
    spread = [p[1] for p in inside] if loss else [p[2] for p in inside]
    assert max(spread) - min(spread) > 20, "what stays is not squeezed into a point"
    found = ground.picture(wild, range(4))
    arrows = [arrow for *_, arrow in found["p"]]
    assert arrows == (["", "", "← −900", "→ 1e9"] if loss else ["", "", "↓ −900", "↑ 1e9"])
    assert found["arrow"] == "Arrow: beyond the edge."
    assert all(0 <= x <= 320 and 0 <= y <= 190 for _, x, y, *_ in found["p"])


def test_runs_side_by_side_stand_on_one_ground_of_the_longest() -> None:
    healthy, wild = walked([1.0], [1.2], [1.4]), walked([1.0], [40.0], [-7000.0], [5.0])
    ground = weights.field([healthy, wild], bowl, right=[healthy])
    assert ground is not None
    ours, theirs = (ground.picture(one, range(3)) for one in (healthy, wild))
    assert ours["m"] == theirs["m"]
    assert "One scale for all runs." in ours["note"]
    assert "scale" not in told(healthy)["note"]
    assert ours["p"][2][1] - ours["p"][0][1] > 20
    assert theirs["p"][1][4].startswith("→")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_written(value: float) -> None:
    found = told(walked([1.0], [2.0], [value]), bowl)
    assert ("NaN" if math.isnan(value) else "∞") in found["p"][2][4]
    assert "loss" not in found["p"][2][3]


def test_where_there_is_nothing_to_walk_there_is_no_pane() -> None:
    assert told(walked([1.0, 1.0], [2.0, 2.0]), bowl) == {}, "one weight has a way"
    assert told(walked([1.0])) == {}, "no step"
    assert told(Ledger.build([], [])) == {}
    assert told(Ledger.build([Parameter("w", (1,))], [{"kind": "backward"}, {"kind": "step"}])) == {}
    ranked = walked([1.0], [2.0])
    assert told(Ledger.merge([ranked, ranked])) == {}


def test_weights_that_were_kept_at_steps_only_begin_with_the_first_step() -> None:
    found = told(walked([1.0], [1.2], [1.4], begins=False))
    assert [place for place, *_ in found["p"]] == [1, 2]


def test_a_loss_that_is_no_function_of_the_weights_is_named() -> None:
    with pytest.raises(TypeError, match="loss gave no number"):
        play(walked([1.0], [2.0]), loss=3.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes one number"):
        play(walked([1.0], [2.0]), loss=lambda w: str(w) + "?")


def test_the_ground_covers_what_runs_reach_if_none_of_them_runs_away() -> None:
    """Of 1.422 a point was drawn at 1.31, as if it were there: the other run came to 1.092."""
    runs = [walked([1.0], [1.152], [1.422]), walked([1.0], [1.03], [1.092])]
    ground = weights.field(runs)
    assert ground is not None
    assert ground.up[1] > 1.422
    still = weights.field([walked([1.0], [1.000005]), *[walked([1.0], [1.1])] * 3])
    assert still is not None
    assert still.up[1] > 1.1, "a run that hardly moves does not decide what of the others is seen"


def test_weights_that_hardly_move_are_told_with_the_digits_that_say_so() -> None:
    """A line rose above the only mark 1, and the words said: w is now 1."""
    ledger = walked([1.0], [1.00005], [1.0001])
    found = told(ledger)
    assert [text for *_, text, _ in found["p"]] == ["w 1", "w 1.00005", "w 1.0001"]
    assert len(set(texts(found, "text.av-ticky"))) > 2
    assert words.moved(ledger, ledger[2]) == "w is now 1.0001"
    assert play(ledger).words[-1].endswith("w is now 1.0001.")
    assert words.moved(walked([1.0], [1.5]), walked([1.0], [1.5])[1]) == "w is now 1.5"
