"""The figures of the CUDA allocator, from counters that the test moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accumviz.recorder.memory import Allocated

NAN = float("nan")


class Counters:
    """What `torch.cuda.memory_stats_as_nested_dict` says of each device, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.peak, self.asked = {0: 0, 1: 0}, {0: 0, 1: 0}, 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def _stats(self, device: int) -> dict[str, Any]:
        self.asked += 1
        return {"allocated_bytes": {"all": {"current": self.current[device], "peak": self.peak[device]}}}

    def _reset(self, *_: Any) -> None:
        raise AssertionError("the peak is the user's to reset")

    def allocate(self, most: int, left: int, device: int = 0) -> None:
        self.peak[device] = max(self.peak[device], most)
        self.current[device] = left


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    return Counters(monkeypatch)


def test_a_peak_is_told_where_it_is_a_new_maximum_and_nowhere_else(counters: Counters) -> None:
    counters.allocate(50, 10)
    allocated = Allocated(wanted=True)
    allocated.open([torch.device("cuda", 0)])
    found = []
    for most, left in ((40, 20), (90, 30), (80, 40), (91, 5)):
        counters.allocate(most, left)
        found.append(allocated.after())
    np.testing.assert_array_equal(found, [(20, NAN), (30, 90), (40, NAN), (5, 91)])


@pytest.mark.parametrize(("wanted", "device"), [(False, "cuda:0"), (True, "cpu"), (None, "cpu")])
def test_nobody_is_asked_where_nobody_wants_to_know(counters: Counters, wanted: bool | None, device: str) -> None:
    allocated = Allocated(wanted)
    allocated.open([torch.device(device)])
    assert np.isnan(allocated.after()).all()
    assert counters.asked == 0
