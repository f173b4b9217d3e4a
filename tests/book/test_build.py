"""The build itself: math, shared assets, notebooks, and what makes it start over."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from docutils import nodes
from docutils.utils import new_document
from jupyter_cache import executors, get_cache
from sphinx.errors import ExtensionError
from wherebook import mathml, outputs, pages

from tests.book.conftest import HEAD
from tests.conftest import ROOT


@pytest.fixture
def make_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script, at work in a folder of its own, with a builder that only leaves a mark."""
    spec = importlib.util.spec_from_file_location("make_book_here", ROOT / "_ext" / "make_book.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "BUILD", tmp_path / "_build")
    monkeypatch.setattr(module, "INDEX", tmp_path / "_build" / "html" / "index.html")
    (tmp_path / "accumviz").mkdir()
    (tmp_path / "accumviz" / "ledger.py").write_text("one = 1\n")
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "01_graphs.md").write_text("# Graphs\n")
    module.built = []

    def build(command: list[str], **kwargs: object) -> SimpleNamespace:
        module.built.append(command)
        (tmp_path / "_build" / ".jupyter_cache").mkdir(parents=True, exist_ok=True)
        if module.writes_index:
            module.INDEX.parent.mkdir(parents=True, exist_ok=True)
            module.INDEX.write_text("the book")
        return SimpleNamespace(returncode=module.status)

    module.status, module.writes_index, module.really = 0, True, subprocess.run
    monkeypatch.setattr(module.subprocess, "run", build)
    return module


