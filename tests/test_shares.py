"""What micro-batches weigh: ledgers written by hand, against weights that are followed forwards."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import accumviz as av
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Events
from accumviz.ledger.flow import BY_HAND, UNREAD
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views import payload
from tests.by_hand import Play, of, played, term, windows
from tests.thorough import examples
from tests.toys import W, backward, segments


def shares(play: Play) -> list[float]:
    return [row.share for row in play.ledger.shares()]


@pytest.mark.parametrize(
    ("events", "rows"),
    [
        ("22sz2s", [(2, 0, 0.5), (2, 1, 0.5), (5, 4, 0.5)]),
        ("z2z2s", [(4, 1, 0), (4, 3, 0.5)]),  # erased before the step
        ("2s2s", [(1, 0, 0.5), (3, 0, 0.5), (3, 2, 0.5)]),  # never zeroed
        ("22es", [(3, 0, 0.25), (3, 1, 0.25)]),
        ("2e2s", [(3, 0, 0.25), (3, 2, 0.5)]),
        ("2Sz2s", [(4, 3, 0.5)]),  # a skipped step had read it: it is not erased
        ("2e[w]s", [(2, 0, "different")]),  # of some parameters only
        ("+2s", [(1, 0, "by the same factor")]),
        ("+2+2us", [(3, 0, "by the same factor"), (3, 1, 0.5)]),
        ("+22ues", [(4, 0, 0.25), (4, 1, 0.25)]),
        ("+2u2s", [(3, 0, 0.5), (3, 2, "by the same factor")]),
        ("2Zs", [(2, 0, 0.5)]),  # the step zeroes what it has read
        ("bZs", [(2, 0, "erased")]),  # the closure's own, or the step's after it has read
        ("ZbZbs", [(4, 1, "a closure"), (4, 3, 0.5)]),
    ],
)
def test_what_a_backward_weighs_in_a_step_is_known_or_unknown_with_its_reason(
    events: str, rows: list[tuple[int, int, Any]]
) -> None:
    shares = played(events).ledger.shares()
    assert [(row.step, row.backward) for row in shares] == [(step, backward) for step, backward, _ in rows]
    for row, (*_, expected) in zip(shares, rows, strict=True):
        if isinstance(expected, str):
            assert math.isnan(row.share) and expected in row.unknown
        else:
            assert (row.share, row.unknown) == (pytest.approx(expected, rel=1e-5), "")


def test_what_some_parameters_only_keep_after_a_step_is_said_of_the_next_one() -> None:
    play = Play({"w": 0, "v": 0})
    play.backward(term(8, 1.0))
    first = play.step()
    play.grad.pop("w")
    play.edit(1.0)
    play.backward(term(8, 1.0))
    second = play.step()
    rows = [(row.step, row.share) for row in play.ledger.shares() if not row.unknown]
    assert rows == [(first, 1.0), (second, 1.0)]
    (unknown,) = (row for row in play.ledger.shares() if row.unknown)
    assert (unknown.step, unknown.backward) == (second, 0) and "erased in some parameters" in unknown.unknown


def test_a_clip_just_above_the_norm_enlarges_no_share() -> None:
    play = Play()
    play.backward()
    norm = math.sqrt(sum(float((g**2).sum()) for g in play.grad.values()))
    play.clip(1.01 * norm)
    play.step()
    assert shares(play) == pytest.approx([0.25], rel=1e-4)


def test_a_change_by_hand_that_is_no_factor_is_unknown_though_all_norms_agree() -> None:
    play = Play()
    play.backward()
    for name, grad in play.grad.items():
        play.grad[name] = -np.roll(grad, 1) * 0.5
    play.touched(play._put("edit"), ["w", "v"])
    play.step()
    (row,) = play.ledger.shares()
    assert math.isnan(row.share) and "by hand" in row.unknown


@pytest.mark.parametrize("put_back", [False, True])
def test_what_was_erased_may_be_in_what_a_hand_puts_there_afterwards(put_back: bool) -> None:
    play = Play()
    play.backward()
    play.zero()
    play.backward()
    if put_back:
        play.grad = {name: np.roll(grad, 1) * 0.7 for name, grad in play.grad.items()}
        play.touched(play._put("edit"), ["w", "v"])
    else:  # taken away, which is no change by a factor, and before the last one
        play.grad = {}
        play.touched(play._put("edit"), ["w", "v"])
        play.backward()
    play.step()
    found = shares(play)
    assert found[:2] == ([pytest.approx(math.nan, nan_ok=True)] * 2 if put_back else [0, 0])
    assert put_back or found[2] == 0.25


def test_an_average_over_ranks_counts_once_however_often_it_is_made() -> None:
    play = Play()
    play.backward()
    play.sync(2)
    play.backward()
    # The second average leaves alone what is the same everywhere already.
    play.weights = {n: {b: w if b == 0 else w / 2 for b, w in ws.items()} for n, ws in play.weights.items()}
    play.touched(play._put("sync", within="backward", details={"op": "all-reduce", "ranks": 2}), ["w", "v"])
    play.step()
    assert shares(play) == pytest.approx([0.125, 0.125])


@pytest.mark.parametrize(
    ("backwards", "objectives", "total"),
    [
        # sum(losses) / 2: a mean over two of a kind
        ([(term(8, 0.5), term(8, 0.5))] * 2, ["loss"], 1.0),
        ([tuple(term(8, 1 / 4) for _ in range(4))] * 3 + [(term(8, 1 / 2), term(8, 1 / 2))], ["loss"], 1.0),
        # padded: the mean of means of a list of losses
        ([(term(3, 0.5), term(40, 0.5)), (term(9, 0.5), term(5, 0.5))], ["loss"], 1.0),
        ([(term(3, 1 / 43, "sum"), term(40, 1 / 43, "sum"))], ["loss"], 1.0),
        # two heads added up; two heads, and one of them counts less; two resolutions
        ([(term(8, 1.0), term(8, 1.0))] * 2, ["loss · NllLossBackward0", "loss · NllLossBackward0 2"], 1.0),
        ([(term(8, 0.7), term(8, 0.3))] * 2, ["loss · NllLossBackward0", "loss · NllLossBackward0 2"], 0.7),
        ([(term(64, 0.5), term(16, 0.5))] * 2, ["loss · NllLossBackward0", "loss · NllLossBackward0 2"], 0.5),
        ([(term(), term(op="MseLossBackward0"))] * 2, ["loss · NllLossBackward0", "loss · MseLossBackward0"], 0.25),
    ],
)
def test_losses_of_which_a_mean_is_taken_are_one_objective_and_others_are_not(
    backwards: list[tuple[dict[str, Any], ...]], objectives: list[str], total: float
) -> None:
    shares = of(*[[terms] for terms in backwards]).ledger.shares()
    assert list(shares.objectives) == objectives
    first = shares.of(shares[0].step)
    mine = first.objective == 0
    assert first.share[mine].sum() == pytest.approx(total)
    assert mine.sum() == (len(backwards[0]) if len(objectives) == 1 else 1)


@pytest.mark.parametrize(
    ("given", "share", "each", "said"),
    [
        (term(factor=None), math.nan, math.nan, "constant"),
        (term(elements=None, reduction="sum"), math.nan, 0.25, "how many elements"),
        (term(elements=None), 0.25, math.nan, ""),
        (term() | {"unknown": "a product of two losses"}, 0.25, math.nan, "a product of two losses"),
        ("nonsense", math.nan, math.nan, "how its loss was reduced is not known"),
        (None, math.nan, math.nan, "no terms"),
    ],
)
def test_what_is_not_known_of_a_loss_has_its_reason(given: Any, share: float, each: float, said: str) -> None:
    play = Play()
    play.backward(terms=None if given is None else [given])
    play.step()
    (row,) = play.ledger.shares()
    assert (row.share, row.per_element) == (pytest.approx(share, nan_ok=True), pytest.approx(each, nan_ok=True))
    assert said in row.unknown and bool(said) == bool(row.unknown)


def test_two_lines_with_one_expression_are_two_objectives() -> None:
    play = Play()
    for line in (3, 5):
        play.backward(line=line)
    play.step()
    assert [row.objective for row in play.ledger.shares()] == ["loss (line 3)", "loss (line 5)"]


@pytest.mark.parametrize("owners", [{"w": 0, "d": 1}, {"w": (0, 1)}])
def test_optimizers_have_rows_of_their_own_and_what_one_used_is_not_erased_for_the_next(owners: dict[str, Any]) -> None:
    play = Play(owners)
    b = play.backward(term(8, 1.0))
    one = play.step(0)
    shared = "d" not in owners
    if shared:
        play.zero()
    c = play.backward(term(8, 1.0)) if shared else b
    two = play.step(1)
    rows = [(row.step, row.backward, row.share) for row in play.ledger.shares()]
    assert rows == [(one, b, 1.0), (two, c, 1.0)]


def test_a_loss_that_cannot_be_taken_apart_has_the_share_of_its_constant() -> None:
    play = Play()
    play.backward(term(None, 0.5, "", "PowBackward0") | {"unknown": "PowBackward0 is no sum and no mean"})
    play.edit(0.5)
    play.step()
    (row,) = play.ledger.shares()
    assert row.share == pytest.approx(0.25) and math.isnan(row.per_element) and "PowBackward0" in row.unknown


_DOINGS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.integers(1, 50), st.sampled_from([0.25, 1.0, 1 / 3]), st.booleans()),
        st.tuples(st.just("clip"), st.floats(0.05, 5)),
        st.tuples(st.just("edit"), st.floats(0.1, 4)),
        st.tuples(st.just("step"), st.sampled_from([0, 1])),
        st.tuples(st.just("zero"), st.sampled_from([None, 0, 1])),
    ),
    max_size=24,
)


@given(doings=_DOINGS, seed=st.integers(0, 1000))
@example(doings=[("backward", 8, 0.25, True), ("clip", 0.05), ("step", 0)], seed=0)  # clips are drawn seldom
@settings(max_examples=examples(150), deadline=None)
def test_shares_are_the_weights_that_were_followed(doings: list[tuple[Any, ...]], seed: int) -> None:
    play = Play({"w": 0, "v": 0, "d": 1}, seed=seed)
    known: dict[int, tuple[float, bool, int]] = {}
    for what, *how in doings:
        if what == "backward":
            elements, factor, mean = how
            b = play.backward(term(elements, factor, "mean" if mean else "sum"))
            known[b] = factor, mean, elements
        elif what in ("clip", "edit"):
            if play.grad:
                getattr(play, what)(*how)
        else:
            getattr(play, what)(*how)
    found = {(row.step, row.backward): row for row in play.ledger.shares()}
    expected = {(s, b): weight for s, weights in play.steps.items() for b, weight in weights.items()}
    assert {key for key, row in found.items() if row.share != 0} == expected.keys()
    for key, weight in expected.items():
        factor, mean, elements = known[key[1]]
        assert found[key].share == pytest.approx(weight * factor * (1 if mean else elements), rel=1e-3)
        assert found[key].per_element == pytest.approx(weight * factor / (elements if mean else 1), rel=1e-3)


def test_shares_are_a_sequence_and_a_table() -> None:
    rows = windows(4, 2).ledger.shares()
    assert len(rows) == 6 and rows[-1] == list(rows)[5] and len(rows[1:3]) == 2
    assert [row.backward for row in rows.of(4)] == [0, 1, 2, 3] and len(rows.of(3)) == 0
    text = repr(rows)
    assert text.splitlines()[0] == "Shares: 6 rows, 2 steps" and "0.25" in text
    with pytest.raises(IndexError):
        rows[6]
    assert repr(Ledger.build([], []).shares()) == "Shares: 0 rows, 0 steps"


def test_a_loop_that_never_zeroes_is_listed_without_filling_the_memory() -> None:
    count = 6000
    columns = Events.of_columns(kind=["backward", "step"] * count, details=[{"terms": [term()]}, {}] * count)
    state = np.full((2 * count, 1), PRESENT, np.uint8)
    state[::2] |= CONTRIBUTED | CHANGED
    norms = np.ones((2 * count, 1), np.float32)
    ledger = Ledger((Parameter("w", (9, 9), optimizers=(0,)),), columns, norms, norms, state)
    rows = ledger.shares()
    assert len(rows) + rows.left_out == count * (count + 1) // 2
    assert f"{rows.left_out} more rows" in repr(rows)


def _edited(grad: float) -> Ledger:
    """One weight, contributions of -16 and -4; then `.grad` is made this by hand."""
    known = {"details": {"terms": [term(8, 0.5)]}}
    rows = [backward(-16, -16, **known), backward(-4, -20, **known), {"kind": "edit", "grad": {"w": grad}}]
    return Ledger.build([W], [*rows, {"kind": "step", "details": {"optimizer": "SGD"}, "grad": {"w": grad}}])


def test_a_gradient_halved_by_hand_has_one_story_in_shares_timeline_page_and_report() -> None:
    ledger = _edited(-10)
    assert [row.share for row in ledger.shares()] == [0.25, 0.25]
    assert [(part.born, part.amount) for part in segments(ledger, 0, [2])[0]] == [(0, -8), (1, -2)]
    data = payload.ledger_data(ledger)
    assert data["lanes"]["by"] == [[-1, -1, -1, -0.5, -0.5, -0.5, -0.5]]
    assert ledger.shares().per_element.tolist() == [1 / 32, 1 / 32]
    assert "unknown" not in str(av.check(ledger))


def test_a_gradient_replaced_by_hand_is_unknown_in_shares_timeline_page_and_report() -> None:
    ledger = _edited(10)  # a sign is no factor
    assert {row.unknown for row in ledger.shares()} == {UNREAD[BY_HAND]}
    assert [(part.born, part.amount) for part in segments(ledger, 0, [2])[0]] == [(-1, 10)]
    data = payload.ledger_data(ledger)
    assert data["lanes"]["age"][0][-1] == -1 and data["lanes"]["look"][0][-1] == "3"
    assert np.isnan(ledger.shares().share).all()
    report = av.check(ledger)
    assert not report.healthy and UNREAD[BY_HAND] in report.reason


def test_of_one_large_parameter_its_norm_alone_shows_no_factor_of_a_change_by_hand() -> None:
    given = {"contribution": {"w": 2.0}, "details": {"terms": [term(8, 0.5)]}}
    rows = [{"kind": "backward", "grad": {"w": 2.0}, **given}]
    rows += [{"kind": kind, "grad": {"w": 1.0}} for kind in ("edit", "step")]
    built = Ledger.build([Parameter("w", (9, 9), optimizers=(0,))], rows)
    ledger = Ledger(built.parameters, built.events, built.contribution, built.grad, built.state)  # no elements
    assert [row.unknown for row in ledger.shares()] == [UNREAD[BY_HAND]]


@pytest.mark.parametrize(
    ("first", "used"),
    [
        ({"kind": "backward", "contribution": {"w": 1.0}, "grad": {"w": 3.0}}, True),
        ({"kind": "backward", "contribution": {"w": 3.0}, "grad": {"w": 3.0}}, False),
        ({"kind": "loader", "grad": {"w": 3.0}}, True),
        ({"kind": "zero_grad", "grad": {"w": 0.0}}, False),
    ],
)
def test_a_step_that_uses_what_grad_held_before_the_recording_is_known(first: dict[str, Any], used: bool) -> None:
    rows = [first, {"kind": "step", "grad": first["grad"]}, {"kind": "zero_grad"}]
    others = [Parameter("v", (9,), optimizers=(0,)), Parameter("w", (9,), optimizers=(0,))]
    assert Ledger.build(others, rows).flow.used_from_before() == used


def test_a_ledger_whose_shares_were_asked_for_can_be_pickled() -> None:
    ledger = _edited(-10)
    assert [row.share for row in ledger.shares()] == [0.25, 0.25]
    assert [row.share for row in pickle.loads(pickle.dumps(ledger)).shares()] == [0.25, 0.25]
