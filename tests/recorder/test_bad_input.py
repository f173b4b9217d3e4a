"""Whatever is passed in and whatever goes wrong: a clear error or a sensible record, and the training undisturbed."""

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED
from tests.recorder.loops import Refusing, kinds, leaf, raised_inside


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


@pytest.mark.parametrize(
    ("dtype", "size", "factor"),
    [(torch.float16, 1000, 200), (torch.bfloat16, 2, 3), (torch.float64, 2, 1 / 3), (torch.complex64, 3, 2)],
)
def test_gradients_of_each_precision_have_their_elements_and_norms(dtype: Any, size: int, factor: float) -> None:
    w = leaf(size, dtype)
    with av.record(w, exact=2) as recording:
        for _ in range(2):
            (w * factor).abs().sum().backward()
    ledger, norm = recording.ledger, math.hypot(*[factor] * size)
    np.testing.assert_allclose(ledger.contribution[:, 0], [norm, norm], rtol=1e-3)
    np.testing.assert_allclose(ledger.grad[:, 0], [norm, 2 * norm], rtol=1e-3)
    if size == 2:
        assert ledger.values("w").tolist() == [[factor] * 2, [2 * factor] * 2]


def test_roots_of_every_kind() -> None:
    w = leaf()
    with av.record(w) as recording:
        torch.autograd.backward([(w * 2).sum(), (w * 3).sum()])
        torch.autograd.backward((w * k).sum() for k in (2, 3))
        (w * 2).backward(gradient=torch.ones(2))
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge((w * 2).sum()))
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(w * 2)], [torch.ones(2)])
        (w * 2).sum().backward(torch.tensor(0.5))
        torch.autograd.backward(((w * 2).sum(),), (None,))
    ledger = recording.ledger
    assert ledger.values("w", "contribution").tolist() == [[5, 5], [5, 5], [2, 2], [2, 2], [2, 2], [1, 1], [2, 2]]
    assert [len(event.terms) for event in ledger] == [1] * 7
    unknown = "backward did not start from one number alone"
    assert [event.terms[0]["unknown"] for event in ledger] == [unknown] * 6 + [""]


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
        with pytest.raises(ValueError, match="not today"):
            ((Refusing.apply(w) * 1).sum() + (v * 3).sum()).backward()
        arrived = None if v.grad is None else v.grad.clone()
        (w + v).sum().backward()
    ledger = recording.ledger
    assert kinds(ledger) == ["backward"] * 3
    assert ledger[1].details["error"] == "ValueError: not today"
    assert ledger.values("v")[1].tolist() == arrived.tolist()
    assert ledger.values("w").tolist() == [[1, 1], [1, 1], [2, 2]]


def test_a_tied_weight_is_one_parameter_with_two_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with av.record(model) as recording:
        model(torch.ones(2)).sum().backward()
    (parameter,) = recording.ledger.parameters
    assert (parameter.name, parameter.aliases) == ("0.weight", ("1.weight",))
    np.testing.assert_allclose(recording.ledger.values(0, "contribution")[0], model[0].weight.grad.ravel(), rtol=1e-6)


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


@pytest.mark.parametrize("first", [0, 1])
def test_recordings_that_overlap_see_the_same_and_close_in_any_order(first: int) -> None:
    w, v = leaf(), leaf()
    outer, inner = recordings = av.record(w), av.record(w, v)
    for recording in recordings:
        recording.start()
        (w * v).sum().backward()
    recordings[first].stop()
    (w * v).sum().backward()
    recordings[1 - first].stop()
    assert outer.ledger.values("w", "contribution").tolist() == [[1, 1]] * (2 + first)
    assert outer.ledger.values("w").tolist() == [[1, 1], [2, 2], [3, 3]][: 2 + first]
    assert inner.ledger.values("w", "contribution").tolist() == [[1, 1]] * (2 - first)
    assert inner.ledger.values("v").tolist() == [[2, 2], [3, 3]][: 2 - first]


def test_a_recording_follows_the_thread_in_which_its_own_leaves_are_reached() -> None:
    mine, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([mine], 0.1)
    with av.record(mine, optimizer) as recording:
        elsewhere = threading.Thread(target=lambda: (other * 5).sum().backward())
        elsewhere.start()
        elsewhere.join()
        optimizer.zero_grad()
        (mine * mine).mean().backward()
        optimizer.step()
    ledger = recording.ledger
    assert kinds(ledger) == ["backward", "zero_grad", "backward", "step"]
    assert ledger.values(0, "contribution")[2].tolist() == [1, 1]
    assert [(row.backward, row.share, row.unknown) for row in ledger.shares()] == [(2, 1, "")]
    assert "notes" not in ledger.meta


def test_two_threads_that_train_at_once_never_end_the_process() -> None:
    # Torch ends it where one of them reads a `.grad` that the other's backward writes: once in some hundred rounds.
    code = """if True:
        import contextlib, threading, warnings
        import torch
        from torch import nn
        import accumviz as av

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)

        def train(model, start):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            start.wait()
            for n in range(4):
                model(torch.full((3, 4), 1.0 + n)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        def trained(recording_of):
            torch.manual_seed(0)
            models = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) for _ in range(2)]
            start = threading.Barrier(2)
            threads = [threading.Thread(target=train, args=(model, start)) for model in models]
            with recording_of(*models) as recording:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            return [p for model in models for p in model.parameters()], recording

        alone, _ = trained(lambda *_: contextlib.nullcontext())
        for _ in range(600):
            recorded, recording = trained(lambda one, two: av.record(one=one, two=two))
            assert all(map(torch.equal, alone, recorded))
            assert "another thread trains" in recording.ledger.meta["stopped"], recording.ledger.meta
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("pressed_in", ["backward", "clip", "zero_grad"])
def test_a_key_that_is_pressed_inside_ours_is_the_users_and_leaves_the_door_open(pressed_in: str) -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    actions: dict[str, Callable[[], Any]] = {
        "backward": lambda: w.square().sum().backward(),
        "clip": lambda: nn.utils.clip_grad_norm_([w], 1.0),
        "zero_grad": lambda: optimizer.zero_grad(),
    }

    for pressed in (True, False):
        with av.record(w, optimizer) as recording:
            for kind, act in actions.items():
                with contextlib.suppress(KeyboardInterrupt):
                    sys.setprofile(raised_inside(KeyboardInterrupt) if pressed and kind == pressed_in else None)
                    act()
                sys.setprofile(None)
    assert kinds(recording.ledger) == [*actions]
