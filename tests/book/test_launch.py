"""What a page offers beside reading: its notebook for download, and in Colab where the site is published."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup, SoupStrainer, Tag
from sphinx.errors import ConfigError
from wherebook import launch

from tests.book import looks
from tests.book.conftest import HEAD

ROOT = Path(__file__).resolve().parents[2]

PAGE = f"""{HEAD}
# A page with a cell

```{{code-cell}}
1 + 1
```
"""


def build(folder: Path, repository: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A book of two pages with this book's configuration, another repository, and nothing to execute."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    config["repository"]["url"] = repository
    config["launch_buttons"] = {"colab_url": "https://colab.research.google.com", "notebook_interface": "classic"}
    config["execute"] = {"execute_notebooks": "off"}
    config["sphinx"]["local_extensions"] = {"wherebook": str(ROOT / "_ext")}
    for name in ("_static", "assets", "references.bib"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "chapters").mkdir()
    (folder / "_config.yml").write_text(yaml.safe_dump(config))
    (folder / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters: [{file: chapters/01_small}]\n")
    (folder / "index.md").write_text("# A page without cells\n")
    (folder / "chapters" / "01_small.md").write_text(PAGE)
    return subprocess.run(
        [Path(sys.executable).with_name("jupyter-book"), "build", folder, "-n", "-W", "--keep-going"],
        env={name: value for name, value in os.environ.items() if name not in CI} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


CI = ("BOOK_PUBLISHES_TO", "GITHUB_REPOSITORY", "GITHUB_SERVER_URL")
COLAB = "https://colab.research.google.com/"
ANYWHERE, HEADER = SoupStrainer("a"), SoupStrainer(class_="book-tools")


@cache
def links(page: Path, within: SoupStrainer = ANYWHERE) -> list[Tag]:
    """A page's links, read without the rest of it, which is long."""
    return BeautifulSoup(page.read_text(), "html.parser", parse_only=within).select("a[href]")


