"""Say of a package that is missing, or too old, what installs it. Imports none of them."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

# The oldest torch that is recorded as newer ones are.
TORCH = 2, 10
# Each optional package, and the extra of accumviz that installs it.
_EXTRAS = {
    "torch": "torch",
    "matplotlib": "notebook",
    "anywidget": "notebook",
    "traitlets": "notebook",
    "cloudpickle": "book",
}


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


def check_torch() -> None:
    """Raise `ImportError` for a torch that would be recorded wrongly, though without any sign of it."""
    version = _version()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and numbers < TORCH:
        needed = ".".join(map(str, TORCH))
        raise ImportError(
            f"recording needs torch {needed} or newer, and this is torch {version}, on which a loss divided by "
            f"K would be recorded as undivided. Install one (pip install 'torch>={needed}'); ledgers that exist "
            "can be loaded and shown with any torch"
        )


def _version() -> str:
    """Return the version of torch: the imported one's, or the one that is installed; "" for none."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    from importlib import metadata  # takes longer than all the rest of the package

    try:
        return metadata.version("torch") if find_spec("torch") else ""
    except metadata.PackageNotFoundError:  # built from source, and never installed
        return ""
