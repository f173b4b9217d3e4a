"""The memory that a long recording takes, with a path: each case in a process of its own (Linux)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._turns import Row, row
from benchmarks.ledger_file import opened

PARAMETERS, SIZE = 150, 65  # more elements than are kept one by one
# What allocators may still take after 100,000 events, in MB, if memory is to count as flat.
FLAT = 4.0
# Where an event takes longer than it should, so many seconds are enough, and the rows say how far it came.
LONGEST = 300.0


def missing() -> str:
    """What this machine lacks."""
    return "" if Path("/proc/self/status").exists() else "it reads /proc/self/status, which only Linux has"


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` records a hundredth of the events."""
    some, many = (1_000, 10_000) if quick else (100_000, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.ledger"
        measured = _in_a_process(path, some, some, read=True)
        spent, added = opened(path)
        path.unlink()
        longer = _in_a_process(path, some, many, read=False)
        size, done = path.stat().st_size, int(longer["events"])
    graphs = _in_a_process(None, 0, 300, read=False)
    what = f"{some:,} events × {PARAMETERS}"
    return [
        row(f"memory: {what} with a path", longer["some"], "MB", 40.0),
        row(f"memory: from there to {done:,} events", longer["many"] - longer["some"], "MB", FLAT),
        row("memory: file of these, bytes per event and parameter", size / done / PARAMETERS, "B"),
        row("memory: an event, training included", 1e6 * longer["seconds"] / done, "µs"),
        row(f"memory: .ledger of {what}, process time", measured["read seconds"], "s", 2.0),
        row("memory: .ledger, at its peak", measured["read"], "MB", 300.0),
        row(f"memory: opening the file of {what}, process time", spent, "s", 2.0),
        row("memory: opening the file, at its peak", added, "MB", 300.0),
        row(f"memory: 100 graphs of {PARAMETERS} leaves with graphs=True", graphs["many"], "MB"),
    ]


def _in_a_process(path: Path | None, some: int, many: int, *, read: bool) -> dict[str, float]:
    asked = [str(path or ""), str(some), str(many), str(int(read))]
    here = [sys.executable, "-m", "benchmarks.memory", *asked]
    done = subprocess.run(here, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _kilobytes(what: str) -> int:
    found = re.search(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def _loop() -> tuple[Any, Any, Iterator[None]]:
    """As cheap a step of 150 parameters as there is: the gradients are at hand, and the step changes nothing."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(SIZE)) for _ in range(PARAMETERS)])
    parameters, unit = list(model), torch.randn(PARAMETERS, SIZE)
    factor = torch.ones(PARAMETERS, 1)

    class Still(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            pass

    optimizer = Still(parameters, {})

    def steps() -> Iterator[None]:
        while True:
            optimizer.zero_grad()
            # Norms that no file can compress away.
            (torch.stack(parameters) * (unit * factor.exponential_())).sum().backward()
            optimizer.step()
            yield

    return model, optimizer, steps()


def _measure(path: str, some: int, many: int, read: bool) -> dict[str, float]:
    """Megabytes that were added to the resident ones, at most until so many events, and at most until the end."""
    import torch

    import accumviz as av
    import accumviz.ledger.file

    torch.set_num_threads(1)
    model, optimizer, steps = _loop()
    for _ in range(200):
        next(steps)
    with av.record(model, optimizer):  # what is imported on first use is not memory that events take
        for _ in range(200):
            next(steps)
    before, start = _kilobytes("VmRSS"), time.process_time()
    found: dict[str, float] = {"some": 0.0, "many": 0.0}
    with av.record(model, optimizer, **({"path": path} if path else {"graphs": True})) as recording:
        last = many // 3
        for step in range(1, last + 1):
            next(steps)
            if step % 1_000 == 0 or step == last:
                added = (_kilobytes("VmRSS") - before) / 1000
                found["many"] = max(found["many"], added)
                if 3 * step <= some:
                    found["some"] = found["many"]
                elif time.process_time() - start > LONGEST:
                    break
        found["events"] = 3.0 * step
        found["seconds"] = time.process_time() - start
        if read:
            before, start = _kilobytes("VmRSS"), time.process_time()
            assert len(recording.ledger) == 3 * (many // 3)
            found["read seconds"] = time.process_time() - start
            # The peak is the process's: it is this read's as long as the loop before had less.
            found["read"] = (_kilobytes("VmHWM") - before) / 1000
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")))
