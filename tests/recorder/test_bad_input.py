"""Whatever is passed in and whatever goes wrong: a clear error or a sensible record, and the training undisturbed."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT
from accumviz.recorder import patches, targets
from accumviz.recorder.recording import Recording
from tests.light import LIGHT

ROOT = Path(__file__).resolve().parents[2]


def leaf(size: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype).requires_grad_()


def kinds(ledger: Any) -> list[str]:
    return [event.kind for event in ledger]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no derivative today")


# --- what is passed to record ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "error", "says"),
    [
        ((), ValueError, "nothing to record in no arguments; expected a module"),
        (([],), ValueError, "nothing to record in list"),
        ((nn.ReLU(),), ValueError, "nothing to record in ReLU"),
        ((torch.ones(2),), ValueError, "requires_grad_()"),
        ((leaf() * 2,), ValueError, "not a leaf"),
        ((nn.LazyLinear(2),), ValueError, "weight, bias are made by the first forward; run one before you record"),
        (("model",), TypeError, "cannot record 'model', a str; expected a module"),
        ((3,), TypeError, "cannot record 3, an int; expected a module"),
        ((None,), TypeError, "cannot record None"),
        (({"w": 3},), TypeError, "cannot record 'w', an int; expected a tensor"),
    ],
)
def test_what_holds_no_parameters_is_refused_with_what_was_expected(objects: Any, error: Any, says: str) -> None:
    with pytest.raises(error) as refused:
        av.record(*objects)
    assert says in str(refused.value)


def test_a_negative_exact_is_refused() -> None:
    with pytest.raises(ValueError, match="exact=-1; expected"):
        av.record(leaf(), exact=-1)


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"), av.record(leaf(), path=tmp_path / "nowhere" / "x.ledger"):
        pytest.fail("this does not run")


def test_a_recording_is_used_once() -> None:
    recording = av.record(leaf())
    with recording:
        pass
    with pytest.raises(RuntimeError, match=r"call record\(...\) again"), recording:
        pass


# --- gradients of every kind ------------------------------------------------------------------------


def test_infinite_and_missing_numbers_are_kept_as_they_are() -> None:
    w, v = leaf(100), leaf(2)
    with av.record(w, v) as recording:
        for factor in (math.inf, math.nan):
            (w.sum() * factor + (v * torch.tensor([1.0, factor])).sum()).backward()
            w.grad = v.grad = None
    ledger = recording.ledger
    assert ledger.contribution[0, 0] == math.inf
    assert np.isnan(ledger.contribution[2, 0])
    assert ledger.values("v")[0].tolist() == [1.0, math.inf]
    assert (ledger.state[0] & CONTRIBUTED > 0).all()


def test_half_precision_does_not_overflow_its_norm() -> None:
    w = leaf(1000, torch.float16)
    with av.record(w) as recording:
        (w * 200).sum().backward()
        (w * 200).sum().backward()
    expected = 200 * math.sqrt(1000)
    np.testing.assert_allclose(recording.ledger.contribution[:, 0], [expected, expected], rtol=1e-3)
    np.testing.assert_allclose(recording.ledger.grad[:, 0], [expected, 2 * expected], rtol=1e-3)


def test_bfloat16_and_float64_elements_are_kept() -> None:
    w, v = leaf(2, torch.bfloat16), leaf(2, torch.float64)
    with av.record(w, v) as recording:
        ((w * 3).sum() + (v * 1e-300).sum()).backward()
    assert recording.ledger.values("w").tolist() == [[3.0, 3.0]]
    assert recording.ledger.values("v").tolist() == [[1e-300, 1e-300]]


def test_a_norm_beyond_single_precision_is_infinite_and_says_nothing() -> None:
    w = leaf(100, torch.float64)
    with av.record(w) as recording:
        (w * 1e200).sum().backward()
    assert recording.ledger.grad[0, 0] == math.inf


def test_complex_gradients_have_norms() -> None:
    w = leaf(3, torch.complex64)
    with av.record(w) as recording:
        for _ in range(2):
            (w * w.conj()).real.sum().backward()
    np.testing.assert_allclose(recording.ledger.contribution[:, 0], [math.sqrt(12)] * 2, rtol=1e-6)
    np.testing.assert_allclose(recording.ledger.grad[:, 0], [math.sqrt(12), 2 * math.sqrt(12)], rtol=1e-6)


@pytest.mark.parametrize("size", [4, 400])
def test_sparse_gradients_count_each_row_once(size: int) -> None:
    table = nn.Embedding(size, 3, sparse=True)
    with av.record(table) as recording:
        for _ in range(2):
            table(torch.tensor([0, 0, 1])).sum().backward()
    expected = math.sqrt(3 * 4 + 3)
    np.testing.assert_allclose(recording.ledger.contribution[:, 0], [expected, expected], rtol=1e-6)
    np.testing.assert_allclose(recording.ledger.grad[:, 0], [expected, 2 * expected], rtol=1e-6)


# --- backward in every way ----------------------------------------------------------------------------


def test_backward_to_some_inputs_contributes_to_those() -> None:
    w, v = leaf(), leaf()
    with av.record(w, v) as recording:
        (w * v).sum().backward(inputs=[v])
        (w * v).sum().backward(inputs=w)
    assert (recording.ledger.state & CONTRIBUTED > 0).tolist() == [[False, True], [True, False]]
    assert [event.details["inputs"] for event in recording.ledger] == [1, 1]


def test_roots_of_every_kind() -> None:
    w = leaf()
    with av.record(w) as recording:
        torch.autograd.backward([(w * 2).sum(), (w * 3).sum()])
        torch.autograd.backward((w * k).sum() for k in (2, 3))
        (w * 2).backward(gradient=torch.ones(2))
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge((w * 2).sum()))
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(w * 2)], [torch.ones(2)])
    ledger = recording.ledger
    assert ledger.values("w", "contribution").tolist() == [[5, 5], [5, 5], [2, 2], [2, 2], [2, 2]]
    assert [event.details.get("roots") for event in ledger] == [2, 2, None, None, None]
    assert ledger[2].details["root_shape"] == [2]


def test_create_graph_replaces_the_grad_and_is_recorded() -> None:
    w = leaf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against it
        with av.record(w) as recording:
            for _ in range(2):
                (w**3).sum().backward(create_graph=True)
    w.grad = None
    assert recording.ledger.values("w").tolist() == [[3, 3], [6, 6]]
    assert recording.ledger[0].details["create_graph"] is True


def test_autograd_grad_is_no_event() -> None:
    w = leaf()
    with av.record(w) as recording:
        (w * w).sum().backward()
        torch.autograd.grad((w * w).sum(), w)
        (w * w).sum().backward()
    assert kinds(recording.ledger) == ["backward", "backward"]


@pytest.mark.parametrize("wrong", [3, "loss", None, [3]])
def test_a_backward_that_torch_refuses_stops_no_recording(wrong: Any) -> None:
    w = leaf()
    with av.record(w) as recording:
        with pytest.raises((TypeError, RuntimeError, AssertionError)):
            torch.autograd.backward(wrong)
        (w * w).sum().backward()
    assert kinds(recording.ledger)[-1] == "backward"
    assert recording.ledger.values("w")[-1].tolist() == [2, 2]


def test_an_exception_in_the_middle_of_backward_keeps_what_had_arrived() -> None:
    w, v = leaf(), leaf()
    with av.record(w, v) as recording:
        (w + v).sum().backward()
        with pytest.raises(RuntimeError, match="no derivative today"):
            ((Fails.apply(w) * 1).sum() + (v * 3).sum()).backward()
        arrived = None if v.grad is None else v.grad.clone()
        (w + v).sum().backward()
    ledger = recording.ledger
    assert kinds(ledger) == ["backward"] * 3
    assert ledger[1].details["error"] == "RuntimeError: no derivative today"
    assert ledger.values("v")[1].tolist() == arrived.tolist()
    assert ledger.values("w").tolist() == [[1, 1], [1, 1], [2, 2]]


def test_a_graph_that_is_freed_is_torchs_error_and_an_event() -> None:
    w = leaf()
    with av.record(w) as recording:
        loss = (w * w).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert "second time" in recording.ledger[1].details["error"]


def test_an_exception_in_the_loop_ends_the_recording_and_goes_on() -> None:
    w = leaf()
    with pytest.raises(KeyError), av.record(w) as recording:
        (w * w).sum().backward()
        raise KeyError("the user's")
    assert kinds(recording.ledger) == ["backward"]
    assert patches.listening == ()


def test_an_optimizer_whose_step_raises_leaves_nothing_open() -> None:
    w = leaf()
    optimizer = torch.optim.LBFGS([w])

    def closure() -> torch.Tensor:
        raise KeyError("in the closure")

    with av.record(w, optimizer) as recording:
        with pytest.raises(KeyError):
            optimizer.step(closure)
        (w * w).sum().backward()
    assert [(event.kind, event.within) for event in recording.ledger] == [("backward", "")]


# --- parameters that change ---------------------------------------------------------------------------


def test_a_tied_weight_is_one_parameter_with_two_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with av.record(model) as recording:
        model(torch.ones(2)).sum().backward()
    (parameter,) = recording.ledger.parameters
    assert (parameter.name, parameter.aliases) == ("0.weight", ("1.weight",))
    np.testing.assert_allclose(recording.ledger.values(0, "contribution")[0], model[0].weight.grad.ravel(), rtol=1e-6)


def test_parameters_may_be_frozen_and_unfrozen_meanwhile() -> None:
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    with av.record(model) as recording:
        for trains in (False, True, True, False, True, True):
            model.weight.requires_grad_(trains)
            model(torch.ones(2)).sum().backward()
    ledger = recording.ledger
    assert (ledger.state[:, 0] & CONTRIBUTED > 0).tolist() == [False, True, True, False, True, True]
    expected = [math.nan, *(math.sqrt(2) * n for n in (1, 2, 2, 3, 4))]
    assert ledger.grad[:, 0].tolist() == pytest.approx(expected, nan_ok=True)


def test_a_model_that_is_cast_while_recording_goes_on() -> None:
    model = nn.Linear(2, 1, bias=False)
    with av.record(model) as recording:
        model(torch.ones(2)).sum().backward()
        model.double()
        model(torch.ones(2, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        model.to(torch.bfloat16)
        model(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
    ledger = recording.ledger
    assert ledger.parameters[0].dtype == "bfloat16"
    backwards = [event.index for event in ledger.of("backward")]
    assert ledger.values(0)[backwards].tolist() == [[1, 1], [2, 2], [1, 1]]
    assert ledger.values(0, "contribution")[backwards].tolist() == [[1, 1]] * 3


def test_a_compiled_model_is_recorded_like_any_other() -> None:
    model = nn.Linear(2, 1, bias=False)
    compiled = torch.compile(model, backend="aot_eager")
    with av.record(model) as recording:
        for _ in range(2):
            compiled(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        compiled(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()
    ledger = recording.ledger
    assert kinds(ledger) == ["backward", "backward", "zero_grad", "backward"]
    assert ledger.values(0, "contribution")[[0, 1, 3]].tolist() == [[1, 1]] * 3


def test_a_parameter_added_to_the_optimizer_later_is_owned() -> None:
    w, v = leaf(), leaf()
    optimizer = torch.optim.SGD([w], 0.1)
    with av.record(w, v, optimizer) as recording:
        optimizer.add_param_group({"params": [v]})
        (w * v).sum().backward()
        optimizer.step()
    assert [parameter.optimizers for parameter in recording.ledger.parameters] == [(0,), (0,)]
    assert (recording.ledger.outcomes.steps[0] == 1).all()


# --- several at once ------------------------------------------------------------------------------------


def test_nested_recordings_see_the_same() -> None:
    w, v = leaf(), leaf()
    with av.record(w) as outer:
        (w * v).sum().backward()
        with av.record(w, v) as inner:
            (w * v).sum().backward()
            (w * v).sum().backward()
        (w * v).sum().backward()
    assert outer.ledger.values("w", "contribution").tolist() == [[1, 1]] * 4
    assert outer.ledger.values("w").tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert inner.ledger.values("w", "contribution").tolist() == [[1, 1]] * 2
    assert inner.ledger.values("v").tolist() == [[2, 2], [3, 3]]


def test_recordings_may_close_in_any_order() -> None:
    w = leaf()
    first, second = av.record(w), av.record(w)
    first.__enter__()
    second.__enter__()
    (w * w).sum().backward()
    first.__exit__(None, None, None)
    (w * w).sum().backward()
    second.__exit__(None, None, None)
    assert (len(first.ledger), len(second.ledger)) == (1, 2)


def test_two_threads_train_under_two_recordings() -> None:
    found: dict[int, Any] = {}

    def train(n: int) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with av.record(model, optimizer) as recording:
            for _ in range(100):
                optimizer.zero_grad()
                for k in (1, 2):
                    (model(torch.ones(3)) * (n + 1) * k).sum().backward()
                optimizer.step()
        found[n] = recording.ledger

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, ledger in found.items():
        assert kinds(ledger) == ["zero_grad", "backward", "backward", "step"] * 100
        values = ledger.values(0, "contribution")[ledger.state[:, 0] & CONTRIBUTED > 0]
        assert values.tolist() == [[n + 1] * 3, [2 * n + 2] * 3] * 100


class _Held(torch.autograd.Function):
    """A backward that waits in its middle until another thread has done something."""

    began, go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _Held.began, _Held.go_on = threading.Event(), threading.Event()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Held.began.set()
        assert _Held.go_on.wait(60)
        return grad


def _meanwhile(loss: torch.Tensor, do: Callable[[], Any], *, in_main: bool = False) -> None:
    """Another thread does this in the middle of this loss's backward."""

    def others() -> None:
        assert _Held.began.wait(60)
        do()
        _Held.go_on.set()

    first, second = threading.Thread(target=loss.backward), threading.Thread(target=others)
    second.start()
    (first.run if in_main else first.start)()
    if not in_main:
        first.join()
    second.join()


