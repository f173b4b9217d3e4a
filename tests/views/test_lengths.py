"""Equal numbers have equal lengths: what each part of a static figure draws is read back as what was recorded."""

from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from accumviz.ledger.ledger import CONTRIBUTED, Ledger, Parameter
from accumviz.views import payload
from accumviz.views.figure import PageFigure
from accumviz.views.layout import heat
from accumviz.views.timeline import timeline
from tests.toys import W

ADDED = [-16.0, -4.0, 6.0]
SAVED, AFTERWARDS = [9000.0, 6000.0, 3000.0], [4500.0, 3000.0, 0.0]
GRADS = [-16.0, -20.0, -14.0]


def ledger(parameters: int = 1) -> Ledger:
    """Three backwards, of the same numbers in each parameter."""
    names = [f"w{p}" for p in range(parameters)]
    rows: list[dict[str, Any]] = [
        {
            "kind": "backward",
            "label": "loss",
            "contribution": dict.fromkeys(names, ADDED[i]),
            "grad": dict.fromkeys(names, GRADS[i]),
            "saved_before": SAVED[i],
            "saved_after": AFTERWARDS[i],
        }
        for i in range(3)
    ]
    return Ledger.build([Parameter(name, (1,), optimizers=(0,)) for name in names], rows)


def boxes(figure: PageFigure, color: str, alpha: float) -> list[Rectangle]:
    """The rectangles of this fill that are no swatch, from the left."""
    found = [box for box in figure.axes[0].patches if isinstance(box, Rectangle)]
    own = [box for box in found if box.get_facecolor()[:3] == pytest.approx(_rgb(color)) and box.get_alpha() is None]
    own = [box for box in own if box.get_facecolor()[3] == pytest.approx(alpha) and box.get_width() > 14]
    return sorted(own, key=lambda box: float(box.get_x()))


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def lines(figure: PageFigure, width: float) -> list[Line2D]:
    """The level lines of this thickness that are no swatch, from the left."""
    found = [line for line in figure.axes[0].lines if line.get_linewidth() == width and np.ptp(line.get_ydata()) == 0]
    return sorted((line for line in found if np.ptp(line.get_xdata()) > 20), key=lambda line: line.get_xdata()[0])


def test_parts_and_totals_of_a_lane_are_drawn_to_one_scale() -> None:
    figure = timeline(ledger())
    zero = lines(figure, 0.9)[0].get_ydata()[0]
    ends = [line.get_ydata()[0] - zero for line in lines(figure, 2.6)]
    unit = ends[0] / -GRADS[0]
    assert ends == pytest.approx([-unit * grad for grad in GRADS])
    # An outlined part stands half an outline within its edges.
    new = [box.get_height() + 1.2 for box in boxes(figure, "#0072B2", 1.0)]
    assert new == pytest.approx([abs(unit * added) for added in ADDED])
    live = [box.get_height() + 1.2 for box in boxes(figure, "#0072B2", 0.36)]
    assert live == pytest.approx([abs(unit * added) for added in (-16, -16, -4)])


def test_equal_norms_are_equally_strong_whichever_loss_they_are_of() -> None:
    added = np.array([[8.0, 8.0, 2.0, 2.0]])
    codes = heat(added, added > 0, np.array([0, 1, 0, 1]), np.arange(4))[0].astype(int)
    first, second, third, fourth = (codes - 3) % 30
    assert first == second > third == fourth


def test_a_players_ranks_have_one_scale_in_what_it_is_told() -> None:
    """Equal numbers on two ranks were drawn at two lengths."""

    def rank(number: int, added: float) -> Ledger:
        return Ledger.build(
            [W], [{"kind": "backward", "contribution": {"w": added}, "grad": {"w": added}}], meta={"rank": number}
        )

    both = Ledger.merge([rank(0, -8.0), rank(1, 20.0)])
    assert (both.state & CONTRIBUTED).any()
    assert [row["r"] for row in payload.ledger_data(both)["p"]] == [[-8, 20], [-8, 20]]
