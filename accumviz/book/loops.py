"""An arrangement of a training loop's lines -> its source text, and the places where each of its lines could stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from accumviz import given

NOWHERE = "nowhere"
# Fourteen samples, in micro-batches of two, or of one to three: two windows of three, and one left over.
SIZES = {"equal": (2,) * 7, "unequal": (3, 1, 2, 2, 1, 2, 3)}
# So many choices may differ from the start at once.
REACH = 2


class Row(NamedTuple):
    """A line of the loop, with what the reader may move or change in it (`role`); or, without text, a place for one.

    A place is that of the line `role` once `value` is chosen.
    """

    depth: int
    text: str
    role: str = ""
    value: str = ""


@dataclass(frozen=True)
class Axis:
    """One choice: its name, what it is called, and its values with what they are called; a `line` can be moved."""

    name: str
    title: str
    values: Mapping[Any, str]
    line: str = ""


AXES = (
    Axis(
        "zero_grad",
        "zero_grad",
        {
            "epoch": "above the loop over micro-batches",
            "micro-batch": "first in every micro-batch",
            "backward": "below backward",
            "before": "above the step",
            "after": "below the step",
            NOWHERE: "nowhere",
        },
        "optimizer.zero_grad()",
    ),
    Axis(
        "step",
        "step",
        {"micro-batch": "in every micro-batch", "window": "after K micro-batches", "epoch": "after the loop"},
        "optimizer.step()",
    ),
    Axis(
        "clip",
        "clip",
        {"backward": "after every backward", "step": "above the step", NOWHERE: "nowhere"},
        "nn.utils.clip_grad_norm_(w, 4)",
    ),
    Axis(
        "divide",
        "each loss is divided by",
        {"window": "the window's length", "K": "K", "nothing": "nothing", "samples": "the window's samples"},
    ),
    Axis("k", "K", {3: "3", 2: "2", 1: "1"}),
    Axis("sizes", "micro-batches", {"equal": "equal", "unequal": "unequal"}),
    Axis("tail", "the last, shorter window", {"step": "gets a step", "carry": "is carried on", "drop": "is dropped"}),
    Axis("lr", "learning rate", {0.05: "0.05"}),
)
RIGHT: dict[str, Any] = {
    "zero_grad": "after",
    "step": "window",
    "clip": NOWHERE,
    "divide": "window",
    "k": 3,
    "sizes": "equal",
    "tail": "step",
    "lr": 0.05,
}
_WINDOW = {
    "window": "min(K, len(loader) - i // K * K)",
    "epoch": "len(loader)",
    "micro-batch": "1",
}
_SAMPLES = {"window": "sum(sizes[i // K * K :][:K])", "epoch": "sum(sizes)", "micro-batch": "len(x)"}


@dataclass(frozen=True)
class Arrangement:
    """Where the lines of a loop stand and what they say; `choice` has a value for each choice, and `lr`."""

    choice: Mapping[str, Any]
    rows: tuple[Row, ...] = field(default=())

    @property
    def text(self) -> str:
        """The source of the loop.

        >>> print(arranged(RIGHT | {"step": "epoch", "k": 2, "divide": "nothing"}).text)
        sizes = [2, 2, 2, 2, 2, 2, 2]
        loader = batches_of(sizes)
        for epoch in range(2):
            for x, y in loader:
                loss = (w * x - y).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        <BLANKLINE>
        """
        return "".join(f"{'    ' * row.depth}{row.text}\n" for row in self.rows if row.text)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples each micro-batch of an epoch has."""
        sizes = self.choice["sizes"]
        return SIZES[sizes] if isinstance(sizes, str) else tuple(sizes)


def arranged(choice: Mapping[str, Any]) -> Arrangement:
    """Write the loop of a choice."""
    return Arrangement(choice, tuple(_rows(choice)))


def checked(choice: Mapping[str, Any] | None, argument: str = "start") -> dict[str, Any]:
    """Complete a choice from one that names what differs from the right loop.

    Values outside the lists are taken where they mean something: another `k`, `lr`, or `sizes`
    that add up to fourteen samples. Raises `TypeError` and `ValueError` for others.

    >>> checked({"k": 5, "sizes": [7, 7]})["k"]
    5
    """
    if choice is not None and not isinstance(choice, Mapping):
        raise TypeError(f"{argument}={choice!r:.80}; expected choices by name, as in {argument}={{'step': 'epoch'}}")
    known = {axis.name: axis for axis in AXES}
    whole = dict(RIGHT)
    for name, value in (choice or {}).items():
        if name not in whole:
            raise ValueError(f"{argument} names {name!r:.80}; the choices are {', '.join(whole)}")
        if name == "k":
            whole[name] = given.whole("k", value, "how many micro-batches a window has", least=1)
        elif name == "lr":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 10:
                raise ValueError(f"lr={value!r:.80}; expected a learning rate above 0, at most 10, as in 0.05")
            whole[name] = float(value)
        elif name == "sizes" and not isinstance(value, str):
            whole[name] = _sizes(value)
        elif isinstance(value, str) and value in known[name].values:
            whole[name] = value
        else:
            offered = ", ".join(map(repr, known[name].values))
            raise ValueError(f"{argument} has {name}={value!r:.80}; expected one of {offered}")
    return whole


