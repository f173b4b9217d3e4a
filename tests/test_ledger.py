"""What a ledger says of contributions: against a `.grad` that is really accumulated, and a slow reference."""

import importlib.util
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Events, Ledger, Parameter
from tests.thorough import examples
from tests.toys import W, backward


def step(grad: float | None = None, **details: Any) -> dict[str, Any]:
    return {"kind": "step", "details": {"optimizer": "SGD", **details}, "grad": {} if grad is None else {"w": grad}}


ZERO: dict[str, Any] = {"kind": "zero_grad"}


@pytest.fixture
def toy() -> Ledger:
    return Ledger.build([W], [backward(-16, -16), backward(-4, -20), step(-20), ZERO])


@pytest.mark.parametrize(("own", "shares"), [(False, [0.5, 0.5]), (True, [0.0, 0.5])])
def test_an_exact_zero_is_erased_by_a_zeroing_of_its_own_only(own: bool, shares: list[float]) -> None:
    used, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (used, other)]
    with av.record(used, *optimizers) as recording:
        for gate in (0.0, 1.0):
            (gate * used(torch.randn(2, 3))).square().mean().div(2).backward()
            if not gate:
                optimizers[not own].zero_grad(set_to_none=False)
        optimizers[0].step()
    assert [row.share for row in recording.ledger.shares()] == shares


def test_a_closure_that_zeroes_before_its_step_has_ended_is_consumed_by_that_step() -> None:
    rows = [
        ZERO | {"within": "step"},
        backward(1, 1, within="step"),
        ZERO | {"within": "step"},
        backward(2, 2, within="step"),
        step(2),
    ]
    ledger = Ledger.build([W], rows)
    assert ledger.outcomes.consumed[:, 0].tolist() == [-1, 4, -1, 4, -1]
    assert ledger.outcomes.erased[:, 0].tolist() == [-1, 2, -1, -1, -1]
    assert ledger.windows()[0].backwards == (1, 3)
    assert ledger.unconsumed(2) == {}


def test_an_optimizer_that_steps_inside_backward_consumes_that_backward() -> None:
    rows = [backward(1, 1), step(1) | {"within": "backward"}, ZERO | {"within": "backward"}, backward(2, 2)]
    ledger = Ledger.build([W], rows)
    assert ledger.windows()[0].backwards == (0,)
    assert ledger.live(3, "w") == [3]


def test_an_empty_ledger_answers_every_question() -> None:
    ledger = Ledger.build([], [])
    assert (len(ledger), ledger.windows(), ledger.labels) == (0, [], ())
    assert ledger.provenance().total.shape == (0, 0)
    assert "no events" in repr(ledger)


def test_elements_that_were_not_kept_say_how_to_keep_them() -> None:
    shape = (0, 1)
    ledger = Ledger((Parameter("w", (9, 9)),), (), np.zeros(shape), np.zeros(shape), np.zeros(shape, np.uint8))
    with pytest.raises(KeyError, match=r"81 elements.*exact=N"):
        ledger.values("w")


def test_arrays_of_the_wrong_shape_are_refused() -> None:
    good = np.zeros((1, 1))
    with pytest.raises(ValueError, match=r"grad has shape \(2, 1\)"):
        Ledger((W,), (Event(0, "step"),), good, np.zeros((2, 1)), good)


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is an extra")
def test_pandas_gets_one_row_per_event_and_parameter(toy: Ledger) -> None:
    frame = toy.to_pandas()
    assert len(frame) == 4
    assert frame.loc[frame.kind == "backward", "contribution"].tolist() == [16, 4]
    assert frame.loc[0, ["consumed_by", "erased_by"]].tolist() == [2, 3]
    assert not frame.present.iloc[3]


@pytest.fixture
def events() -> Events:
    return Events.of_columns(
        kind=["backward", "step", "backward", "step"],
        label=["a", "", "b", ""],
        loss=[2.5, np.nan, 1.5, np.nan],
        line=[3, 4, 3, 4],
        rank=[None, 0, 1, None],
        details=[{}, {"lr": [0.1], "skipped": True}, {}, '{"lr":[0.2],"optimizer_index":1}'],
    )


