"""accumviz records what every `backward()` does to every `.grad`, and replays it.

>>> import accumviz as av
>>> " ".join(sorted(av.__all__))
'Graph Ledger check compare distribute expect explore lab load play predict record timeline trace'
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from accumviz import arguments

__version__ = "0.1.0"

# verb -> module: loaded on first use, so that looking at a ledger brings in neither torch nor matplotlib
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_HOME = {name: home for home, name in re.findall(r"from (\S+) import (\w+)", _STUB)}
__all__ = sorted(_HOME)  # noqa: PLE0605 - the stub is the one list of public names


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'accumviz' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as missing:
        raise arguments.explained(missing, name) from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
