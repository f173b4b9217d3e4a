"""A notebook's function as bytes: cloudpickle's, and with it the text of the cells that its events will show."""

from __future__ import annotations

import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from accumviz.recorder.callsite import readable


def pack(function: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    """Write a function and its arguments down for another process of the same Python.

    Functions and classes that an import finds go by their name. Others, those of a notebook or
    a script, go with their code, and with the imports, functions, classes and values that the
    code names. Raises `TypeError` for a value that cannot be copied.
    """
    files: dict[str, str] = {}
    buffer = io.BytesIO()
    try:
        _Packer(buffer, files).dump((function, kwargs))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"cannot send {name!r} to other processes: {error}. Everything it uses from outside must be an import, "
            "a function, a class or a value that pickle copies; make the rest inside the function"
        ) from error
    return pickle.dumps((sys.path, files, buffer.getvalue()))


def unpack(data: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Read what `pack` wrote; what its notebook or script defined is found in this process's `__main__`."""
    path, files, inner = pickle.loads(data)  # noqa: S301 - written by the process that started this one
    sys.path[:] = path
    for name, text in files.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function, kwargs = pickle.loads(inner)  # noqa: S301 - as above
    known = getattr(function, "__globals__", {})
    if (
        known.get("__name__") == "__main__"
    ):  # where pickle, as in all_gather_object, looks for a class
        vars(sys.modules["__main__"]).update(known)
    return function, kwargs


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Gives code the file name that a person would, and keeps that file's text."""

    def __init__(self, buffer: io.BytesIO, files: dict[str, str]) -> None:
        super().__init__(buffer)
        self._files = files

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.CodeType):
            return super().reducer_override(value)
        name = readable(value.co_filename)
        text = "".join(linecache.getlines(value.co_filename))
        if text:
            self._files[name] = text
        return self.dispatch_table[types.CodeType](value.replace(co_filename=name))