def _sizes(value: Any) -> tuple[int, ...]:
    whole = sum(SIZES["equal"])
    fits = isinstance(value, Iterable)
    sizes = tuple(value) if fits else ()
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise TypeError(f"sizes={value!r:.80}; expected 'equal', 'unequal', or numbers of samples, as in [4, 4, 6]")
    if sum(sizes) != whole:
        raise ValueError(f"sizes={value!r:.80} are {sum(sizes)} samples; there are {whole}: let them add up to {whole}")
    return sizes


def axes_from(start: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Give the choices, the values of the start among them."""
    found = []
    for axis in AXES:
        own, others = start[axis.name], {} if axis.name == "lr" else dict(axis.values)
        found.append(axis if own in axis.values else replace(axis, values={own: written(own)} | others))
    return tuple(found)


def written(value: Any) -> str:
    """How a value is written that is in no list.

    >>> written((7, 7)), written(0.1)
    ('7, 7', '0.1')
    """
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def near(start: Mapping[str, Any], reach: int = REACH) -> Iterator[dict[str, Any]]:
    """Every choice that differs from the start in at most `reach` places, the start first.

    >>> sum(1 for _ in near(RIGHT))
    137
    """
    offered = {axis.name: [v for v in axis.values if v != start[axis.name]] for axis in axes_from(start)}
    for size in range(reach + 1):
        for names in combinations(offered, size):
            for values in product(*(offered[name] for name in names)):
                yield {**start, **dict(zip(names, values, strict=True))}


def _rows(choice: Mapping[str, Any]) -> Iterator[Row]:
    """The loop from top to bottom, lines and places."""
    step, divide, tail = choice["step"], choice["divide"], choice["tail"]
    sizes = Arrangement(choice).sizes
    inside = step == "window"
    divisor = {"window": _WINDOW if tail == "step" else _WINDOW | {"window": "K"}, "samples": _SAMPLES}.get(divide)
    counted = inside or (divisor is not None and "i //" in divisor[step])
    if divide == "K" or inside:
        yield Row(0, f"K = {choice['k']}", "k")
    yield Row(0, f"sizes = [{', '.join(map(str, sizes))}]", "sizes")
    yield Row(0, "loader = batches_of(sizes)")
    yield Row(0, "for epoch in range(2):")
    yield _zero(choice, "epoch", 1)
    yield Row(1, "for i, (x, y) in enumerate(loader):" if counted else "for x, y in loader:")
    yield _zero(choice, "micro-batch", 2)
    if divisor is not None:
        yield Row(2, f"{divide} = {divisor[step]}", "divide")
    reduced = "sum" if divide == "samples" else "mean"
    by = "" if divide == "nothing" else f" / {divide}"
    yield Row(2, f"loss = (w * x - y).square().{reduced}(){by}", "divide")
    yield Row(2, "loss.backward()")
    yield _movable(choice, "clip", "backward", 2)
    if step != "micro-batch":
        yield _zero(choice, "backward", 2)
    yield from _step(choice, "micro-batch", 2)
    if inside:
        last = " or i + 1 == len(loader)" if tail == "step" else ""
        yield Row(2, f"if (i + 1) % K == 0{last}:", "tail")
    yield from _step(choice, "window", 3 if inside else 2)
    if inside and tail == "drop":
        yield Row(1, "optimizer.zero_grad()  # drops what is left", "tail")
    yield from _step(choice, "epoch", 1)


def _step(choice: Mapping[str, Any], where: str, depth: int) -> Iterator[Row]:
    """The step and what stands right above and below it; elsewhere, its place."""
    if choice["step"] != where:
        yield Row(depth, "", "step", where)
        return
    # Above a step in every micro-batch is below backward, too: the two are one place.
    above = "backward" if where == "micro-batch" and choice["zero_grad"] == "backward" else "before"
    yield _zero(choice, above, depth)
    yield _movable(choice, "clip", "step", depth)
    yield Row(depth, "optimizer.step()", "step", where)
    yield _zero(choice, "after", depth)


def _zero(choice: Mapping[str, Any], where: str, depth: int) -> Row:
    return _movable(choice, "zero_grad", where, depth)


def _movable(choice: Mapping[str, Any], role: str, where: str, depth: int) -> Row:
    """The line where it was put; elsewhere, a place for it."""
    line = next(axis.line for axis in AXES if axis.name == role)
    return Row(depth, line if choice[role] == where else "", role, where)
