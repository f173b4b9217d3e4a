"""The timeline: exact where it is small, honest where it is large, and at home on any page."""

import base64
import gzip
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from accumviz.ledger.ledger import KINDS, Ledger, Parameter
from accumviz.views import payload, style
from accumviz.views.figure import PageFigure
from accumviz.views.layout import heat, lay_out
from accumviz.views.timeline import timeline
from tests.toys import W, backward, large, ranks, segments, synced

LOSSES = ("d_loss", "g_loss")
SAVING = {"line": 7, "saved_before": 96.0, "saved_after": 0.0}
TOY: list[dict[str, Any]] = [
    backward(-16, -16, **SAVING),
    backward(-4, -20, **SAVING),
    {"kind": "step", "line": 8, "details": {"optimizer": "SGD"}, "grad": {"w": -20}},
]


@pytest.fixture
def toy() -> Ledger:
    return Ledger.build([W], TOY)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_small_ledger_shows_each_contribution_and_each_sum_and_says_them(toy: Ledger) -> None:
    figure = timeline(toy)
    shown = texts(figure)
    assert [shown.count(number) for number in ("−16", "−4", "−20")] == [4, 2, 2]
    assert {"backward", "step", "loss", "SGD", "line 7", "line 8", "w", "number"} <= set(shown)
    assert figure.words == [
        "1 parameter × 3 events, 1 accumulation window of 2 backwards; contribution norms from 4 to 16.",
        "Event 0, backward of loss, line 7: w receives −16, .grad −16; saved tensors 96 B before, 0 B after.",
        "Event 1, backward of loss, line 7: w receives −4, .grad −20; saved tensors 96 B before, 0 B after.",
        "Event 2, step by SGD, line 8: w.grad −20.",
    ]


def test_parts_of_a_bar_are_new_then_live_then_used_and_stand_on_each_other(toy: Ledger) -> None:
    (lane,) = lay_out(toy, [0], range(3))
    found = [[(start, length, part.look) for part, start, length in bar.pieces()] for bar in lane.bars]
    assert found == [[(0, -16, "new")], [(0, -16, "live"), (-16, -4, "new")], [(0, -16, "used"), (-16, -4, "used")]]
    assert [bar.reach for bar in lane.bars] == [(-16, 0), (-20, 0), (-20, 0)]


def test_negative_parts_hang_below_zero_and_the_total_stands_at_its_own_side() -> None:
    (lane,) = lay_out(Ledger.build([W], [backward(3, 3), backward(-5, -2), backward(1, -1)]), [0], range(3))
    assert [(start, length) for _, start, length in lane.bars[2].pieces()] == [(0, 3), (0, -5), (3, 1)]
    assert [bar.reach for bar in lane.bars] == [(0, 3), (-5, 3), (-5, 4)]
    assert lane.reach == (-5, 4)


def test_what_is_none_or_not_finite_has_no_parts() -> None:
    rows = [{"kind": "zero_grad"}, backward(np.inf, np.inf), {"kind": "edit", "grad": {"w": 4}}]
    ledger = Ledger.build([W], rows)
    (lane,) = lay_out(ledger, [0], range(3))
    assert [bar.state for bar in lane.bars] == ["none", "broken", "whole"]
    assert [(part.born, part.look) for part in lane.bars[2].parts] == [(-1, "unseen")]
    assert {"None", "∞", "not recorded"} <= set(texts(timeline(ledger)))


NOTES: dict[str, tuple[Ledger, str, int]] = {
    "an incomplete recording": (Ledger.build([W], TOY, complete=False), "The recording is incomplete.", 1),
    "a skipped step": (
        Ledger.build([W], [backward(1, 1), {"kind": "step", "details": {"skipped": True}}]),
        "skipped",
        1,
    ),
    "a norm": (Ledger.build([Parameter("w", (8,))], [backward(1, 1), backward(1, 2)]), "Norms do not add up", 1),
    "a number": (Ledger.build([W], TOY), "Norms", 0),
    "two scales": (
        Ledger.build(
            [W, Parameter("b", (1,))],
            [{"kind": "backward", "contribution": {"w": -16, "b": 0.5}, "grad": {"w": -16, "b": 0.5}}],
        ),
        "Each lane has a scale of its own.",
        1,
    ),
    "one scale": (Ledger.build([W, Parameter("b", (1,))], TOY), "scale", 0),
}


