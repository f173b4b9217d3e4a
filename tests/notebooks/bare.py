"""A bare runtime: what a hosted notebook such as Colab has, and nothing of the book.

`make test` installs tests/notebooks/requirements.txt into .venv-bare and has this module link the book's torch there.
Each test gets a runtime of its own on top of it, because a notebook installs what it brings.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nbformat
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BARE = ROOT / ".venv-bare"

# Colab has Graphviz. Not every machine that runs the tests does, but the book's environment has it as a library.
DOT = """#!/bin/sh
exec "{python}" "{script}" "$@"
"""
KERNEL = """{{"argv": ["{python}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"],
"display_name": "bare", "language": "python"}}
"""


def site(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def torch_and_what_it_needs() -> list[metadata.Distribution]:
    """Of this environment."""
    waiting, found = ["torch"], dict[str, metadata.Distribution]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found[name] = metadata.distribution(name)
            needs = map(Requirement, found[name].requires or ())
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def link_torch(environment: Path) -> None:
    """Torch is large, and the book's will do: give it, and what it needs and is not there, a second home."""
    target = site(environment)
    there = {canonicalize_name(one.name) for one in metadata.distributions(path=[str(target)])}
    for distribution in torch_and_what_it_needs():
        if canonicalize_name(distribution.name) not in there:
            for name in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
                if not (target / name).exists():
                    (target / name).symlink_to(Path(str(distribution.locate_file(name))))


@dataclass(frozen=True)
class Runtime:
    """An environment on top of the bare one, in a folder of its own, in which nothing reaches the network."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def work(self) -> Path:
        """Where a notebook runs, empty at first."""
        return self.folder / "work"

    @property
    def refused(self) -> str:
        """What tried to leave the machine."""
        log = self.folder / "refused.log"
        return log.read_text() if log.exists() else ""

    @property
    def env(self) -> dict[str, str]:
        ours = ("PIP_", "PYTHON", "JUPYTER", "IPYTHON", "TQDM", "MPL", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return kept | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "REFUSED_LOG": str(self.folder / "refused.log"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "MPLCONFIGDIR": str(BARE / "matplotlib"),
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=self.work, env=self.env, capture_output=True, text=True, check=False)

    def freeze(self) -> dict[str, str]:
        """What is installed, by name."""
        done = self.run("-m", "pip", "freeze", "--all")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return {line.replace(" @ ", "==").partition("==")[0]: line for line in lines}

    def execute(self, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
        """Run all cells, as a reader does who chooses that in the menu."""
        path = self.work / "notebook.ipynb"
        nbformat.write(notebook, path)
        command = [sys.executable, str(HERE / "execute.py"), str(path), str(self.work)]
        env = self.env | {"JUPYTER_PATH": str(self.folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        ran = nbformat.read(path, as_version=4)
        path.unlink()
        return ran


def runtime(folder: Path) -> Runtime:
    venv.EnvBuilder(symlinks=True).create(folder)
    made = Runtime(folder)
    made.work.mkdir()
    # pip lists and checks what lies there like its own, but cannot change it
    (site(folder) / "bare.pth").write_text(f"{site(BARE)}\n")
    (site(folder) / "sitecustomize.py").write_text((HERE / "no_network.py").read_text())
    dot = folder / "bin" / "dot"
    dot.write_text(DOT.format(python=sys.executable, script=HERE / "dot.py"))
    dot.chmod(0o755)
    (folder / "kernels" / "bare").mkdir(parents=True)
    (folder / "kernels" / "bare" / "kernel.json").write_text(KERNEL.format(python=made.python))
    return made


if __name__ == "__main__":
    link_torch(Path(sys.argv[1]))
