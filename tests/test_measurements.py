"""Runs and the files that keep them: every number survives, and a strange file is an error that says what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumviz.book import measurements
from accumviz.book.measurements import Measured, Measurement, RecordingFileError

# No device has this name: nothing in a test may look as if it had been measured on a GPU.
MADE: dict[str, Any] = {
    "gpu": "test device",
    "torch": "0.0.1",
    "cuda": "0.1",
    "date": "2026-01-02",
    "commit": "0123456789abcdef",
    "settings": {"width": 64.0},
}
names = st.text(min_size=1, max_size=20)
numbers = st.floats()
forms = st.one_of(
    st.dictionaries(names, numbers, min_size=1, max_size=5),
    st.dictionaries(names, st.fixed_dictionaries({"a": numbers, "b": numbers}), min_size=1, max_size=5),
    st.dictionaries(names, st.fixed_dictionaries({"a": st.lists(numbers, min_size=1, max_size=9)}), min_size=1),
)


def content(**changed: Any) -> dict[str, Any]:
    """What a good file holds, but for what is changed in its one run."""
    return {"format": 1, "runs": {"peak": {**MADE, "values": {"full batch": 2.5}, **changed}}}


@given(values=forms)
def test_every_number_survives_a_file(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("runs") / "06_memory.json"
    measurements.write(path, {"peak": Measurement(measurements.checked(values, "f"), **MADE)})
    (back,) = measurements.read(path).values()
    assert repr(back.values) == repr(measurements.checked(values, "f"))
    assert [getattr(back, name) for name in MADE] == list(MADE.values())
    json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)


def test_a_file_that_is_not_there_holds_no_runs(tmp_path: Path) -> None:
    assert measurements.read(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "Expecting value"),
        (b"\xff\xff{}", "codec"),
        (b"\x80\x04cos\nsystem\n", "decode"),
        (b"[]", "no JSON object"),
        (b'{"format": 1, "runs": []}', "no JSON object"),
        (b'{"format": 2, "runs": {}}', "its format is 2, this accumviz reads 1"),
        (b'{"format": true, "runs": {}}', "its format is True"),
        (b'{"format": 1, "runs": NaN}', "a bare NaN"),
        (b"[" * 100_000, "recursion"),
        (b'{"format": 1, "runs": {"peak": {"values": ' + b'{"a":' * 400 + b"1" + b"}" * 403, "missing 'gpu'"),
        (b" " * (1 << 21), "more than 1,048,576 bytes"),
        (b'{"format": 1, "runs": {"../x": {}}}', "under a plain name"),
        (b'{"format": 1, "runs": {"peak": 3}}', "under a plain name"),
    ],
)
def test_a_strange_file_is_named_with_what_is_wrong_and_what_to_do(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "06_memory.json"
    path.write_bytes(text)
    with pytest.raises(RecordingFileError) as caught:
        measurements.read(path)
    assert said in str(caught.value)
    assert "'06_memory.json'" in str(caught.value)
    assert "make recordings" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"values": {}}, "expected one of {label: number}"),
        ({"values": None}, "is None"),
        ({"values": {"a": "1e3"}}, "'1e3'; expected a number"),
        ({"values": {"a": True}}, "True; expected a number"),
        ({"values": {"a": 10**400}}, "a float can hold"),
        ({"values": {"a": [1, 2]}}, "a list belongs to a series"),
        ({"values": {"a": 1, "b": {"c": 2}}}, "the same form throughout"),
        ({"values": {"a": {"c": 1}, "b": {"d": 2}}}, "expected the same in every row"),
        ({"values": {"a": {"c": []}}}, "has 0 numbers"),
        ({"values": {"a": {"c": {"d": 1}}}}, "expected a number"),
        ({"values": {"": 1}}, "a text of 1 to 120 characters"),
        ({"values": {"x" * 121: 1}}, "a text of 1 to 120 characters"),
        ({"values": {str(i): 1 for i in range(65)}}, "65 rows"),
        ({"values": {"a": {str(i): 1 for i in range(5)}}}, "5 series"),
        ({"values": {"a": {"b": [0] * 4097}}}, "4097 numbers"),
        ({"gpu": ""}, "missing 'gpu'"),
        ({"torch": 2}, "missing 'torch'"),
        ({"date": "today"}, "expected a date"),
        ({"commit": "../../x"}, "expected a date (2026-11-21) and a commit"),
        ({"settings": {"width": {"a": 1}}}, "settings"),
        ({"settings": [1]}, "settings"),
        ({"host": "somewhere"}, "strange 'host'"),
    ],
)
def test_a_strange_run_is_named_with_what_is_wrong(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = tmp_path / "06_memory.json"
    path.write_text(json.dumps(content()))
    assert list(measurements.read(path)) == ["peak"]
    path.write_text(json.dumps(content(**changed)))
    with pytest.raises(RecordingFileError) as caught:
        measurements.read(path)
    assert said in str(caught.value)


def test_a_folder_in_place_of_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecordingFileError, match=f"cannot open .*{tmp_path.name}"):
        measurements.read(tmp_path)


def test_what_could_not_be_read_is_not_written_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "06_memory.json"
    measurements.write(path, {"peak": Measurement({"a": 1.0}, **MADE)})
    before = path.read_bytes()
    for bad in (
        Measurement({"a": 1.0}),
        Measurement({"a": 1.0}, **{**MADE, "commit": ""}),
        Measurement({"a": "b"}, **MADE),
    ):
        with pytest.raises((ValueError, TypeError)):
            measurements.write(path, {"peak": bad})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_series_is_one_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "06_memory.json"
    measurements.write(path, {"peak": Measurement({"a [0]": {"b": [1.0, 2.5, math.nan]}}, **MADE)})
    assert '"b": [ 1, 2.5, "NaN" ]' in path.read_text()


def test_the_text_says_where_each_run_was_made_and_what_was_not_measured() -> None:
    here = Measurement({"full batch": {"saved": [3.0, 7.0], "peak": [math.nan, math.nan]}}, torch="0.0.1")
    alone = repr(Measured("06_memory/peak", here, unit="bytes"))
    assert "this run: CPU, torch 0.0.1" in alone
    assert "at most 7 bytes" in alone
    assert "not measured" in alone
    assert "GPU" not in alone
    both = repr(Measured("06_memory/peak", here, Measurement(here.values, **MADE)))
    assert both.index("recorded: test device, CUDA 0.1") < both.index("this run: CPU")
    assert "not recorded" not in both


def test_a_recorded_run_stands_in_front() -> None:
    here, there = Measurement({"a": 1.0}), Measurement({"a": 2.0}, **MADE)
    assert list(Measured("a/b", here).runs.values()) == [here]
    assert list(Measured("a/b", here, there).runs.values()) == [there, here]
