"""Measuring: on which device, what is kept where, and what an error says. No test here has a GPU: one is acted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accumviz as av
from accumviz.book import measure as instrument
from accumviz.book import measurements

COMMIT = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(instrument.FOLDER, raising=False)
    monkeypatch.delenv(instrument.COMMIT, raising=False)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not there, under a name that no device has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "test device")
    monkeypatch.setattr(torch.version, "cuda", "0.1")


@pytest.fixture
def recording(acted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(instrument.FOLDER, str(tmp_path / "recordings"))
    monkeypatch.setenv(instrument.COMMIT, COMMIT)
    return tmp_path / "recordings"


def test_the_function_is_called_once_with_the_device_and_its_own_settings(without: None) -> None:
    calls: list[Any] = []

    def f(device: str, **settings: float) -> dict[str, float]:
        calls.append((device, settings))
        return {"seconds": 1}

    result = av.measure(f, "06_memory/peak", unit="s", cpu={"width": 64}, cuda={"width": 1024})
    assert calls == [("cpu", {"width": 64})]
    assert (result.here.gpu, result.here.settings, result.here.torch) == ("", {"width": 64}, str(torch.__version__))
    assert result.recorded is None


def test_on_a_gpu_the_function_gets_its_device_and_settings(acted: None) -> None:
    result = av.measure(lambda device, width: {device: width}, "06_memory/peak", cpu={"width": 1}, cuda={"width": 2})
    assert result.here.values == {"cuda": 2}
    assert (result.here.gpu, result.here.cuda) == ("test device", "0.1")


def test_nothing_is_written_unless_recordings_are_made(acted: None, tmp_path: Path) -> None:
    av.measure(lambda device: {"a": 1}, "06_memory/peak")
    assert list(tmp_path.iterdir()) == []


def test_what_was_recorded_is_found_below_the_working_directory(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    av.measure(lambda device, width: {"a": 1, "b": math.inf}, "06_memory/peak", cuda={"width": 2})
    av.measure(lambda device: {"c": {"d": [1, math.nan]}}, "06_memory/scale")
    monkeypatch.delenv(instrument.FOLDER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = av.measure(lambda device: {"a": 3, "b": 4}, "06_memory/peak", cuda={"width": 2})
    assert result.recorded is not None
    assert result.recorded.values == {"a": 1, "b": math.inf}
    assert (result.recorded.gpu, result.recorded.commit, result.recorded.settings) == (
        "test device",
        COMMIT,
        {"width": 2},
    )
    assert result.here.values == {"a": 3, "b": 4}
    assert set(measurements.read(recording / "06_memory.json")) == {"peak", "scale"}


def test_recording_again_replaces_one_run_and_keeps_the_others(recording: Path) -> None:
    for value in (1, 2):
        av.measure(lambda device, value=value: {"a": value}, "06_memory/peak")
        av.measure(lambda device: {"b": 5}, "06_memory/scale")
    found = measurements.read(recording / "06_memory.json")
    assert {name: run.values for name, run in found.items()} == {"peak": {"a": 2}, "scale": {"b": 5}}


def test_a_recording_made_without_a_commit_is_refused(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(instrument.COMMIT)
    with pytest.raises(TypeError, match="missing 'commit'"):
        av.measure(lambda device: {"a": 1}, "06_memory/peak")
    assert not recording.exists()


def test_recording_without_a_gpu_is_refused_before_anything_is_measured(
    without: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(instrument.FOLDER, str(tmp_path))
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        av.measure(lambda device: pytest.fail("measured"), "06_memory/peak")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("built", "said"), [(None, "built without CUDA"), ("0.1", "CUDA 0.1, which finds no GPU")])
def test_the_refusal_says_what_was_found_what_is_needed_and_what_to_do(
    without: None, built: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    text = instrument.why_no_gpu()
    assert f"found torch {torch.__version__}" in text
    assert said in text
    assert "Run `make recordings` on a machine that has both" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"f": lambda device: {"other": 1}},
        {"f": lambda device: {"a": {"b": 1}}},
        {"cuda": {"width": 3}},
    ],
)
def test_a_recording_of_a_cell_that_has_changed_since_is_an_error_not_a_figure(
    recording: Path, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    av.measure(lambda device: {"a": 1}, "06_memory/peak")
    monkeypatch.delenv(instrument.FOLDER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    f: Callable[[str], dict[str, Any]] = changed.pop("f", lambda device: {"a": 2})
    with pytest.raises(measurements.RecordingFileError, match=r"has changed since '06_memory\.json' was recorded"):
        av.measure(f, "06_memory/peak", **changed)


@pytest.mark.parametrize("name", ["peak", "06_memory/", "../06_memory/peak", "06_memory/../peak", "A/b", "a/b/c", 5])
def test_a_name_that_is_no_chapter_and_run_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="expected a chapter and a run"):
        av.measure(lambda device: pytest.fail("measured"), name)


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (None, TypeError, "is None; expected"),
        ({"a": torch.tensor(1.0)}, TypeError, r"take \.item\(\)"),
        ({"a": [1, 2]}, TypeError, "a list belongs to a series"),
        ({}, ValueError, "expected one of"),
        ({1: 2}, TypeError, "has the name 1"),
    ],
)
def test_a_result_of_another_form_is_an_error_that_names_the_function(
    without: None, returned: Any, error: type[Exception], said: str
) -> None:
    def by_way(device: str) -> Any:
        return returned

    with pytest.raises(error, match=said) as caught:
        av.measure(by_way, "06_memory/peak")
    assert "by_way('cpu')" in str(caught.value)


def test_a_file_in_the_way_is_an_error_also_where_nothing_is_recorded(without: None, tmp_path: Path) -> None:
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "06_memory.json").write_text(json.dumps({"format": 99, "runs": {}}))
    with pytest.raises(measurements.RecordingFileError, match="its format is 99"):
        av.measure(lambda device: {"a": 1}, "06_memory/peak")
