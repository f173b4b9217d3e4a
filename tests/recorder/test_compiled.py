"""torch.compile and CUDA graphs: recorded as an eager loop is, or said plainly what is not."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning")
Step = Callable[[], None]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _train(
    compiled: Callable[[nn.Module], nn.Module] = lambda model: model,
    wrap: Callable[[Step], Step] = lambda step: step,
    recorded: bool = True,
    compile_step: bool = False,
    graphs: bool = False,
) -> tuple[list[torch.Tensor], Ledger | None]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9)
    x, model = torch.randn(4, 3), compiled(inner)
    with av.record(inner, optimizer, graphs=graphs) if recorded else nullcontext() as recording:
        take = torch.compile(optimizer.step, backend="aot_eager") if compile_step else optimizer.step

        def step() -> None:
            for _ in range(2):
                loss = model(x).square().mean() / 2
                loss.backward()
            take()
            optimizer.zero_grad()

        run = wrap(step)
        for _ in range(3):
            run()
    return [p.detach().clone() for p in inner.parameters()], recording.ledger if recording is not None else None


def _compiling(backend: str, **how: Any) -> Callable[[Any], Any]:
    return lambda compiled: torch.compile(compiled, backend=backend, **how)


WAYS: dict[str, dict[str, Any]] = {
    "the model, aot_eager": {"compiled": _compiling("aot_eager", fullgraph=True), "graphs": True},
    "the model, eager": {"compiled": _compiling("eager", fullgraph=True)},
    "the model, inductor": {"compiled": _compiling("inductor")},
    "the whole step": {"wrap": _compiling("aot_eager")},
    "the optimizer's step": {"compile_step": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_is_recorded_as_an_eager_loop_and_computes_the_same(way: str) -> None:
    if "inductor" in way:
        try:
            torch.compile(lambda x: (x * 2).sin())(torch.ones(3))
        except Exception as missing:  # no C++ compiler, or one that inductor cannot use
            pytest.skip(f"inductor does not work here: {type(missing).__name__}")
    _, eager = _train()
    weights, ledger = _train(**WAYS[way])
    bare, _ = _train(**WAYS[way], recorded=False)
    assert all(torch.equal(a, b) for a, b in zip(weights, bare, strict=True))
    assert ledger is not None
    assert eager is not None
    assert "stopped" not in ledger.meta
    assert [event.kind for event in ledger] == [event.kind for event in eager]
    assert [w.backwards for w in ledger.windows()] == [w.backwards for w in eager.windows()]
    for ours, theirs in zip(ledger.of("backward"), eager.of("backward"), strict=True):
        assert (ours.label, ours.line, ours.source) == ("loss", theirs.line, theirs.source)
    np.testing.assert_array_equal(ledger.state, eager.state)
    np.testing.assert_allclose(ledger.contribution, eager.contribution, rtol=1e-5)
    np.testing.assert_allclose(ledger.grad, eager.grad, rtol=1e-5)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    answer = [False]
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answer[0])

    def switch(on: bool) -> None:
        answer[0] = on

    return switch


def test_a_recording_stops_once_a_graph_was_captured_and_says_what_to_do(capture: Callable[[bool], None]) -> None:
    model = nn.Linear(3, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with av.record(model, optimizer) as recording:
        model(torch.ones(2, 3)).sum().backward()
        capture(True)
        with warnings.catch_warnings(action="error"):
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        capture(False)
        with pytest.warns(RuntimeWarning, match="record the loop before it is captured") as said:
            model(torch.ones(2, 3)).sum().backward()
    assert len(said) == 1
    assert [event.kind for event in recording.ledger] == ["backward"]
    assert "CUDA graph" in av.check(recording).reason
