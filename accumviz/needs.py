"""Say of a package that is missing what installs it. Imports none of them."""

from __future__ import annotations

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
