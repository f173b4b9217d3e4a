"""The stripes of two ranks: as data, and as a reader meets them, with two switches and a slider over the moments."""

from typing import Any

import pytest

from accumviz.book.memory import Sharding, ShardMoment


def moments(sync: bool = True, reshard: bool = True) -> list[ShardMoment]:
    """Two micro-batches of one layer of 8 bytes on two ranks: its shard, gathered, whole gradient, averaged one."""
    window: list[ShardMoment] = []
    averaged = waiting = 0
    for k in (1, 2):
        held = [(0, waiting), (8, waiting)]
        window += [(f"forward {k}", [(4, gathered, grad, averaged)], 20) for gathered, grad in held]
        between = [(0, waiting)] if reshard else []
        for gathered, grad in [*between, (8, waiting), (8, 8)]:
            window.append((f"backward {k}", [(4, gathered, grad, averaged)], 28))
        if sync or k == 2:
            averaged, waiting = 4, 0
        else:
            waiting = 8
        window.append((f"backward {k}", [(4, 0, waiting, averaged)], 24))
    return [*window, ("step", [(4, 0, 0, 0)], 8)]


def made() -> Sharding:
    settings = [(reshard, sync) for reshard in (True, False) for sync in (True, False)]
    runs = {(reshard, sync): [moments(sync, reshard)] * 2 for reshard, sync in settings}
    return Sharding(runs, ddp=40)


shards = pytest.fixture(made, name="shards")


@pytest.mark.parametrize(
    ("setting", "counts"),
    [((True, True), (4, 2, 4)), ((True, False), (4, 1, 8)), ((False, True), (2, 2, 4)), ((False, False), (2, 1, 8))],
)
def test_a_window_counts_what_it_sends_and_the_gradients_that_wait(
    shards: Sharding, setting: tuple[bool, bool], counts: tuple[int, int, int]
) -> None:
    assert shards.counts(setting) == counts


def test_a_rank_holds_its_own_stripe_always_and_the_other_one_while_it_is_gathered(shards: Sharding) -> None:
    lanes = shards.lanes((True, True))
    (first,), (second,), (memory,) = lanes.values()
    assert dict(first.shapes)["own av-rank-0"] == "M0 0h13v1h-13z"
    assert dict(second.shapes)["own av-rank-1"] == "M0 1h13v1h-13z"
    assert dict(first.shapes)["lent av-rank-1"].startswith("M1 1h1v1h-1zM3 1h2v1h-2z")
    assert dict(first.shapes)["whole"] == "M4 2h1v2h-1zM10 2h1v2h-1z"
    assert dict(first.shapes)["averaged"] == "M5 4h7v1h-7z"
    assert dict(memory.shapes)["ddp"] == "M0 0h13", "DDP takes the most of all"


def test_a_moment_says_what_has_changed_and_what_is_held(shards: Sharding) -> None:
    said = shards.content["runs"][3]["moments"]
    assert said[0] == "forward 1: nothing has changed. Rank 0 holds 20 B."
    assert said[1] == "forward 1: layer 1 is gathered. Rank 0 holds 20 B."
    assert said[-1] == "step: zero_grad frees the gradient of layer 1. Rank 0 holds 8 B."


@pytest.fixture
def page(shown: Any) -> Any:
    return shown(made(), wait="[type=range]", reduced_motion="reduce")


def test_a_window_that_averages_once_keeps_the_whole_gradient_meanwhile(page: Any) -> None:
    whole = page.locator(".av-map svg").first.locator(".av-whole")
    assert whole.get_attribute("d") == "M4 2h1v2h-1zM10 2h1v2h-1z"
    page.get_by_role("switch", name="set_requires_gradient_sync").press("Space")
    assert whole.get_attribute("d") == "M4 2h7v2h-7z"
    assert "1 reduce-scatter." in page.locator(".av-says").inner_text()
    assert page.locator("svg").first.get_attribute("viewBox") == "0 0 13 5"
    page.get_by_role("switch", name="reshard_after_forward").press("Space")
    assert page.locator("svg").first.get_attribute("viewBox") == "0 0 11 5"


def test_the_slider_moves_through_the_moments_and_says_each(page: Any) -> None:
    slider, now = page.get_by_role("slider"), page.locator(".av-now")
    before = now.bounding_box()["x"]
    assert page.locator(".av-points").inner_text() == "forward 1: layer 1 is gathered. Rank 0 holds 20 B."
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == page.locator(".av-points").inner_text()
    assert now.bounding_box()["x"] > before + 20
    slider.press("End")
    for switch in page.get_by_role("switch").all():
        switch.press("Space")
    assert page.locator(".av-points").inner_text().startswith("step"), "a shorter window has a last moment, too"


def test_on_a_phone_the_layers_of_two_ranks_and_their_memory_fit_one_screen(shown: Any) -> None:
    page = shown(made(), wait="[type=range]", width=375)
    rows = page.locator(".av-map p:not(.av-title)").evaluate_all("all => all.map(one => one.offsetHeight)")
    assert max(rows) > 0 and min(rows) <= 16
    heads = page.locator(".av-heads span")
    assert heads.evaluate_all("all => all.filter(one => one.scrollWidth > one.offsetWidth).length") == 0
    assert heads.last.is_visible()
    frame, last = page.locator(".av-now").bounding_box(), heads.last.bounding_box()
    assert frame["y"] >= last["y"] + last["height"], "the frame lies on no head"


def test_a_pointer_on_the_stripes_moves_the_frame_to_it(page: Any) -> None:
    lane = page.locator(".av-map svg").nth(1).bounding_box()
    page.mouse.move(lane["x"] + lane["width"] / 2, lane["y"] + 5)
    assert page.get_by_role("slider").input_value() == "1"
    page.mouse.down()
    assert page.get_by_role("slider").input_value() == "6"
    page.mouse.move(lane["x"] + lane["width"] - 2, lane["y"] + 5)
    page.mouse.up()
    assert page.locator(".av-points").inner_text().startswith("step")
