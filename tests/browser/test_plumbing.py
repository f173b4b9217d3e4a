"""A GAN's pipes: what each step consumes, and how a reader turns them by key, by a click on a valve, and on a phone."""

import itertools
import re
from functools import cache
from typing import Any

import pytest
import torch

import accumviz as av
from accumviz.book.plumbing import Game, Plumbing, Taps, norms
from tests.contrast import contrast

SETTINGS = list(itertools.product((False, True), repeat=3))
OFF = (False, False, False)
GAMES = {
    (False, False): Game([[[0.0, 0.0]], [[2.0, 0.0]]], [8, 8]),
    (True, False): Game([[[0.0, 0.0]], [[0.0, 2.0]]], [7, 8]),
    (False, True): Game([[[0.0, 0.0]], [[1.0, 1.0]]], [3, 4]),
    (True, True): Game([[[0.0, 0.0]], [[0.0, 0.0]]], [0, 0]),
}


def two_rounds(zero: bool, freeze: bool, detach: bool) -> av.Ledger:
    """Weights that stay: `g_loss` brings 1/4 to G and 2 to D, `d_loss` 1/4 to G and 8 to D."""
    G, D = torch.tensor([2.0], requires_grad=True), torch.tensor([0.25], requires_grad=True)
    g_opt, d_opt = torch.optim.SGD([G], lr=0.0), torch.optim.SGD([D], lr=0.0)
    with av.record(g_opt, d_opt, G=G, D=D) as recording:
        for _ in range(2):
            D.requires_grad_(not freeze)
            g_loss = (1 - D * G).square().mean()
            g_loss.backward()
            D.requires_grad_(True)
            g_opt.step()
            g_opt.zero_grad()
            if zero:
                d_opt.zero_grad()
            fake = G.detach() if detach else G
            d_loss = (1 - 6 * D).square().mean() + (D * fake).square().mean()
            d_loss.backward()
            d_opt.step()
            d_opt.zero_grad()
    return recording.ledger


@cache
def made() -> Plumbing:
    ledgers = {taps: two_rounds(*taps) for taps in SETTINGS}
    return Plumbing(ledgers, GAMES, rounds=[0, 600], centres=[[2.0, 0.0]])


picture = pytest.fixture(made, name="picture")


@pytest.mark.parametrize("taps", SETTINGS)
def test_a_tap_stops_its_own_leak_and_nothing_else(taps: Taps) -> None:
    zero, freeze, detach = taps
    written, consumed = norms(two_rounds(*taps)).tolist()
    into_d, into_g = 0 if freeze else 2, 0 if detach else 0.25
    assert written == [0.25, into_d, into_g, 8]
    assert consumed == [0.25, 0 if zero else into_d, into_g, 8]


def test_zero_drains_what_is_written_and_not_consumed(picture: Plumbing) -> None:
    runs = picture.content["runs"]
    assert runs[0]["pipes"] == [14, 3.5, 14, 14, 0] and runs[0]["levels"] == [1, 0.25, 1, 1]
    zeroed = runs[SETTINGS.index((True, False, False))]
    assert zeroed["pipes"] == [14, 3.5, 14, 14, 3.5] and zeroed["levels"] == [1, 0, 1, 1]


def test_each_setting_shows_the_training_that_consumes_its_leaks(picture: Plumbing) -> None:
    leaks = [picture.game(taps) for taps in SETTINGS]
    assert leaks == [(not (zero or freeze), not detach) for zero, freeze, detach in SETTINGS]
    assert picture.sentence(OFF) == (
        "g_loss leaks into D, d_loss leaks into G: after 600 rounds, samples fill 0 of the 8 circles."
    )


READY = ".av-plumbing[data-stands]"
PAINTED = "(all, side) => all.map(one => getComputedStyle(one)[side])"


def widths(page: Any) -> list[float]:
    return page.locator(".av-pipe").evaluate_all("all => all.map(one => Number(one.getAttribute('stroke-width')))")


@pytest.mark.parametrize("width", [1100, 375])
def test_a_key_turns_a_tap_and_a_click_on_the_valve_turns_it_back(shown: Any, width: int) -> None:
    page = shown(made(), wait=READY, width=width, reduced_motion="reduce")
    assert widths(page) == [14, 3.5, 14, 14, 0]
    page.get_by_role("switch", name="freeze").press("Space")
    assert widths(page) == [14, 0, 14, 14, 0]
    assert page.locator(".av-says").inner_text().startswith("d_loss leaks into G")
    page.locator(".av-valve.av-freeze text").click()
    assert widths(page) == [14, 3.5, 14, 14, 0]
    page.get_by_role("switch", name="zero").press("Space")
    assert widths(page) == [14, 3.5, 14, 14, 3.5]
    assert page.locator(".av-number").all_text_contents() == ["0.25", "0", "0.25", "8"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_setting_that_trains_otherwise_plays_its_rounds(shown: Any) -> None:
    page = shown(made(), wait=READY)
    page.get_by_role("switch", name="detach").press("Space")
    page.get_by_text("600", exact=True).wait_for()
    dot = page.locator(".av-dot")
    assert dot.get_attribute("style") == "transform: translate(150px, 54px);"
    page.get_by_role("slider").press("Home")
    assert page.locator("output").inner_text() == "0"
    assert dot.get_attribute("style") == "transform: translate(150px, 150px);"


def test_on_a_phone_the_round_s_slider_is_on_the_screen_and_its_words_can_be_read(shown: Any) -> None:
    page = shown(made(), wait=READY, width=375)
    box = page.locator(".av-plumbing").bounding_box()
    slider = page.get_by_role("slider").bounding_box()
    assert slider["y"] + slider["height"] - box["y"] <= 812 - 48
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"
    assert page.locator("svg text").evaluate_all(size) >= 11
    assert page.locator(".av-legend span").count() == 4


def test_each_network_has_a_colour_of_its_own_and_samples_stand_out(shown: Any, mode: str) -> None:
    """In the chapter on two networks, both had one colour; its rings were dim in the dark."""
    page = shown(made(), wait=READY, mode=mode, reduced_motion="reduce")
    colours = []
    for network in ("g", "d"):
        painted = set()
        for part, side in ((".av-pipe", "stroke"), (".av-level", "fill"), (".av-box", "stroke")):
            painted |= {*page.locator(f"{part}.av-of-{network}").evaluate_all(PAINTED, side)}
        colours.append(painted)
    assert [len(painted) for painted in colours] == [1, 1]
    assert colours[0] != colours[1]
    (dot,) = {*page.locator(".av-dot").evaluate_all(PAINTED, "fill")}
    ground = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    numbers = ([int(number) for number in re.findall(r"\d+", colour)[:3]] for colour in (ground, dot))
    assert contrast(page, *numbers) >= 3
