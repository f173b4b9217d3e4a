"""The first cell of a notebook: it installs what is missing, says what it cannot do, and else does nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_notebook
from wherebook import setupcell

from tests.notebooks.bare import Runtime

# Runs a cell twice, and tells of the second time all that reaches outside: what it starts, makes or writes.
TWICE = """
import sys
cell, told = open(sys.argv[1]).read(), []
exec(cell, {})
print("--- again")
def tell(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if told is not None and (writes or event in ("subprocess.Popen", "os.mkdir", "os.system", "socket.connect")):
        told.append((event, arguments[0]))
sys.addaudithook(tell)
exec(cell, {})
found, told = told, None
print(found)
"""


# What Colab answers when a cell asks for its notebook; sources are lists of lines there.
COLAB = """
import json
def blocking_request(what, timeout_sec):
    assert what == "get_ipynb"
    notebook = json.load(open({path!r}))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
    return {{"ipynb": notebook}}
"""


def setup_cells(path: Path) -> list[Any]:
    """A notebook's first cell with code, and its last."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [code[0], code[-1]]


@pytest.fixture
def chapter(site: Path) -> Path:
    """The notebook of the chapter that needs torchviz, too."""
    return site / "notebooks" / "01_graphs.ipynb"


@pytest.fixture
def cell(chapter: Path, tmp_path: Path) -> Path:
    """Its first cell."""
    path = tmp_path / "cell.py"
    path.write_text(setup_cells(chapter)[0].source)
    return path


def test_where_accumviz_is_there_the_first_cell_does_nothing(cell: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWICE, str(cell)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "--- again\n[]\n"
    assert done.stderr == ""


@pytest.mark.parametrize("where", ["beside other notebooks", "in Colab", "the last cell alone"])
def test_it_installs_once_and_then_does_nothing(where: str, cell: Path, chapter: Path, bare: Runtime) -> None:
    (bare.work / "accumviz").mkdir()  # a mere folder is no package, though Python would import it as one
    if where == "in Colab":
        (bare.work / "google" / "colab").mkdir(parents=True)
        (bare.work / "google" / "colab" / "_message.py").write_text(COLAB.format(path=str(chapter)))
    elif where == "beside other notebooks":
        other = chapter.with_name("02_zero_grad.ipynb")
        for path in (other, chapter):
            shutil.copy(path, bare.work)
        (bare.work / "0_broken.ipynb").write_text("{")
    else:
        cell.write_text(setup_cells(chapter)[1].source)
    done = bare.run("-c", TWICE, str(cell))
    assert re.fullmatch(r"Installed: accumviz [\d.]+, torchviz [\d.]+\n--- again\n\[\]\n", done.stdout), done.stderr
    assert bare.run("-c", "import accumviz, torchviz; accumviz.record").returncode == 0
    assert bare.refused == ""


def test_where_a_notebook_cannot_read_itself_its_last_cell_is_to_be_run(cell: Path, bare: Runtime) -> None:
    done = bare.run(str(cell))
    assert done.stderr.endswith("Run its last cell, then go on with the next one.\n")


def test_a_pip_that_fails_is_quoted_with_the_files_that_it_should_have_installed(chapter: Path, bare: Runtime) -> None:
    (bare.work / "pip.py").write_text("raise SystemExit('this pip installs nothing')\n")
    ran, _ = bare.execute(new_notebook(cells=setup_cells(chapter))).cells
    (error,) = ran.outputs
    said = "\n".join(error.traceback)
    assert said.startswith("accumviz could not be set up: pip said\nthis pip installs nothing\n")
    assert len(said) < 1000, "neither the code nor the text that the cell carries"
    files = re.findall(r"^/.*\.whl$", said, re.MULTILINE)
    assert [Path(file).name.partition("-")[0] for file in files] == ["accumviz", "torchviz"]
    assert all(Path(file).exists() for file in files)


def test_what_a_runtime_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    wanted = '"torch>=99.1" "no_such_package" "nor_this>=2.4"'
    needs = {"torch": "99.1", "no_such_package": "0", "nor_this": "2.4", "numpy": "1.26"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in ("torch", "numpy"))
    with pytest.raises(setupcell.NotSetUp) as failed:
        setupcell.install({"no_such_package": "1"}, needs, "")
    assert str(failed.value).splitlines()[1:] == [
        f"- torch>=99.1 is needed, and {torch.__version__} is here",
        "- no_such_package is missing",
        "- nor_this>=2.4 is missing",
        f"Install that with `%pip install {wanted}`, and run this cell again.",
    ]