@pytest.mark.parametrize(("ledger", "text", "count"), NOTES.values(), ids=NOTES)
def test_a_figure_says_what_is_to_be_known_of_it(ledger: Ledger, text: str, count: int) -> None:
    assert " ".join(texts(timeline(ledger))).count(text) == count


def test_the_parts_of_a_tensor_share_its_norm_in_proportion_to_their_own() -> None:
    m = Parameter("m", (8,))
    rows = [
        {"kind": "backward", "contribution": {"m": [3.0, *[0] * 7]}, "grad": {"m": [3.0, *[0] * 7]}},
        {"kind": "backward", "contribution": {"m": [0, 4.0, *[0] * 6]}, "grad": {"m": [3.0, 4.0, *[0] * 6]}},
    ]
    (lane,) = lay_out(Ledger.build([m], rows), [0], [1])
    assert [part.amount for part in lane.bars[0].parts] == [3.0, 4.0]
    assert lane.bars[0].lengths == pytest.approx([15 / 7, 20 / 7]), "together as tall as ‖.grad‖"


def test_what_is_erased_unused_is_marked() -> None:
    shown = texts(timeline(Ledger.build([W], [TOY[0], {"kind": "zero_grad"}])))
    assert "× −16" in shown
    assert "erased before any step used it" in shown


def test_parameters_and_events_can_be_chosen() -> None:
    ledger = large(600, 24)
    assert "layers.1.0.weight" in timeline(ledger, parameters=["layers.1.0.weight"], events=slice(6)).words[1]
    figure = timeline(ledger, parameters=[0, "layers.1.3.weight"], events=slice(-6, None))
    assert figure.words[-1].startswith("Event 599, zero_grad on AdamW, line 3: layers.0.0.weight.grad None; layers.1.3")
    assert len(figure.words) == 7


def test_nothing_recorded_is_a_sentence_not_an_error(toy: Ledger) -> None:
    assert texts(timeline(Ledger.build([W], []))) == ["Nothing to show: this ledger has no event."]
    assert texts(timeline(toy, parameters=[])) == ["Nothing to show: this ledger has no parameter."]


def test_of_a_large_ledger_the_first_lanes_are_drawn_and_it_is_said_what_is_left_out() -> None:
    figure = timeline(large(1000, 150))
    shown = " ".join(texts(figure))
    assert "The first 8 of 150 parameters. The first 96 of 1,000 events." in shown
    assert "layers.0.7.weight" in shown and "layers.0.8.weight" not in shown
    assert figure.words[0].startswith("150 parameters × 1,000 events, 166 accumulation windows of 4 backwards")
    assert figure.get_size_inches()[0] * 72 < 2200
    assert "The first" not in " ".join(texts(timeline(large(96, 8))))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_event_of_every_kind_but_a_backward_has_a_line_of_its_own_colour(kind: str) -> None:
    figure = timeline(Ledger.build([W], [backward(1, 1), {"kind": kind, "grad": {"w": 1}}]))
    own = [line for line in figure.axes[0].lines if line.get_color() == style.kind(kind)[0]]
    assert [line for line in own if len(set(line.get_xdata())) == 1 and np.ptp(line.get_ydata()) > 40]
    assert f", {kind}" in figure.words[-1]


def test_no_text_is_smaller_than_eleven_pixels_even_on_a_phone(toy: Ledger) -> None:
    for ledger in (toy, large(9, 20, LOSSES), large(60, 20, LOSSES)):
        figure = timeline(ledger)
        assert min(text.get_fontsize() for text in figure.axes[0].texts) >= 11
        width = figure.get_size_inches()[0] * 72
        shrunk = float(re.findall(r"min-width: (\d+)px", figure.to_svg())[0])
        assert shrunk / width >= 0.92


@pytest.mark.parametrize(("events", "parameters"), [(9, 2), (22, 3), (9, 14), (60, 20)])
def test_every_text_stands_inside_the_figure_and_on_no_other(events: int, parameters: int) -> None:
    figure = timeline(large(events, parameters, LOSSES))
    figure.set_dpi(72)
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts if text.get_text()]
    width, height = figure.get_size_inches() * 72
    for told, box in boxes:
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, told
    for i, (told, box) in enumerate(boxes):
        for other, another in boxes[i + 1 :]:
            wide = min(box.x1, another.x1) - max(box.x0, another.x0)
            tall = min(box.y1, another.y1) - max(box.y0, another.y0)
            assert wide < 2.1 or tall < 3, f"{told!r} lies on {other!r}"  # a box has a margin of its own


