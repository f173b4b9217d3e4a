"""A script that trains, and knows nothing of accumviz: `python -m benchmarks._alone transformer 500`.

It trains so many steps each time that a line comes on stdin, and answers with a line; the last one says what it took.
"""

from __future__ import annotations

import atexit
import json
import re
import sys
import time
from pathlib import Path

import torch

from benchmarks.record import mlp, transformer


def told() -> None:
    """Seconds of process time and megabytes at the peak, from the start of Python to after what others left to do."""
    most = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert most is not None
    print(json.dumps({"seconds": time.process_time(), "most": int(most[1]) / 1000}), flush=True)


def main(which: str, steps: int, at_once: int) -> None:
    torch.set_num_threads(1)
    loop = transformer(128, 576, (8, 32)) if which == "transformer" else mlp(5e-4)
    for done in range(steps):
        if done % at_once == 0:
            print("next", flush=True)
            sys.stdin.readline()
        loop[2]()


if __name__ == "__main__":
    atexit.register(told)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
