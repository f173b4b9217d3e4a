"""The notebooks of the built site, and runtimes to try them in."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import missing
from tests.notebooks.bare import BARE, ROOT, Runtime, runtime
from tests.thorough import THOROUGH

NOTEBOOKS = ROOT / "_build" / "html" / "notebooks"
# The build has run every chapter's cells already. What a notebook adds, its first cell and a runtime with Graphviz's
# program alone, is in this one: it records, and draws by torchviz, too.
AT_EACH_PUSH = ("01_graphs.ipynb",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "notebook_name" in metafunc.fixturenames:
        names = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
        if metafunc.definition.get_closest_marker("executes") and not THOROUGH:
            names = [name for name in names if name in AT_EACH_PUSH]
        metafunc.parametrize("notebook_name", names or ["index.ipynb"])


@pytest.fixture
def notebook_path(site: Path, notebook_name: str) -> Path:
    return site / "notebooks" / notebook_name


@pytest.fixture
def notebook(notebook_path: Path) -> Any:
    return nbformat.read(notebook_path, as_version=4)


@pytest.fixture
def bare(tmp_path: Path) -> Runtime:
    """A runtime of this test alone."""
    if not (BARE / ".ready").exists():
        missing(f"there is no bare runtime: run `make {BARE.name}/.ready`")
    return runtime(tmp_path / "runtime")
