"""The same views as widgets: what a page does without a kernel, with one that answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from accumviz.views.explore import Explorer, record_run, sheet_text
from accumviz.views.payload import encode
from accumviz.views.player import Player, assets

if TYPE_CHECKING:
    from anywidget import AnyWidget


def live_player(player: Player) -> AnyWidget:
    """A player as a widget; `at` is its moment, which Python may read and set."""
    sheet, script = assets()
    widget: AnyWidget = _host(script, sheet)(kind="player", data=encode(*player.content))
    return widget


def live_explorer(explorer: Explorer) -> AnyWidget:
    """An explorer as a widget, whose sliders also take values outside the grid: the kernel records them then."""
    sheet, script = assets()
    host = _host(script, sheet + sheet_text())
    widget: AnyWidget = host(kind="explorer", data=encode(*explorer.content), live=True)

    def record(change: Any) -> None:
        asked = change["new"]["choice"]
        choice = {
            name: values[place] if isinstance(place, int) else number(place, values)
            for place, (name, values) in zip(asked, explorer.choices.items(), strict=True)
        }
        widget.told = {"choice": asked, "run": encode(*record_run(explorer.experiment, choice).content())}

    widget.observe(record, "ask")
    return widget


def number(text: str, values: Sequence[Any]) -> float | int:
    """The number that a reader typed: whole where all recorded ones are.

    >>> number("3", (1, 2)), number("3", (0.5, 1))
    (3, 3.0)
    """
    value = float(text)
    return int(value) if value.is_integer() and all(isinstance(known, int) for known in values) else value


@cache
def _host(module: str, sheet: str) -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as missing:
        raise ImportError(
            f"live() needs the package anywidget ({missing}): pip install anywidget. "
            "What a notebook shows without live() needs nothing"
        ) from missing

    class Live(anywidget.AnyWidget):
        """The state that page and kernel share."""

        _esm, _css = module, sheet
        kind = traitlets.Unicode().tag(sync=True)
        data = traitlets.Unicode().tag(sync=True)
        id = traitlets.Unicode().tag(sync=True)
        live = traitlets.Bool(False).tag(sync=True)
        at = traitlets.Dict().tag(sync=True)
        ask = traitlets.Dict().tag(sync=True)
        told = traitlets.Dict().tag(sync=True)

    return Live
