"""The player as data and as HTML: what goes into a page, how large it is, and that none of it can run."""

import base64
import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accumviz.book import explore
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.recorder.callsite import needs, only
from accumviz.views import graph as drawing_of
from accumviz.views import payload
from accumviz.views.layout import heat
from accumviz.views.player import FORMAT, Player, play, scenes
from accumviz.views.style import CYCLE, kind, static
from tests.toys import W, backward, chain, large, ranks, synced, toy


def carried(player: Player) -> dict[str, Any]:
    """What a browser reads out of the page."""
    text = re.search(r'<script type="application/json">(.*?)</script>', player.to_html(), re.DOTALL)
    assert text
    data: dict[str, Any] = json.loads(text[1], parse_constant=lambda name: pytest.fail(f"bare {name}"))
    if "z" in data:
        data = json.loads(zlib.decompress(base64.b64decode(data["z"])))
    return data


def test_a_notebook_gets_html_and_the_same_in_words() -> None:
    bundle = play(toy())._repr_mimebundle_()
    assert "Event 1, backward of loss, line 3, loss 1: w receives −4, .grad −20" in bundle["text/plain"]
    assert 'class="accumviz av-player"' in bundle["text/html"]


def test_exact_numbers_of_small_parameters_go_along() -> None:
    data = carried(play(toy()))
    assert data["x"]["0"] == [[[-16], [-4], None, None], [[-16], [-20], [-20], None]]


