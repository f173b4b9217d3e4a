"""Build the book: every chapter executed, every warning an error, nothing stale, nothing done twice.

Sphinx repeats no warning of a page it has read before, and the execution cache looks at a chapter's code but
not at accumviz. So the site is built whole or not at all, and recorded outputs are dropped when the code behind
them changed. Sphinx runs one chapter after another: they are run before it, as many at once as there are processors,
and it finds their outputs. With the number of a chapter: that chapter alone, to be looked at, and the built book
stays as it is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
INDEX = BUILD / "html" / "index.html"
CODE = ("accumviz", "requirements.txt", "pyproject.toml")
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


def jupyter_book(*options: str | Path) -> int:
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", str(ROOT), *map(str, options)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def configured() -> dict[str, Any]:
    """What _config.yml says."""
    import yaml  # a book that has not changed needs none

    found: dict[str, Any] = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))
    return found


def run_chapters() -> None:
    """The pages with cells that have not run, side by side; what fails is run, and told, by Sphinx once more.

    A page that measures time needs the machine for itself: it is left to Sphinx, too.
    """
    from jupyter_cache import get_cache  # as above
    from jupyter_cache.executors import load_executor
    from myst_nb.core.read import is_myst_markdown_notebook

    cache, pages = get_cache(BUILD / ".jupyter_cache"), []
    for path in files(("chapters", "*.md")):
        text = path.read_text("utf-8") if path.suffix == ".md" else ""
        if is_myst_markdown_notebook(text) and "perf_counter" not in text:
            reader = {"type": "plugin", "name": "myst_nb_md"}
            pages.append(cache.add_nb_to_project(str(path), read_data=reader).pk)
    if not pages:
        return
    print(f"Running the cells of {len(pages)} pages, where they have changed.", flush=True)
    timeout = configured()["execute"]["timeout"]
    load_executor("local-parallel", cache, logging.getLogger("chapters")).run_and_cache(
        filter_pks=pages, timeout=timeout
    )


def build_chapter(number: str) -> int:
    """One chapter alone, executed anew, with the glossary and the bibliography that it refers to.

    It is to be looked at, not checked: what it says of other chapters leads nowhere, and it has no notebook.
    """
    import yaml  # as above

    started = time.monotonic()
    chapters = sorted((ROOT / "chapters").glob("*.md"))
    found = [path for path in chapters if path.stem.partition("_")[0] == number.zfill(2)]
    if len(found) != 1:
        listed = "\n".join(f"  make chapter N={path.stem.partition('_')[0]}   {path.name}" for path in chapters)
        print(f"There is no chapter {number!r}. One of these:\n{listed}", file=sys.stderr)
        return 2
    page = found[0].relative_to(ROOT).with_suffix("").as_posix()
    folder = BUILD / "chapter"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = configured()
    config["sphinx"]["local_extensions"] = {"wherebook": str(ROOT / "_ext")}
    config["sphinx"]["config"] |= {"book_has_notebooks": False, "suppress_warnings": ["ref", "myst.xref_missing"]}
    (folder / "_config.yml").write_text(yaml.safe_dump(config), "utf-8")
    beside = [{"file": name} for name in ("glossary", "bibliography") if (ROOT / f"{name}.md").exists()]
    (folder / "_toc.yml").write_text(yaml.safe_dump({"format": "jb-book", "root": page, "chapters": beside}), "utf-8")
    places = ["--config", folder / "_config.yml", "--toc", folder / "_toc.yml", "--path-output", folder]
    status, html = jupyter_book("-q", *places), folder / "_build" / "html" / f"{page}.html"
    if status != 0 or not html.exists():
        print(f"\n{found[0].name} was not built: see the warnings and errors above.", file=sys.stderr)
        return status or 1
    print(f"\nBuilt in {time.monotonic() - started:.0f} s. Open {html.as_uri()}")
    return 0


def main(chapter: str | None = None) -> int:
    os.environ["TQDM_DISABLE"] = "1"  # a bar would be on those pages whose cells were slow this time
    if chapter is not None:
        return build_chapter(chapter)
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

    run_chapters()
    status = jupyter_book("-n", "-W", "--keep-going")
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
    sys.exit(main(*sys.argv[1:2]))