def test_events_as_columns_are_the_sequence_that_a_tuple_is(events: Events) -> None:
    plain = (
        Event(0, "backward", "a", line=3, loss=2.5),
        Event(1, "step", line=4, details={"lr": [0.1], "skipped": True}, rank=0),
        Event(2, "backward", "b", line=3, loss=1.5, rank=1),
        Event(3, "step", line=4, details={"lr": [0.2], "optimizer_index": 1}),
    )
    assert tuple(events) == plain
    assert tuple(Events.of(plain)) == plain
    assert [events[-1], events[np.int64(2)]] == [plain[-1], plain[2]]
    for where in (slice(1, 3), slice(-2, None), slice(None, None, -1), slice(9, 3)):
        assert events[where] == plain[where]
    with pytest.raises(IndexError):
        events[4]


def test_nothing_in_a_ledger_or_its_events_can_be_changed(toy: Ledger, events: Events) -> None:
    for held in (toy.contribution, toy.values("w"), events.codes, events.column("loss")):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 1
    events[3].details["lr"][0] = 7.0
    assert events[3].details["lr"] == [0.2]


def test_columns_answer_for_all_events_at_once(events: Events) -> None:
    assert events.where("label", "a", "b").tolist() == [True, False, True, False]
    assert events.where("kind", "clip").tolist() == [False] * 4
    assert events.skipped.tolist() == [False, True, False, False]
    assert events.detail("optimizer_index", 0).tolist() == [0, 0, 0, 1]
    assert events.detail("lr", None).tolist() == [None, [0.1], None, [0.2]]
    assert events.column("rank").tolist() == [-1, 0, 1, -1]


def test_a_part_of_events_keeps_only_the_texts_that_it_has(events: Events) -> None:
    part = events.take([3, 0])
    assert [event.kind for event in part] == ["step", "backward"]
    assert part.tables["label"] == ("a", "")
    assert [dict(event.details) for event in part] == [{"lr": [0.2], "optimizer_index": 1}, {}]
    assert len(events.take(slice(0, 0))) == len(Events.of(())) == 0


class Loop(NamedTuple):
    ledger: Ledger
    grads: np.ndarray  # events × parameters; NaN: None


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    owners = draw(st.lists(st.sampled_from([(), (0,), (1,), (0, 1)]), min_size=1, max_size=3))
    parameters = [Parameter(f"p{i}", (1,), optimizers=owner) for i, owner in enumerate(owners)]
    held: dict[str, float] = {}
    rows, grads = [], []
    for kind in draw(st.lists(st.sampled_from(["backward", "backward", "step", "zero", "none"]), max_size=24)):
        if kind == "backward":
            names = draw(st.sets(st.sampled_from([p.name for p in parameters])))
            # Whole numbers, so that sums are exact.
            added = {name: float(draw(st.integers(-9, 9))) for name in sorted(names)}
            held = held | {name: held.get(name, 0.0) + value for name, value in added.items()}
            label = draw(st.sampled_from(["a", "b"]))
            rows.append({"kind": kind, "label": label, "contribution": added, "grad": dict(held)})
        elif kind == "step":
            details = {"optimizer_index": draw(st.integers(0, 1)), "skipped": draw(st.integers(0, 4)) == 0}
            rows.append({"kind": "step", "details": details, "grad": dict(held)})
        else:
            held = dict.fromkeys(held, 0.0) if kind == "zero" else {}
            rows.append({"kind": "zero_grad", "grad": dict(held)})
        grads.append([held.get(p.name, np.nan) for p in parameters])
    return Loop(Ledger.build(parameters, rows), np.array(grads).reshape(len(rows), len(parameters)))


def walked(ledger: Ledger, p: int) -> Iterator[tuple[int, int, list[int]]]:
    """Backward, what erased it, the steps that used it: found by walking on from the backward, one event at a time."""
    for born in range(len(ledger)):
        if not ledger.state[born, p] & CONTRIBUTED:
            continue
        erased, used = -1, []
        for event in ledger.events[born + 1 :]:
            if event.kind == "zero_grad":
                erased = event.index
                break
            mine = event.details.get("optimizer_index") in ledger.parameters[p].optimizers
            if event.kind == "step" and mine and not event.skipped:
                used.append(event.index)
        yield born, erased, used


