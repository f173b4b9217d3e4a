"""The timeline: exact where it is small, honest where it is large, and at home on any page."""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import accumviz as av
from accumviz.book.charts import ThemedFigure
from accumviz.ledger.ledger import CONTRIBUTED, KINDS, PRESENT, Event, Ledger, Parameter
from accumviz.views import style
from accumviz.views.figure import PageFigure
from accumviz.views.parts import heights, segments
from accumviz.views.timeline import timeline

W = Parameter("w", (1,), optimizers=(0,))
TOY: list[dict[str, Any]] = [
    {
        "kind": "backward",
        "label": "loss",
        "line": 7,
        "contribution": {"w": -16},
        "grad": {"w": -16},
        "saved_before": 96.0,
        "saved_after": 0.0,
    },
    {
        "kind": "backward",
        "label": "loss",
        "line": 7,
        "contribution": {"w": -4},
        "grad": {"w": -20},
        "saved_before": 96.0,
        "saved_after": 0.0,
    },
    {"kind": "step", "line": 8, "details": {"optimizer": "SGD"}, "grad": {"w": -20}},
]


@pytest.fixture
def toy() -> Ledger:
    return Ledger.build([W], TOY)


def large(events: int, parameters: int, *, broken: bool = False) -> Ledger:
    """Four backwards, a step, a zero: a run with structure, two losses and (if wanted) two infinite contributions."""
    kinds = [("zero_grad", "backward", "backward", "backward", "backward", "step")[e % 6] for e in range(events)]
    born, empty = (np.array([kind == wanted for kind in kinds])[:, None] for wanted in ("backward", "zero_grad"))
    norm = np.outer(np.exp(-np.arange(events) / events), 10.0 ** -(np.arange(parameters) % 12 / 4))
    added, grad = np.where(born, norm, np.nan), np.where(empty, np.nan, 2 * norm)
    if broken:
        added[events // 6 * 3 + 1 - events // 6 * 3 % 6, :2] = np.inf
    state = (born * CONTRIBUTED + ~empty * PRESENT).astype(np.uint8).repeat(parameters, 1)
    names = [Parameter(f"blocks.{p // 12}.part{p % 12}.weight", (8, 8), optimizers=(0,)) for p in range(parameters)]
    rows = [
        Event(e, kind, label=("d_loss", "g_loss")[e % 2] if kind == "backward" else "") for e, kind in enumerate(kinds)
    ]
    return Ledger(tuple(names), tuple(rows), added, grad, state)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_toy_shows_each_contribution_and_each_sum(toy: Ledger) -> None:
    shown = texts(timeline(toy))
    assert [shown.count(number) for number in ("−16", "−4", "−20")] == [4, 2, 2]
    assert {"backward", "step", "loss", "SGD", "line 7", "line 8", "w", "96 B → 0 B"} <= set(shown)


def test_the_words_say_the_same_numbers(toy: Ledger) -> None:
    assert timeline(toy).words == [
        "1 parameter × 3 events, 1 accumulation window of 2 backwards; contribution norms from 4 to 16.",
        "Event 0, backward of loss, line 7: w receives −16, .grad −16; saved tensors 96 B before, 0 B after.",
        "Event 1, backward of loss, line 7: w receives −4, .grad −20; saved tensors 96 B before, 0 B after.",
        "Event 2, step by SGD, line 8: w.grad −20.",
    ]


def test_segments_are_new_then_live_then_used(toy: Ledger) -> None:
    states = [[(part.amount, part.new, part.used) for part in stack] for stack in segments(toy, 0, [0, 1, 2])]
    assert states == [
        [(-16, True, False)],
        [(-16, False, False), (-4, True, False)],
        [(-16, False, True), (-4, False, True)],
    ]


def test_what_no_backward_added_is_a_segment_of_its_own() -> None:
    ledger = Ledger.build([W], [TOY[0], {"kind": "edit", "grad": {"w": 4}}])
    assert [(part.born, part.amount) for part in segments(ledger, 0, [1])[0]] == [(-1, 4)]
    assert "not from a recorded backward" in texts(timeline(ledger))


def test_none_and_zero_look_different() -> None:
    ledger = Ledger.build([W], [{"kind": "zero_grad"}, {"kind": "zero_grad", "grad": {"w": 0}}])
    shown = texts(timeline(ledger))
    assert shown.count("None") == 1
    assert shown.count("0") == 1


@pytest.mark.parametrize(("events", "fits"), [(2, True), (7, True), (20, False)])
def test_a_figure_that_can_stand_on_a_phone_without_being_moved_does(events: int, fits: bool) -> None:
    """Twenty events have no room in any."""
    rows = [{"kind": "backward", "contribution": {"w": -1}, "grad": {"w": -1.0 - e}} for e in range(events)]
    figure = av.timeline(Ledger.build([Parameter("w", (1,))], rows))
    page = figure.to_html()
    assert ("av-narrow" in page.partition("</style>")[2]) == fits
    widths = [float(width) for width in re.findall(r'class="av-figure"[^>]*?viewBox="0 [\d.]+ ([\d.]+)', page)]
    assert len(widths) == 1 + fits
    assert not fits or min(widths) <= 343 < max(widths)
    assert page.count("In words") == 1


def test_a_norm_is_said_to_be_one() -> None:
    m = Parameter("m", (3, 3))
    ledger = Ledger.build([m], [{"kind": "backward", "contribution": {"m": np.ones(9)}, "grad": {"m": np.ones(9)}}])
    assert {"norm ‖·‖", "3"} <= set(texts(timeline(ledger)))


def test_the_parts_of_a_tensor_share_its_norm_in_proportion_to_their_own() -> None:
    m = Parameter("m", (8,))
    rows = [
        {"kind": "backward", "contribution": {"m": [3.0, *[0] * 7]}, "grad": {"m": [3.0, *[0] * 7]}},
        {"kind": "backward", "contribution": {"m": [0, 4.0, *[0] * 6]}, "grad": {"m": [3.0, 4.0, *[0] * 6]}},
    ]
    (stack,) = segments(Ledger.build([m], rows), 0, [1])
    assert [part.amount for part in stack] == [3.0, 4.0]
    assert heights(stack, 5.0, signed=False) == pytest.approx([15 / 7, 20 / 7]), "together as tall as ‖.grad‖"


def test_what_is_erased_unused_is_marked() -> None:
    shown = texts(timeline(Ledger.build([W], [TOY[0], {"kind": "zero_grad"}])))
    assert "× −16" in shown
    assert "erased before any step used it" in shown


def test_infinite_and_undefined_values_are_visible() -> None:
    inf = {"w": float("inf")}
    ledger = Ledger.build(
        [W],
        [
            {"kind": "backward", "contribution": inf, "grad": inf},
            {"kind": "backward", "contribution": {"w": -float("inf")}, "grad": {"w": float("nan")}},
        ],
    )
    assert {"∞", "NaN", "not finite"} <= set(texts(timeline(ledger)))


def test_a_skipped_step_says_so() -> None:
    row = {"kind": "step", "details": {"skipped": True, "optimizer": "SGD"}, "grad": {"w": -16}}
    assert "skipped" in texts(timeline(Ledger.build([W], [TOY[0], row])))


def test_parameters_and_events_can_be_chosen() -> None:
    ledger = large(600, 24)
    assert "blocks.1.part0.weight" in timeline(ledger, parameters="blocks.1.*", events=slice(6)).words[1]
    figure = timeline(ledger, parameters=[0, "blocks.1.part3.weight"], events=range(-6, 0))
    assert figure.words[1].startswith("Event 594, zero_grad: blocks.0.part0.weight.grad None; blocks.1.part3")
    assert len(figure.words) == 7


def test_an_unknown_choice_says_what_there_is(toy: Ledger) -> None:
    with pytest.raises(KeyError, match=r"no parameter 'v'.*nearest: w"):
        timeline(toy, parameters=["v"])
    with pytest.raises(IndexError, match=r"indices of this ledger's 3 events"):
        timeline(toy, events=[7])


def test_nothing_recorded_is_a_sentence_not_an_error(toy: Ledger) -> None:
    assert texts(timeline(Ledger.build([W], []))) == ["Nothing to show: this ledger has no event."]
    assert texts(timeline(toy, parameters=[])) == ["Nothing to show: this ledger has no parameter."]


def test_an_incomplete_recording_says_so() -> None:
    assert "The recording is incomplete." in texts(timeline(Ledger.build([W], TOY, complete=False)))


# --- the heat map


def test_a_thousand_events_of_150_parameters_have_few_labels_that_do_not_touch() -> None:
    figure = timeline(large(1000, 150))
    figure.canvas.draw()
    shown = texts(figure)
    assert len(shown) < 60
    assert {"blocks.0", "blocks.12"} <= set(shown)
    assert "150 parameters × 1,000 events, 166 accumulation windows of 4 backwards" in shown
    assert any(text.startswith("Thinned: each cell shows the largest contribution of 2 events") for text in shown)


def test_rules_that_are_too_many_to_draw_are_counted_instead() -> None:
    shown = texts(timeline(large(1000, 150)))
    assert "step" not in shown
    assert any("167 × zero_grad, 166 × step" in text for text in shown)


@pytest.mark.parametrize(("events", "turned"), [(1, False), (19, True)])
def test_totals_that_have_no_room_level_are_turned_and_none_is_left_out(events: int, turned: bool) -> None:
    rows = [add(-0.12345, -0.12345 * (n + 1)) for n in range(events)]
    figure = timeline(Ledger.build([W], rows))
    told = [text for text in figure.axes[0].texts if text.get_weight() == "bold"]
    assert len(told) == events
    assert any(text.get_rotation() for text in told) == turned
    assert not any("left out" in text for text in texts(figure))


def test_thinning_ten_thousand_events_is_said_and_keeps_the_largest() -> None:
    ledger = large(10_000, 150)
    figure = timeline(ledger)
    assert any("largest contribution of" in text and "events" in text for text in texts(figure))
    opacity = pixels_of(figure)[..., 3]
    assert opacity[0, 0] == 1, "where the largest contribution is"
    assert opacity.size < ledger.contribution.size / 15


def test_one_infinite_contribution_among_many_survives_thinning() -> None:
    figure = timeline(large(10_000, 150, broken=True))
    assert "not finite (2 contributions)" in texts(figure)
    assert "2 contributions not finite" in figure.words[0]
    assert any(line.get_marker() == "x" and len(line.get_xdata()) == 2 for line in figure.axes[0].lines)


def pixels_of(figure: Figure) -> Any:
    return figure.axes[0].images[0].get_array()


def test_cells_tell_a_contribution_from_a_grad_that_was_held_and_from_none() -> None:
    none, added, held = pixels_of(timeline(large(60, 20)))[0, [0, 1, 5]]
    assert none[3] == 0
    assert held[:3].tolist() == [0.5, 0.5, 0.5]
    assert 0 < held[3] < added[3]


def test_opacity_grows_with_the_norm() -> None:
    strong = pixels_of(timeline(large(60, 20)))[:12, 1, 3]
    assert (np.diff(strong) < 0).all(), "each parameter's contribution is smaller than that of the one above it"
    assert strong[0] == 1


def test_a_cell_has_the_colour_of_its_loss() -> None:
    ledger = large(60, 20)
    colors = [mpl.colors.to_rgb(color) for color in style.label_colors(ledger.labels).values()]
    pixels = pixels_of(timeline(ledger))[0, [1, 2], :3]
    assert pixels.tolist() == [list(color) for color in colors]


def test_the_band_of_a_window_reaches_from_its_first_backward_to_its_step() -> None:
    ledger = large(60, 20)
    boxes = [patch for patch in timeline(ledger).axes[0].patches if isinstance(patch, Rectangle)]
    bands = [box for box in boxes if box.get_height() == 6]
    windows = ledger.windows()
    assert len(bands) == len(windows) == 10
    each = (bands[1].get_x() - bands[0].get_x()) / (windows[1].backwards[0] - windows[0].backwards[0])
    for band, window in zip(bands, windows, strict=True):
        assert band.get_width() == pytest.approx(each * (window.step - window.backwards[0]))


def test_every_step_and_zero_rules_through_all_rows() -> None:
    ledger = large(60, 20)
    image = timeline(ledger).axes[0].images[0]
    _, _, bottom, top = image.get_extent()
    rules = [
        line
        for line in timeline(ledger).axes[0].lines
        if len(set(line.get_xdata())) == 1 and min(line.get_ydata()) <= top and max(line.get_ydata()) >= bottom
    ]
    assert len(rules) == len(ledger.of("step")) + len(ledger.of("zero_grad"))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("many", [1, 40])
def test_an_event_of_every_kind_but_a_backward_has_a_line_of_its_own_colour(kind: str, many: int) -> None:
    grad = {f"w{p}": 1.0 for p in range(many)}
    rows = [{"kind": "backward", "contribution": grad, "grad": grad}] * many
    figure = timeline(Ledger.build([Parameter(name, (1,)) for name in grad], [*rows, {"kind": kind, "grad": grad}]))
    assert bool(figure.axes[0].images) == (many > 1), "bars are lanes, many of them a heat map"
    own = [line for line in figure.axes[0].lines if line.get_color() == style.KIND[kind]]
    assert [line for line in own if len(set(line.get_xdata())) == 1 and np.ptp(line.get_ydata()) > 40]
    assert f", {kind}" in figure.words[-1]


def test_a_thousand_parameters_are_thinned_and_it_is_said() -> None:
    figure = timeline(large(30, 1000))
    assert any("largest contribution of 3 parameters" in text for text in texts(figure))


# --- on a page, and elsewhere


def test_no_text_is_smaller_than_eleven_pixels_even_on_a_phone(toy: Ledger) -> None:
    for ledger in (toy, large(9, 20), large(60, 20), large(1000, 150)):
        figure = timeline(ledger)
        assert min(text.get_fontsize() for text in figure.axes[0].texts) >= 11
        width = figure.get_size_inches()[0] * 72
        shrunk = float(re.findall(r"min-width: (\d+)px", figure.to_svg())[0])
        assert shrunk / width >= 0.92


@pytest.mark.parametrize(("events", "parameters"), [(9, 2), (22, 3), (9, 14), (60, 20), (1000, 150)])
def test_every_text_stands_inside_the_figure_and_on_no_other(events: int, parameters: int) -> None:
    figure = timeline(large(events, parameters))
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
            assert wide < 2 or tall < 3, f"{told!r} lies on {other!r}"


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
    inf = {"w": float("inf")}
    ledger = Ledger.build([W], [{"kind": "backward", "contribution": inf, "grad": inf}])
    figure = timeline(ledger)
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


def test_a_name_may_be_in_any_script(recwarn: pytest.WarningsRecorder) -> None:
    ledger = Ledger.build([Parameter("משקל.重み", (1,))], [{"kind": "step", "grad": {"משקל.重み": 1}}])
    bundle = timeline(ledger)._repr_mimebundle_()
    assert "משקל.重み" in bundle["text/html"]
    assert not recwarn.list


def test_the_notebook_gets_html_a_picture_and_words(toy: Ledger) -> None:
    figure = timeline(toy)
    bundle = figure._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"].splitlines() == figure.words
    assert len(gzip.compress(bundle["text/html"].encode())) < 4_000, "the drawing for a phone is much like the other"


def test_elsewhere_it_is_an_ordinary_figure(toy: Ledger, tmp_path: Path) -> None:
    figure = timeline(toy)
    assert isinstance(figure, Figure)
    for name in ("x.png", "x.svg", "x.pdf"):
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    figure.save(tmp_path / "x.html")
    assert "<svg" in (tmp_path / "x.html").read_text("utf-8")


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


# --- several ranks --------------------------------------------------------------------------------


def two_ranks() -> Ledger:
    def one(rank: int, local: float) -> Ledger:
        def add(total: float) -> dict[str, Any]:
            return {"kind": "backward", "label": "loss", "contribution": {"w": local}, "grad": {"w": total}}

        def reduce(mean: float) -> dict[str, Any]:
            return {
                "kind": "sync",
                "details": {"op": "all-reduce", "bytes": 4, "ranks": 2, "reduction": "avg"},
                "grad": {"w": mean},
            }

        rows = [add(local), reduce(3.0), add(3.0 + local), reduce(6.0), {"kind": "step", "grad": {"w": 6.0}}]
        return Ledger.build([Parameter("w", (1,), optimizers=(0,))], rows, meta={"rank": rank, "optimizers": ["SGD"]})

    return Ledger.merge([one(0, 2.0), one(1, 4.0)])


def test_after_an_all_reduce_a_rank_has_its_share_of_the_mean_and_the_rest_is_from_others() -> None:
    ledger = two_ranks()
    first, second = (event.index for event in ledger.of("sync"))
    parts = segments(ledger, 0, [first, second])
    assert [(part.born >= 0, part.amount) for part in parts[0]] == [(False, 2.0), (True, 1.0)]
    # What was averaged once is not halved again.
    assert [(part.born >= 0, part.amount) for part in parts[1]] == [(False, 4.0), (True, 1.0), (True, 1.0)]


def test_what_a_reduce_scatter_adds_to_a_shard_is_no_average_of_what_was_there() -> None:
    said = {"op": "reduce-scatter", "ranks": 4}
    rows = [{"kind": "sync", "contribution": {"w": 2}, "grad": {"w": n}, "details": said} for n in (2, 4)]
    (parts,) = segments(Ledger.build([W], rows), 0, [1])
    assert [(part.born, part.amount) for part in parts] == [(0, 2.0), (1, 2.0)]


def test_events_of_several_ranks_are_told_with_their_rank() -> None:
    figure = timeline(two_ranks())
    assert figure.words[1].startswith("Event 0, backward of loss, rank 0")
    assert "sync by all-reduce of 4 bytes" in figure.words[3]
    assert "rank" not in figure.words[3].split(":", maxsplit=1)[0]


def test_what_an_event_did_is_whole_above_a_narrow_column() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "backward", "label": "scaler.scale(loss)", "contribution": {"w": 1.0}, "grad": {"w": 1.0}},
        {"kind": "step", "grad": {"w": 1.0}, "details": {"optimizer": "optimizer", "skipped": True}},
    ]
    drawing = av.timeline(Ledger.build([W], rows * 6)).to_svg()
    titles = re.findall(r">((?:backward|step) [^<]*)</text>", drawing)
    assert set(titles) == {"backward scale(loss)", "step skipped optimizer"}


