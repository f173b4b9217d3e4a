"""Waiting for what a page draws, instead of for a time in which it might have."""

from __future__ import annotations

from typing import Any

# A view draws in the next frame, and some of what it draws is measured in the one after.
_DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"


def drawn(page: Any) -> None:
    """Return once everything that has happened to the page is drawn."""
    page.evaluate(_DRAWN)
