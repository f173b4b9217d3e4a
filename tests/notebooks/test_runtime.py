"""Each notebook as a reader has it: uploaded to a runtime that knows nothing of the book, and run to its end."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from packaging.utils import canonicalize_name

from tests.notebooks.bare import HERE, Runtime, runtime

CELL = re.compile(r"\bIn\[(\d+)\]")
# A picture of its own, or one with a kernel beside it.
SHOWN = {"text/html", "application/vnd.jupyter.widget-view+json"}
SHOWS = re.compile(r"^av\.(?:predict|play|explore|timeline|trace)\((?!.*\)\.save)|^(?:explorer|graph)$", re.MULTILINE)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a runtime has before a notebook came."""
    return runtime(tmp_path_factory.mktemp("before") / "runtime").freeze()


@cache
def pins() -> dict[str, str]:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line.lower() for line in lines if not line.startswith("#")}


def test_the_bare_runtime_has_the_versions_of_colab_and_nothing_of_the_book(bare: Runtime) -> None:
    frozen = {canonicalize_name(name): line.lower() for name, line in bare.freeze().items()}
    assert frozen["ipython"] == "ipython==7.34.0"
    assert frozen["ipywidgets"] == "ipywidgets==7.7.1"
    assert pins().items() <= frozen.items()
    assert "torch" in frozen
    assert not {"accumviz", "torchviz", "pygraphviz", "jupyter-book", "sphinx"} & frozen.keys()


def test_nothing_leaves_a_bare_runtime(bare: Runtime) -> None:
    tried = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    assert "no network in this runtime" in bare.run("-c", tried).stderr
    assert "192.0.2.1" in bare.refused


def assert_lines_are_found_in_their_cells(cells: list[Any], page: str) -> None:
    """A recording shows the line that did it, and in which cell that line stands, as it does on the page."""
    shown = "".join(output.get("data", {}).get("text/html", "") for cell in cells for output in cell.get("outputs", []))
    named = {int(number) for number in CELL.findall(shown)}
    assert len(named) == len({*CELL.findall(page)})
    sources = {cell.execution_count: cell.source for cell in cells if cell.cell_type == "code"}
    assert all(re.search("backward|step|record", sources[number]) for number in named)


@pytest.mark.executes
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_notebook_runs_from_top_to_bottom_and_changes_no_package(
    notebook: Any, notebook_path: Path, bare: Runtime, frozen: dict[str, str]
) -> None:
    cells = bare.execute(notebook).cells
    outputs = [(cell, output) for cell in cells for output in cell.get("outputs", [])]
    failed = [(cell, output) for cell, output in outputs if output.output_type == "error"]
    assert [
        output.traceback for cell, output in failed if "raises-exception" not in cell.metadata.get("tags", [])
    ] == []
    assert [output.text for _, output in outputs if output.get("name") == "stderr"] == []
    said = next(cell for cell in cells if cell.cell_type == "code").outputs[0].text
    assert said.startswith("Installed: accumviz")
    for cell, after in zip(cells, [*cells[1:], None], strict=True):
        captioned = after is not None and after.source.startswith("**Fig. ")
        if cell.cell_type == "code" and (captioned or SHOWS.search(cell.source)):
            assert any(SHOWN & output.get("data", {}).keys() for output in cell.outputs), cell.source
    (page,) = notebook_path.parents[1].glob(f"**/{notebook_path.stem}.html")
    assert_lines_are_found_in_their_cells(cells, page.read_text())
    installed = bare.freeze()
    assert {name: line for name, line in installed.items() if name in frozen} == frozen
    brought = {"accumviz"} | ({"torchviz"} if "torchviz" in said else set())
    assert installed.keys() - frozen.keys() == brought
    assert bare.refused == ""
    assert [path.name for path in bare.work.iterdir()] == []


LIVE = """
import torch
import accumviz as av

def train(k):
    w = torch.tensor([1.0], requires_grad=True)
    with av.record(w, graphs=True) as recording:
        for x in torch.tensor([4.0, 2.0]).chunk(k):
            ((2 * x - w * x).square().mean() / k).backward()
    return recording

explorer = av.explore(train, k=[1, 2]).live()
explorer.ask = {"choice": ["4"]}
print("backward" in explorer.told["run"])
explorer
"""


def test_a_view_with_a_kernel_works_in_a_runtime_with_old_widgets(site: Path, bare: Runtime) -> None:
    cells = nbformat.read(site / "notebooks" / "index.ipynb", as_version=4).cells
    setup = next(cell for cell in cells if cell.cell_type == "code")
    notebook = nbformat.v4.new_notebook(cells=[setup, nbformat.v4.new_code_cell(LIVE), cells[-1]])
    printed, shown = bare.execute(notebook).cells[1].outputs
    assert printed.text == "True\n"
    assert "application/vnd.jupyter.widget-view+json" in shown.data