def test_optimizers_that_two_threads_step_for_the_first_time_at_once_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    other, name = threading.Thread(target=optimizers[1].step), targets.Optimizers._name

    def slowly(*args: Any) -> str:
        if not other.ident:
            other.start()
            other.join(0.5)
        return name(*args)

    monkeypatch.setattr(targets.Optimizers, "_name", slowly)
    with av.record(a=models[0], b=models[1]) as recording:
        optimizers[0].step()
        other.join()
    ledger = recording.ledger
    assert sorted(event.details["optimizer_index"] for event in ledger.of("step")) == [0, 1]
    assert sorted(p.optimizers for p in ledger.parameters if p.name.endswith("weight")) == [(0,), (1,)]


def test_another_threads_training_of_other_parameters_is_none_of_ours() -> None:
    w, other = leaf(), leaf()
    with av.record(w) as recording:
        thread = threading.Thread(target=lambda: (other * other).sum().backward())
        thread.start()
        thread.join()
        (w * w).sum().backward()
    assert len(recording.ledger) == 1


# --- our own failures -----------------------------------------------------------------------------------


def test_a_warning_that_the_user_made_an_error_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    w = leaf()

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("ours")

    with av.record(w):
        monkeypatch.setattr(Recording, "backward_ends", failing)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (w * w).sum().backward()
    assert w.grad is not None
    assert "stopped recording" in capsys.readouterr().err