@settings(max_examples=examples(300), deadline=None)
@given(loops())
def test_what_becomes_of_each_contribution_agrees_with_walking_event_by_event(loop: Loop) -> None:
    ledger = loop.ledger
    fates, provenance, events = ledger.outcomes, ledger.provenance(), range(len(ledger))
    walks = [list(walked(ledger, p)) for p in range(len(ledger.parameters))]
    for p, parameter in enumerate(ledger.parameters):
        assert np.array_equal(ledger.running_sum(p)[:, 0], np.nan_to_num(loop.grads[:, p]))
        expected = dict.fromkeys(events, (-1, -1, 0))
        expected |= {born: (erased, used[0] if used else -1, len(used)) for born, erased, used in walks[p]}
        assert {e: (fates.erased[e, p], fates.consumed[e, p], fates.steps[e, p]) for e in events} == expected
        lost = [b for e in events for b in ledger.unconsumed(e).get(parameter.name, [])]
        assert sorted(lost) == [born for born, erased, used in walks[p] if erased >= 0 and not used]
        for e in events:
            assert ledger.live(e, p) == [born for born, erased, _ in walks[p] if born <= e and not 0 <= erased <= e]
    for window in ledger.windows():
        owner = ledger[window.step].details["optimizer_index"]
        mine = [walk for walk, parameter in zip(walks, ledger.parameters, strict=True) if owner in parameter.optimizers]
        assert {*window.backwards} == {born for walk in mine for born, _, used in walk if window.step in used}
    assert [w.step for w in ledger.windows()] == [e.index for e in ledger.of("step") if not e.skipped]
    assert np.array_equal(provenance.count.sum(axis=0), (ledger.state & CONTRIBUTED > 0).sum(axis=0))
    assert np.allclose(provenance.total.sum(axis=0), np.nansum(ledger.contribution, axis=0, dtype=float))


def of_rank(rank: int, rows: list[dict[str, Any]]) -> Ledger:
    return Ledger.build([W], rows, meta={"rank": rank, "optimizers": ["SGD"]})


def adds(value: float, total: float | None = None) -> dict[str, Any]:
    return backward(value, total or value)


def reduces(mean: float, **details: Any) -> dict[str, Any]:
    return {"kind": "sync", "details": {"op": "all-reduce", "bytes": 4, **details}, "grad": {"w": mean}}


def test_ranks_take_turns_between_collectives_and_each_has_windows_and_fates_of_its_own() -> None:
    one = of_rank(0, [adds(1), adds(1, 2), reduces(3), step(3), ZERO])
    two = of_rank(1, [adds(4), reduces(3), step(3), ZERO])
    merged = Ledger.merge([two, one])
    kinds = ["backward"] * 3 + ["sync"] + ["step"] * 2 + ["zero_grad"] * 2
    assert [(e.kind, e.rank) for e in merged] == [*zip(kinds, (0, 1, 0, None, 0, 1, 0, 1), strict=True)]
    assert merged.values("rank 0 · w").ravel()[:6].tolist() == [1, 1, 2, 3, 3, 3]
    assert np.isnan(merged.values("rank 1 · w")[0, 0])
    assert merged.values("rank 1 · w").ravel()[1:7].tolist() == [4, 4, 3, 3, 3, 3]
    assert [(w.step, w.backwards) for w in merged.windows()] == [(4, (0, 2)), (5, (1,))]
    assert (merged.live(6, "rank 0 · w"), merged.live(6, "rank 1 · w")) == ([], [1])
    assert merged.outcomes.erased[1].tolist() == [-1, 7]


def test_a_zero_grad_of_one_rank_erases_nothing_on_another_even_where_grad_is_zero() -> None:
    one = of_rank(0, [adds(1), ZERO | {"grad": {"w": 0.0}}])
    two = of_rank(1, [adds(0.0), step(0.0)])
    merged = Ledger.merge([one, two])
    assert [e.kind for e in merged] == ["backward", "backward", "zero_grad", "step"]
    assert merged.live(-1, "rank 1 · w") == [1]
    assert merged.windows()[0].backwards == (1,)


def test_optimizers_are_counted_over_all_ranks() -> None:
    merged = Ledger.merge([of_rank(rank, [reduces(1)]) for rank in range(2)])
    assert [parameter.optimizers for parameter in merged.parameters] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("ends", "said"), [(("closed", "closed"), "closed"), (("closed", "no"), {"0": "closed", "1": "no"})]
)
def test_how_ranks_ended_is_said_once_where_they_ended_alike(ends: tuple[str, str], said: Any) -> None:
    ranks = [Ledger.build([W], [], meta={"rank": rank, "ended": end}) for rank, end in enumerate(ends)]
    assert Ledger.merge(ranks).meta["ended"] == said


