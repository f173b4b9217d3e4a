"""A GAN's pipes as data: what each step consumes, which training it leads to, and what stands there unscripted."""

import itertools
from functools import cache

import pytest
import torch

import accumviz as av
from accumviz.book.plumbing import Game, Plumbing, Taps, norms, plumbing

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
    return plumbing(ledgers, GAMES, rounds=[0, 600], centres=[[2.0, 0.0]])


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


def test_without_scripts_a_drawing_and_sentences_say_the_same(picture: Plumbing) -> None:
    text = picture.to_html().partition("<script")[0]
    assert picture.sentence(OFF) in text
    assert 'stroke-width="3.5"' in text and 'style="transform:scaleY(0.25)"' in text
    assert "<li>With zero, detach: No leak: after 600 rounds, samples fill 8 of the 8 circles.</li>" in text
    assert "<li>With freeze: d_loss leaks into G: after 600 rounds, samples fill 3 to 4 of the 8 circles.</li>" in text
