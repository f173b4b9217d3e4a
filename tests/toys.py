"""Ledgers and graphs written by hand that the tests of the player as data and in a browser share."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accumviz.graph.graph import Edge, Graph, Node, Saved
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.views.layout import Gradient, Part

W = Parameter("w", (1,), optimizers=(0,))
CODE = "for sample in x:\n    loss = f(sample)  # one\n    loss.backward()\noptimizer.step()\noptimizer.zero_grad()\n"


def backward(contribution: float, grad: float, **more: Any) -> dict[str, Any]:
    """What one backward adds to `w`, and what is in its `.grad` then."""
    return {"kind": "backward", "label": "loss", "contribution": {"w": contribution}, "grad": {"w": grad}} | more


def synced(total: float, op: str = "all-reduce") -> dict[str, Any]:
    """What is in the `.grad` of `w` after ranks have averaged it."""
    return {"kind": "sync", "within": "backward", "details": {"op": op, "bytes": 4, "ranks": 2}, "grad": {"w": total}}


def ranks(*rows: list[dict[str, Any]]) -> Ledger:
    """The ledger of so many ranks, from what happened on each."""
    return Ledger.merge([Ledger.build([W], own, meta={"rank": rank}) for rank, own in enumerate(rows)])


def _saving(saved: float, **more: Any) -> dict[str, Any]:
    return {"file": "a.py", "line": 3, "saved_before": saved, "saved_after": 0.0} | more


ROWS: list[dict[str, Any]] = [
    backward(-16, -16, **_saving(2e4, loss=16.0)),
    backward(-4, -20, **_saving(20.0, loss=1.0)),
    {"kind": "step", "file": "a.py", "line": 4, "details": {"optimizer": "SGD"}, "grad": {"w": -20}},
    {"kind": "zero_grad", "file": "a.py", "line": 5},
]
EVIL = '</script><script>window.ran=1</script>"\'<img src=x onerror="window.ran=2">\u202eabc'


def toy(**changes: Any) -> Ledger:
    return Ledger.build([W], ROWS, sources={"a.py": CODE}, **changes)


def run(ledger: Ledger, graphs: dict[int, Graph]) -> Any:
    """A recording, as far as views ask for one."""
    return SimpleNamespace(ledger=ledger, graphs=graphs)


def window(
    parts: list[float], *, after: float | None = None, zero: int = 0, code: str = CODE, label: str = "loss"
) -> Ledger:
    """Backwards of these contributions, and a step: as `code` has them, on the line of `backward` and on the next one.

    With `after`, the weight is 1 at first, and that after the step; with `zero`, a zeroing is on that line.
    """
    place: dict[str, Any] = {"file": "a.py", "line": code[: code.index("backward()")].count("\n") + 1}
    rows = [backward(part, sum(parts[: n + 1]), label=label, **place) for n, part in enumerate(parts)]
    rows.append(place | {"kind": "step", "line": place["line"] + 1, "grad": {"w": sum(parts)}})
    if after is not None:
        rows[0]["weights"], rows[-1]["weights"] = {"w": 1.0}, {"w": after}
    if zero:
        rows.append(place | {"kind": "zero_grad", "line": zero})
    return Ledger.build([W], rows, sources={"a.py": code})


def chain(grad: float = -16.0, **meta: Any) -> Graph:
    kept = (Saved("_saved_self", (1,), "float32", 4, 1),)
    return Graph(
        (
            Node(0, "PowBackward0", "loss", shape=(1,), saved=kept, value=[16.0], grad=[1.0]),
            Node(1, "SubBackward0", shape=(1,), value=[4.0], grad=[8.0]),
            Node(2, "AccumulateGrad", "w", shape=(1,), value=[1.0], grad=[grad]),
        ),
        (Edge(0, 1), Edge(1, 2)),
        (0,),
        **meta,
    )


def hostile() -> tuple[Ledger, Graph]:
    """A ledger and a graph all of whose texts are a script."""
    row = {"kind": "backward", "label": EVIL, "file": EVIL, "line": 1, "source": EVIL}
    rows = [row | {"contribution": {EVIL: 1}, "grad": {EVIL: 1}}, {"kind": EVIL, "label": EVIL}]
    graph = Graph((Node(0, EVIL, EVIL, EVIL), Node(1, "AccumulateGrad", EVIL)), (Edge(0, 1),), (0,), notes=[EVIL])
    return Ledger.build([Parameter(EVIL, (1,))], rows, sources={EVIL: EVIL}), graph


def large(events: int, parameters: int, labels: tuple[str, ...] = ("loss",)) -> Ledger:
    """Windows of four backwards, a step and a zero_grad."""
    rng = np.random.default_rng(0)
    kinds = ["backward"] * 4 + ["step", "zero_grad"]
    said = [labels[e % len(labels)] if e % 6 < 4 else "AdamW" for e in range(events)]
    rows = tuple(Event(e, kinds[e % 6], said[e], "a.py", 3) for e in range(events))
    backward, held = (np.array([e % 6 < most for e in range(events)])[:, None] for most in (4, 5))
    added = np.where(backward, np.exp(rng.normal(-2, 1, (events, parameters))), np.nan)
    grad = np.where(held, np.exp(rng.normal(-1, 1, (events, parameters))), np.nan)
    state = np.where(backward, CONTRIBUTED, 0) + np.where(held, PRESENT, 0) + np.zeros((1, parameters), int)
    names = tuple(Parameter(f"layers.{p // 12}.{p % 12}.weight", (8, 8), optimizers=(0,)) for p in range(parameters))
    return Ledger(names, rows, added, grad, state, sources={"a.py": CODE})


def segments(ledger: Ledger, parameter: int, events: Iterable[int]) -> list[list[Part]]:
    """The parts of `.grad` after each of these events."""
    gradient = Gradient(ledger, parameter)
    return [gradient.parts(e) for e in events]
