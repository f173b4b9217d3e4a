"""Which rank this process is, and where its ledgers go."""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

# A rank that `distribute` started keeps its ledgers here, and its open recordings can be written out.
_folder: Path | None = None
_recordings: weakref.WeakSet[Any] = weakref.WeakSet()


def where() -> tuple[int, int] | None:
    """Return this process's rank and how many there are; None when it is no rank of anything."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def collect_in(folder: Path) -> None:
    """Keep the ledgers of this process in a folder, and list those that go elsewhere."""
    global _folder  # noqa: PLW0603 - a process is one rank, once
    _folder = folder


def ledger_path(path: str | Path | None) -> str | Path | None:
    """Return where this process writes its ledger: each rank has a file of its own."""
    here = where()
    if here is None:
        return path
    if path is not None:
        path = Path(path)
        path = path.with_name(f"{path.stem}.rank{here[0]}{path.suffix}")
    if _folder is None:
        return path
    if path is None:
        path = _folder / f"rank{here[0]}.{time.monotonic_ns()}.ledger"
    with (_folder / f"rank{here[0]}.ledgers").open("a") as listed:
        listed.write(json.dumps(str(path.absolute())) + "\n")
    return path


def opened(recording: Any) -> None:
    """Remember a recording, to write it out when this rank is stopped."""
    if _folder is not None:
        _recordings.add(recording)


def write_out() -> None:
    """Write out what open recordings hold, before this process is ended."""
    for recording in list(_recordings):
        with contextlib.suppress(Exception):
            recording.write_out()
