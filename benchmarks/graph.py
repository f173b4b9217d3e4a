"""What looking at a graph costs, each against what a user would do instead, inside one run."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accumviz.graph.trace import trace
from accumviz.recorder.memory import nodes_below, saved_storages
from accumviz.views.graph import graph_html, graphviz


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds.

    `quick` draws and traces a tenth of the nodes; its ratios are not those the bars are about.
    """
    return [*_drawing(8 if quick else 74), *_chain(10_000 if quick else 100_000), *_saved()]


def _drawing(layers: int) -> list[dict[str, Any]]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), layers, enable_nested_tensor=False)
    given = torch.randn(2, 2, 16)

    def loss() -> torch.Tensor:
        return model(given).mean()

    def ours() -> None:
        graph_html(trace(loss()))

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchviz imports distutils
            import torchviz
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(200_000)
        try:
            graphviz(torchviz.make_dot(loss()).source, "svg")
        finally:
            sys.setrecursionlimit(limit)

    near, whole = _best(ours, 3), _best(theirs, 1)
    nodes = len(trace(loss()))
    return [
        _row(f"draw {nodes:,} nodes, those nearest the loss", near, "s"),
        _row(f"draw {nodes:,} nodes, torchviz and Graphviz", whole, "s"),
        _row("torchviz over ours", whole / near, "×", ">= 15", whole / near >= 15),
    ]


def _chain(length: int) -> list[dict[str, Any]]:
    total = torch.ones(1, requires_grad=True)
    for _ in range(length):
        total = total + 1
    start = time.perf_counter()
    graph = trace(total)
    seconds = time.perf_counter() - start
    whole = len(graph) == length + 1
    return [_row(f"trace a chain of {length:,} operations", seconds, "s", "no recursion error", whole)]


def _saved() -> list[dict[str, Any]]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 12, enable_nested_tensor=False)
    loss = model(torch.randn(8, 2, 64)).mean()
    nodes = len(trace(loss))
    seconds = _best(lambda: saved_storages(nodes_below([loss.grad_fn])), 20)
    return [_row(f"saved_bytes over {nodes} nodes", 1e6 * seconds / nodes, "µs per node")]


def _best(call: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _row(name: str, value: float, unit: str, bar: str = "", holds: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": holds}


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(json.dumps(row, ensure_ascii=False))
