"""Fixtures every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[1]

# A window per figure would open on a desktop and fail on a server.
mpl.use("agg")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def site(root: Path) -> Path:
    """The built book."""
    built = root / "_build" / "html"
    if not (built / "index.html").exists():
        missing("the book is not built: run `make book`")
    return built


def missing(what: str) -> None:
    """What a test cannot do without: on a developer's machine a skip, under CI and `make test` a failure."""
    if os.environ.get("CI") or os.environ.get("MAKELEVEL"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(autouse=True)
def _no_figure_left() -> Iterator[None]:
    """pyplot keeps every figure alive until it is closed; views must not use it, and tests must not count on it."""
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
