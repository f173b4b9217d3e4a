"""On a machine with a CUDA GPU: run the chapters that measure on one, and keep what they measured.

A chapter runs from its first cell to its last, as a reader's notebook would. Its file in chapters/recordings is
replaced once it has come to its end; what a failed chapter had measured by then is left in _build/recordings.
Nothing but torch and what accumviz needs has to be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a measurement depends on, and what it makes.
CODE, KEPT = ("accumviz", "chapters", "requirements.txt"), "chapters/recordings/"
DRAFTS = ROOT / "_build" / "recordings"
CELL = re.compile(r"^```\{code-cell\}\n(?:---\n.*?^---\n)?(?::[^\n]*\n)*(.*?)^```$", re.MULTILINE | re.DOTALL)


def cells(source: str) -> list[str]:
    """The code of a chapter's cells, without their metadata.

    >>> cells("```{code-cell}\\n:tags: [hide-input]\\nx = 1\\n```\\ntext\\n```{code-cell}\\nx\\n```\\n")
    ['x = 1', 'x']
    """
    return [match[1].strip() for match in CELL.finditer(source)]


def chapters() -> list[Path]:
    """Those that measure something."""
    return [path for path in sorted((ROOT / "chapters").glob("*.md")) if "av.measure(" in path.read_text("utf-8")]


def commit() -> str:
    """The commit that is checked out, if the chapters and the package are as it has them."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        sys.exit("This is no git checkout: name the commit, as in `make recordings COMMIT=8afdafe`.")

    def ask(*words: str) -> str:
        return subprocess.run([git, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    changed = [line for line in ask("status", "--porcelain", "--", *CODE).splitlines() if KEPT not in line]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed[:10])
        sys.exit(f"A recording names the commit that made it, and these files are not as committed:\n{listed}\nCommit.")
    return ask("rev-parse", "HEAD").strip()


def record(chapter: Path, made_with: str) -> bool:
    """Run one chapter, and keep its file if it came to its end."""
    script, draft = DRAFTS / f"{chapter.stem}.py", DRAFTS / f"{chapter.stem}.json"
    script.write_text("\n\n".join(cells(chapter.read_text("utf-8"))) + "\n", "utf-8")
    draft.unlink(missing_ok=True)
    known = {"ACCUMVIZ_RECORDINGS": str(DRAFTS), "ACCUMVIZ_COMMIT": made_with}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **known, "PYTHONPATH": path, "MPLBACKEND": "agg"}
    status = subprocess.run([sys.executable, str(script)], cwd=chapter.parent, env=environment, check=False).returncode
    if status != 0 or not draft.exists():
        left = f" What it measured until then: {draft.relative_to(ROOT)}" if draft.exists() else ""
        print(f"{chapter.stem} did not come to its end; its recording stays as it was.{left}", file=sys.stderr)
        return False
    kept = chapter.parent / "recordings" / draft.name
    kept.parent.mkdir(exist_ok=True)
    draft.replace(kept)
    print(f"{chapter.stem}: {kept.relative_to(ROOT)}")
    return True


def main(arguments: list[str] | None = None) -> int:
    sys.path.insert(0, str(ROOT))
    from accumviz.book import measure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="the commit that is checked out, where git cannot say it")
    named = parser.parse_args(arguments).commit
    if missing := measure.why_no_gpu():
        sys.exit(missing)
    made_with = named or commit()
    DRAFTS.mkdir(parents=True, exist_ok=True)
    done = [record(chapter, made_with) for chapter in chapters()]
    return 0 if done and all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
