"""What a chapter asks its reader to keep: each point has one hidden cell that would fail if it were false."""

import ast
import re
from pathlib import Path

import jupytext
import pytest

from tests.book.conftest import CHAPTERS

AUDIT = "13_audit"  # its rows are its summary, and each has its cell
ROLE = re.compile(r"\{[\w:+-]+\}`([^`<]*?)(?:\s*<[^`>]*>)?`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
POINT = re.compile(r"^- (.+?)(?=^- |^\S|\Z)", re.MULTILINE | re.DOTALL)
PAIRED = re.compile(r"^# keep: *(.*)$", re.MULTILINE)
FEWEST_WORDS = 2
SUMMED_UP = [path for path in CHAPTERS if path.stem != AUDIT]


def plain(text: str) -> str:
    """A text without its markup, on one line.

    >>> plain("A {term}`leaf <leaf>` of `w`, in [the *first*](#a)\\n  chapter.")
    'A leaf of w, in the first chapter.'
    """
    return " ".join(LINK.sub(r"\1", ROLE.sub(r"\1", text)).replace("`", "").replace("*", "").split())


def unpaired(markdown: str) -> list[str]:
    """What is wrong with the summary of a chapter, a sentence for each fault."""
    cells = jupytext.reads(markdown, fmt="md:myst").cells
    headings = [i for i, cell in enumerate(cells) if "\n## What to keep\n" in f"\n{cell.source}\n"]
    if len(headings) != 1:
        return [f"{len(headings)} sections are called What to keep"]
    summary = cells[headings[0]].source.partition("## What to keep\n")[2].partition("\n## ")[0]
    points = [plain(point) for point in POINT.findall(summary)]
    found = [] if points else ["nothing is there to keep"]
    proofs = []
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        said = [plain(start) for start in PAIRED.findall(cell.source)]
        proofs += said
        if said and "remove-cell" not in cell.metadata.get("tags", []):
            found.append(f"the cell is seen: {said[0]}")
        if said and not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source))):
            found.append(f"the cell asserts nothing: {said[0]}")
    found += [f"too few words to tell: {start}" for start in proofs if len(start.split()) < FEWEST_WORDS]
    found += [
        f"{count} cells for: {point}"
        for point in points
        if (count := sum(point.startswith(start) for start in proofs)) != 1
    ]
    found += [
        f"no point begins so: {start}" for start in proofs if not any(point.startswith(start) for point in points)
    ]
    return found


@pytest.mark.parametrize("path", SUMMED_UP, ids=lambda path: path.stem)
def test_every_point_to_keep_has_one_hidden_cell_that_proves_it(path: Path) -> None:
    assert unpaired(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", SUMMED_UP, ids=lambda path: path.stem)
def test_a_chapter_ends_with_exercises_and_what_to_keep(path: Path) -> None:
    assert re.findall(r"^## (.+)$", path.read_text("utf-8"), re.MULTILINE)[-2:] == ["Exercises", "What to keep"]


RIGHT = """# A chapter

## What to keep

- `backward` *adds*: the first
  {term}`sum <accumulation>`.
- A second point, of [two](#two).

```{code-cell}
:tags: [remove-cell]
# keep: backward adds: the first sum
assert 1 + 1 == 2
```

```{code-cell}
:tags: [remove-cell]
# keep: A second point
assert True
```
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# keep: A second point\n", "", "0 cells for: A second point, of two."),
        ("- A second point, of [two](#two).\n", "", "no point begins so: A second point"),
        ("# keep: A second point", "# keep: A second paint", "0 cells for: A second point, of two."),
        ("# keep: A second point", "# keep: A second point\n# keep: A second point, of", "2 cells for"),
        ("# keep: A second point", "# keep: A", "too few words to tell: A"),
        (":tags: [remove-cell]\n# keep: A", "# keep: A", "the cell is seen: A second point"),
        ("assert True", "True", "the cell asserts nothing: A second point"),
        ("## What to keep", "## Something else", "0 sections are called What to keep"),
    ],
)
def test_a_summary_whose_points_and_cells_do_not_pair_is_found(old: str, new: str, said: str) -> None:
    assert unpaired(RIGHT) == []
    assert old in RIGHT
    assert any(one.startswith(said) for one in unpaired(RIGHT.replace(old, new)))
