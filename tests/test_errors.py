"""What is refused, and how: an error names what was passed, what was expected and what to do."""

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accumviz as av
from accumviz.ledger.ledger import Ledger, Parameter
from tests.toys import W, chain, toy

w = torch.nn.Parameter(torch.tensor([1.0]))
loss = (w * 2).sum()
L, G = toy(), chain()


def one(k: int) -> Any:
    return L


def build(*rows: Any) -> Callable[[], Any]:
    return lambda: Ledger.build([W], list(rows))


# What is called, which error it is, and texts in it: what was passed, what was expected or what to do.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "check(3)": (lambda: av.check(3), TypeError, ("check() was given an int", "a ledger", "av.load(")),
    "compare(3, ledger)": (lambda: av.compare(3, L), TypeError, ("compare() was given an int", "a ledger", "av.load(")),
    "compare, other names": (
        lambda: av.compare(L, Ledger.build([Parameter("v", (1,))], [])),
        ValueError,
        ("no parameter that both have", "a has w (1,), b has v (1,)", "recorded in the same way"),
    ),
    "compare, other shapes": (
        lambda: av.compare(L, Ledger.build([Parameter("w", (2,))], [])),
        ValueError,
        ("no parameter that both have", "a has w (1,), b has w (2,)"),
    ),
    "compare, nothing in it": (
        lambda: av.compare(L, Ledger.build([W], [])),
        ValueError,
        ("no step in b", "in which an optimizer steps"),
    ),
    "expect(3)": (lambda: av.expect(3), TypeError, ("3, an int", "expected a module")),
    "timeline(3)": (lambda: av.timeline(3), TypeError, ("timeline() was given an int", "a ledger", "av.load(")),
    "timeline, no such name": (lambda: av.timeline(L, parameters=["v"]), KeyError, ("'v'", "nearest: w")),
    "timeline, one event": (lambda: av.timeline(L, events=1), TypeError, ("events=1", "slice(0, 8)")),
    "ledger[99]": (lambda: L[99], IndexError, ("no event 99", "it has 4 events")),
    "an empty ledger[0]": (lambda: Ledger.build([], [])[0], IndexError, ("no event 0", "has 0 events")),
    "ledger.of": (lambda: L.of("backwards"), ValueError, ("'backwards'", "expected one of backward")),
    "ledger.index(99)": (lambda: L.index(99), IndexError, ("no parameter 99", "it has 1 parameter")),
    "ledger.index('v')": (lambda: L.index("v"), KeyError, ("no parameter 'v'", "nearest: w")),
    "ledger.index(None)": (lambda: L.index(None), TypeError, ("integers", "not NoneType")),
    "ledger.values(9)": (lambda: L.values(9), IndexError, ("no parameter 9", "it has 1 parameter")),
    "ledger.values(of=)": (lambda: L.values("w", of="x"), ValueError, ("of='x'", "'grad' or 'contribution'")),
    "ledger.live(99)": (lambda: L.live(99, "w"), IndexError, ("no event 99", "it has 4 events")),
    "ledger.live('a')": (lambda: L.live("a", "w"), TypeError, ("integers", "not str")),
    "ledger.live(.., 'v')": (lambda: L.live(0, "v"), KeyError, ("'v'", "nearest: w")),
    "ledger.unconsumed(99)": (lambda: L.unconsumed(99), IndexError, ("no event 99", "it has 4 events")),
    "ledger.running_sum": (lambda: L.running_sum("v"), KeyError, ("'v'", "nearest: w")),
    "ledger.save(3)": (lambda: L.save(3), TypeError, ("path is an int", "pathlib.Path")),
    "build, no such name": (build({"kind": "step", "grad": {"v": 1}}), KeyError, ("'v'", "parameters are ['w']")),
    "merge(ledger)": (lambda: Ledger.merge(L), TypeError, ("given a Ledger", "a list of the ranks'")),
    "merge([])": (lambda: Ledger.merge([]), ValueError, ("no ledger", "pass the ledger of each rank")),
    "record()": (lambda: av.record(), ValueError, ("no arguments", "expected a module", "record(model, optimizer)")),
    "record(3)": (lambda: av.record(3), TypeError, ("3, an int", "expected a module", "record(model")),
    "record(loss)": (lambda: av.record(loss), ValueError, ("not a leaf", "pass the parameters")),
    "record, exact='a'": (lambda: av.record(w, exact="a"), TypeError, ("exact='a'", "whole number from 0")),
    "record, memory": (lambda: av.record(w, memory="no"), TypeError, ("memory='no'", "True, False or None")),
    "record, sources": (lambda: av.record(w, sources="a.py"), TypeError, ("sources='a.py'", "True or False")),
    "record, path": (lambda: av.record(w, path=3), TypeError, ("path is an int", "pathlib.Path")),
    "record, misspelt": (lambda: av.record(w, exakt=3), TypeError, ("exakt=3, an int", "record(G=generator")),
    "record, none in it": (lambda: av.record(torch.nn.ReLU()), ValueError, ("nothing to record in ReLU",)),
    "record, no gradient": (lambda: av.record(torch.ones(2)), ValueError, ("requires_grad_()",)),
    "record, lazy": (lambda: av.record(torch.nn.LazyLinear(2)), ValueError, ("weight is made by the first forward",)),
    "record('model')": (lambda: av.record("model"), TypeError, ("cannot record 'model', a str", "expected a module")),
    "record({'w': 3})": (lambda: av.record({"w": 3}), TypeError, ("cannot record 'w', an int", "expected a tensor")),
    "trace()": (lambda: av.trace(), ValueError, ("nothing to trace", "av.trace(loss)")),
    "trace(w)": (lambda: av.trace(w), ValueError, ("w is a leaf", "such as the loss")),
    "load(3)": (lambda: av.load(3), TypeError, ("path is an int", "the name of a file")),
    "load, not there": (lambda: av.load("not there.ledger"), ValueError, ("'not there.ledger'", "No such file")),
    "play(3)": (lambda: av.play(3), TypeError, ("play() was given an int", "a ledger", "record(...)")),
    "play(l, {7: None})": (lambda: av.play(L, {7: None}), TypeError, ("graphs[7] is None", "leave it out")),
    "play(l, {7: graph})": (lambda: av.play(L, {7: G}), ValueError, ("event 7", "its backwards are: 0, 1")),
    "play(l, 3)": (lambda: av.play(L, 3), TypeError, ("graphs is an int", "expected graphs by event")),
    "explore(3)": (lambda: av.explore(3), TypeError, ("given an int", "a function that records one run")),
    "explore, no choice": (lambda: av.explore(one), ValueError, ("of 0 choices", "k=[1, 2, 4]")),
    "explore, k=3": (lambda: av.explore(one, k=3), TypeError, ("k=3", "k=[1, 2, 4]")),
    "explore, k=[]": (lambda: av.explore(one, k=[]), ValueError, ("one value or more",)),
    "explore, k=[1, 1]": (lambda: av.explore(one, k=[1, 1]), ValueError, ("each of them once",)),
    "explore, k='abc'": (lambda: av.explore(one, k="abc"), TypeError, ("a list of values",)),
    "explore, 100 runs": (lambda: av.explore(one, k=range(100)), ValueError, ("at most 64",)),
    "explore, start, q": (lambda: av.explore(one, k=[1], start={"q": 1}), ValueError, ("'q'", "the choices are k")),
    "explore, against": (lambda: av.explore(one, k=[1], against={"k": 3}), ValueError, ("k=3", "expected one of 1")),
    "explore, returns three": (lambda: av.explore(lambda k: (L, {}, {}), k=[1]), TypeError, ("given a tuple",)),
    "explorer.save(.txt)": (lambda: av.explore(one, k=[1]).save("run.txt"), ValueError, ("ends in .html",)),
    "explore, start, k=2": (lambda: av.explore(one, k=[1], start={"k": 2}), ValueError, ("k=2", "expected one of 1")),
    "explore, returns 3": (lambda: av.explore(lambda k: 3, k=[1]), TypeError, ("given an int", "a recording")),
    "explorer.run(k=3)": (lambda: av.explore(one, k=[1]).run(k=3), ValueError, ("k=3", "expected one of 1")),
    "distribute(3)": (lambda: av.distribute(3), TypeError, ("given an int", "the function that each rank calls")),
    "distribute, ranks='2'": (lambda: av.distribute(one, ranks="2"), TypeError, ("ranks='2'", "how many processes")),
    "predict(3)": (lambda: av.predict(3, 4), ValueError, ("question=3", "a text")),
    "predict, (3, 1, 'w')": (
        lambda: av.predict("q", (3, 1, "w")),
        TypeError,
        ("given an int", "expected a recording or a ledger"),
    ),
    "predict, late": (lambda: av.predict("q", (L, 99, "w")), IndexError, ("no event 99", "it has 4 events")),
    "lab(3)": (lambda: av.lab(3), TypeError, ("start=3", "{'step': 'epoch'}")),
    "lab, a place": (lambda: av.lab({"zero_grad": "up"}), ValueError, ("zero_grad='up'", "expected one of", "nowhere")),
    "lab, a choice": (lambda: av.lab({"zero": "up"}), ValueError, ("'zero'", "the choices are zero_grad, step, clip")),
    "graph.collapse_modules(0)": (lambda: G.collapse_modules(0), ValueError, ("depth=0", "from 1 on")),
    "a verb that is not there": (lambda: av.timelin, AttributeError, ("'timelin'", "it has Graph, Ledger", "timeline")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_error_says_what_was_passed_what_was_expected_and_what_to_do(what: str) -> None:
    call, kind, texts = REFUSED[what]
    with pytest.raises(kind) as refused:
        call()
    assert isinstance(refused.value, kind)
    said = str(refused.value)
    assert [text for text in texts if text not in said] == [], said
    assert not re.search(
        r"object of type|has no attribute '(parameters|items)'|unsupported operand|not supported", said
    )


def test_every_verb_is_refused_something_above() -> None:
    verbs = {name for name in av.__all__ if name[0].islower()}
    assert verbs - {re.match(r"\w+", what)[0] for what in REFUSED} == set()


def recorded() -> Any:
    """A recording that is still open, and what it leads to."""
    recording = av.record(w, graphs=True)
    recording.start()
    (w * 2).sum().backward()
    return recording


@pytest.mark.parametrize("state", ["open", "closed"])
def test_whatever_takes_a_ledger_takes_a_recording(state: str) -> None:
    recording = recorded()
    try:
        if state == "closed":
            recording.stop()
        ledger = recording.ledger
        assert av.timeline(recording).words == av.timeline(ledger).words
        played = av.play(recording)
        assert played.words == av.play(ledger).words
        assert list(played.graphs) == [0], "a recording brings its own graphs"
        assert list(av.play(recording, {0: G}).graphs) == [0]
        assert av.play(recording, {}).graphs == {}
        assert av.predict("q", (recording, 0, "w")).answer == 2.0
        assert len(Ledger.merge([recording])) == len(ledger)
        runs = av.explore({"one": recording, "two": ledger}, start={"run": "two"})
        assert [len(runs.run(run=name)) for name in ("one", "two")] == [len(ledger)] * 2
        assert av.explore(lambda k: recording, k=[1]).runs[0].player.graphs.keys() == {0}
    finally:
        recording.stop()
        w.grad = None


def test_what_has_a_ledger_counts_as_one_and_what_has_something_else_of_that_name_does_not() -> None:
    assert av.timeline(SimpleNamespace(ledger=L)).words == av.timeline(L).words
    with pytest.raises(TypeError, match="given a SimpleNamespace"):
        av.timeline(SimpleNamespace(ledger=3))


def test_every_verb_is_listed_before_any_is_loaded() -> None:
    script = (
        "import sys, accumviz as av; listed = dir(av); assert set(av.__all__) < set(listed), listed\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert av.Ledger.__name__ == 'Ledger' and not {'torch', 'matplotlib'} & set(sys.modules)\n"
        "import rlcompleter; found = rlcompleter.Completer({'av': av})\n"
        "assert found.complete('av.timel', 0).startswith('av.timeline')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_misspelt_verb_is_corrected_in_its_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import accumviz as av; av.timelin"], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'timeline'?" in done.stderr
