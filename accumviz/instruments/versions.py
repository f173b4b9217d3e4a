"""The oldest torch on which a right loop reads right."""

from __future__ import annotations

import re

import torch

# Before 2.10 a SavedTensor does not show what it holds: a loss divided by K reads as an undivided one.
NEEDED = 2, 10


def check() -> None:
    """Raise `ImportError` on a torch that would be recorded wrongly, though without any sign of it."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise ImportError(
            f"record needs torch {needed} or newer, and this is torch {torch.__version__}, on which a loss divided by "
            f"K would be recorded as undivided. Install one (pip install 'torch>={needed}'); ledgers that exist "
            "can be loaded and shown with any torch"
        )
