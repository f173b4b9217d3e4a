"""`measure`: numbers from the best device there is, beside those that were recorded on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from accumviz import arguments
from accumviz.book import measurements
from accumviz.book.measurements import NAME, Measured, Measurement, RecordingFileError

# `make recordings` sets these: the folder that takes the runs, and the commit they are made with.
FOLDER, COMMIT = "ACCUMVIZ_RECORDINGS", "ACCUMVIZ_COMMIT"


def measure(
    f: Callable[..., Mapping[str, Any]],
    name: str,
    *,
    unit: str = "",
    cpu: Mapping[str, float] | None = None,
    cuda: Mapping[str, float] | None = None,
    says: Callable[[Any], str] | None = None,
) -> Measured:
    """Call `f(device)`, on a GPU if there is one, and show what it returns beside the run recorded on a GPU.

    `f` returns `{label: number}`, `{row: {series: number}}` or `{row: {series: [numbers]}}`, with
    NaN for what its device does not have. `unit` is `"s"`, `"bytes"` or anything else, of every
    number. `cpu` and `cuda` are arguments for `f`, such as sizes, that only one kind of device
    gets. `says` makes a sentence of what `f` returned, one for each run.

    `name` says where the recording is kept: `"06_memory/peak"` is the run `peak` in
    `recordings/06_memory.json`, below the working directory. While `make recordings` runs on a
    machine with a GPU, the run is written there.

    Raises `ValueError` for a name or a result of another form, and when what was recorded no
    longer fits what is measured; `RecordingFileError` for a file that holds no recordings.

    >>> import accumviz as av
    >>> sizes = {"samples": 64}
    >>> measured = av.measure(lambda device, samples: {"bytes": 4 * samples}, "doc/example", cpu=sizes, cuda=sizes)
    >>> measured.here.values
    {'bytes': 256.0}
    """
    if not callable(f):
        raise TypeError(
            f"measure() was given {arguments.a(f)}; expected a function of a device that returns numbers"
        )
    if says is not None and not callable(says):
        raise TypeError(
            f"says is {arguments.a(says)}; expected a function that makes a sentence of what was measured"
        )
    if not isinstance(unit, str):
        raise TypeError(f"unit={unit!r:.80}; expected a text such as 's' or 'bytes'")
    for which, settings in (("cpu", cpu), ("cuda", cuda)):
        if settings is not None and not isinstance(settings, Mapping):
            raise TypeError(
                f"{which}={settings!r:.80}; expected arguments by name, as in {which}={{'samples': 64}}"
            )
    path, key = _place(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    into = os.environ.get(FOLDER)
    if into and (missing := why_no_gpu()):
        raise RuntimeError(missing)
    passed = dict((cpu if device == "cpu" else cuda) or {})
    values = measurements.checked(
        f(device, **passed), f"what {getattr(f, '__name__', 'f')}({device!r}) returned"
    )
    here = Measurement(values, **_made(device), settings=passed)
    if into:
        target = Path(into, path.name)
        measurements.write(target, {**measurements.read(target), key: here})
    recorded = None if into else measurements.read(path).get(key)
    if recorded is not None:
        _compare(name, path, recorded, here, dict(cuda or {}))
    return Measured(name, here, recorded, unit, says)


def why_no_gpu() -> str:
    """Nothing where there is a GPU; else what was found, what is needed and what to do: the text of an error."""
    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}, which finds no GPU (does `nvidia-smi` list one?)"
    return (
        "a recording needs a CUDA GPU and a torch that is built for it; found "
        f"torch {torch.__version__}, {built if torch.version.cuda else 'built without CUDA'}. "
        "Run `make recordings` on a machine that has both; without them the pages show the recordings that are there"
    )


def _place(name: str) -> tuple[Path, str]:
    parts = NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise ValueError(
            f"name={name!r}; expected a chapter and a run in small letters, digits and _, as in '06_memory/peak'"
        )
    return Path("recordings", f"{parts[1]}.json"), parts[2]


def _made(device: str) -> dict[str, str]:
    made = {"torch": str(torch.__version__)}
    if device == "cuda":
        made |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda or torch.version.hip),
        }
    if os.environ.get(FOLDER):
        made |= {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": os.environ.get(COMMIT, ""),
        }
    return made


def _compare(
    name: str,
    path: Path,
    recorded: Measurement,
    here: Measurement,
    settings: dict[str, float],
) -> None:
    """A recording of other rows, or made with other settings, is of a cell that has changed since."""
    for what, then, now in (
        ("rows", recorded.names(), here.names()),
        ("settings", dict(recorded.settings), settings),
        ("one number in each", recorded.single, here.single),
    ):
        if then != now:
            raise RecordingFileError(
                f"the cell of {name!r} has changed since {path.name!r} was recorded ({what}: {then} then, {now} now); "
                "record again with `make recordings` on a machine with a GPU, or remove the run from the file"
            )
