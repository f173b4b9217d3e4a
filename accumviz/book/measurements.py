"""What was measured, and where: a chapter's measurements as data, and the files that keep those made on a GPU.

A recording is read as a stranger's file: plain JSON, every field checked, never pickle.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.show import Displayed, decoded, encoded, save_page

FORMAT = 1
NAME = re.compile(r"([a-z0-9_]+)/([a-z0-9_]+)")
_FORMS = "{label: number}, {row: {series: number}} or {row: {series: [numbers]}}"
_FIELDS = ("gpu", "torch", "cuda", "date", "commit")
# More than a figure can show, and less than would fill a page or a memory.
_MOST_BYTES, _MOST_NAMES, _MOST_SERIES, _MOST_NUMBERS, _LONGEST = (
    1 << 20,
    64,
    4,
    4096,
    120,
)


class RecordingFileError(ValueError):
    """A file that cannot be read as a chapter's recordings; the message says why and what to do."""


@dataclass(frozen=True)
class Measurement:
    """Numbers measured in one go, and what they were measured on.

    `values` is `{label: number}`, `{row: {series: number}}` or `{row: {series: [numbers]}}`. `gpu`
    is the name of the device, empty for a CPU; `torch` and `cuda` are versions; `settings` is
    what the measured function was called with. `date` and `commit` say when, and with which code,
    a run was recorded.
    """

    values: Mapping[str, Any]
    gpu: str = ""
    torch: str = ""
    cuda: str = ""
    date: str = ""
    commit: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """What it was measured on, in a word: the name of the GPU, or "CPU"."""
        return self.gpu or "CPU"

    @property
    def flat(self) -> bool:
        """Whether there is one number for each label."""
        return not any(isinstance(row, Mapping) for row in self.values.values())

    @property
    def single(self) -> bool:
        """Whether every series is one number."""
        return all(
            len(cell) == 1
            for series in self.rows().values()
            for cell in series.values()
        )

    def rows(self) -> dict[str, dict[str, list[float]]]:
        """The numbers in one form, whichever they were given in: rows of series of numbers.

        >>> Measurement({"full batch": 2.0}).rows()
        {'full batch': {'': [2.0]}}
        """
        table = {
            row: given if isinstance(given, Mapping) else {"": given}
            for row, given in self.values.items()
        }
        return {
            row: {
                name: cell if isinstance(cell, list) else [cell]
                for name, cell in series.items()
            }
            for row, series in table.items()
        }

    def names(self) -> dict[str, list[str]]:
        """What was measured, without the numbers: the series of each row."""
        return {row: list(series) for row, series in self.rows().items()}


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Displayed):
    """What `measure` has measured: the run made `here`, and the one `recorded` on a GPU, if there is one.

    `name` is the recording's, `unit` that of every number; `says` makes a sentence of a run's values.
    """

    name: str
    here: Measurement
    recorded: Measurement | None = None
    unit: str = ""
    says: Callable[[Any], str] | None = None

    @property
    def runs(self) -> dict[str, Measurement]:
        """The runs in the order in which they are shown: what was recorded on a GPU stands in front."""
        return (
            {"this run": self.here}
            if self.recorded is None
            else {"recorded": self.recorded, "this run": self.here}
        )

    def save(self, path: str | Path) -> None:
        """Write a self-contained page that any browser opens."""
        save_page(path, "Measured", self.to_html())

    def __repr__(self) -> str:
        lines = [f"Measured: {self.name}"]
        for title, run in self.runs.items():
            lines.append(f"  {title}: {', '.join(provenance(run))}")
            for row, series in run.rows().items():
                for name, cell in series.items():
                    most = max((x for x in cell if not math.isnan(x)), default=math.nan)
                    what = (
                        "not measured"
                        if math.isnan(most)
                        else f"{most:.4g} {self.unit}".rstrip()
                    )
                    at_most = (
                        "at most " if len(cell) > 1 and not math.isnan(most) else ""
                    )
                    lines.append(
                        f"    {' / '.join(filter(None, (row, name))):28} {at_most}{what}"
                    )
        return "\n".join(lines)


def provenance(run: Measurement) -> list[str]:
    """Where a run was made, part by part, as a chip says it.

    >>> provenance(Measurement({}, torch="2.13.0", settings={"width": 64}))
    ['CPU', 'torch 2.13.0', 'width 64']
    """
    known = [
        ("CUDA", run.cuda),
        ("torch", run.torch),
        ("", run.date),
        ("commit", run.commit[:7]),
    ]
    known += [
        (name.replace("_", " "), f"{value:g}") for name, value in run.settings.items()
    ]
    return [run.device, *(f"{name} {value}".strip() for name, value in known if value)]