def test_a_full_disk_costs_the_file_not_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, path = leaf(), tmp_path / "x.ledger"
    with pytest.warns(RuntimeWarning, match="No space left") as said, av.record(w, path=path) as recording:
        for n in range(1000):
            if n == 600:

                def full(*_: Any) -> None:
                    raise OSError(28, "No space left on device")

                monkeypatch.setattr(recording._rows._writer, "append", full)
            (w * w).sum().backward()
    assert len(said) == 1
    assert w.grad.tolist() == [2000.0, 2000.0]
    ledger = recording.ledger
    assert ledger.values("w")[:, 0].tolist() == [2.0 * n for n in range(1, 1001)]
    assert any("No space left" in note for note in ledger.meta["notes"])
    kept = av.load(path)
    assert not kept.complete
    assert 256 <= len(kept) < 1000


def test_an_unused_recording_leaves_an_empty_ledger() -> None:
    with av.record(leaf()) as recording:
        pass
    assert len(recording.ledger) == 0
    assert "no events" in repr(recording.ledger)


def test_someone_who_wraps_backward_while_we_record_keeps_working() -> None:
    w, calls = leaf(), []
    with av.record(w):
        ours = torch.autograd.backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        torch.autograd.backward = theirs
    assert torch.autograd.backward is theirs
    (w * w).sum().backward()
    assert calls == [1]
    torch.autograd.backward = ours.__wrapped__


