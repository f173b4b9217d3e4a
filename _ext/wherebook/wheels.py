"""What a notebook brings along, so that it needs no download: wheels, packed as text."""

from __future__ import annotations

import base64
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

LINE = 500  # a notebook spends ten bytes more on each line
# What pip notes down about one machine, and the bytecode of one Python.
LOCAL = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}


@dataclass(frozen=True)
class Wheel:
    """A pure Python wheel: its file name, and its files, which are text, by their path inside."""

    name: str
    files: dict[str, str]

    @property
    def version(self) -> str:
        return self.name.split("-")[1]

    @property
    def requirements(self) -> list[Requirement]:
        text = next(data for path, data in self.files.items() if path.endswith(".dist-info/METADATA"))
        return [Requirement(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]


def built(project: Path) -> Wheel:
    """The wheel of the sources in a folder, made by what its pyproject.toml names, without a download.

    Made from a copy, because the tools leave in the folder what they would find there again the next time.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, target = Path(folder, "project"), Path(folder, "wheels")
        copy.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(project / name, copy)
        shutil.copytree(project / "accumviz", copy / "accumviz", ignore=shutil.ignore_patterns("__pycache__"))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", str(target), str(copy)], check=True)
        (path,) = target.glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name).decode() for name in archive.namelist() if Path(name).name not in LOCAL}
    return Wheel(path.name, files)


def installed(name: str) -> Wheel:
    """The wheel that an installed pure Python package came from, with its licence."""
    distribution = metadata.distribution(name)
    paths = [path for path in distribution.files or () if path.name not in LOCAL and path.suffix != ".pyc"]
    wheel = distribution.read_text("WHEEL") or ""
    if "Root-Is-Purelib: true" not in wheel or any(".." in path.parts for path in paths):
        raise ValueError(f"{name} is more than a folder of Python files; a notebook cannot bring it along")
    files = {path.as_posix(): Path(str(path.locate())).read_bytes().decode() for path in paths}
    return Wheel(f"{distribution.name}-{distribution.version}-py3-none-any.whl", files)


def needs(wheels: Iterable[Wheel]) -> dict[str, str]:
    """The packages that the wheels need, each with the lowest version that will do ("0": any).

    Of accumviz's extras a notebook needs those that are not there for graphs, which fall back to tables. Any other
    requirement with a condition is none that every runtime must meet, and what the wheels bring is no need.
    """
    always = {None, *(f'extra == "{extra}"' for extra in ("torch", "notebook", "book"))}
    brought, found = {wheel.name.partition("-")[0] for wheel in wheels}, dict[str, str]()
    for requirement in (requirement for wheel in wheels for requirement in wheel.requirements):
        condition = str(requirement.marker) if requirement.marker else None
        if condition in always and requirement.name not in brought:
            least = [spec.version for spec in requirement.specifier if spec.operator == ">="]
            found[requirement.name] = max("0", found.get(requirement.name, "0"), *least, key=Version)
    return dict(sorted(found.items()))


@cache
def packed(data: bytes) -> str:
    """The data as lines of text that stand in a notebook's cell without an escape."""
    small = lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}])
    text = base64.b85encode(small).decode()
    return "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE))


def together(wheels: Iterable[Wheel]) -> str:
    """What a notebook brings, packed: each wheel's files by its name.

    Not as wheels: their sums of files are what no packing makes smaller, and the notebook's cell makes them anew.
    """
    brought = {wheel.name: wheel.files for wheel in wheels}
    return packed(json.dumps(brought, ensure_ascii=False, sort_keys=True).encode())