def test_none_is_not_zero() -> None:
    data = carried(play(Ledger.build([W], [{"kind": "zero_grad"}, {"kind": "zero_grad", "grad": {"w": 0}}])))
    assert data["x"]["0"][1] == [None, [0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_bare(value: float) -> None:
    data = carried(play(Ledger.build([W], [backward(value, value, loss=value)])))
    assert data["x"]["0"][0] == [[payload.plain([value])[0]]]
    assert "c" not in data, "all elements are there"


@pytest.mark.parametrize(
    ("first", "unknown"),
    [
        (backward(2, 2), False),
        (backward(2, 5), True),
        ({"kind": "step", "grad": {"w": 5}}, True),
        ({"kind": "step"}, False),
        ({"kind": "zero_grad"}, True),
    ],
    ids=["all of it is added", "some was there", "it was there", "none is there", "none is left"],
)
def test_a_row_says_that_nobody_knows_what_its_grad_was_before_the_first_event(
    first: dict[str, Any], unknown: bool
) -> None:
    data = carried(play(Ledger.build([W], [first, {"kind": "step"}])))
    assert data["p"][0].get("u", 0) == unknown


def test_the_largest_event_of_a_pixel_is_the_one_that_it_shows() -> None:
    added = np.ones((1, 3840))
    added[0, 3001] = 1000.0
    pixels = heat(added, added > 0, np.zeros(3840, int), np.arange(0, 3840, 6))
    assert np.flatnonzero(pixels[0] == pixels.max()).tolist() == [3001 // 6]
    assert pixels.max() > pixels.min()


def test_norms_of_large_ledgers_stand_parameter_by_parameter_with_three_digits() -> None:
    ledger = large(600, 20)
    data = carried(play(ledger))
    back = np.array(data["c"], float).reshape(-1, 600)
    assert len(back) == 20 + len([row for row in data["p"] if "in" in row])
    assert np.allclose(back[3][:4], ledger.contribution[:4, 3], rtol=5e-3)
    assert back[3][4] == -1


def listed(text: str, *lines: int) -> list[int]:
    """The numbers of the lines that are shown where something happened on these; 0 is a gap."""
    rows = [{"kind": "step", "file": "a.py", "line": line} for line in lines]
    ledger = Ledger.build([], rows, sources={"a.py": text})
    (file,), at = payload.listing(ledger, ledger.events)
    assert [file["lines"][i][0] for i in at] == list(lines)
    return [line[0] for line in file["lines"]]


def test_only_the_stretch_of_code_in_which_something_happened_is_shown() -> None:
    text = "\n".join(f"line {n}" for n in range(1, 2001))
    assert listed(text, 1000, 1900) == [*range(976, 1025), 0, *range(1876, 1925)]


def test_what_a_ledger_left_out_is_left_out_code_and_empty_lines_that_somebody_wrote_stay() -> None:
    head = ["import torch", "", 'PASSWORD = "secret"', "one = 1", "two = 2", "three = 3", "", ""]
    head += ["def help():", "    return PASSWORD", "", ""]
    train = ["def train():", "    for x in data:", "", "        loss.backward()", "", "", "    opt.step()", "", ""]
    text = "\n".join([*head, *train, *"abcd", "", "", "def again():", "    opt.zero_grad()"])
    kept = only(text, needs(text, 16, 13) | needs(text, 29, 28))
    assert "secret" not in kept
    assert listed(kept, 16, 29) == [*range(13, 20), 0, 28, 29]
    assert listed(text, 16, 29) == [*range(1, 30)]


def test_graphs_of_one_form_share_a_layout_and_keep_their_numbers() -> None:
    drawn = scenes({0: chain(-16.0), 1: chain(-4.0)})
    assert len(drawn["layouts"]) == 1
    assert [graph["v"][2][1] for graph in drawn["graphs"]] == ["[−16]", "[−4]"]
    assert drawn["of"] == {0: 0, 1: 1}


def test_a_folded_graph_has_an_order_of_its_own() -> None:
    nodes = tuple(Node(i, "AddBackward0", shape=(1,)) for i in range(400))
    graph = Graph(nodes, tuple(Edge(i, i + 1) for i in range(399)), (0,), order=[0, 1])
    drawn = scenes({0: graph})
    assert len(drawn["graphs"][0]["order"]) == len(drawn["layouts"][0]["n"]) < 151
    assert "400 nodes drawn as" in " ".join(drawn["layouts"][0]["notes"])


def test_without_graphviz_the_player_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise drawing_of.LayoutError("install one: `pip install pygraphviz`")

    monkeypatch.setattr("accumviz.views.graph.graphviz", missing)
    data = carried(play(toy(), {0: chain()}))
    assert "pip install pygraphviz" in data["missing"]


def test_too_many_events_are_thinned_by_whole_windows_and_a_note_says_so() -> None:
    ledger = large(30_000, 4)
    chosen, note = payload.thin(ledger)
    assert len(chosen) <= payload.MOST_EVENTS
    assert len(chosen) >= payload.MOST_EVENTS * 0.7
    assert np.array_equal(chosen % 6, np.arange(len(chosen)) % 6)
    assert "of 30,000 events are shown" in note
    data = carried(play(ledger))
    assert data["note"] == note
    assert data["e"]["i"] == chosen.tolist()


def test_of_one_long_window_the_first_events_are_shown() -> None:
    rows = tuple(Event(e, "backward", "loss") for e in range(20_000))
    there = np.ones((20_000, 1))
    chosen, note = payload.thin(Ledger((W,), rows, there, there, np.full((20_000, 1), PRESENT | CONTRIBUTED)))
    assert chosen.tolist() == [*range(payload.MOST_EVENTS)]
    assert note.startswith("10,000 of 20,000 events are shown")


def test_a_saved_page_stands_alone(tmp_path: Path) -> None:
    play(toy(), {0: chain()}).save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert not re.search(r'(?:src|href)="https?:|url\(|@import|\bimport\s', page.partition("av-words")[0])


def test_the_script_takes_what_this_version_writes() -> None:
    for script in (static("accumviz.js"), static("lab.js", explore.__file__), static("whole.js", explore.__file__)):
        assert set(re.findall(r'data-v="?(\d+)', script)) == {str(FORMAT)}
    assert f'data-v="{FORMAT}"' in play(toy()).to_html()


def test_a_teaching_player_is_small() -> None:
    text = re.search(r'json">(.*?)</script>', play(toy(), {0: chain(), 1: chain(-4.0)}).to_html(), re.DOTALL)
    assert text
    assert len(text[1].encode()) <= 15_000


def test_a_graph_of_many_nodes_is_told_folded_by_module() -> None:
    nodes = [Node(i, "MulBackward0", module=f"layers.{i // 20}") for i in range(60)]
    graph = Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(59)), (0,), order=list(range(60)))
    drawn = scenes({0: graph, 5: chain()})
    assert drawn["of"] == {0: 0, 5: 1}
    assert [len(layout["n"]) for layout in drawn["layouts"]] == [3, 3]
    assert drawn["graphs"][0]["order"] == [0, 1, 2]


def test_a_colour_has_one_meaning_in_pages_and_figures() -> None:
    table = dict(re.findall(r"--av-(\w+): ?(#\w{6})", static("base.css")))
    kinds = {"contribution": "backward", "step": "step", "zero": "zero_grad"}
    assert [table[name] for name in kinds] == [kind(name)[0].lower() for name in kinds.values()]
    assert [table[name] for name in ("first", "second", "third", "fourth")] == [color.lower() for color in CYCLE[:4]]


def test_styles_are_small_as_they_travel() -> None:
    sheets = static("player.css"), static("explore.css", explore.__file__)
    assert sum(len(gzip.compress(sheet.encode())) for sheet in sheets) <= 5 * 1024


def test_headings_begin_with_the_rank_and_say_what_a_sync_is() -> None:
    step = {"kind": "step", "details": {"optimizer": "SGD"}, "grad": {"w": -20.0}}
    rows = ([backward(x, x, label="a long loss / K"), synced(-20.0, "reduce-scatter"), step] for x in (-32.0, -8.0))
    data = payload.ledger_data(ranks(*rows))
    on_end, actions, subjects = zip(*(data["heads"][i] for i in data["e"]["u"]), strict=True)
    assert on_end == ("0: a …ss / K", "1: a …ss / K", "reduc…catter", "0: step", "1: step")
    assert actions == ("backward", "backward", "sync", "step", "step")
    assert subjects == ("0: a long loss / K", "1: a long loss / K", "reduce-scatter", "0: SGD", "1: SGD")


def test_the_norm_of_a_group_is_of_those_that_received_something() -> None:
    names = [f"{module}.w{n}" for module in "ab" for n in range(14)]
    row = {"kind": "backward", "contribution": {"a.w0": [3.0], "a.w1": [4.0]}, "grad": {"a.w0": [3.0], "a.w1": [4.0]}}
    data = payload.ledger_data(Ledger.build([Parameter(name, (1,)) for name in names], [row]))
    groups = {one["n"]: norm for one, norm in zip(data["p"], data["c"], strict=True) if "in" in one}
    assert groups == {"a": 5, "b": -1}


def test_bytes_before_and_after_a_backward_are_told_apart() -> None:
    row = backward(1.0, 1.0, saved_before=96.0, saved_after=8.0)
    events = payload.ledger_data(Ledger.build([W], [row]))["e"]
    assert (events["b"], events["a"]) == ([96], [8])


def test_before_the_first_event_the_first_backwards_graph_is_the_one_that_is_there() -> None:
    row = backward(1.0, 1.0)
    graphs = {n: Graph((), before=n == 0) for n in range(2)}
    said = play(Ledger.build([W], [row, row]), graphs).content["before"]
    assert said[1] == "This graph was built before the recording began."


@pytest.mark.parametrize("added", [[-1.0] * 3, [1.0, -2.0, 1.5], [50.0, -1.0]])
def test_a_lane_has_the_bars_that_a_figure_has(added: list[float]) -> None:
    grads = np.cumsum(added)
    rows = [backward(one, grad) for one, grad in zip(added, grads, strict=True)]
    told = play(Ledger.build([W], rows)).content
    assert told["lane"] == 160
    assert told["lanes"]["n"] == [[*range(1, len(rows) + 1)]]
    assert [told["lanes"][name][0][0] for name in ("age", "by", "look")] == [0, math.copysign(1, added[0]), "0"]
    assert play(large(200, 4)).content["lane"] == 0, "a heat map"
    assert play(large(2100, 4)).content["lanes"] == {}, "whole bars"


def at_random(rng: np.random.Generator) -> Ledger:
    """A loop in no order at all: contributions, Nones, zeros, clips, syncs, closures, two optimizers, two ranks."""
    count, length = int(rng.choice([1, 2, 7, 32], p=[0.3, 0.3, 0.3, 0.1])), int(rng.integers(1, 60))
    kinds = rng.choice(["backward", "backward", "step", "zero_grad", "clip", "sync", "edit"], length)
    events = tuple(
        Event(
            e,
            str(kind),
            rank=int(rng.integers(2)) if rng.random() < 0.2 else None,
            within="step" if kind == "backward" and rng.random() < 0.2 else "",
            details={"optimizer_index": int(rng.integers(2)), "skipped": bool(rng.random() < 0.2)}
            if kind == "step"
            else {},
        )
        for e, kind in enumerate(kinds)
    )
    present = rng.random((length, count)) < 0.8
    added = (kinds == "backward")[:, None] & (rng.random((length, count)) < 0.7)
    grad = rng.choice([0.0, 1.0, 2.5, np.inf, np.nan], (length, count), p=[0.3, 0.4, 0.2, 0.05, 0.05])
    norms = rng.choice([0.0, 1.0, np.nan], (length, count), p=[0.2, 0.7, 0.1])
    owners = [(), (0,), (1,), (0, 1)]
    parameters = tuple(
        Parameter(
            f"m{p // 4}.w{p}",
            (2, 2),
            optimizers=owners[rng.integers(4)],
            rank=int(rng.integers(2)) if rng.random() < 0.3 else None,
            unsharded_of="m0.w0" if p and rng.random() < 0.2 else "",
        )
        for p in range(count)
    )
    state = np.where(present, PRESENT, 0) + np.where(added, CONTRIBUTED, 0)
    return Ledger(parameters, events, np.where(added, norms, np.nan), np.where(present, grad, np.nan), state)


def test_the_page_holds_live_used_and_lost_what_the_ledger_says() -> None:
    rng = np.random.default_rng(7)
    groups = 0
    for ledger in (at_random(rng) for _ in range(100)):
        data = payload.ledger_data(ledger)
        consumed = ledger.outcomes.consumed
        for row, n, ages, looks in zip(data["p"], *(data["lanes"][name] for name in ("n", "age", "look")), strict=True):
            members = range(*row.get("in", (data["p"].index(row), data["p"].index(row) + 1)))
            groups += len(members) > 1
            parts = iter(zip(ages, looks, strict=True))
            assert row["r"][0] == 0, "norms, and None, reach nowhere below zero"
            for e, count in enumerate(n):
                told = [next(parts) for _ in range(count)]
                born = [e - age for age, _ in told if age >= 0]
                live = sorted({b for p in members for b in ledger.live(e, p)})
                assert born == live or (set(born) < set(live) and told[0][1] == "3" and ledger.of("edit", "sync"))
                for age, look in told[-len(born) :] if born else []:
                    b = e - age
                    steps = [int(consumed[b, p]) for p in members if b in ledger.live(e, p)]
                    assert look == "0" or (look == "2") == any(0 <= step <= e for step in steps)
        for e in range(len(ledger)):
            lost = {row["n"]: row["lost"][e] for row in data["p"] if e in row.get("lost", {})}
            assert lost == ledger.unconsumed(e)
    assert groups, "there are groups"