def test_collectives_that_do_not_fit_together_stay_apart() -> None:
    merged = Ledger.merge([of_rank(0, [reduces(1, parameters=["w"])]), of_rank(1, [reduces(1, parameters=["b"])])])
    assert [(e.kind, e.rank) for e in merged] == [("sync", 0), ("sync", 1)]


def test_a_merged_ledger_survives_a_round_trip(tmp_path: Path) -> None:
    merged = Ledger.merge([of_rank(r, [adds(1 + r), reduces(1.5), step(1.5)]) for r in range(3)])
    merged.save(tmp_path / "merged.ledger")
    again = av.load(tmp_path / "merged.ledger")
    # nan is not equal to itself, so by their words
    assert (again.parameters, repr([*again.events])) == (merged.parameters, repr([*merged.events]))
    np.testing.assert_array_equal(again.grad, merged.grad)


def test_ledgers_that_cannot_be_merged_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \[1, 1\]"):
        Ledger.merge([of_rank(1, []), of_rank(1, [])])


def test_what_a_reduce_scatter_takes_from_a_whole_gradient_is_consumed_with_the_shard() -> None:
    parameters = [
        Parameter("w", (1,), optimizers=(0,)),
        Parameter("w (unsharded)", (2,), optimizers=(0,), unsharded_of="w"),
    ]
    whole = "w (unsharded)"
    rows: list[dict[str, Any]] = [
        {"kind": "backward", "contribution": {whole: [1, 2]}, "grad": {whole: [1, 2]}},
        {"kind": "backward", "contribution": {whole: [1, 2]}, "grad": {whole: [2, 4]}},
        {"kind": "sync", "contribution": {"w": 2}, "grad": {"w": 2}},
        {"kind": "step", "details": {"optimizer": "SGD"}, "grad": {"w": 2}},
        {"kind": "zero_grad"},
    ]
    ledger = Ledger.build(parameters, rows)
    assert ledger.windows()[0].backwards == (0, 1)
    assert ledger.live(1, whole) == [0, 1]
    assert ledger.live(2, whole) == []
    assert ledger.outcomes.consumed[:2, 1].tolist() == [3, 3]
    assert [ledger.unconsumed(e) for e in range(5)] == [{}] * 5
    assert ledger.flow.erased_for_good[:2, 1].tolist() == [4, 4]
    not_zeroed = Ledger.build(parameters, rows[:-1])
    assert not_zeroed.flow.erased_for_good[:2, 1].tolist() == [-1, -1]


def never_zeroed(events: int) -> Ledger:
    """A backward and a step by turns: every window holds every backward before it."""
    rows = tuple(
        Event(e, ("backward", "step")[e % 2], details={"optimizer": "SGD"} if e % 2 else {}) for e in range(events)
    )
    born = (np.arange(events) % 2 == 0)[:, None]
    state = np.where(born, PRESENT | CONTRIBUTED, PRESENT).astype(np.uint8)
    norms = np.ones((events, 1)), np.cumsum(born, dtype=float)[:, None]
    return Ledger((Parameter("w", (64,), optimizers=(0,)),), rows, np.where(born, 1.0, np.nan), norms[1], state)


def held(action: Callable[[Ledger], Any], events: int) -> int:
    """The most bytes that were taken at once for this, a ledger's own aside."""
    ledger = never_zeroed(events)
    tracemalloc.start()
    kept = action(ledger)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return most


@pytest.mark.parametrize(
    "what", [Ledger.windows, lambda ledger: len(av.play(ledger).to_html())], ids=["windows", "play"]
)
def test_what_is_never_zeroed_takes_memory_in_proportion_to_its_length(what: Callable[[Ledger], Any]) -> None:
    held(what, 50)  # what is imported and kept once
    one, two = (held(what, events) for events in (500, 1000))
    assert two < 20e6
    assert two < 2.6 * one, "twice the events, twice the memory: four times, were each window a tuple"


def test_the_backwards_of_a_window_are_used_as_a_tuple_is() -> None:
    found = never_zeroed(10).windows()[3].backwards
    assert (found, repr(found), len(found), hash(found)) == ((0, 2, 4, 6), "(0, 2, 4, 6)", 4, hash((0, 2, 4, 6)))
    assert (found[-1], found[1:3], 6 in found, 5 in found) == (6, (2, 4), True, False)
    assert pickle.loads(pickle.dumps(found)) == found