def test_the_page_shows_svg_in_its_own_colours(toy: Ledger) -> None:
    html = timeline(toy).to_html()
    assert html.startswith('<div class="accumviz av-timeline">')
    svg = html[html.index("<svg") : html.index("</svg>") + 6]
    ET.fromstring(svg)
    assert 'role="img"' in svg
    assert "w receives −16, .grad −16" in re.findall(r'aria-label="([^"]*)"', svg)[0]
    assert "currentColor" in svg
    assert "var(--av-muted)" in svg
    # What would show as a pale box in the dark, or leak into the page.
    assert not re.findall(r"fill: (?:#ffffff|white)(?=[^>]*><?/?path)|<style|<metadata|<title", svg)
    assert "#1a1f26" not in svg
    assert not re.findall(r"https?://(?!www\.w3\.org)", html)


def test_two_figures_on_one_page_share_no_id() -> None:
    # What was not recorded is hatched, and a hatching is a pattern with an id.
    figure = timeline(Ledger.build([W], [{"kind": "edit", "grad": {"w": 4}}]))
    first, second = (set(re.findall(r' id="([^"]*)"', figure.to_html())) for _ in range(2))
    assert first
    assert not first & second
    html = figure.to_html()
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(re.findall(r' id="([^"]*)"', html))


def test_names_are_shown_as_they_are() -> None:
    evil = '<script>$x_1$</script>"\u202e url(#a) #1a1f26'
    ledger = Ledger.build(
        [Parameter(evil, (1,))],
        [
            {"kind": "backward", "label": evil, "contribution": {evil: 1}, "grad": {evil: 1}},
            {"kind": "backward", "label": "b", "contribution": {evil: 1}, "grad": {evil: 2}},
        ],
    )
    html = timeline(ledger).to_html()
    assert "<script" not in html
    assert "\u202e" not in html
    svg = ET.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    shown = [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("<script>") for text in shown)
    assert all(len(text) < 60 for text in shown)


def test_the_notebook_gets_html_a_picture_and_words(toy: Ledger) -> None:
    figure = timeline(toy)
    bundle = figure._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"].splitlines() == figure.words
    assert len(gzip.compress(bundle["text/html"].encode())) < 4_000, "the drawing for a phone is much like the other"


def test_drawing_changes_no_defaults_and_no_defaults_change_the_drawing(toy: Ledger) -> None:
    before = dict(mpl.rcParams)
    buffer, plain = io.BytesIO(), re.sub(r"av[0-9a-f]{6}-\d+-", "", timeline(toy).to_svg())
    timeline(toy).savefig(buffer)
    assert dict(mpl.rcParams) == before
    with mpl.rc_context(
        {
            "savefig.bbox": "tight",
            "figure.autolayout": True,
            "font.size": 30,
            "svg.fonttype": "path",
            "figure.facecolor": "black",
            "text.color": "white",
            "lines.marker": "o",
        }
    ):
        assert re.sub(r"av[0-9a-f]{6}-\d+-", "", timeline(toy).to_svg()) == plain


