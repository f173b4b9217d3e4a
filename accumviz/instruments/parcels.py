"""A notebook's function as bytes: it, and what it uses, for a process that cannot import the notebook."""

from __future__ import annotations

import dataclasses
import dis
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from accumviz.instruments.callsite import readable

# What a class is given anew when it is made, or what says nothing about it.
_OWN = {"__dict__", "__weakref__", "__module__", "_abc_impl", "__firstlineno__", "__static_attributes__"}


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
    """Read what `pack` wrote, into this process's `__main__`."""
    path, files, inner = pickle.loads(data)  # noqa: S301 - written by the process that started this one
    sys.path[:] = path
    for name, text in files.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function, kwargs = pickle.loads(inner)  # noqa: S301 - as above
    return function, kwargs


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, files: dict[str, str]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._files = files

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            return _make_cell, (), _contents(value), None, None, _fill_cell
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.MappingProxyType):
            return _make_proxy, (dict(value),)
        if type(value).__module__ == "dataclasses" and not isinstance(value, dataclasses.Field | type):
            names = [name for name, known in vars(dataclasses).items() if known is value]
            if names:  # a mark that is told apart by being itself
                return getattr, (dataclasses, names[0])
        if isinstance(value, classmethod | staticmethod):
            return type(value), (value.__func__,)
        if isinstance(value, types.FunctionType) and not _importable(value):
            return self._function(value)
        if isinstance(value, type) and not _importable(value):
            kept = {name: item for name, item in vars(value).items() if name not in _OWN}
            for name in kept.get("__slots__", ()):
                kept.pop(name, None)
            body = {"__slots__": kept.pop("__slots__")} if "__slots__" in kept else {}
            made = (type(value), value.__name__, value.__bases__, value.__module__, body)
            return _make_class, made, kept, None, None, _fill_class
        return NotImplemented

    def _function(self, value: types.FunctionType) -> Any:
        code = self._named(value.__code__)
        known = value.__globals__
        state = {
            "globals": {name: known[name] for name in dict.fromkeys(_names(code)) if name in known},
            "attributes": {
                name: getattr(value, name)
                for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__doc__", "__dict__")
            },
        }
        made = (marshal.dumps(code), value.__name__, value.__module__, value.__closure__)
        return _make_function, made, state, None, None, _fill_function

    def _named(self, code: types.CodeType) -> types.CodeType:
        """The code under the name that a person would give its file; that file's text is sent, too."""
        name = readable(code.co_filename)
        text = "".join(linecache.getlines(code.co_filename))
        if text:
            self._files[name] = text
        inner = tuple(self._named(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
        return code.replace(co_filename=name, co_consts=inner)


def _importable(value: Any) -> bool:
    """Whether another process finds the same thing by importing its module."""
    if value.__module__ in ("__main__", "__mp_main__", None):
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function, and what is defined inside it, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


# These two types go by names that no import finds.
def _make_cell() -> types.CellType:
    return types.CellType()


def _make_proxy(inside: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(inside)


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]


def _make_function(code: bytes, name: str, module: str, closure: Any) -> types.FunctionType:
    namespace = vars(sys.modules["__main__"])
    made = types.FunctionType(marshal.loads(code), namespace, name, None, closure)  # noqa: S302 - see unpack
    made.__module__ = module
    return made


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    for name, value in state["attributes"].items():
        setattr(function, name, value)


def _make_class(kind: Any, name: str, bases: tuple[type, ...], module: str, body: dict[str, Any]) -> type:
    made: type = kind(name, bases, {"__module__": module, **body})
    if module == "__main__":
        setattr(sys.modules["__main__"], name, made)
    return made


def _fill_class(made: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(made, name, value)
