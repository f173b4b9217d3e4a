"""What the CUDA allocator has given out, read from the counters that it keeps on the host."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from accumviz.instruments.held import FREE, SHARE

_UNKNOWN = float("nan")


class Allocated:
    """Bytes allocated on a recording's devices, after an event and at most since the one before.

    `torch.cuda.memory_stats` copies counters that the allocator keeps on the host: nothing waits
    for a device. Only the user resets its peak, so a peak is known where it moved.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted, self.devices = wanted, list[int]()
        self._peaks: dict[int, int] = {}
        self._spent, self._start = 0.0, time.perf_counter()

    def open(self, devices: Iterable[torch.device]) -> None:
        """Begin with what the allocator says now."""
        if self._wanted is not False:
            self.devices = sorted(device.index or 0 for device in devices if device.type == "cuda")
        self._peaks = {device: _counters(device)[1] for device in self.devices}

    def after(self) -> tuple[float, float]:
        """Bytes allocated now, and the new maximum if there was one since the last call; NaN where not known."""
        if not self.devices:
            return _UNKNOWN, _UNKNOWN
        now = time.perf_counter()
        if self._wanted is None and self._spent > FREE + SHARE * (now - self._start):
            return _UNKNOWN, _UNKNOWN
        allocated, peak = 0, _UNKNOWN
        for device in self.devices:
            current, most = _counters(device)
            allocated += current
            if most != self._peaks[device] and len(self.devices) == 1:
                peak = float(most)
            self._peaks[device] = most
        self._spent += time.perf_counter() - now
        return float(allocated), peak


def _counters(device: int) -> tuple[int, int]:
    """Bytes allocated, and the most since the process began or the user reset the peak."""
    found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return found.get("current", 0), found.get("peak", 0)