def test_a_rank_and_its_line_are_whole_where_the_column_has_room_for_them() -> None:
    rows: list[dict[str, Any]] = [{"kind": "step", "grad": {"w": 1.0}, "line": 10}] * 3
    ledger = Ledger.merge([Ledger.build([W], rows, meta={"rank": rank}) for rank in (0, 1)])
    drawing = av.timeline(ledger, events=range(5)).to_svg()
    assert "rank 0 line 10" in drawing
    assert "rank 0…" not in drawing


def test_very_many_live_parts_are_drawn_as_few_and_lose_nothing() -> None:
    rows: list[dict[str, Any]] = []
    for e in range(400):
        sign = 1.0 if e % 3 else -0.5
        held = sum(1.0 if b % 3 else -0.5 for b in range(e + 1))
        rows.append({"kind": "backward", "label": "ab"[e % 2], "contribution": {"w": sign}, "grad": {"w": held}})
    ledger = Ledger.build([Parameter("w", (1,))], rows)
    (parts,) = segments(ledger, 0, [399])
    assert len(parts) == 4 + 23, "two labels and two signs, then the latest one by one"
    assert sum(part.together for part in parts) == 400
    assert sum(part.amount for part in parts) == pytest.approx(ledger.values("w")[399, 0])
    assert [part.born for part in parts[-23:]] == list(range(377, 400))
    assert len(timeline(ledger, events=[398, 399]).to_html()) < 60_000