def checked(values: Any, source: str) -> dict[str, Any]:
    """The values in plain floats, if they have one of the three forms; `source` says whose they are.

    Raises `TypeError` for what is no number, and `ValueError` for what no figure can show.

    >>> checked({"full batch": 2}, "f('cpu')")
    {'full batch': 2.0}
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{source} is {arguments.a(values)}; expected {_FORMS}")
    kinds = {
        _kind(cell)
        for row in values.values()
        for cell in (row.values() if _table(row) else [row])
    }
    if (
        not values
        or len(kinds) != 1
        or len({_table(row) for row in values.values()}) != 1
    ):
        raise ValueError(
            f"{source} is {_shown(values)}; expected one of {_FORMS}, the same form throughout"
        )
    if len(values) > _MOST_NAMES:
        raise ValueError(
            f"{source} has {len(values)} rows; expected at most {_MOST_NAMES}"
        )
    rows = {_name(row, source): given for row, given in values.items()}
    if not _table(next(iter(values.values()))):
        if "list" in kinds:
            raise TypeError(
                f"{source} is {_shown(values)}; expected {_FORMS}: a list belongs to a series"
            )
        return {
            row: _number(given, f"{source}[{row!r}]") for row, given in rows.items()
        }
    plain: dict[str, Any] = {}
    for row, series in rows.items():
        plain[row] = {
            _name(name, source): _cell(cell, f"{source}[{row!r}][{name!r}]")
            for name, cell in series.items()
        }
        if plain[row].keys() != next(iter(plain.values())).keys() or not series:
            raise ValueError(
                f"{source}: row {row!r} has the series {list(series)}; expected the same in every row"
            )
    if len(next(iter(plain.values()))) > _MOST_SERIES:
        raise ValueError(
            f"{source} has {len(next(iter(plain.values())))} series; expected at most {_MOST_SERIES}"
        )
    return plain


def _table(row: Any) -> bool:
    return isinstance(row, Mapping)


def _kind(cell: Any) -> str:
    return "list" if isinstance(cell, list | tuple) else "number"


def _shown(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _name(name: Any, source: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        raise TypeError(
            f"{source} has the name {_shown(name)}; expected a text of 1 to {_LONGEST} characters"
        )
    return name


def _cell(cell: Any, source: str) -> float | list[float]:
    if _kind(cell) == "number":
        return _number(cell, source)
    if not 0 < len(cell) <= _MOST_NUMBERS:
        raise ValueError(
            f"{source} has {len(cell)} numbers; expected 1 to {_MOST_NUMBERS}"
        )
    return [_number(x, source) for x in cell]


def _number(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{source} is {_shown(value)}; expected a number (of a tensor, take .item())"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{source} has {len(str(value))} digits; expected a number that a float can hold"
        ) from None


def read(path: str | Path) -> dict[str, Measurement]:
    """The runs in a file that `write` wrote, by name; none if there is no such file.

    Raises `RecordingFileError` for a file that is anything else.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordingFileError(
            f"cannot open {str(path)!r}: {error.strerror or error}"
        ) from error
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        content = json.loads(data, parse_constant=_no_constant)
        if not isinstance(content, dict) or not isinstance(content.get("runs"), dict):
            raise TypeError('it is no JSON object with "format" and "runs"')
        if content.get("format") != FORMAT or isinstance(content["format"], bool):
            raise ValueError(
                f"its format is {_shown(content.get('format'))}, this accumviz reads {FORMAT}"
            )
        return {name: _run(name, given) for name, given in content["runs"].items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingFileError(
            f"{path.name!r} is not a file of recordings: {error}; "
            "record again with `make recordings` on a machine with a GPU, or remove the file"
        ) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"it holds a bare {text}, which is no JSON")


def _run(name: str, given: Any) -> Measurement:
    if not re.fullmatch(r"[a-z0-9_]+", name) or not isinstance(given, dict):
        raise TypeError(
            f"the run {_shown(name)} is {_shown(given)}; expected an object under a plain name"
        )
    unknown = [key for key in given if key not in (*_FIELDS, "settings", "values")]
    texts = {
        key: text
        for key in _FIELDS
        if isinstance(text := given.get(key), str) and 0 < len(text) <= _LONGEST
    }
    wrong = [key for key in _FIELDS if key not in texts]
    if unknown or wrong:
        raise TypeError(
            f"the run {name!r} has a {'strange' if unknown else 'missing'} {(unknown or wrong)[0]!r}"
        )
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", texts["date"]) or not re.fullmatch(
        r"[0-9a-f]{7,64}", texts["commit"]
    ):
        shown = f"the date {texts['date']!r} and the commit {texts['commit']!r}"
        raise ValueError(
            f"the run {name!r} has {shown}; expected a date (2026-11-21) and a commit's hash"
        )
    settings = given.get("settings", {})
    if settings:
        settings = checked(settings, f"the settings of {name!r}")
    if not isinstance(settings, dict) or any(
        _table(value) for value in settings.values()
    ):
        raise TypeError(
            f"the settings of {name!r} are {_shown(settings)}; expected {{name: number}}"
        )
    return Measurement(
        checked(_each(given.get("values"), decoded), f"the run {name!r}"),
        **texts,
        settings=settings,
    )


def write(path: str | Path, runs: Mapping[str, Measurement]) -> None:
    """Write runs to a file, all at once: whoever reads it meanwhile, or after a kill, finds the old one whole.

    Raises as `read` would if a run has no commit, say: nothing is written that could not be read.
    """
    path = Path(path)
    content = {
        name: {
            **{key: getattr(run, key) for key in _FIELDS},
            "settings": dict(run.settings),
            "values": _each(run.values, _short),
        }
        for name, run in sorted(runs.items())
    }
    for name, told in content.items():
        _run(name, told)
    text = json.dumps(
        {"format": FORMAT, "runs": content},
        indent=1,
        ensure_ascii=False,
        allow_nan=False,
    )
    # Numbers of one series in one line, so that a new recording is a diff that can be read.
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda series: re.sub(r"\s*\n\s*", " ", series[0]), text
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text + "\n", "utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _each(values: Any, convert: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf converted; three deep at most."""
    if isinstance(values, Mapping):
        return {key: _each(value, convert) for key, value in values.items()}
    return (
        [convert(x) for x in values]
        if isinstance(values, list | tuple)
        else convert(values)
    )


def _short(value: float) -> float | str:
    """A number for JSON; a whole one without a needless point, but for 0, which may be negative."""
    whole = value and float(value).is_integer() and abs(value) < 1 << 53
    return int(value) if whole else encoded(value)
