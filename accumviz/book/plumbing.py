"""Show which loss of a GAN writes into which network, with three taps, and what each setting of them trains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.ledger import Ledger
from accumviz.views.player import Picture
from accumviz.views.style import number

# Which lines are in the loop, in the order of `LINES`.
Taps = tuple[bool, ...]
LINES = (
    ("zero", "d_opt.zero_grad()", "before d_loss.backward()"),
    ("freeze", "D.requires_grad_(False)", "for g_loss.backward()"),
    ("detach", "D(fake.detach())", "when d_loss is computed"),
)
# A loss, and the network that it writes into. What a loss brings to the other player's network is a leak.
PATHS = (("g_loss", "G"), ("g_loss", "D"), ("d_loss", "G"), ("d_loss", "D"))
_INTO_D, _INTO_G = 1, 2
# How wide the widest pipe into a network is.
_THICK = 14
# The ring's drawing: its size, and how many of its units are 1.
_SIDE, _UNIT = 300, 48
# A host keeps its shortcuts from inputs, and a browser does not bring back what they were.
_ALONE = 'autocomplete="off" data-lm-suppress-shortcuts="true"'
_TAP = f'<input type="checkbox" role="switch" {_ALONE}>'

_LEGEND = (
    '<p class="av-legend"><span><i class="av-real"></i> circle: real samples</span>'
    '<span><i class="av-made"></i> dot: a sample of G</span>'
    "<span>tank: norm in .grad, G and D on separate scales</span>"
    "<span>tap: open if its bar is along the pipe</span></p>"
)


class Game(NamedTuple):
    """What one training made: samples of one game at some rounds, and in how many circles each game has samples."""

    samples: Sequence[Sequence[Sequence[float]]]
    filled: Sequence[int]

    @property
    def centres(self) -> str:
        """The fewest and the most that one of the games has filled."""
        least = min(self.filled)
        most = max(self.filled)
        return f"{least} to {most}" if least < most else f"{least}"


@dataclass(eq=False, repr=False)
class Plumbing(Picture):
    """Two rounds of a GAN for each setting of the taps, and a training for each combination of leaks.

    The losses are `g_loss` and `d_loss`, the networks G and D, their optimizers g_opt and d_opt.
    `games` holds the trainings by whether `g_loss` leaks into D and whether `d_loss` leaks into G. Of each,
    `rounds` says at which rounds its samples were taken.
    """

    ledgers: Mapping[Taps, Ledger]
    games: Mapping[tuple[bool, bool], Game]
    rounds: Sequence[int]
    centres: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        self._norms = {taps: norms(ledger) for taps, ledger in self.ledgers.items()}
        # G and D have each a scale: only what comes to the same network is compared.
        most = np.max(list(self._norms.values()), axis=(0, 1))
        self._scale = []
        for _, network in PATHS:
            alike = [i for i, (_, other) in enumerate(PATHS) if other == network]
            self._scale.append(most[alike].max())

    def game(self, taps: Taps) -> tuple[bool, bool]:
        """Return which leaks the steps consumed, and so which training shows where they lead."""
        _, consumed = self._norms[taps]
        return bool(consumed[_INTO_D] > 0), bool(consumed[_INTO_G] > 0)

    def sentence(self, taps: Taps) -> str:
        """Return which leaks the steps consume, and what eight games have found in the end."""
        into_d, into_g = self.game(taps)
        leaks = ["g_loss leaks into D"] * into_d + ["d_loss leaks into G"] * into_g
        leaking = ", ".join(leaks) or "No leak"
        filled = self.games[into_d, into_g].centres
        return f"{leaking}: after {self.rounds[-1]} rounds, samples fill {filled} of the 8 circles."

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: for each setting its sentence, widths, levels, numbers and game."""
        keys = list(self.games)
        runs = []
        for taps in itertools.product((False, True), repeat=len(LINES)):
            written, consumed = self._norms[taps]
            levels = self._parts(consumed)
            pipes = self._parts(written)
            pipes.append(pipes[_INTO_D] - levels[_INTO_D])
            runs.append(
                {
                    "says": self.sentence(taps),
                    "pipes": [round(_THICK * part, 2) for part in pipes],
                    "levels": levels,
                    "numbers": [number(norm, 2) for norm in consumed],
                    "game": keys.index(self.game(taps)),
                }
            )
        games = []
        for game in self.games.values():
            games.append([_placed(samples) for samples in game.samples])
        return {"runs": runs, "rounds": list(self.rounds), "games": games}

    def _parts(self, of_paths: np.ndarray) -> list[float]:
        parts: list[float] = (of_paths / self._scale).round(4).tolist()
        return parts

    @property
    def still(self) -> str:
        """Taps, pipes and samples as they are without any tap."""
        first = self.content["runs"][0]
        taps = ""
        for name, line, when in LINES:
            taps += f"<label>{_TAP}<span><code>{line}</code> <b>{name}</b> {when}</span></label>"
        return (
            f'<div class="av-taps" role="group" aria-label="Lines of the loop">{taps}</div>'
            f'<p class="av-says" aria-live="polite">{first["says"]}</p>'
            f'<div class="av-both">{self._pipes(first)}{self._ring(first["game"])}</div>{_LEGEND}'
        )

    def _pipes(self, run: Mapping[str, Any]) -> str:
        """Draw pipes, levels and norms, numbered as `PATHS`; the last pipe is what `d_opt.zero_grad()` drains."""
        holes = {}
        for i, width in enumerate(run["pipes"]):
            holes[f"width of pipe {i}"] = width
        for i, level in enumerate(run["levels"]):
            holes[f"level {i}"] = level
            holes[f"some {i}"] = " av-some" if level else ""
            holes[f"norm {i}"] = run["numbers"][i]
        return self.drawn("plumbing", holes)

    def _ring(self, game: int) -> str:
        """Draw the circles of the centres, and the samples of a game at its last round."""
        circles, dots = "", ""
        for x, y in _placed(self.centres):
            circles += (
                f'<circle class="av-centre" cx="{x}" cy="{y}" r="{0.6 * _UNIT:g}"/>'
            )
        last = list(self.games.values())[game].samples[-1]
        for x, y in _placed(last):
            dots += f'<circle class="av-dot" r="3.5" style="transform:translate({x}px,{y}px)"/>'
        end = len(self.rounds) - 1
        return (
            f'<div class="av-ring"><svg viewBox="0 0 {_SIDE} {_SIDE}" role="img" aria-label="Samples of one game, and'
            f' eight circles in a ring">{circles}{dots}</svg><label>G’s samples at round <input type="range"'
            f' max="{end}" value="{end}" {_ALONE}><output>{self.rounds[-1]}</output></label></div>'
        )

    @property
    def words(self) -> list[str]:
        """What each setting of the taps leads to, in a sentence."""
        names = [name for name, *_ in LINES]
        shown = []
        for taps in self.ledgers:
            on = itertools.compress(names, taps)
            which = ", ".join(on) or "nothing"
            shown.append(f"With {which}: {self.sentence(taps)}")
        return shown


def norms(ledger: Ledger) -> np.ndarray:
    """Return for each path the norm of what the last backward of its loss wrote, and of what the last step consumed."""
    windows = {window.optimizer: window for window in ledger.windows()}
    brought = np.zeros((2, len(PATHS)))
    for i, (loss, network) in enumerate(PATHS):
        names = [parameter.name for parameter in ledger.parameters]
        columns = [name.startswith(network) for name in names]
        size = np.linalg.norm(np.nan_to_num(ledger.contribution[:, columns]), axis=1)
        consumed = windows[f"{network.lower()}_opt"].backwards
        brought[0, i] = size[ledger.events.where("label", loss)][-1]
        brought[1, i] = sum(size[b] for b in consumed if ledger[b].label == loss)
    return brought


def _placed(points: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return where points are in the ring's drawing."""
    rows = []
    for x, y in points:
        rows.append([round(_SIDE / 2 + _UNIT * x), round(_SIDE / 2 - _UNIT * y)])
    return rows
