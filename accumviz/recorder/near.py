"""Gradients read where they lie in memory, by numpy: torch takes twice as many instructions, and is less exact."""

from __future__ import annotations

import ctypes
import sys
from math import sqrt
from typing import Any

import numpy as np
import torch

# What numpy's function is inside: finding out that no argument is of another library costs a fifth of the call.
# `dot` costs less, and warns of what is too large.
vdot = getattr(np.vdot, "_implementation", np.vdot)
_FLOAT, _STRIDED, _TENSOR = torch.float32, torch.strided, torch.Tensor
# All of memory, but for its beginning, which nobody has: from 0, numpy would take memory of its own.
_FIRST, _LAST = 1 << 12, sys.maxsize >> 1
_everything: Any = (ctypes.c_float * ((_LAST - _FIRST) // 4)).from_address(_FIRST)
_memory: np.ndarray = np.frombuffer(_everything, np.float32)
# So many places in memory are known of tensors of one size: an allocator mostly gives the same ones again.
_PLACES = 1024


def length(tensor: Any, size: int) -> float | None:
    """The 2-norm of a tensor of so many elements; None of one that has others, or cannot be read where it lies.

    >>> length(torch.tensor([3.0, 4.0]), 2), length(torch.ones(2, dtype=torch.float64), 2), length(None, 2)
    (5.0, None, None)
    """
    if (
        type(tensor) is not _TENSOR
        or not tensor.is_cpu
        or tensor.dtype is not _FLOAT
        or tensor.layout is not _STRIDED
    ):
        return None
    if tensor.is_contiguous() and tensor.numel() == size:
        place = tensor.data_ptr()
        if _FIRST <= place < _LAST and not place & 3:
            start = (place - _FIRST) >> 2
            # Made anew each time: what was kept since the last step is no longer in the cache.
            array = _memory[start : start + size]
            return sqrt(vdot(array, array))
    return None


def array_at(place: int, size: int, known: dict[int, np.ndarray]) -> np.ndarray:
    """An array over so many float32 at an address, put into those that are known.

    It holds no tensor, and outlives those that were there: it may be read only while a living one of
    that size says that it is at this address.
    """
    if len(known) > _PLACES:
        known.clear()
    memory: Any = (ctypes.c_float * size).from_address(place)
    array: np.ndarray = np.frombuffer(memory, np.float32)
    known[place] = array
    return array
