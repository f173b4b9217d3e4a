"""`make recordings` without a GPU: everything around the measuring, with chapters and a device that are acted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import jupytext
import make_book
import make_recordings
import pytest

from accumviz.book import measure, measurements

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "0123456789abcdef"
ACTED = """\
```{code-cell}
import torch
import accumviz as av
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "test device"
```

```{code-cell}
:tags: [hide-input]
av.measure(lambda device: {"a": 1}, "06_memory/peak")
```
"""
FAILS = "```{code-cell}\n---\nmystnb:\n  image: {}\n---\nassert False\n```\n"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A book of one chapter, on a machine that says it has a GPU."""
    monkeypatch.setattr(make_recordings, "ROOT", tmp_path)
    monkeypatch.setattr(make_recordings, "DRAFTS", tmp_path / "_build" / "recordings")
    monkeypatch.setattr(measure, "why_no_gpu", lambda: "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def chapter(text: str) -> Path:
        path = tmp_path / "chapters" / "06_memory.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path.parent / "recordings" / "06_memory.json"

    return chapter


def test_a_chapter_is_run_and_its_recording_kept_with_the_commit(write: Write) -> None:
    kept = write(ACTED)
    assert make_recordings.main(["--commit", COMMIT]) == 0
    (run,) = measurements.read(kept).values()
    assert (run.values, run.gpu, run.commit) == ({"a": 1}, "test device", COMMIT)


def test_a_chapter_that_fails_leaves_its_recording_as_it_was(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    kept = write(ACTED + FAILS)
    kept.parent.mkdir()
    kept.write_text("what was there")
    assert make_recordings.main(["--commit", COMMIT]) == 1
    assert kept.read_text() == "what was there"
    said = capfd.readouterr().err
    assert "06_memory did not come to its end; its recording stays as it was." in said
    assert "until then: _build/recordings/06_memory.json" in said


def test_runs_of_an_earlier_try_do_not_come_back(write: Write) -> None:
    kept = write(ACTED.replace("peak", "old") + FAILS)
    make_recordings.main(["--commit", COMMIT])
    assert make_recordings.DRAFTS.joinpath("06_memory.json").exists()
    write(ACTED)
    assert make_recordings.main(["--commit", COMMIT]) == 0
    assert list(measurements.read(kept)) == ["peak"]


def test_without_a_gpu_nothing_is_run_and_the_reason_is_said(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = write(ACTED)
    monkeypatch.setattr(measure, "why_no_gpu", lambda: "found a toaster; run it on a machine that has both")
    with pytest.raises(SystemExit, match="found a toaster"):
        make_recordings.main(["--commit", COMMIT])
    assert not kept.exists()


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_changed_work_tree_is_refused_and_a_changed_recording_is_not(write: Write, tmp_path: Path) -> None:
    kept = write(ACTED)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "A chapter")
    kept.parent.mkdir()
    kept.write_text("{}")
    assert make_recordings.commit() == git(tmp_path, "rev-parse", "HEAD")
    write(ACTED + FAILS)
    with pytest.raises(SystemExit, match=r"chapters/06_memory\.md\nCommit"):
        make_recordings.commit()


def test_outside_a_checkout_the_commit_has_to_be_named(write: Write) -> None:
    write(ACTED)
    with pytest.raises(SystemExit, match="make recordings COMMIT="):
        make_recordings.commit()


@pytest.mark.parametrize("chapter", sorted((ROOT / "chapters").glob("*.md")), ids=lambda path: path.stem)
def test_the_cells_that_are_run_are_those_of_the_notebook(chapter: Path) -> None:
    read = jupytext.read(chapter, fmt="md:myst").cells
    assert make_recordings.cells(chapter.read_text()) == [c.source.strip() for c in read if c.cell_type == "code"]


def test_every_run_of_a_chapter_is_named_after_it() -> None:
    chapters = make_recordings.chapters()
    assert [path.stem for path in chapters] == ["03_accumulation"]
    for path in chapters:
        text = path.read_text()
        assert text.count("av.measure(") == text.count(f'"{path.stem}/')


def test_what_is_recorded_was_made_on_a_gpu_and_can_be_read() -> None:
    for path in sorted((ROOT / "chapters" / "recordings").glob("*.json")):
        for name, run in measurements.read(path).items():
            assert run.gpu, (path.name, name)
            assert "test" not in run.gpu, (path.name, name)


def test_a_new_recording_runs_the_chapters_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_book, "ROOT", tmp_path)
    recordings = tmp_path / "chapters" / "recordings"
    before = make_book.fingerprint(make_book.CODE)
    recordings.mkdir(parents=True)
    (recordings / "06_memory.json").write_text("{}")
    with_one = make_book.fingerprint(make_book.CODE)
    (recordings / "06_memory.json").write_text('{"format": 1}')
    assert len({before, with_one, make_book.fingerprint(make_book.CODE)}) == 3
