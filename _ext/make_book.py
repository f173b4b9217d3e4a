"""Build the book: every chapter executed, every warning an error, nothing stale, nothing done twice.

Sphinx repeats no warning of a page it has read before, and the execution cache looks at a chapter's code but
not at accumviz. So the site is built whole or not at all, and recorded outputs are dropped when the code behind
them changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
INDEX = BUILD / "html" / "index.html"
CODE = ("accumviz", "requirements.txt", "pyproject.toml", "chapters/recordings")
PUBLISHING = ("BOOK_PUBLISHES_TO", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY")  # what pages link to in Colab
PAGES = ("chapters", "_ext", "_static", "_config.yml", "_toc.yml", "references.bib", "*.md")


def files(patterns: Iterable[str]) -> list[Path]:
    """Every source file under the patterns, in a fixed order, leaving out what Python and notebooks write."""
    found: set[Path] = set()
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            found.update(path.rglob("*") if path.is_dir() else [path])
    return sorted(
        path
        for path in found
        if path.is_file() and path.suffix != ".pyc" and not {"__pycache__", ".ipynb_checkpoints"} & {*path.parts}
    )


def fingerprint(patterns: Iterable[str]) -> str:
    """A hash of names and contents, and of the Python that runs them."""
    digest = hashlib.sha256(sys.version.encode())
    for path in files(patterns):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def remembered(name: str) -> str:
    path = BUILD / name
    return path.read_text() if path.exists() else ""


def remember(name: str, value: str) -> None:
    BUILD.mkdir(exist_ok=True)
    (BUILD / name).write_text(value)


def main() -> int:
    started = time.monotonic()
    code, book = fingerprint(CODE), fingerprint((*CODE, *PAGES))
    book += "".join(f" {os.environ.get(name, '')}" for name in PUBLISHING)
    if remembered("book.sha") == book and INDEX.exists():
        print(f"Nothing has changed. Open {INDEX.as_uri()}")
        return 0
    if remembered("code.sha") != code:
        if (BUILD / ".jupyter_cache").exists():
            print("The code behind the chapters changed: every chapter runs again.")
        shutil.rmtree(BUILD / ".jupyter_cache", ignore_errors=True)
    for stale in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(BUILD / stale, ignore_errors=True)
    (BUILD / "book.sha").unlink(missing_ok=True)
    remember("code.sha", code)

    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", str(ROOT), "-n", "-W", "--keep-going"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status != 0:
        print("\nThe book was not built: see the warnings and errors above.", file=sys.stderr)
        return status
    if not INDEX.exists():
        print(f"\nThe build ended without a complaint, and without {INDEX.relative_to(ROOT)}.", file=sys.stderr)
        return 1
    remember("book.sha", book)
    print(f"\nBuilt in {time.monotonic() - started:.0f} s. Open {INDEX.as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
