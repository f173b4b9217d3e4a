"""Fixtures every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pytest

from tests.thorough import examples
from tests.windows import Windows

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]

# Workers share the cores; threads of torch that wait for each other there would turn in circles, for most of the time
# that small loops take. Read when torch is imported, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What checks addresses in the schemas of notebooks compiles 38 grammars first: jsonschema does without.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Looking through everything for what can be thrown away takes a quarter of a second where torch and all tests are
# imported, and took a third of the time of tests in this process. A test that needs it asks for it.
gc.set_threshold(gc.get_threshold()[0], gc.get_threshold()[1], 500)

# A window per figure would open on a desktop and fail on a server.
mpl.use("agg")

with contextlib.suppress(ImportError):  # the oldest versions are tested without it
    from hypothesis import settings

    # A deadline would be missed on a busy machine.
    settings.register_profile("here", max_examples=examples(100), deadline=None)
    settings.load_profile("here")


@cache
def shares(module: str) -> bool:
    """Whether tests of a module share what is made once for it, such as a built book or the ledgers of ranks."""
    path = ROOT / module
    return path.suffix == ".py" and any(once in path.read_text("utf-8") for once in ('scope="module"', "\n@cache\n"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: while a test waits for its browser or another process, another test runs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes one test at a time, or a module whose tests share something, so that it is made once."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if shares(module) else nodeid

        def remove_node(self, node: Any) -> str | None:
            """Give out again what a worker that crashed has left; xdist would wait for ever for what it had done."""
            work = self.assigned_work.pop(node)
            left = [(tests, test) for tests in work.values() for test, done in tests.items() if not done]
            if not left:
                return None
            tests, crashed = left[0]
            tests[crashed] = True
            self.workqueue.update((scope, tests) for scope, tests in work.items() if not all(tests.values()))
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest is begun first, then modules that stay together: or one worker would end after the others."""
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, not shares(item.nodeid.partition("::")[0])))


def pytest_collection_finish() -> None:
    """What collecting has made stays to the end, and needs no looking through."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The one browser of this test process: two Playwrights cannot run in one thread."""
    from playwright.sync_api import sync_playwright

    from tests.book import chromium

    path = chromium.find()
    if path is None:
        pytest.fail(chromium.HELP, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(chromium.FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def windows(browser: Browser) -> Windows:
    return Windows(browser)


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
