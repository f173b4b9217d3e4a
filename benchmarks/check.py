"""How fast files are judged: each in a process that does nothing else, which imports no torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._repeated import recorded, repeated, written
from benchmarks._turns import Row, row

# VmHWM and not ru_maxrss, which a process takes over from the one that started it.
_JUDGE = """
import contextlib, io, pathlib, re, sys, time
from accumviz.cli import main
import accumviz.checks.check, accumviz.ledger.ledger
with contextlib.redirect_stdout(io.StringIO()):
    if sys.argv[1] == "read":
        ledger = accumviz.ledger.ledger.load(sys.argv[2])
        start = time.process_time()
        accumviz.checks.check.check(ledger)
    else:
        start = time.process_time()
        main(["check", *sys.argv[2:]])
spent = time.process_time() - start
print(spent, re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


def missing() -> str:
    """What this machine lacks."""
    return "" if Path("/proc/self/status").exists() else "it reads /proc/self/status, which only Linux has"


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` judges a tenth of the events and of the ranks."""
    events, ranks, each = (10_000, 6, 1_000) if quick else (100_000, 64, 10_000)
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one.ledger"
        ledger = recorded()
        repeated(ledger, events).save(one)
        alone = min(_judged("read", one)[0] for _ in range(1 if quick else 3))
        spent, most = _judged("check", *written(Path(folder), ranks, each))
    what = f"{events:,} events × {len(ledger.parameters)}"
    files = f"{ranks} ranks' files of {each:,} events"
    return [
        row(f"check: {what} parameters, process time", alone, "s", 2.0),
        row(f"check: {files}, process time", spent, "s", 10.0),
        row(f"check: {files}, all memory at its peak", most, "MB", 500.0),
    ]


def _judged(how: str, *files: Path) -> tuple[float, float]:
    """Seconds of process time, and megabytes at the peak."""
    asked = [sys.executable, "-c", _JUDGE, how, *map(str, files)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    spent, most = done.stdout.split()
    return float(spent), int(most) / 1000
