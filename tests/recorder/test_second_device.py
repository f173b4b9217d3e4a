"""Recording on a device whose backward runs on the engine's thread and whose numbers come late, in a process apart."""

import inspect
import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.recorder import on_second_device as checks

# The device can be registered once in a process, before its first backward.
_RUN = """
import json, traceback
import torch
from tests.recorder import second_device
torch.set_num_threads(1)  # the operations are tiny
second_device.register()
from tests.recorder import on_second_device, test_second_device
failed = {}
for name in test_second_device.NAMES:
    try:
        getattr(on_second_device, name)()
    except BaseException:
        failed[name] = traceback.format_exc()
print("RESULT" + json.dumps(failed))
"""
NAMES = [
    name
    for name, value in vars(checks).items()
    if inspect.isfunction(value) and value.__module__ == checks.__name__ and not name.startswith("_")
]


@cache
def _failures() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told, f"the process ended with {done.returncode}:\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(told[0].removeprefix("RESULT"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_a_second_device(name: str) -> None:
    assert name not in _failures(), _failures()[name]
