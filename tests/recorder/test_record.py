"""What each event of a recording says: label, line, scale, kind, bytes, and what state each `.grad` is in."""

import linecache
import math
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import accumviz as av
from accumviz.ledger.ledger import CHANGED, CONTRIBUTED, PRESENT
from tests.recorder.loops import kinds, leaf
from tests.thorough import examples


def here(offset: int = 0) -> int:
    return sys._getframe(1).f_lineno + offset


def test_a_loss_goes_by_the_expression_that_backward_was_called_on() -> None:
    w = leaf()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with av.record(w) as recording:
        g_loss = (w * w).sum()
        g_loss.backward()
        (0.5 * (w * w).sum()).backward()
        (
            (w * w).sum()
            * 0.25
        ).backward()  # fmt: skip
        scaler.scale((w * w).sum()).backward()
        torch.autograd.backward((w * w).sum())
        torch.autograd.backward(tensors=(w * w).sum())
    assert [(event.label, event.loss) for event in recording.ledger] == [
        ("g_loss", 2.0),
        ("0.5 * (w * w).sum()", 1.0),
        ("(w * w).sum() * 0.25", 0.5),
        ("scaler.scale((w * w).sum())", 8.0),
        ("(w * w).sum()", 2.0),
        ("(w * w).sum()", 2.0),
    ]


def test_an_event_knows_its_line_and_source() -> None:
    w = leaf()
    with av.record(w) as recording:
        line = here(1)
        (w * w).sum().backward()
        (
            (w * w)
            .sum()
            .backward()
        )  # fmt: skip
    first, second = recording.ledger.events
    assert (first.file, first.line) == (os.path.relpath(__file__), line)
    assert first.source == "(w * w).sum().backward()"
    assert second.source == "(w * w) .sum() .backward()"
    assert second.line == line + 4
    assert "def test_an_event_knows_its_line" in recording.ledger.sources[first.file]


def test_code_without_a_readable_source_has_a_line_and_its_loss_its_operation() -> None:
    w = leaf()
    linecache.cache["<cell>"] = (10, None, ["this is not Python at all ("], "<cell>")
    try:
        with av.record(w) as recording:
            exec(compile("\n(w * w).sum().backward()", "<generated>", "exec"), {"w": w})
            exec(compile("(w * w).sum().backward()", "<cell>", "exec"), {"w": w})
    finally:
        del linecache.cache["<cell>"]
    assert [(event.line, event.label) for event in recording.ledger] == [(2, "SumBackward0"), (1, "SumBackward0")]


def test_zeroing_a_part_of_the_model_touches_that_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with av.record(model) as recording:
        model(torch.ones(2)).sum().backward()
        model[0].zero_grad()
        model.zero_grad()
    assert [event.label for event in recording.ledger.of("zero_grad")] == ["model[0]", "model"]
    assert (recording.ledger.state[1] & PRESENT > 0).tolist() == [False, False, True, True]