def boxes(figure: PageFigure) -> list[tuple[str, Any]]:
    """Each text of a figure and the box that it takes, in pixels from the top left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer, scale = FigureCanvasAgg(figure).get_renderer(), 72 / figure.dpi
    height = figure.get_size_inches()[1] * 72
    found = []
    for text in figure.axes[0].texts:
        box = text.get_window_extent(renderer)
        found.append(
            (text.get_text(), (box.x0 * scale, height - box.y1 * scale, box.x1 * scale, height - box.y0 * scale))
        )
    return found


def bold(figure: PageFigure) -> list[tuple[str, Any]]:
    """The texts that are totals, of lanes and of shares, with their boxes."""
    return [
        one
        for one, text in zip(boxes(figure), figure.axes[0].texts, strict=True)
        if one[0] and text.get_weight() == "bold"
    ]


def overlap(one: Any, other: Any) -> bool:
    return bool(one[0] < other[2] and other[0] < one[2] and one[1] < other[3] - 1 and other[1] < one[3] - 1)


def test_no_line_strikes_a_number_through_that_is_not_finite() -> None:
    never = {"kind": "backward", "contribution": {"w": -1, "b": -np.inf}, "grad": {"w": -1, "b": -np.inf}}
    figure = timeline(Ledger.build([W, Parameter("b", (1,))], [never] * 2))
    struck = [line.get_ydata()[0] for line in figure.axes[0].lines if len(set(line.get_ydata())) == 1]
    numbers = [box for text, box in boxes(figure) if text == "−∞"]
    height = figure.get_size_inches()[1] * 72
    assert len(numbers) == 2
    assert height > 0
    for _, top, _, bottom in numbers:
        assert not [y for y in struck if top + 2 < y < bottom - 2]


@pytest.mark.parametrize("events", [24, 100])
def test_nothing_beside_or_above_a_heat_map_is_cut_off_or_printed_over(events: int) -> None:
    one = large(events, 12)
    rows = [
        Event(e.index, e.kind, "AdamW" if e.kind != "backward" else "loss", saved_before=1e6 * e.index, saved_after=0.0)
        for e in one
    ]
    short = tuple(Parameter(f"w{p}", (8, 8), optimizers=(0,)) for p in range(12))
    figure = timeline(Ledger(short, rows, one.contribution, one.grad, one.state))
    found = boxes(figure)
    assert all(x0 >= 0 for _, (x0, *_) in found), [text for text, box in found if box[0] < 0]
    assert any(text == "saved tensors" for text, _ in found)
    (summary,) = [box for text, box in found if "parameters ×" in text]
    assert [text for text, box in found if "parameters ×" not in text and overlap(summary, box)] == []


def test_one_parameter_on_several_ranks_has_one_scale() -> None:
    def rank(number: int, added: float) -> Ledger:
        sync = {"kind": "sync", "details": {"op": "all-reduce", "ranks": 2, "reduction": "avg"}, "grad": {"w": -28.0}}
        return Ledger.build(
            [W], [{**TOY[0], "contribution": {"w": added}, "grad": {"w": added}}, sync], meta={"rank": number}
        )

    figure = timeline(Ledger.merge([rank(0, -16.0), rank(1, -40.0)]))
    # the thick line that ends a bar, below the thin one from which it hangs
    thin, thick = (
        [line for line in figure.axes[0].lines if line.get_linewidth() == width and len(set(line.get_ydata())) == 1]
        for width in (0.9, 2.6)
    )
    zeros, last = sorted({float(line.get_ydata()[0]) for line in thin})[:2], max(line.get_xdata()[1] for line in thick)
    ends = sorted(float(line.get_ydata()[0]) for line in thick if line.get_xdata()[1] == last)
    assert len(ends) == 2
    assert ends[0] - zeros[0] == pytest.approx(ends[1] - zeros[1], rel=0.01), "equal numbers are equally long"
    assert "scale" not in " ".join(texts(figure))


def test_lanes_of_different_scales_say_so() -> None:
    row = {"kind": "backward", "contribution": {"w": -16, "b": 0.5}, "grad": {"w": -16, "b": 0.5}}
    parameters = [W, Parameter("b", (1,))]
    assert "Each lane has a scale of its own." in texts(timeline(Ledger.build(parameters, [row])))
    assert "scale" not in " ".join(texts(timeline(Ledger.build(parameters, TOY)))), "a lane without a bar has none"


def test_numbers_below_two_panels_stand_apart() -> None:
    figure = ThemedFigure(figsize=(9, 2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes in panels:
        axes.barh([0, 1], [1.0, 0.3])
        axes.set_xlim(0, 1.02)
    figure.draw_without_rendering()
    last, first = (
        [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text() in ("0.0", "1.0")]
        for axes in panels
    )
    assert first[0].x0 - last[-1].x1 > figure.dpi * 0.18


# --- what a mark means is said, and each thing has a mark of its own


def add(amount: float, total: float, **more: Any) -> dict[str, Any]:
    return {"kind": "backward", "label": "loss", "contribution": {"w": amount}, "grad": {"w": total}} | more


def bars(figure: PageFigure) -> list[Rectangle]:
    """The parts of the bars of a timeline, which are as wide as one another; not the swatches of its legend."""
    found = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    return [patch for patch in found if patch.get_width() > 14]


@pytest.mark.parametrize("many", [1, 12])
def test_the_legend_names_every_line_that_is_ruled(many: int) -> None:
    grad = {f"w{p}": 1.0 for p in range(many)}
    each = [{"kind": kind, "grad": grad} for kind in ("clip", "schedule", "step", "zero_grad", "edit")]
    rows = [{"kind": "backward", "contribution": grad, "grad": grad}, *each]
    shown = texts(timeline(Ledger.build([Parameter(name, (1,)) for name in grad], rows)))
    assert [shown.count(row["kind"]) for row in each] == [2] * len(each), "above its column, and in the legend"


def test_the_line_of_an_optimizer_is_faint_where_it_owns_nothing_and_that_is_said() -> None:
    owned = [Parameter("body", (1,), optimizers=(1,)), Parameter("head", (1,), optimizers=(0,))]
    both = {"body": 1.0, "head": 1.0}
    rows: list[dict[str, Any]] = [
        {"kind": "backward", "contribution": both, "grad": both},
        {"kind": "zero_grad", "label": "early", "grad": {"body": 1.0}},
        {"kind": "zero_grad", "label": "model", "grad": {"body": 1.0}},
    ]
    figure = timeline(Ledger.build(owned, rows, meta={"optimizers": ["early", "late"]}))
    ruled = [line for line in figure.axes[0].lines if line.get_color() == style.KIND["zero_grad"]]
    across = [line for line in ruled if np.ptp(line.get_ydata()) > 60]
    faint = [line.get_alpha() for line in sorted(across, key=lambda line: (line.get_xdata()[0], line.get_ydata()[0]))]
    assert faint == [0.25, 1.0, 1.0], "early's across the body and the head, then the model's across both"
    assert any("faint" in text for text in texts(figure))


def test_thin_parts_have_no_outline_that_would_fill_them() -> None:
    rows = [add(-1, -1 - n) for n in range(40)]
    step = {"kind": "step", "grad": {"w": -40.0}, "details": {"optimizer": "SGD"}}
    ledger = Ledger.build([W], [*rows, step])
    thin = [part for part in bars(timeline(ledger, events=[20, 39, 40])) if part.get_height() < 2.8]
    assert len(thin) > 60
    assert {part.get_edgecolor()[3] for part in thin} == {0.0}
    assert {part.get_facecolor()[3] for part in thin} == {0.0, 0.36, 1.0}, "used, already there and new stay apart"


@pytest.mark.parametrize(("times", "inside"), [(1, ["−2", "−1.27"]), (4, [])])
def test_parts_of_a_lane_are_all_labelled_or_none(times: int, inside: list[str]) -> None:
    rows = [add(-2, -2), {"kind": "zero_grad"}, add(-1.27, -1.27), {"kind": "zero_grad"}]
    figure = timeline(Ledger.build([W], rows * times))
    plain = [text.get_text() for text in figure.axes[0].texts if text.get_weight() == "normal"]
    assert [text for text in plain if text.startswith("−")] == inside, "there would be room for a −2"


def test_a_short_total_stands_level_beside_turned_ones() -> None:
    rows = [add(-6, -6), add(-0.1234, -6.1234)] * 8
    turned = {text.get_text(): text.get_rotation() for text in timeline(Ledger.build([W], rows)).axes[0].texts}
    assert (turned["−6"], turned["−6.123"]) == (0, 90)


@pytest.mark.parametrize("times", [1, 3])
def test_totals_are_all_told_however_narrow_their_columns_are(times: int) -> None:
    """One here and one there, as there was room, said nothing of those between."""
    rows = [add(-0.00123, -0.00123), add(-5.0, -5.00123), {"kind": "step", "grad": {"w": -5.00123}}]
    figure = timeline(Ledger.build([W], [*rows, {"kind": "zero_grad"}] * times))
    assert [text for text, _ in bold(figure)] == ["−0.00123", "−5.001", "−5.001"] * times


def test_several_losses_share_the_swatches_of_what_became_of_them() -> None:
    figure = timeline(Ledger.build([W], [add(-1, -1, label="d_loss"), add(-1, -2, label="g_loss")]))
    swatches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_width() == 6.5]
    used = {mpl.colors.to_hex(patch.get_facecolor()).upper() for patch in swatches}
    assert used == set(style.CYCLE[:2]), "no grey, in which nothing is drawn"


def test_windows_that_overlap_have_a_bar_each() -> None:
    """Two optimizers read the same backwards: their bars lay on each other, and eight windows looked like four."""
    names = [Parameter(f"w{p}", (8, 8), optimizers=(p % 2,)) for p in range(12)]
    grad = {parameter.name: np.ones(64) for parameter in names}
    step = [{"kind": "step", "grad": grad, "details": {"optimizer": f"o{i}", "optimizer_index": i}} for i in (0, 1)]
    rows = [{"kind": "backward", "contribution": grad, "grad": grad}, *step, {"kind": "zero_grad"}] * 4
    ledger = Ledger.build(names, rows)
    figure = timeline(ledger)
    bands = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_height() == 6]
    assert len(bands) == len(ledger.windows()) == 8
    assert len({(band.get_x(), band.get_y()) for band in bands}) == 8
    assert len({mpl.colors.to_hex(band.get_facecolor(), keep_alpha=True) for band in bands}) == 1
    assert {"accumulation window", "no .grad (None)"} <= set(texts(figure))


def seen(color: Any, ground: float) -> float:
    """How light a colour is on a grey ground, as WCAG reckons."""
    *rgb, alpha = mpl.colors.to_rgba(color)
    mixed = [c * alpha + ground * (1 - alpha) for c in rgb]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mixed]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("color", style.CYCLE)
def test_the_weakest_contribution_is_told_from_a_grad_without_one_in_the_dark(color: str) -> None:
    pixels = pixels_of(timeline(large(60, 20)))
    weakest = min(pixels[..., 3][np.ptp(pixels[..., :3], axis=-1) > 0])
    weak, grey = (*mpl.colors.to_rgb(color), weakest), pixels[0, 5]
    light, dark = seen(weak, 18 / 255), seen(grey, 18 / 255)
    assert (light + 0.05) / (dark + 0.05) > 1.4


@pytest.mark.parametrize("after", [0.0, 40.0])
def test_bytes_have_the_colour_that_the_legend_says(after: float) -> None:
    rows = [add(-1.0, -1.0 - n, saved_before=96.0, saved_after=after) for n in range(3)]
    for figure in (timeline(Ledger.build([W], rows)), timeline(Ledger.build([W], rows * 20))):
        shown = texts(figure)
        assert ("saved after it" in shown) == bool(after)
        faces = [mpl.colors.to_hex(patch.get_facecolor(), keep_alpha=True) for patch in figure.axes[0].patches]
        assert all(faces.count(f"#5f6b77{alpha}") >= 2 for alpha in ["80", "f2"][: 1 + bool(after)])


def test_stacks_of_one_step_are_named() -> None:
    def term(op: str) -> dict[str, Any]:
        return {"op": op, "reduction": "mean", "elements": 8, "factor": 1.0, "unknown": ""}

    one = add(-1, -1, details={"terms": [term("MseLossBackward0"), term("MeanBackward0")]})
    step = {"kind": "step", "grad": {"w": -1.0}, "details": {"optimizer": "SGD"}}
    shown = texts(timeline(Ledger.build([W], [one, step])))
    (note,) = [text for text in shown if text.startswith("Shares of one step, from the left: ")]
    assert "MseLossBackward0" in note
    alone = add(-1, -1, details={"terms": [term("MseLossBackward0")]})
    assert not any("from the left" in text for text in texts(timeline(Ledger.build([W], [alone, step]))))


def test_on_a_phone_names_stand_above_their_lanes_where_beside_them_they_leave_no_room() -> None:
    parameters = [Parameter(f"{n}.weight{more}", (2,)) for more in ("", " (unsharded)") for n in (0, 1)]
    backward = {"contribution": {"0.weight (unsharded)": 1.0}, "grad": {"0.weight (unsharded)": 1.0}}
    rows = [{"kind": "backward", **backward}, *({"kind": "sync", "details": {"op": "all-gather"}} for _ in range(6))]
    figure = timeline(Ledger.build(parameters, rows))
    assert figure.narrow is not None
    assert 72 * figure.narrow.get_size_inches()[0] <= 343
    shown = boxes(figure.narrow)
    assert "1.weight (unsharded)" in [text for text, _ in shown]
    for (one, box), (other, beside) in itertools.combinations(shown, 2):
        assert not overlap(box, beside), (one, other)
    lanes = [box for text, box in shown if "weight" in text]
    (axes,) = figure.narrow.axes
    for line in axes.lines:
        xs, ys = line.get_data()
        upright = xs[0] == xs[-1] and line.get_zorder() == 1
        assert not any(upright and x0 < xs[0] < x1 and min(ys) < (y0 + y1) / 2 < max(ys) for x0, y0, x1, y1 in lanes)


def test_what_came_from_other_ranks_has_its_number_and_is_hollow_once_used() -> None:
    def rank(number: int, added: float) -> Ledger:
        sync = {"kind": "sync", "details": {"op": "all-reduce", "ranks": 2, "reduction": "avg"}, "grad": {"w": -20.0}}
        step = {"kind": "step", "details": {"optimizer": "SGD"}, "grad": {"w": -20.0}}
        own = {"kind": "backward", "contribution": {"w": added}, "grad": {"w": added}}
        return Ledger.build([Parameter("w", (1,), optimizers=(0,))], [own, sync, step], meta={"rank": number})

    ledger = Ledger.merge([rank(0, -32.0), rank(1, -8.0)])
    after = [[(part.born < 0, part.used) for part in parts] for parts in segments(ledger, 1, [2, 4])]
    assert after == [[(True, False), (False, False)], [(True, True), (False, True)]]
    assert texts(timeline(ledger)).count("−16") >= 3  # of rank 0 once or more, of what reached rank 1 twice


def test_a_heading_that_is_cut_keeps_its_rank_and_says_what_a_sync_was() -> None:
    def rank(number: int) -> Ledger:
        sync = {
            "kind": "sync",
            "details": {"op": "reduce-scatter", "ranks": 2, "reduction": "avg"},
            "grad": {"w": -20.0},
        }
        own = {"kind": "backward", "contribution": {"w": -20.0}, "grad": {"w": -20.0}, "file": "a.py", "line": 1600}
        return Ledger.build([W], [own, sync], meta={"rank": number})

    shown = texts(timeline(Ledger.merge([rank(0), rank(1)]), width=330))
    assert {"rank 0", "rank 1", "scatter"} <= set(shown)


def ranks(columns: int = 2) -> Ledger:
    """Two ranks whose gradients are averaged, then taken by a step; each loses half of what it weighs."""
    terms = [{"op": "MseLossBackward0", "reduction": "mean", "elements": 4, "factor": 0.5, "unknown": ""}]

    def one(rank: int, each: float) -> Ledger:
        rows = [add(each, each * (n + 1), details={"terms": terms}) for n in range(columns)]
        sync = {"kind": "sync", "details": {"op": "all-reduce", "ranks": 2, "reduction": "avg"}, "grad": {"w": -30.0}}
        step = {"kind": "step", "grad": {"w": -30.0}, "details": {"optimizer": "SGD"}}
        return Ledger.build([W], [*rows, sync, step], meta={"rank": rank, "ranks": 2, "optimizers": ["SGD"]})

    return Ledger.merge([one(0, -20 / columns), one(1, -40 / columns)])


def test_what_came_from_other_ranks_has_one_look_in_bars_and_legend() -> None:
    figure = timeline(ranks())
    hatched = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    assert len(hatched) > 4
    assert any(text.get_text() == "−20" and text.get_weight() == "normal" for text in figure.axes[0].texts)
    looks = {(p.get_hatch(), p.get_facecolor()[3], mpl.colors.to_hex(p.get_edgecolor())) for p in hatched}
    assert looks == {("xx", 0.0, "#5f6b77")}, "pale hatching on grey was not seen, and grey behind a number not either"
    assert [patch for patch in hatched if patch in figure.edges[0]], "the legend's"


def test_where_norms_are_parts_of_a_norm_it_is_said_that_they_do_not_add() -> None:
    m = Parameter("m", (8,))
    rows = [
        {"kind": "backward", "contribution": {"m": np.eye(8)[n]}, "grad": {"m": np.eye(8)[: n + 1].sum(0)}}
        for n in range(2)
    ]
    assert any(text.startswith("Norms do not add up") for text in texts(timeline(Ledger.build([m], rows))))
    assert not any("Norms" in text for text in texts(timeline(Ledger.build([W], TOY))))


def test_names_that_differ_at_their_ends_are_whole_beside_their_lanes() -> None:
    names = ["_flat_param (sharded)", "_flat_param (unsharded)", "layers.10.self_attn.out_proj.weight"]
    rows = [{"kind": "backward", "contribution": {name: 1.0}, "grad": {name: 1.0}} for name in names]
    shown = boxes(timeline(Ledger.build([Parameter(name, (1,)) for name in names], rows)))
    pieces = [text for text, (_, _, right, _) in shown if any(text in name for name in names) and right < 200]
    written = "".join(pieces).replace(" ", "")
    assert all(name.replace(" ", "") in written for name in names)
    assert not any("…" in text for text in pieces)
    for (one, box), (other, beside) in itertools.combinations(shown, 2):
        assert not overlap(box, beside), (one, other)


@pytest.mark.parametrize(("factor", "gaps"), [(0.5, 0), (0.9, 1), (1.0, 0)])
def test_what_shares_add_to_stands_at_the_end_of_its_bar_and_no_line_strikes_it_through(
    factor: float, gaps: int
) -> None:
    terms = [{"op": "MseLossBackward0", "reduction": "mean", "elements": 4, "factor": factor, "unknown": ""}]
    step = {"kind": "step", "grad": {"w": -1.0}, "details": {"optimizer": "SGD"}}
    figure = timeline(Ledger.build([W], [add(-1, -1, details={"terms": terms}), step]))
    ((told, box),) = [one for one in bold(figure) if one[0] == style.number(factor)]
    ones = [line for line in figure.axes[0].lines if line.get_linestyle() == "--" and line.get_linewidth() == 1.2]
    assert len(ones) == 1 + gaps
    for line in ones:
        (x0, x1), (y, _) = line.get_data()
        assert not (box[1] < y < box[3] and x0 < box[2] and box[0] < x1), f"{told} is struck through"
    (bar,) = [
        patch
        for patch in bars(figure)
        if patch.get_y() + patch.get_height() > box[3]
        and abs(patch.get_x() + patch.get_width() / 2 - (box[0] + box[2]) / 2) < 4
        and patch.get_y() > box[1]
    ]
    assert bar.get_y() - box[3] < 6


def test_sums_of_bars_that_are_too_narrow_are_left_out_and_that_is_said() -> None:
    """Three of them were read as a hundred and eleven."""
    terms = [{"op": f"Mean{n}", "reduction": "mean", "elements": 4, "factor": 1.0, "unknown": ""} for n in range(3)]
    rows = [add(-1, -1, details={"terms": terms}), {"kind": "step", "grad": {"w": -1.0}}, {"kind": "zero_grad"}]
    for times, told in ((1, True), (4, False)):
        wide = timeline(Ledger.build([W], rows * times))
        figure = wide if told else wide.narrow
        assert figure is not None
        ones = [box for text, box in bold(figure) if text == "1"]
        assert len(ones) == (3 if told else 0)
        assert all(right[0] - left[2] > 2 for left, right in itertools.pairwise(sorted(ones)))
        assert ("Sums without room" in " ".join(texts(figure))) != told


def test_a_number_that_lost_digits_keeps_its_last_zero() -> None:
    rows = [add(0.1001, 0.10013), add(0.3301, 0.43021)]
    shown = texts(timeline(Ledger.build([W], rows), width=160))
    assert {"0.100", "0.430"} <= set(shown) or {"0.1001", "0.4302"} <= set(shown)
