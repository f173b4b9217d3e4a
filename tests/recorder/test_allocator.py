"""The figures of the CUDA allocator, from counters that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accumviz.recorder.memory import Allocated

NAN = float("nan")


class Counters:
    """What `torch.cuda.memory_stats_as_nested_dict` says, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.peak, self.asked = 0, 0, 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def _stats(self, device: int) -> dict[str, Any]:
        self.asked += 1
        return {"allocated_bytes": {"all": {"current": self.current, "peak": self.peak}}}

    def _reset(self, *_: Any) -> None:
        raise AssertionError("the peak is the user's to reset")

    def allocate(self, most: int, left: int) -> None:
        self.peak = max(self.peak, most)
        self.current = left


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    return Counters(monkeypatch)


def noted(allocated: Allocated) -> tuple[float, float]:
    row = SimpleNamespace(allocated=NAN, peak=NAN)
    allocated.note(row)
    return row.allocated, row.peak


def test_a_peak_is_told_where_it_is_a_new_maximum_and_nowhere_else(counters: Counters) -> None:
    counters.allocate(50, 10)
    allocated = Allocated(wanted=True)
    allocated.open([torch.device("cuda", 0)])
    found = []
    for most, left in ((40, 20), (90, 30), (80, 40), (91, 5)):
        counters.allocate(most, left)
        found.append(noted(allocated))
    np.testing.assert_array_equal(found, [(20, NAN), (30, 90), (40, NAN), (5, 91)])


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [(False, ["cuda:0"]), (True, ["cpu"]), (None, ["cpu"]), (True, ["cuda:0", "cuda:1"])],
    ids=str,
)
def test_nobody_is_asked_where_nobody_wants_to_know_and_of_several_devices(
    counters: Counters, wanted: bool | None, devices: list[str]
) -> None:
    allocated = Allocated(wanted)
    allocated.open(map(torch.device, devices))
    assert np.isnan(noted(allocated)).all()
    assert counters.asked == 0
