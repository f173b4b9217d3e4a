"""A loop with lines that can be moved: its choices, the source of each arrangement, and how one is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from accumviz import arguments
from accumviz.checks.report import Report
from accumviz.ledger.ledger import Ledger

NOWHERE = "nowhere"
# So many choices may differ from the start at once.
REACH = 2


class LoopLine(NamedTuple):
    """A line of the loop, with what the reader may move or change in it (`role`); or, without text, a place for one.

    A place is that of the line `role` once `value` is chosen.
    """

    depth: int
    text: str
    role: str = ""
    value: str = ""


@dataclass(frozen=True)
class Other:
    """What a choice takes beside its list: `take` checks a value, `read` makes one of what was typed."""

    take: Callable[[Any], Any]
    read: Callable[[str], Any]
    wanted: str
    example: str


@dataclass(frozen=True)
class Axis:
    """One choice: its name, what it is called, and its values with what they are called; a `line` can be moved."""

    name: str
    title: str
    values: Mapping[Any, str]
    line: str = ""
    other: Other | None = None


def _nothing(_ledger: Ledger, _report: Report) -> str:
    return ""


@dataclass(frozen=True)
class Loop:
    """A loop as a lab needs it.

    `right` has a value for each choice, and makes a loop without a mistake. `rows` writes the loop of a
    choice from top to bottom, lines and places. `begin` opens nothing yet: it returns a recording, and
    the names with which the text runs. `loss` is what lies below the path of the weights, if anything,
    and `remark` says of a recording what `check` cannot.
    """

    axes: tuple[Axis, ...]
    right: Mapping[str, Any]
    rows: Callable[[Mapping[str, Any]], Iterable[LoopLine]]
    begin: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]
    loss: Callable[..., float] | None = None
    remark: Callable[[Ledger, Report], str] = _nothing

    def axis(self, name: str) -> Axis:
        """One of the choices."""
        return next(axis for axis in self.axes if axis.name == name)

    def text(self, choice: Mapping[str, Any]) -> str:
        """The source of the loop of a choice."""
        return "".join(
            f"{'    ' * row.depth}{row.text}\n" for row in self.rows(choice) if row.text
        )

    def checked(
        self, choice: Mapping[str, Any] | None, argument: str = "start"
    ) -> dict[str, Any]:
        """Complete a choice from one that names what differs from the right loop.

        Values outside the lists are taken where they mean something. Raises `TypeError` and
        `ValueError` for others.
        """
        if choice is not None and not isinstance(choice, Mapping):
            raise TypeError(
                f"{argument}={choice!r:.80}; expected choices by name, as in {argument}={{'step': 'epoch'}}"
            )
        whole = dict(self.right)
        for name, value in (choice or {}).items():
            if name not in whole:
                raise ValueError(
                    f"{argument} names {name!r:.80}; the choices are {', '.join(whole)}"
                )
            axis = self.axis(name)
            if axis.other is not None and not isinstance(value, str):
                whole[name] = axis.other.take(value)
            elif isinstance(value, str) and value in axis.values:
                whole[name] = value
            else:
                offered = ", ".join(map(repr, axis.values))
                raise ValueError(
                    f"{argument} has {name}={value!r:.80}; expected one of {offered}"
                )
        return whole

    def read(self, told: Mapping[str, str], argument: str = "this") -> dict[str, Any]:
        """Complete a choice from values as a page has them: texts by name; raises as `checked` does."""
        choice: dict[str, Any] = {}
        for name, text in told.items():
            if name not in self.right:
                raise ValueError(
                    f"{name!r:.80} is no choice; expected {', '.join(self.right)}"
                )
            axis = self.axis(name)
            listed = {written(value): value for value in axis.values}
            if text in listed or axis.other is None:
                choice[name] = listed.get(text, text)
                continue
            try:
                choice[name] = axis.other.read(text)
            except ValueError:
                raise ValueError(
                    f"{name}={text!r:.40}; expected {axis.other.wanted}"
                ) from None
        return self.checked(choice, argument)

    def axes_from(self, start: Mapping[str, Any]) -> tuple[Axis, ...]:
        """Give the choices, the values of the start among them."""
        found = []
        for axis in self.axes:
            own = start[axis.name]
            others = dict(axis.values) if len(axis.values) > 1 else {}
            found.append(
                axis
                if own in axis.values
                else replace(axis, values={own: written(own)} | others)
            )
        return tuple(found)

    def near(
        self, start: Mapping[str, Any], reach: int = REACH
    ) -> Iterator[dict[str, Any]]:
        """Every choice that differs from the start in at most `reach` places, the start first."""
        offered = {
            axis.name: [v for v in axis.values if v != start[axis.name]]
            for axis in self.axes_from(start)
        }
        for size in range(reach + 1):
            for names in combinations(offered, size):
                for values in product(*(offered[name] for name in names)):
                    yield {**start, **dict(zip(names, values, strict=True))}


def movable(axis: Axis, choice: Mapping[str, Any], where: str, depth: int) -> LoopLine:
    """The line of this choice where it was put; elsewhere, a place for it."""
    return LoopLine(
        depth, axis.line if choice[axis.name] == where else "", axis.name, where
    )


def written(value: Any) -> str:
    """How a value is written, one that is in no list, too.

    >>> written((7, 7)), written(0.1)
    ('7, 7', '0.1')
    """
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _k(value: Any) -> int:
    return arguments.whole("k", value, "how many micro-batches a window has", least=1)


def _lr(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= 10
    ):
        raise ValueError(
            f"lr={value!r:.80}; expected a learning rate above 0, at most 10, as in 0.05"
        )
    return float(value)


K = Other(_k, int, "a whole number", "5")
LEARNING_RATE = Other(_lr, float, "a number", "0.03")
