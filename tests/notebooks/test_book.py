"""Notebooks of a small book: its numbers, titles and works, and what happens when something has no plain form."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.book.conftest import HEAD

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
from pathlib import Path
nb_execution_cache_path = str(Path(__file__).parents[1] / "executed")
extensions = ["myst_nb", "sphinxcontrib.bibtex", "wherebook.claims", "wherebook.notebooks"]
html_title, nb_execution_mode, numfig, math_numfig = "Small", "cache", True, True
bibtex_bibfiles, bibtex_reference_style = ["references.bib"], "author_year"
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_theme = "basic"
"""
INDEX = """
# Small book

```{toctree}
:numbered:
one
two
works
```
"""
ONE = """
# One

(sec-first)=
## The first `section`

As {cite:p}`chen2016` and {cite:t}`chen2016` have it, see {numref}`fig-dot` and {eq}`eq-two`.

```{code-cell}
:tags: [remove-cell]
assert True
```

```{code-cell}
---
mystnb:
  figure:
    name: fig-dot
    caption: A dot, as in {eq}`eq-two`.
---
if False:
    import torchviz
"a dot"
```

```{code-cell}
:tags: [hide-input, raises-exception]
1 / 0
```
"""
TWO = """
# Two

[As before](#sec-first), in [chapter 1](#sec-first), on [another page](one.md), and [below](#sec-own).

(sec-own)=
## Own

```{math}
:label: eq-two
a = b
```

```{claims}
An article

1. > `a`

   **Says:** so.
```

(claim-1)=
Here claim [1](#claim-row-1) is decided.

```{code-cell}
:tags: [remove-cell]
{"claim-1": "right"}
```

```{code-cell}
1 + 1
```
"""
WORKS = """# Works

```{bibliography}
```
"""
BIB = """@misc{chen2016, author = {Chen, Tianqi and Xu, Bing and Zhang, Chiyuan}, title = {Sublinear}, year = {2016}}"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    pages = {"one.md": HEAD + ONE, "two.md": HEAD + TWO, "works.md": WORKS, "index.md": INDEX}
    for name, text in {**pages, "references.bib": BIB, "conf.py": CONFIG}.items():
        (folder / name).write_text(text)
    return folder


def build(sources: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-d", str(target / "trees")]
    command += [*options, str(sources), str(target)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "_ext")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("built")
    done = build(sources, target)
    assert done.returncode == 0, done.stderr
    return target / "notebooks"


def cells(notebooks: Path, name: str) -> list[Any]:
    return nbformat.read(notebooks / name, as_version=4).cells


def test_every_page_with_cells_is_a_notebook(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == ["one.ipynb", "two.ipynb"]


def test_numbers_and_works_are_those_of_the_book(built: Path) -> None:
    opening, words, setup, _, caption, code, references, last = cells(built, "one.ipynb")
    assert "**Small**, chapter 1, *One*" in opening.source
    assert "torchviz" in setup.source.splitlines()[1]
    assert "torchviz" in last.source.splitlines()[1]
    assert "As (Chen et al., 2016) and Chen et al. (2016) have it, see Fig. 1.1 and (2.1)." in words.source
    assert caption.source == "**Fig. 1.1** A dot, as in (2.1)."
    assert references.source.startswith("## References\n\n- Tianqi Chen, Bing Xu, and Chiyuan Zhang. Sublinear.")
    assert code.source == "#@title Code\n1 / 0"
    assert code.metadata == {"jupyter": {"source_hidden": True}, "cellView": "form", "tags": ["raises-exception"]}


def test_a_page_that_imports_nothing_else_brings_accumviz_alone(built: Path) -> None:
    assert "torchviz" not in cells(built, "two.ipynb")[-1].source


def test_a_claims_number_is_a_link_on_the_site_and_a_number_in_a_notebook(built: Path) -> None:
    assert "Here claim 1 is decided." in "".join(cell.source for cell in cells(built, "two.ipynb"))
    assert 'href="#claim-row-1"><span class="std std-ref">1</span>' in (built.parent / "two.html").read_text()


def test_where_no_address_is_known_other_pages_are_named_in_words(built: Path) -> None:
    words = cells(built, "two.ipynb")[1].source
    first = (
        "As before (chapter 1, *The first section*), in chapter 1, *The first section*, on another page (chapter 1), "
    )
    assert first + "and below (*Own*)." in words


def test_where_the_address_is_known_other_pages_are_linked_and_the_rest_is_byte_for_byte_the_same(
    sources: Path, built: Path, tmp_path: Path
) -> None:
    done = build(sources, tmp_path, "-D", "html_baseurl=https://example.org/book/")
    assert done.returncode == 0, done.stderr
    words = cells(tmp_path / "notebooks", "two.ipynb")[1].source
    assert "[As before](https://example.org/book/one.html#sec-first)" in words
    assert "[another page](https://example.org/book/one.html)" in words
    assert (tmp_path / "notebooks" / "one.ipynb").read_bytes() == (built / "one.ipynb").read_bytes()