def test_an_unchanged_book_is_not_built_again(make_book: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_book.main() == 0
    assert make_book.main() == 0
    assert len(make_book.built) == 1
    assert "index.html" in capsys.readouterr().out


def test_a_changed_chapter_keeps_what_the_others_computed(make_book: ModuleType) -> None:
    make_book.main()
    (make_book.ROOT / "chapters" / "01_graphs.md").write_text("# Other graphs\n")
    kept = make_book.BUILD / ".jupyter_cache" / "kept"
    kept.write_text("")
    make_book.main()
    assert len(make_book.built) == 2
    assert kept.exists()


def test_cells_run_side_by_side_before_sphinx_but_those_that_measure_time(
    make_book: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (make_book.ROOT / "_config.yml").write_text("execute: {timeout: 60}\n")
    cells = {"01_graphs": "1 + 1", "02_zero_grad": "2 + 2", "03_accumulation": "import time; time.perf_counter()"}
    for name, code in cells.items():
        (make_book.ROOT / "chapters" / f"{name}.md").write_text(f"{HEAD}\n# A\n\n```{{code-cell}}\n{code}\n```\n")
    asked, load = [], executors.load_executor

    def one_by_one(name: str, cache: object, logger: object) -> object:
        """Two kernels that begin at once may choose the same port: in a build, Sphinx runs what failed once more."""
        asked.append(name)
        return load("local-serial", cache, logger)

    monkeypatch.setattr(executors, "load_executor", one_by_one)
    make_book.main()
    cache = get_cache(make_book.BUILD / ".jupyter_cache")
    ran = {Path(record.uri).stem: cache.get_cache_bundle(record.pk).nb for record in cache.list_cache_records()}
    found = {name: nb.cells[-1].outputs[0].data["text/plain"] for name, nb in ran.items()}
    assert found == {"01_graphs": "2", "02_zero_grad": "4"}
    assert asked == ["local-parallel"]


def test_a_book_that_is_published_elsewhere_is_built_again_for_its_links(
    make_book: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOK_PUBLISHES_TO", "gh-pages")
    for repository, builds in (("reader/book", 1), ("reader/book", 1), ("other/book", 2)):
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
        make_book.main()
        assert len(make_book.built) == builds
    monkeypatch.delenv("BOOK_PUBLISHES_TO")
    make_book.main()
    assert len(make_book.built) == 3


def test_a_change_inside_accumviz_runs_every_chapter_again(make_book: ModuleType) -> None:
    make_book.main()
    old, stale = make_book.BUILD / ".jupyter_cache" / "old", make_book.INDEX.with_name("removed.html")
    old.write_text("")
    stale.write_text("")
    (make_book.ROOT / "accumviz" / "ledger.py").write_text("one = 2\n")
    make_book.main()
    assert not old.exists()
    assert not stale.exists(), "a page that left the book leaves the site"


def test_a_build_with_warnings_fails_again_when_it_is_repeated(make_book: ModuleType) -> None:
    make_book.status = 1
    assert make_book.main() == 1
    assert make_book.main() == 1
    assert len(make_book.built) == 2
    assert {"-n", "-W", "--keep-going"} <= set(make_book.built[0])


def test_a_build_that_wrote_no_index_fails(make_book: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    make_book.writes_index = False
    assert make_book.main() == 1
    assert "index.html" in capsys.readouterr().err


def test_a_chapter_alone_is_executed_and_told_where_it_is_and_the_book_stays(
    make_book: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_book.subprocess, "run", make_book.really)
    folder = make_book.ROOT
    for name in ("_ext", "_static", "assets", "references.bib", "_config.yml"):
        (folder / name).symlink_to(ROOT / name)
    cells = (
        "(sec-own)=\n## Own\n\n[There](#sec-elsewhere), {numref}`fig-elsewhere`.\n\n```{code-cell}\nprint(6 * 7)\n```\n"
    )
    (folder / "chapters" / "01_graphs.md").write_text(f"{HEAD}# Graphs\n\n{cells}")
    (folder / "chapters" / "02_other.md").write_text(f"{HEAD}# Other\n\n```{{code-cell}}\n1 / 0\n```\n")
    (folder / "glossary.md").write_text("# Words\n")
    assert make_book.main("1") == 0
    said, page = capfd.readouterr(), folder / "_build/chapter/_build/html/chapters/01_graphs.html"
    assert said.out.splitlines()[-1].endswith(f"Open {page.as_uri()}")
    assert "elsewhere" not in said.err
    assert ">42\n" in page.read_text()
    assert not (folder / "_build" / "html").exists()


def test_a_chapter_that_fails_alone_is_named(make_book: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (make_book.ROOT / "_config.yml").write_text("sphinx: {config: {}}\n")
    make_book.status = 1
    assert make_book.main("01") == 1
    assert "01_graphs.md was not built" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"\frac{a}{b}", "<mfrac>"),
        (r"\hat y", "<mover"),
        (r"\begin{aligned} a &= b \\ &= c \end{aligned}", "<mtable"),
        (r"\begin{align} a &= b \\ &= c \end{align}", "<mtable"),
        (r"\begin{cases} a & b \\ c & d \end{cases}", "<mtable"),
        (r"1 - 0.01 \cdot (-20)", 'form="prefix"'),
        (r"- \log D", '<mi>log</mi><mspace width="0.17em"/><mi>D</mi>'),
        (r"\sqrt{16}", f"<msqrt><mrow>{mathml.STRUT}"),
    ],
)
def test_math_becomes_mathml(tex: str, expected: str) -> None:
    assert expected in mathml.mathml(tex, "block", nodes.math_block())


@pytest.mark.parametrize(
    "tex", [r"\frac{a}", r"\sqrt{\frac{a}{b}}", r"\nosuchcommand x", r"\begin{nosuch} a & b \end{nosuch}"]
)
def test_math_that_cannot_be_converted_is_a_warning_and_stays_readable(
    tex: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[object] = []
    monkeypatch.setattr(mathml.logger, "warning", lambda *arguments, **_: warned.append(arguments))
    html = mathml.mathml(tex, "inline", nodes.math())
    assert warned
    assert html.startswith("<code>")
    assert "&amp;" in html or "&" not in html


def test_a_number_stays_with_its_word_in_text_and_not_in_code() -> None:
    document = new_document("page")
    document += nodes.paragraph("", "", nodes.Text("At event 7, in step"), nodes.literal("", "step 2"))
    pages.keep_together(SimpleNamespace(builder=SimpleNamespace(format="html")), document, "page")  # type: ignore[arg-type]
    assert document.astext() == "At event\xa07, in stepstep 2"


def test_payloads_of_two_players_both_stay_though_they_are_equal() -> None:
    payload = '<script type="application/json" data-accumviz>{"events": 3}</script>'
    module = '<script type="module" data-accumviz>mount()</script>'
    assert outputs.share_assets(payload + module + payload + module) == payload + module + payload


def test_a_cell_that_raised_fails_the_build_also_without_warnings_as_errors() -> None:
    environment = SimpleNamespace(nb_metadata={"chapters/01": {"exec_data": {"succeeded": False}}})
    with pytest.raises(ExtensionError, match="chapters/01"):
        outputs.no_failed_cells(SimpleNamespace(warningiserror=False, keep_going=False), environment)
