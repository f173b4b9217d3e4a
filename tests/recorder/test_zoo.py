"""Training under a recording is bitwise the training without it, and what is recorded is what happened."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT

MICRO, STEPS = 2, 3


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to_dense().to(torch.float64).clone()


@dataclass
class Witness:
    """Looks at every `.grad` by hand, after each thing a program does."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    rows: list[tuple[str, list[torch.Tensor | None], list[torch.Tensor | None]]] = field(default_factory=list)

    def saw(self, kind: str) -> None:
        before = self.rows[-1][2] if self.rows else [None] * len(self.tensors)
        self.rows.append((kind, before, [dense(tensor.grad) for tensor in self.tensors]))


@dataclass
class Run:
    """What a program gets: a witness, and what to open around its loop."""

    witness: Witness
    recorded: bool
    ledger: Any = None

    @contextlib.contextmanager
    def around(self, *objects: Any, **groups: Any) -> Iterator[None]:
        modules = [x for x in (*objects, *groups.values()) if isinstance(x, nn.Module)]
        self.witness.tensors = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        if not self.recorded:
            yield
            return
        with av.record(*objects, **groups) as recording:
            yield
        self.ledger = recording.ledger


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> None:
    saw = run.witness.saw
    with run.around(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            saw("zero_grad")
            for _ in range(MICRO):
                loss = loss_of() / MICRO
                loss.backward()
                saw("backward")
            optimizer.step()
            saw("step")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):  # the same layer twice: the reentrant kind brings its contribution in parts
            x = checkpoint(lambda y: torch.dropout(self.shared(y).tanh(), 0.3, True), x, use_reentrant=self.reentrant)
        return self.last(x)


def _mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, lambda: model(torch.randn(5, 8)).square().mean()


def _of(make: Callable[[], nn.Module], data: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model = make()
        return model, lambda: model(data()).square().mean()

    return build


MODELS = {
    "mlp": _mlp,
    "tied": _of(Tied, lambda: torch.randint(0, 11, (3, 4))),
    "checkpoint": _of(lambda: Checkpointed(False), lambda: torch.randn(4, 8)),
    "reentrant checkpoint": _of(lambda: Checkpointed(True), lambda: torch.randn(4, 8).requires_grad_()),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
}


def _plain(model_name: str, optimizer_name: str) -> Callable[[Run], list[Any]]:
    def program(run: Run) -> list[Any]:
        model, loss_of = MODELS[model_name]()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        train(run, model, optimizer, loss_of)
        return [model, optimizer]

    return program


def _lbfgs(run: Run) -> list[Any]:
    model, _ = _mlp()
    x, saw = torch.randn(5, 8), run.witness.saw
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        saw("zero_grad")
        loss = model(x).square().mean()
        loss.backward()
        saw("backward")
        return loss

    with run.around(model, optimizer):
        for _ in range(STEPS):
            optimizer.step(closure)
            saw("step")
    return [model, optimizer]


def _sparse(run: Run) -> list[Any]:
    model = nn.EmbeddingBag(50, 7, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randint(0, 50, (4, 3))).square().sum())
    return [model, optimizer]


def _scaler(run: Run) -> list[Any]:
    model, loss_of = _mlp()
    optimizer, saw = torch.optim.SGD(model.parameters(), 0.05), run.witness.saw
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with run.around(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            saw("zero_grad")
            scaler.scale(loss_of() * (float("inf") if step == 1 else 1.0)).backward()
            saw("backward")
            scaler.unscale_(optimizer)
            saw("unscale")
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            saw("clip")
            scaler.step(optimizer)
            saw("step")
            scaler.update()
    return [model, optimizer, scaler]


PROGRAMS: dict[str, Callable[[Run], list[Any]]] = {
    # Each model once, each optimizer at least once.
    **{f"{m}, {o}": _plain(m, o) for m, o in zip(MODELS, itertools.cycle(OPTIMIZERS), strict=False)},
    "lbfgs": _lbfgs,
    "sparse embedding": _sparse,
    "gradient scaler": _scaler,
}


def state_of(things: list[Any]) -> dict[str, torch.Tensor]:
    found = {"rng": torch.get_rng_state()}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().to_dense().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for n, item in enumerate(value):
                visit(f"{name}.{n}", item)
        elif isinstance(value, int | float):
            found[name] = torch.tensor(value, dtype=torch.float64)

    for n, thing in enumerate(things):
        visit(str(n), thing.state_dict())
        if isinstance(thing, nn.Module):
            visit(f"{n}.grad", {name: p.grad for name, p in thing.named_parameters()})
    return found


def play(program: Callable[[Run], list[Any]], *, recorded: bool) -> tuple[Run, Any]:
    torch.manual_seed(7)
    run = Run(Witness(), recorded)
    return run, state_of(program(run))


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_bitwise_that_without_us_and_recorded_as_read_by_hand(name: str) -> None:
    _, plain = play(PROGRAMS[name], recorded=False)
    run, recorded = play(PROGRAMS[name], recorded=True)
    assert plain.keys() == recorded.keys()
    different = [key for key in plain if not torch.equal(plain[key].nan_to_num(7.0), recorded[key].nan_to_num(7.0))]
    assert different == []
    check(run.ledger, run.witness)


def check(ledger: Any, witness: Witness) -> None:
    """Compare a ledger with the clones that were taken after each event."""
    assert [event.kind for event in ledger if not (event.kind == "step" and event.skipped)] == [
        kind for n, (kind, _, _) in enumerate(witness.rows) if not (kind == "step" and ledger[n].skipped)
    ]
    for event, (kind, before, after) in zip(ledger, witness.rows, strict=True):
        for p, (old, new) in enumerate(zip(before, after, strict=True)):
            where = f"event {event.index} ({kind}), {ledger.parameters[p].name}"
            present = bool(ledger.state[event.index, p] & PRESENT)
            assert present == (new is not None), where
            if new is None:
                assert np.isnan(ledger.grad[event.index, p]), where
                continue
            close(ledger.grad[event.index, p], new.norm(), where)
            if kind == "backward" and not ledger.state[event.index, p] & CONTRIBUTED:
                assert old is not None and torch.equal(old, new), where
            if kind != "backward":
                assert np.isnan(ledger.contribution[event.index, p]), where
            elif ledger.parameters[p].name in event.details.get("unmeasured", ()):
                # What comes in parts to a `.grad` that is there is known to have come, and not how much.
                assert "shared" in where and np.isnan(ledger.contribution[event.index, p])
            elif ledger.state[event.index, p] & CONTRIBUTED:
                added = new if old is None else new - old
                scale = float(max(new.norm(), added.norm()))
                close(ledger.contribution[event.index, p], added.norm(), where, scale)
                if p in ledger.exact and np.isfinite(scale):
                    elements = ledger.values(p, "contribution")[event.index]
                    np.testing.assert_allclose(elements, added.ravel().numpy(), rtol=1e-5, atol=1e-6 * scale)
            if p in ledger.exact:
                np.testing.assert_array_equal(ledger.values(p)[event.index], new.ravel().numpy())


def close(recorded: np.floating[Any], expected: torch.Tensor, where: str, scale: float = 0.0) -> None:
    if not np.isfinite(float(expected)):
        assert not np.isfinite(recorded), where
        return
    np.testing.assert_allclose(recorded, float(expected), rtol=2e-5, atol=1e-6 * scale + 1e-12, err_msg=where)