def to_colab(page: Path, within: SoupStrainer = ANYWHERE) -> list[Tag]:
    return [link for link in links(page, within) if str(link["href"]).startswith(COLAB)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    done = build(folder, "https://github.com/reader/where-gradients-go.git")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_build" / "html"


def test_a_page_with_cells_is_offered_in_colab_on_the_published_branch(published: Path) -> None:
    [link] = to_colab(published / "chapters" / "01_small.html")
    path = "notebooks/01_small.ipynb"
    assert link["href"] == f"{COLAB}github/reader/where-gradients-go/blob/gh-pages/{path}"
    assert (published / path).exists()
    assert (link["target"], link["rel"]) == ("_blank", ["noopener"])
    assert " ".join(link.get_text().split()) == "Open in Colab"
    assert [link] == to_colab(published / "chapters" / "01_small.html", HEADER)
    assert not link.select("img")


def test_the_front_page_has_the_books_title_once_and_its_card_the_picture(published: Path) -> None:
    """Its title was the book's twice, and the picture that its card names was not in the site."""
    for page, title in (("index.html", ""), ("chapters/01_small.html", "A page with a cell — ")):
        found = re.findall(r"<title>(.*)</title>", (published / page).read_text("utf-8"))
        assert found == [f"{title}Where Gradients Go"]
    [picture] = re.findall(r'"property=og:image": (\S+)', (ROOT / "index.md").read_text("utf-8"))
    assert (published / picture).stat().st_size > 9_000


def test_a_page_names_its_viewport_once(published: Path) -> None:
    for page in ("index.html", "chapters/01_small.html", "search.html"):
        assert (published / page).read_text("utf-8").count('name="viewport"') == 1


def test_a_page_without_cells_is_offered_nowhere(published: Path) -> None:
    for page in ("index.html", "search.html"):
        assert [link for link in links(published / page) if "notebook" in str(link)] == to_colab(published / page) == []


def test_a_wrong_repository_fails_the_build_before_a_page_is_read(tmp_path: Path) -> None:
    done = build(tmp_path, "git@github.com:reader/book.git")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    for part in ("'git@github.com:reader/book.git'", "https://github.com/OWNER/REPOSITORY", "repository.url"):
        assert part in said
    assert "reading sources" not in said


def settings(url: Any, branch: Any = "gh-pages") -> SimpleNamespace:
    return SimpleNamespace(html_theme_options={"repository_url": url}, published_branch=branch)


@pytest.fixture(autouse=True)
def _not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CI:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "url",
    [
        "github.com/reader/book",
        "https://github.com/reader",
        "https://github.com/reader/book/tree/main",
        "https://github.com.example.org/reader/book",
        'https://github.com/reader/"><script>',
        42,
    ],
)
def test_what_is_no_repository_on_github_is_an_error(url: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        launch.check_published(SimpleNamespace(), settings(url))
    for part in (repr(url), "https://github.com/OWNER/REPOSITORY", "repository.url in _config.yml"):
        assert part in str(raised.value)


@pytest.mark.parametrize("told", [{}, {"GITHUB_REPOSITORY": "book"}, {"GITHUB_SERVER_URL": "https://git.example.org"}])
def test_ci_that_publishes_and_does_not_say_where_is_an_error(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOK_PUBLISHES_TO", "gh-pages")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="BOOK_PUBLISHES_TO"):
        launch.check_published(SimpleNamespace(), settings(""))


def test_ci_names_its_own_repository_where_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"GITHUB_REPOSITORY": "fork/book", "GITHUB_SERVER_URL": "https://github.com"}
    for publishes, expected in (("pages", ("https://github.com/fork/book", "pages")), ("", ("", "gh-pages"))):
        for name, value in (told | {"BOOK_PUBLISHES_TO": publishes}).items():
            monkeypatch.setenv(name, value)
        assert launch.published(settings("")) == expected


def test_every_page_with_cells_leads_to_its_notebook_in_the_site(page_name: str, site: Path) -> None:
    page = site / page_name
    source = (ROOT / page_name).with_suffix(".md")
    has_cells = source.exists() and "\nkernelspec:" in source.read_text()
    downloads = [link for link in links(page) if "btn-download-notebook" in link.get("class", [])] if has_cells else []
    assert len(downloads) == has_cells
    for link in downloads:
        target = (page.parent / str(link["href"])).resolve()
        assert target == site.resolve() / "notebooks" / f"{source.stem}.ipynb"
        assert link.has_attr("download")
        assert "Download notebook" in link.get_text()
        notebook = nbformat.read(target, as_version=4)
        assert notebook.metadata.kernelspec.name == "python3"
        assert any(cell.cell_type == "code" for cell in notebook.cells)


def test_a_link_to_colab_stands_in_the_header_and_leads_to_a_notebook_of_the_site(page_name: str, site: Path) -> None:
    found = to_colab(site / page_name)
    assert found == to_colab(site / page_name, HEADER)
    for link in found:
        assert (site / "notebooks" / str(link["href"]).rpartition("/notebooks/")[2]).is_file()


def test_the_buttons_have_names_and_room_on_every_screen_and_axe_finds_nothing(
    published: Path, mode: str, watch: Any
) -> None:
    watched = watch(mode, reduced_motion="reduce")
    page = watched.page
    page.goto((published / "chapters" / "01_small.html").as_uri())
    for width in (320, 375, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = []
        for name in ("Open in Colab", "Download notebook"):
            link = page.get_by_role("link", name=name, exact=True)
            link.locator("svg").wait_for()
            boxes += [link.locator("svg").bounding_box()]
        assert all(0 <= box["x"] < box["x"] + box["width"] <= width and box["width"] >= 12 for box in boxes)
        assert abs(boxes[0]["y"] - boxes[1]["y"]) < 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width > 320:
            assert looks.axe()(watched) == []
    assert looks.quiet(watched) == []