def test_everything_is_undone_in_a_process_that_goes_on() -> None:
    script = """
    import torch, accumviz as av
    before = torch.autograd.backward, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad
    w = torch.ones(2, requires_grad=True)
    try:
        with av.record(w):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert before == (torch.autograd.backward, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad)
    assert not w._backward_hooks
    """
    subprocess.run([sys.executable, "-c", LIGHT + textwrap.dedent(script)], cwd=ROOT, check=True)


def test_none_and_zero_are_told_apart() -> None:
    w = leaf()
    with av.record(w) as recording:
        (w * w).sum().backward()
        w.grad.zero_()
        (w * 0).sum().backward()
        w.grad = None
    ledger = recording.ledger
    assert (ledger.state[:, 0] & PRESENT > 0).tolist() == [True, True, True, False]
    assert ledger.grad[:3, 0].tolist() == pytest.approx([math.sqrt(8), 0.0, 0.0])
    assert np.isnan(ledger.grad[3, 0])


class _Pressed(set[int]):
    """A key is pressed just when a thread is noted as being inside, the first time."""

    pressed = False

    def add(self, thread: int) -> None:
        super().add(thread)
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["backward", "zero_grad", "clip"])
def test_a_key_that_is_pressed_at_our_door_leaves_it_open(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patches.inside, kind, _Pressed())
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with av.record(w, optimizer) as recording:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                w.square().sum().backward()
                nn.utils.clip_grad_norm_([w], 1.0)
                optimizer.zero_grad()
    assert patches.inside[kind] == set()
    assert [event.kind for event in recording.ledger][-3:] == ["backward", "clip", "zero_grad"]