def test_a_step_says_which_optimizer_and_at_what_rate() -> None:
    a, b = leaf(), leaf()
    first = torch.optim.SGD([a], 0.1)
    second = torch.optim.Adam([{"params": [b], "lr": torch.tensor(0.25)}], 0.5)
    with av.record(a, b, first, second) as recording:
        (a * b).sum().backward()
        second.step()
        first.step()
    steps = recording.ledger.of("step")
    assert [(e.label, e.details["optimizer"], e.details["optimizer_index"], e.details["lr"]) for e in steps] == [
        ("second", "second", 1, [0.25]),
        ("first", "first", 0, [0.1]),
    ]
    assert recording.ledger.windows()[0].backwards == (0,)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_marked_so(fused: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with av.record(model, optimizer) as recording:
        for factor in (1.0, math.inf, 1.0):
            scaler.scale(model(torch.ones(2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [event.skipped for event in recording.ledger.of("step")] == [False, True, False]
    assert len(recording.ledger.windows()) == 2


def test_clipping_is_seen_however_it_was_imported() -> None:
    w = torch.full((2,), 3.0, requires_grad=True)
    with av.record(w) as recording:
        (w * w).sum().backward()
        clip_grad_value_([w], 5.0)
        nn.utils.clip_grad_value_(w, clip_value=4.0)
        clip_grad_norm_([w], 2.0)
        nn.utils.clip_grad_norm_(w, max_norm=1.0, foreach=False)
    ledger = recording.ledger
    assert kinds(ledger) == ["backward", "clip", "clip", "clip", "clip"]
    assert [event.details["by"] for event in ledger.of("clip")] == ["value", "value", "norm", "norm"]
    assert ledger[1].details["clip_value"] == 5.0
    assert ledger[3].details["max_norm"] == 2.0
    assert ledger[3].details["total_norm"] == pytest.approx(4 * math.sqrt(2))
    np.testing.assert_allclose(ledger.grad[1:, 0], [5 * math.sqrt(2), 4 * math.sqrt(2), 2.0, 1.0], rtol=1e-5)
    assert ledger[1].source == "clip_grad_value_([w], 5.0)"


@pytest.mark.parametrize(("size", "dtype", "steps"), [(3, torch.float32, 20), (20_000, torch.bfloat16, 3)])
def test_what_is_changed_through_data_is_an_edit_although_no_version_counts_it(
    size: int, dtype: torch.dtype, steps: int
) -> None:
    layer = nn.Linear(size, 1, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with av.record(layer, optimizer) as recording:
        for step in range(steps):
            for _ in range(2):
                layer(torch.randn(4, size, dtype=dtype)).square().mean().backward()
            for p in layer.parameters():
                p.grad.data.div_(2)
            if step % 2:
                nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    ledger = recording.ledger
    edits = [event.index for event in ledger.of("edit")]
    assert len(edits) == steps
    for edit in edits:
        np.testing.assert_allclose(ledger.grad[edit], ledger.grad[edit - 1] / 2, rtol=1e-6)
    assert {round(share.share, 3) for share in ledger.shares() if share.step < edits[1]} == {0.5}
    assert av.check(ledger).healthy


@pytest.mark.parametrize("after", ["step", "window"])
@pytest.mark.parametrize("begins", [0, 40])
def test_what_is_zeroed_through_data_after_the_step_is_zeroed(begins: int, after: str) -> None:
    layer = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with av.record(layer, optimizer) as recording:
        for step in range(60):
            if step > begins and after == "window":
                for p in layer.parameters():
                    p.grad.data.zero_()
            for _ in range(2):
                (layer(torch.randn(4, 5)).square().mean() / 2).backward()
            optimizer.step()
            if step < begins:
                optimizer.zero_grad()
            elif after == "step":
                for p in layer.parameters():
                    p.grad.data.zero_()
    windows = recording.ledger.windows()
    # A habit that begins late is noticed at one step of a few.
    assert {len(window.backwards) for window in (windows if begins == 0 else windows[:40])} == {2}
    assert len(windows[-1].backwards) == 2


def test_a_backward_by_a_name_of_its_own_is_one() -> None:
    backward, w = torch.autograd.backward, leaf()
    with av.record(w) as recording:
        backward((w * w).mean() / 2)
        backward([(w * w).mean() / 2], retain_graph=True)
        torch.autograd.backward((w * w).mean() / 2)
    ledger = recording.ledger
    assert kinds(ledger) == ["backward"] * 3
    assert [event.details["terms"][0]["factor"] for event in ledger] == [0.5] * 3
    assert [event.details.get("retain_graph", False) for event in ledger] == [False, True, False]
    assert ledger[0].line > 0


def test_a_call_that_raised_has_not_happened() -> None:
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with av.record(layer, optimizer) as recording:
        for _ in range(2):
            scaler.scale(layer(torch.randn(2, 3)).square().mean()).backward()
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    ledger = recording.ledger
    assert kinds(ledger) == ["backward", "unscale", "step", "zero_grad"] * 2
    assert [share.share for share in ledger.shares()] == [1.0, 1.0]


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_what_nobody_changed_is_no_edit(value: float) -> None:
    layer = nn.Linear(100, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with av.record(layer, optimizer) as recording:
        for _ in range(3):
            for _ in range(2):
                (value * layer(torch.randn(4, 100)).square().mean()).backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert "edit" not in {event.kind for event in recording.ledger.events}


def test_an_open_recording_can_be_read_and_shows_edits_so_far() -> None:
    w = leaf()
    with av.record(w) as recording:
        (w * w).sum().backward()
        w.grad.zero_()
        assert kinds(recording.ledger) == ["backward", "edit"]
    assert recording.ledger.complete


def test_closures_and_hooks_say_what_they_ran_inside() -> None:
    w = leaf()
    optimizer = torch.optim.LBFGS([w], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * w).sum()
        loss.backward()
        return loss

    with av.record(w, optimizer) as recording:
        optimizer.step(closure)
    assert {event.within for event in recording.ledger if event.kind != "step"} == {"step"}
    assert [event.within for event in recording.ledger.of("step")] == [""]


def test_saved_bytes_are_those_alive_before_and_after_a_backward() -> None:
    w = leaf(1000)
    with av.record(w, memory=True) as recording:
        for retain in (False, True, True, False):
            w.exp().sum().backward(retain_graph=retain)
    assert [event.saved_before for event in recording.ledger] == [4000, 4000, 4000, 4000]
    assert [event.saved_after for event in recording.ledger] == [0, 4000, 4000, 0]


STEPS = st.sampled_from(
    ["backward", "backward / 4", "retained", "inputs", "grad", "zero", "zeros", "model zero", "model zeros", "step",
     "clip", "edit", "replace", "drop"]
)  # fmt: skip


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=25), st.booleans())
def test_any_program_is_recorded_as_it_was(program: list[str], exact: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    leaves = list(model.parameters())
    expected: list[tuple[str, list[Any], list[Any]]] = []
    nothing: list[Any] = [None] * len(leaves)

    def grads() -> list[Any]:
        return [None if p.grad is None else p.grad.clone() for p in leaves]

    def loss_of() -> torch.Tensor:
        return model(torch.randn(3, 2, dtype=torch.float64)).square().mean()

    pending = False
    with av.record(model, optimizer, exact=64 if exact else 0) as recording:
        for what in program:
            if pending and what not in ("edit", "replace", "drop", "grad"):  # several edits in a row are one
                expected.append(("edit", nothing, grads()))
                pending = False
            if what.startswith("backward") or what in ("retained", "inputs"):
                loss = loss_of() / (4 if what == "backward / 4" else 1)
                chosen = leaves[:2] if what == "inputs" else leaves
                added = list(torch.autograd.grad(loss, chosen, retain_graph=True)) + nothing[len(chosen) :]
                loss.backward(retain_graph=what == "retained", inputs=chosen)
                expected.append(("backward", added, grads()))
            elif what == "grad":
                torch.autograd.grad(loss_of(), leaves)
            elif what in ("edit", "replace", "drop"):
                before = leaves[0].grad
                if what == "edit" and before is not None:
                    before.add_(1)
                elif what == "replace":
                    leaves[0].grad = torch.ones_like(leaves[0])
                elif what == "drop":
                    leaves[0].grad = None
                pending = pending or not (before is None and what != "replace")
                if leaves[0].grad is None and (not expected or expected[-1][2][0] is None):
                    pending = False  # came and went between two events
            elif "zero" in what:
                (model if "model" in what else optimizer).zero_grad(set_to_none=not what.endswith("zeros"))
                expected.append(("zero_grad", nothing, grads()))
            elif what == "step":
                optimizer.step()
                expected.append(("step", nothing, grads()))
            else:
                clip_grad_norm_(leaves, 0.1)
                expected.append(("clip", nothing, grads()))
        if pending:
            expected.append(("edit", nothing, grads()))
    ledger = recording.ledger
    assert kinds(ledger) == [kind for kind, _, _ in expected]
    before = nothing
    for e, (_, added, after) in enumerate(expected):
        for p in range(len(leaves)):
            state = ledger.state[e, p]
            assert bool(state & PRESENT) == (after[p] is not None)
            assert bool(state & CONTRIBUTED) == (added[p] is not None)
            held = [value for value in (before[p], after[p]) if value is not None]
            assert not held or (len(held) == 2 and torch.equal(*held)) or state & CHANGED
            for column, values, name in ((ledger.contribution, added, "contribution"), (ledger.grad, after, "grad")):
                if values[p] is None:
                    assert np.isnan(column[e, p])
                else:
                    np.testing.assert_allclose(column[e, p], values[p].norm(), rtol=1e-6)
                    if exact:
                        np.testing.assert_array_equal(ledger.values(p, name)[e], values[p].ravel())
        before = after
    if exact and not {"clip", "edit"} & set(kinds(ledger)):
        for p in range(len(leaves)):
            present = ledger.state[:, p] & PRESENT > 0
            np.testing.assert_allclose(ledger.running_sum(p)[present], ledger.values(p)[present], atol=1e-12)


def test_a_scaler_that_is_switched_off_unscales_nothing() -> None:
    w = leaf()
    optimizer, scaler = torch.optim.SGD([w], 0.1), torch.amp.GradScaler("cpu", enabled=False)
    with av.record(w, optimizer) as recording:
        scaler.scale((w * w).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert kinds(recording.ledger) == ["backward", "step"]


def test_of_a_leaf_whose_size_changes_the_norm_is_read_and_no_other_leaf_touched() -> None:
    w, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w, other], lr=0.1)

    def step() -> None:
        ((w * 2).sum() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with av.record({"w": w, "other": other}, optimizer) as recording:
        step()
        w.data = torch.ones(5)
        step()
    ledger = recording.ledger
    assert ledger.parameters[0].shape == (3,)
    np.testing.assert_allclose(ledger.grad[[0, 3, 4], 0], 2 * np.sqrt([3, 5, 5]), rtol=1e-6)
    np.testing.assert_allclose(ledger.contribution[[0, 3], 0], 2 * np.sqrt([3, 5]), rtol=1e-6)
    assert ledger.values("w")[0].tolist() == [2, 2, 2]
    assert np.isnan(ledger.values("w")[3]).all()
    assert ledger.values("other")[[0, 3]].tolist() == [[1, 1], [1, 1]]
    assert av.check(ledger).healthy


@pytest.mark.parametrize("recorded", [True, False])
def test_parameters_that_an_optimizer_gets_later_are_recorded_or_said_to_be_missing(recorded: bool) -> None:
    model, head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, *[head] * recorded, optimizer) as recording:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(head.parameters())})
            out = model(torch.randn(4, 3))
            (head(out) if step > 1 else out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report, notes = av.check(recording), recording.ledger.meta.get("notes", [])
    if recorded:
        assert (report.healthy, notes) == (True, [])
    else:
        assert not report.healthy
        assert "`optimizer` got parameters that are not recorded" in report.reason
        assert notes[0] in report.reason
