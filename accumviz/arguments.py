"""Check the arguments of the public verbs, and say in an error what was expected, or which package is missing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from operator import index
from os import fspath
from typing import Any

# Each optional package, and the extra of accumviz that installs it.
_EXTRAS = {
    "torch": "torch",
    "matplotlib": "notebook",
    "anywidget": "notebook",
    "traitlets": "notebook",
    "cloudpickle": "book",
}


def a(value: Any) -> str:
    """Name the kind of a thing.

    >>> a(3), a("w"), a(None)
    ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    if value is None or isinstance(value, bytes):
        return "None" if value is None else name
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def whole(name: str, value: Any, expected: str, *, least: int = 0) -> int:
    """A whole number. Raises `TypeError` for anything else, `ValueError` below `least`.

    >>> whole("ranks", 2.0, "how many processes to start", least=1)
    Traceback (most recent call last):
    TypeError: ranks=2.0; expected how many processes to start, a whole number from 1 on
    """
    said = f"{name}={value!r:.80}; expected {expected}, a whole number from {least} on"
    if isinstance(value, bool):
        raise TypeError(said)
    try:
        number = index(value)
    except TypeError:
        raise TypeError(said) from None
    if number < least:
        raise ValueError(said)
    return number


def above_zero(name: str, value: Any, expected: str) -> float:
    """A number above 0. Raises `TypeError` for what is no number, `ValueError` for another one."""
    said = f"{name}={value!r:.80}; expected {expected}, a number above 0"
    if isinstance(value, str | bytes | bool):
        raise TypeError(said)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(said) from None
    if not 0 < number < math.inf:
        raise ValueError(said)
    return number


def flag(name: str, value: Any, *, or_none: bool = False) -> None:
    """Raise `TypeError` for what is neither True nor False: a text, even `"no"`, would count as True."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise TypeError(
            f"{name}={value!r:.80}; expected True{', False or None' if or_none else ' or False'}"
        )


def mapping(name: str, value: Any, example: str) -> None:
    """Raise `TypeError` for what is neither None nor values by name."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r:.80}; expected {name}={example}")


def file(name: str, value: Any) -> None:
    """Raise `TypeError` for what cannot name a file."""
    try:
        found = fspath(value)
    except TypeError:
        found = None
    if not isinstance(found, str):
        raise TypeError(
            f"{name} is {a(value)}; expected the name of a file, a text or a pathlib.Path"
        )


def nearest(wanted: str, names: Iterable[str]) -> str:
    """The names that are most like the one that is not there; the first ones where none is."""
    known = list(names)
    return (
        ", ".join(
            difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or known[:3]
        )
        or "none"
    )


def explained(missing: ModuleNotFoundError, what: str) -> ImportError:
    """Return the error for something that needs a package which is not installed.

    >>> explained(ModuleNotFoundError(name="matplotlib.figure"), "timeline")
    ImportError("timeline needs matplotlib: pip install 'accumviz[notebook]'")
    """
    package = (missing.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return missing
    install = f"pip install 'accumviz[{_EXTRAS[package]}]'"
    return ImportError(f"{what} needs {package}: {install}")


def describe(error: BaseException) -> str:
    """Return an exception's kind and text, even where making the text raises."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"[:500]
