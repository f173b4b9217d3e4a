"""The same views in a real JupyterLab: through its kernel, and after the kernel has gone."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest

from tests.windows import Windows

TOKEN = "a-test"
RECORD = """
import torch
import accumviz as av

def train(k, divide):
    x, w = torch.linspace(1, 4, 12), torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer, graphs=True) as recording:
        for part in x.chunk(k):
            loss = (2 * part - w * part).square().mean()
            (loss / k if divide else loss).backward()
        optimizer.step()
    return recording

explorer = av.explore(train, k=[1, 2, 4], divide=[True, False])
explorer
"""
# The same gradient without accumviz: every sample on its own, K = 3, not divided.
BY_HAND = "sum((-2 * x * (2 * x - x)).mean() for x in torch.linspace(1, 4, 12).chunk(3)).item()"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab of its own, with a notebook that nobody has run."""
    folder = tmp_path_factory.mktemp("lab")
    texts = (RECORD.strip(), "explorer.live()", f"print({BY_HAND})")
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    cells = [nbformat.v4.new_code_cell(text) for text in texts]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "run.ipynb")
    homes = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    for home in homes.values():
        Path(home).mkdir()
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # else a cell that is out of sight is not in the page
        "docmanager-extension/plugin": {"autosave": False},  # else a page may be loaded while its file is written
    }
    for name, values in settings.items():
        chosen = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        chosen.parent.mkdir(parents=True)
        chosen.write_text(json.dumps(values))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={folder}", "--allow-root", f"--LabApp.workspaces_dir={folder / 'workspaces'}"]
    command += [f"--LabApp.user_settings_dir={folder / 'settings'}", "--LabApp.news_url=None"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=os.environ | homes, stdout=log, stderr=log)
    try:
        yield address(server, folder)
    finally:
        # Asked to end, it waits for its kernels; they end by themselves when it is gone.
        server.kill()
        server.wait()


@pytest.fixture
def page(windows: Windows) -> Iterator[Any]:
    """A page for it; what JupyterLab complains of is its own matter."""
    with windows.lent(1300, ()) as open_page:
        yield open_page().page


def address(server: subprocess.Popen[bytes], folder: Path) -> str:
    for _ in range(300):
        told = list((folder / "runtime").glob("jpserver-*.json"))
        if told and told[0].read_text().endswith("}"):
            return str(json.loads(told[0].read_text())["url"])
        if server.poll() is not None:
            break
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{(folder / 'log').read_text()[-2000:]}")


# The file that the server has holds what every cell put out.
SAVED = """async () => {
    const answer = await fetch("/api/contents/run.ipynb");
    const { content } = await answer.json();
    return answer.ok && content.cells.every(cell => cell.cell_type !== "code" || cell.outputs.length > 0);
}"""


def choose(page: Any, menu: str, item: str) -> None:
    page.locator(".lm-MenuBar-item", has_text=menu).first.click()
    page.get_by_role("menuitem", name=item).first.click()


def is_to(method: str, end: str) -> Callable[[Any], bool]:
    """Whether a response answers such a request."""
    return lambda response: response.request.method == method and urlsplit(response.url).path.endswith(end)


def figure(explorer: Any, name: str) -> str:
    row = explorer.locator(".av-figures div", has=explorer.page.get_by_text(name, exact=True))
    return str(row.locator("dd").first.inner_text())


def test_the_kernel_records_what_the_page_asks_for_and_the_static_view_outlives_it(lab: str, page: Any) -> None:
    """In one visit: to open JupyterLab and to start a kernel takes longer than all that is asked of them."""
    page.goto(f"{lab}lab/tree/run.ipynb?token={TOKEN}")
    page.locator(".jp-Notebook .jp-Cell").nth(2).wait_for(timeout=60_000)
    page.get_by_text("| Idle").wait_for(timeout=60_000)  # what is run before the kernel is there is never run
    choose(page, "Run", "Run All Cells")
    outputs = page.locator(".jp-Notebook .jp-Cell")
    still, live = outputs.nth(0).locator(".av-explorer"), outputs.nth(1).locator(".av-explorer")
    for one in (still, live):
        one.locator(".av-figures dd").first.wait_for(timeout=90_000)
        assert figure(one, "backwards") == "1"
    by_hand = float(outputs.nth(2).locator(".jp-OutputArea-output pre").inner_text(timeout=60_000))

    # A static view has no field for other values; the live one sends what is typed to Python.
    assert still.get_by_label("k: another value").count() == 0
    side = live.get_by_role("group", name="Run", exact=True)
    side.get_by_role("switch", name="divide").click()
    other = side.get_by_label("k: another value")
    other.fill("3")
    other.press("Enter")
    live.locator(".av-figures dd", has_text=re.compile("^3$")).wait_for()
    assert figure(live, "backwards") == "3"
    said = float(figure(live, "gradient of the last step").replace("−", "-"))
    assert said == pytest.approx(by_hand, rel=1e-3)
    other.fill("0")
    other.press("Enter")
    live.locator(".av-raised").wait_for()
    assert "RuntimeError" in live.locator(".av-raised").inner_text()

    # Arrow keys in a control move the control, not the notebook's cells.
    slider = still.get_by_role("slider", name="k").first
    slider.focus()
    slider.press("ArrowRight")
    assert figure(still, "backwards") == "2"

    # To ask for the file while it is written would undo that: the server takes half a notebook for a broken one, and
    # puts back what was there before.
    with page.expect_response(is_to("PUT", "/api/contents/run.ipynb"), timeout=60_000) as saved:
        choose(page, "File", "Save Notebook")
    assert saved.value.ok and page.evaluate(SAVED)
    with page.expect_response(is_to("POST", "/restart"), timeout=60_000) as restarted:
        choose(page, "Kernel", "Restart Kernel…")
        page.locator(".jp-Dialog .jp-mod-accept").click()
    assert restarted.value.ok
    page.reload()
    still = page.locator(".jp-Notebook .jp-Cell").nth(0).locator(".av-explorer")
    still.locator(".av-figures dd").first.wait_for(timeout=60_000)
    assert figure(still, "backwards") == "1"
    still.get_by_role("slider", name="k").first.fill("2")
    assert figure(still, "backwards") == "4"
    still.locator(".av-player:visible .av-b-play").wait_for()
