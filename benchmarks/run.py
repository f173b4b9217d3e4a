"""What `accumviz run` costs a script that knows nothing of it: two processes, of which one trains at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks._turns import Row, row


def missing() -> str:
    """What this machine lacks."""
    return "" if Path("/proc/self/status").exists() else "it reads /proc/self/status, which only Linux has"


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` takes a tenth of the steps."""
    steps = 50 if quick else 500
    bare, recorded, judged = _in_turns(steps, [], ["accumviz", "run", "--out"], ["accumviz", "run", "--check", "--out"])
    name = f"accumviz run: {steps} steps of the transformer"
    return [
        row(f"{name}: python, process time", bare["seconds"], "s"),
        row(f"{name}: process time", recorded["seconds"] / bare["seconds"], "×", 1.05),
        row(f"{name}: with --check, process time", judged["seconds"] / bare["seconds"], "×", 1.05),
        row(f"{name}: memory that it adds, at its peak", judged["most"] - bare["most"], "MB", 100.0),
    ]


def _in_turns(steps: int, *commands: list[str]) -> list[dict[str, float]]:
    """What each process took from its start to its end; whatever disturbs the machine disturbs all of them.

    `commands` are what stands between `python -m` and the script.
    """
    trained = ["benchmarks._alone", "transformer", str(steps), "10"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        running = []
        for n, command in enumerate(commands):
            asked = [*command, str(Path(folder) / f"{n}.ledger"), "-m"] if command else []
            started = subprocess.Popen(
                [sys.executable, "-m", *asked, *trained],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            running.append(stack.enter_context(started))
        said = [process.stdout.readline() for process in running if process.stdout]
        while said[0].startswith("next"):
            for n, process in enumerate(running):
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                said[n] = process.stdout.readline()
        return [json.loads(line) for line in said]
