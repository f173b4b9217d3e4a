"""The wheels that a notebook carries: made here, the same each time, with what a wheel must have."""

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from wherebook import setupcell, wheels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ours() -> wheels.Wheel:
    return wheels.built(ROOT)


def contents(wheel: wheels.Wheel, folder: Path) -> dict[str, bytes]:
    """What the wheel holds that a notebook's first cell makes."""
    with zipfile.ZipFile(setupcell.wheel(folder / wheel.name, wheel.files)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_two_builds_make_the_same_wheel(ours: wheels.Wheel) -> None:
    assert wheels.built(ROOT) == ours


def test_our_wheel_is_the_package_and_nothing_else(ours: wheels.Wheel) -> None:
    sources = [path for path in (ROOT / "accumviz").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    # The sources of scripts and style sheets stay behind: what is built from them travels.
    behind = {ROOT / "accumviz" / folder / name for folder in ("views", "book") for name in ("js", "css")}
    sources = [path for path in sources if behind.isdisjoint(path.parents) and path.name != "ruff.toml"]
    expected = {path.relative_to(ROOT).as_posix(): path.read_bytes().decode() for path in sources}
    assert {name: data for name, data in ours.files.items() if ".dist-info/" not in name} == expected


@pytest.mark.parametrize("name", ["accumviz", "torchviz"])
def test_a_wheel_records_what_it_holds_and_bears_its_licence(name: str, ours: wheels.Wheel, tmp_path: Path) -> None:
    files = contents(ours if name == "accumviz" else wheels.installed(name), tmp_path)
    (record,) = (path for path in files if path.endswith("/RECORD"))
    rows = {path: (digest, size) for path, digest, size in csv.reader(files[record].decode().splitlines())}
    assert rows.pop(record) == ("", "")
    assert rows.keys() == files.keys() - {record}
    for path, (digest, size) in rows.items():
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={expected}", len(files[path]))
    assert any(path.endswith("/LICENSE") for path in files)
    assert not any(path.endswith((".pyc", "/INSTALLER", "/direct_url.json")) for path in files)


def test_the_needs_are_the_highest_lower_bounds_without_conditions_and_without_what_is_brought() -> None:
    def wheel(name: str, *requirements: str) -> wheels.Wheel:
        lines = [f"Requires-Dist: {Requirement(text)}" for text in requirements]
        return wheels.Wheel(f"{name}-1-py3-none-any.whl", {f"{name}-1.dist-info/METADATA": "\n".join(lines)})

    two = [
        wheel("a", "torch>=2.4", "b>=1", "x>=3; sys_platform == 'linux'"),
        wheel("b", "torch>=2.10; extra == 'torch'", "tqdm"),
    ]
    assert wheels.needs(two) == {"torch": "2.10", "tqdm": "0"}
