"""What goes on around `.grad`: schedulers, loaders, settings, the lines that led there, weights, and how it ended."""

import contextlib
import pickle
import site
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import accumviz as av
from accumviz.ledger.events import Events


def model() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def details(ledger: Any, kind: str) -> list[dict[str, Any]]:
    return [dict(event.details) for event in ledger.of(kind)]


class Warmup(lr_scheduler.LRScheduler):
    """A user's own, which steps in a way of its own."""

    def step(self, epoch: int | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 2


MADE: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [1]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "Warmup": Warmup,
}


@pytest.mark.parametrize("recorded", [True, False])
def test_a_warning_of_torch_names_the_users_line_with_a_recording_and_without(recorded: bool) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    recording = av.record(net, optimizer) if recorded else contextlib.nullcontext()
    with recording, pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`") as said:
        scheduler.step()
    assert said[0].filename == __file__


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("when", ["before", "while"])
def test_each_step_of_a_scheduler_is_one_event(kind: str, when: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = MADE[kind](optimizer) if when == "before" else None
    rates = []
    stranger = torch.optim.SGD(model().parameters(), lr=0.1)
    with warnings.catch_warnings(), av.record(net, optimizer) as recording:
        warnings.simplefilter("ignore")
        lr_scheduler.StepLR(stranger, 1).step()  # of an optimizer that is not recorded
        scheduler = scheduler or MADE[kind](optimizer)
        for _ in range(3):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
    about = {"scheduler": kind, "optimizer": "optimizer", "optimizer_index": 0}
    first, *others = details(recording.ledger, "schedule")
    assert first.pop("horizon", None) == (9 if kind == "OneCycleLR" else None)
    assert [first, *others] == [about | {"lr": [rate]} for rate in rates]
    assert {event.label for event in recording.ledger.of("schedule")} == {"scheduler"}
    assert "scheduler.step" in recording.ledger.of("schedule")[0].source


def _linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return 1 - max(0, step - num_warmup_steps) / num_training_steps


LENGTHS: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "a cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8), 8),
    "a line": (lambda o: lr_scheduler.LinearLR(o, total_iters=7), 7),
    "a polynomial": (lambda o: lr_scheduler.PolynomialLR(o, total_iters=6), 6),
    "a partial": (lambda o: lr_scheduler.LambdaLR(o, partial(_linear, num_warmup_steps=1, num_training_steps=5)), 5),
    "a warm-up before a cosine": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, T_max=8)], [2]
        ),
        10,
    ),
    "a cosine without an end": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4), None),
    "a function": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), None),
}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("before", [0, 1])
def test_the_first_step_of_a_schedule_says_for_how_many_it_was_made(kind: str, before: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    make, length = LENGTHS[kind]
    scheduler = make(optimizer)
    for _ in range(before):
        optimizer.step()
        scheduler.step()
    with av.record(net, optimizer) as recording:
        for _ in range(2):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
    said = [each.get("horizon") for each in details(recording.ledger, "schedule")]
    assert said == [None if before else length, None]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.full((3,), float(n))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.full((3,), float(n)) for n in range(5))


def events_of(ledger: Any) -> list[tuple[str, int]]:
    return [(each["what"], each["loader"]) for each in details(ledger, "loader")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_says_where_it_begins_and_ends(workers: int) -> None:
    net, how = model(), {"num_workers": workers, "persistent_workers": workers > 0}
    loader, other = DataLoader(Rows(), batch_size=4, **how), DataLoader(Rows(), batch_size=4, drop_last=True)  # type: ignore[arg-type]
    given = []
    with av.record(net) as recording:
        for _ in range(2):
            given += [batch.shape[0] for batch in loader]
        next(iter(other))
        given += [batch.shape[0] for batch in other]
        given += [batch.shape[0] for batch in DataLoader(Rows(), batch_size=5)]  # held by its loop alone
    assert given == [4, 4, 2] * 2 + [4, 4] + [5, 5]
    assert events_of(recording.ledger) == [
        *[("begins", 0), ("ends", 0)] * 2,
        *[("begins", 1), ("begins", 1), ("ends", 1)],
        *[("begins", 2), ("ends", 2)],
    ]


def test_an_iterator_is_torchs_own() -> None:
    loader = DataLoader(Rows(), batch_size=4)
    bare = iter(loader)
    with av.record(model()):
        recorded = iter(loader)
        assert type(recorded) is type(bare)
        assert vars(recorded).keys() == vars(bare).keys()
        assert len(recorded) == len(bare) == 3
        assert pickle.loads(pickle.dumps(loader)).batch_size == 4
        with pytest.raises(NotImplementedError):
            pickle.dumps(recorded)


def test_a_stream_has_no_length_and_is_not_asked_for_one() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    with av.record(model()) as recording:
        assert len(list(loader)) == 3
    assert events_of(recording.ledger)[1] == ("ends", 0)
    assert loader._IterableDataset_len_called is None


class Drawing(torch.utils.data.Sampler[list[int]]):
    """Its length draws a random number, as some that group by length do."""

    def __len__(self) -> int:
        torch.rand(1)
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2], [3])


def test_a_sampler_of_the_users_is_not_asked() -> None:
    net, loader = model(), DataLoader(Rows(), batch_sampler=Drawing(), generator=torch.Generator())
    before = torch.get_rng_state()
    with av.record(net) as recording:
        given = [len(batch) for batch in loader]  # list(loader) would ask for its length itself
    assert given == [2, 1, 1]
    assert torch.equal(torch.get_rng_state(), before)
    assert events_of(recording.ledger) == [("begins", 0), ("ends", 0)]


def test_what_a_loader_raises_is_the_users() -> None:
    with av.record(model()) as recording, pytest.raises(ZeroDivisionError):
        list(DataLoader([1], collate_fn=lambda _: 1 / 0))  # type: ignore[arg-type]
    assert events_of(recording.ledger) == [("begins", 0)]
    assert recording.ledger.complete


def test_weights_of_small_parameters_are_kept_at_steps(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 50))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept: dict[str, list[Any]] = {"0.weight": [], "0.bias": [], "1.bias": []}
    with av.record(net, optimizer, path=tmp_path / "x.ledger") as recording:
        for n in range(700):  # more than one chunk
            if n == 300:
                net[0].bias.data = torch.tensor([5.0, 6.0])  # another storage
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, values in kept.items():
                values.append(net.get_parameter(name).detach().double().flatten().tolist())
    for ledger in (recording.ledger, av.load(tmp_path / "x.ledger")):
        steps = [event.index for event in ledger.of("step")]
        for name, values in kept.items():
            found = ledger.weights(name)
            assert found.shape[0] == len(ledger)
            assert np.array_equal(found[steps], np.array(values))
            assert np.isfinite(found[0]).all(), "where they began"
            assert np.isnan(np.delete(found, [0, *steps], axis=0)).all()
        assert ledger.weights("1.weight").size == 0


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def test_an_event_knows_the_lines_that_called_its_own() -> None:
    net = model()

    def generator() -> None:
        backward(net(torch.ones(1, 3)).mean())

    def discriminator() -> None:
        backward(net(torch.ones(1, 3)).mean())

    with av.record(net) as recording:
        for _ in range(2):
            generator()
            discriminator()
    events = recording.ledger.of("backward")
    inner = {event.frames[0] for event in events}
    assert inner == {(events[0].file, events[0].line, "loss.backward()")}
    callers = [event.frames[1][1] for event in events]
    assert callers[0] == callers[2] != callers[1] == callers[3]
    assert [event.frames[2] for event in events[:2]] != [event.frames[2] for event in events[1:3]]
    assert {len(event.frames) for event in events} <= {3, 4}
    assert {event.via for event in events} == {""}


def test_a_library_between_names_its_own_line_and_the_event_the_users() -> None:
    space: dict[str, Any] = {"turns": iter((0, 0, 1, 1, 0))}
    for name, text in {
        "helper/__init__.py": "def step(loss):\n    loss.backward()\n",
        "trainer/loop.py": "def backward(loss):\n    run(loss)\n"
        "def run(loss):\n    if next(turns):\n        step(loss)\n    else:\n        step(loss)\n",
    }.items():
        exec(compile(text, str(Path(site.getsitepackages()[0]) / name), "exec"), space)
    library, net = types.SimpleNamespace(backward=space["backward"]), model()
    with av.record(net) as recording:
        for _ in range(5):
            library.backward(net(torch.ones(1, 3)).mean())
    assert [event.via for event in recording.ledger] == [f"trainer/loop.py:{line}" for line in (7, 7, 5, 5, 7)]
    assert {event.frames[0][2] for event in recording.ledger} == {"library.backward(net(torch.ones(1, 3)).mean())"}
    assert {event.label for event in recording.ledger} == {"net(torch.ones(1, 3)).mean()"}


@pytest.mark.parametrize(("module", "via"), [("accelerate.loop", "accelerate/loop.py:2"), ("my.loop", "")])
def test_a_framework_is_a_library_wherever_it_is(module: str, via: str, tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": module}
    exec(compile("def backward(loss):\n    loss.backward()\n", str(tmp_path / "loop.py"), "exec"), space)
    with av.record(net := model()) as recording:
        space["backward"](net(torch.ones(1, 3)).mean())
    (event,) = recording.ledger
    assert event.via == via and event.file.endswith(Path(__file__).name) is bool(via)


def test_a_ledger_is_the_same_from_memory_from_its_file_and_saved_again(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with av.record(net, optimizer, path=tmp_path / "x.ledger") as recording:
        for x in DataLoader(Rows(), batch_size=4):
            (net(x).square().mean() / 3).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    ledger, read = recording.ledger, av.load(tmp_path / "x.ledger")
    read.save(tmp_path / "again.ledger")
    for other in (read, av.load(tmp_path / "again.ledger")):
        assert ([*other.events], other.meta) == ([*ledger.events], ledger.meta)
        assert np.array_equal(other.weights("bias"), ledger.weights("bias"), equal_nan=True)
    assert [*Events.of([*ledger.events])] == [*ledger.events]
