"""Store a graph as one chunk of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.graph.graph import Graph
from accumviz.ledger.container import LedgerFileError, Reader
from accumviz.ledger.ledger import Ledger

__all__ = ["LedgerFileError", "load"]


def load(path: str | Path, *, repair: bool = False) -> Any:
    """Read a ledger or a graph from the file that `save` or `record(..., path=...)` wrote.

    Opening a file runs nothing that is in it, and takes at most 256 MiB and 128 times its size of
    memory. A process that was killed leaves what it had recorded, and `ledger.complete` is False.
    Raises `LedgerFileError` for a file that is neither, is newer than this accumviz, or is damaged;
    `repair=True` then gives what stands before the damage.

    >>> import os, tempfile, accumviz as av
    >>> path = os.path.join(tempfile.mkdtemp(), "run.ledger")
    >>> av.Ledger.build([], [dict(kind="backward", label="loss")]).save(path)
    >>> av.load(path).of("backward")[0].label
    'loss'
    """
    arguments.flag("repair", repair)
    reader = Reader(path, repair=repair)
    kinds = {"ledger": Ledger.read, "graph": Graph.read}
    if reader.kind not in kinds:
        raise LedgerFileError(
            f"{str(reader.path)!r} holds a {reader.kind!r}; expected a ledger or a graph"
        )
    return kinds[reader.kind](reader)