def test_drawing_needs_neither_pyplot_nor_torch() -> None:
    code = (
        "import sys; from accumviz.ledger.ledger import *; from accumviz.views.timeline import timeline\n"
        "w = Parameter('w', (1,)); row = dict(kind='backward', contribution={'w': 1}, grad={'w': 1})\n"
        "timeline(Ledger.build([w], [row]))._repr_mimebundle_()\n"
        "print(sorted({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_after_an_all_reduce_a_rank_has_its_share_of_the_mean_and_the_rest_is_from_others() -> None:
    step = {"kind": "step", "grad": {"w": 6.0}}
    ledger = ranks(*([backward(x, x), synced(3.0), backward(x, 3 + x), synced(6.0), step] for x in (2.0, 4.0)))
    first, second = (event.index for event in ledger.of("sync"))
    parts = segments(ledger, 0, [first, second])
    assert [(part.born >= 0, part.amount) for part in parts[0]] == [(False, 2.0), (True, 1.0)]
    # What was averaged once is not halved again.
    assert [(part.born >= 0, part.amount) for part in parts[1]] == [(False, 4.0), (True, 1.0), (True, 1.0)]
    # A step uses the average as a whole.
    (used,) = segments(ledger, 0, [ledger.of("step")[0].index])
    assert [part.look for part in used] == ["unseen", "used", "used"]


def test_what_a_reduce_scatter_adds_to_a_shard_is_no_average_of_what_was_there() -> None:
    said = {"op": "reduce-scatter", "ranks": 4}
    rows = [{"kind": "sync", "contribution": {"w": 2}, "grad": {"w": n}, "details": said} for n in (2, 4)]
    (parts,) = segments(Ledger.build([W], rows), 0, [1])
    assert [(part.born, part.amount) for part in parts] == [(0, 2.0), (1, 2.0)]


def test_one_parameter_on_several_ranks_has_one_scale() -> None:
    figure = timeline(ranks(*([backward(x, x, **SAVING), synced(-28.0)] for x in (-16.0, -40.0))))
    # the thick line that ends a bar, below the thin one from which it hangs
    thin, thick = lines(figure, 0.9), lines(figure, 2.6)
    zeros, last = sorted({float(line.get_ydata()[0]) for line in thin})[:2], max(line.get_xdata()[1] for line in thick)
    ends = sorted(float(line.get_ydata()[0]) for line in thick if line.get_xdata()[1] == last)
    assert len(ends) == 2
    assert ends[0] - zeros[0] == pytest.approx(ends[1] - zeros[1], rel=0.01), "equal numbers are equally long"
    assert "scale" not in " ".join(texts(figure))


def test_a_bar_is_as_tall_before_the_unscale_as_after_it() -> None:
    scaler = {"amp_scale": 1024.0}
    window = [backward(512, 512, details=scaler), {"kind": "unscale", "grad": {"w": 0.5}, "details": scaler}]
    # To a second unscaled window something scaled is added too late.
    rows = [*window, {"kind": "zero_grad"}, *window, backward(512, 512.5, details=scaler)]
    (lane,) = lay_out(Ledger.build([W], rows), [0], range(6))
    assert [bar.end for bar in lane.bars if bar.state == "whole"] == [0.5, 0.5, 0.5, 0.5, 512.5]
    assert "Bars are divided by the factor of the gradient scaler" in " ".join(texts(timeline(Ledger.build([W], rows))))


def boxes(figure: PageFigure, color: str, alpha: float) -> list[Rectangle]:
    """The rectangles of this fill that are no swatch, from the left."""
    found = [box for box in figure.axes[0].patches if isinstance(box, Rectangle)]
    own = [box for box in found if box.get_facecolor()[:3] == pytest.approx(to_rgb(color)) and box.get_alpha() is None]
    own = [box for box in own if box.get_facecolor()[3] == pytest.approx(alpha) and box.get_width() > 14]
    return sorted(own, key=lambda box: float(box.get_x()))


def lines(figure: PageFigure, width: float) -> list[Line2D]:
    """The level lines of this thickness that are no swatch, from the left."""
    found = [line for line in figure.axes[0].lines if line.get_linewidth() == width and np.ptp(line.get_ydata()) == 0]
    return sorted((line for line in found if np.ptp(line.get_xdata()) > 20), key=lambda line: line.get_xdata()[0])


def test_parts_and_totals_of_a_lane_are_drawn_to_one_scale() -> None:
    added, grads = [-16.0, -4.0, 6.0], [-16.0, -20.0, -14.0]
    figure = timeline(Ledger.build([W], [backward(*row) for row in zip(added, grads, strict=True)]))
    zero = lines(figure, 0.9)[0].get_ydata()[0]
    ends = [line.get_ydata()[0] - zero for line in lines(figure, 2.6)]
    unit = ends[0] / -grads[0]
    assert ends == pytest.approx([-unit * grad for grad in grads])
    # An outlined part stands half an outline within its edges.
    new = [box.get_height() + 1.2 for box in boxes(figure, "#0072B2", 1.0)]
    assert new == pytest.approx([abs(unit * one) for one in added])
    live = [box.get_height() + 1.2 for box in boxes(figure, "#0072B2", 0.36)]
    assert live == pytest.approx([abs(unit * added) for added in (-16, -16, -4)])


def test_equal_norms_are_equally_strong_whichever_loss_they_are_of() -> None:
    added = np.array([[8.0, 8.0, 2.0, 2.0]])
    codes = heat(added, added > 0, np.array([0, 1, 0, 1]), np.arange(4))[0].astype(int)
    first, second, third, fourth = (codes - 3) % 30
    assert first == second > third == fourth


def test_a_players_ranks_have_one_scale_in_what_it_is_told() -> None:
    """Equal numbers on two ranks were drawn at two lengths."""
    both = ranks([backward(-8.0, -8.0)], [backward(20.0, 20.0)])
    assert [row["r"] for row in payload.ledger_data(both)["p"]] == [[-8, 20], [-8, 20]]
