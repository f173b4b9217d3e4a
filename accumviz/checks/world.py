"""Rules that compare ranks, over a few numbers of each: so that no two ranks' ledgers need be in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.evidence import Case, Loop, near
from accumviz.checks.report import CHAPTERS, Finding

# Of each window: the how manyth optimizer and step of its rank, the objective, the extremes of the weights per element
# and of the elements, the events of the step and of its first backward, that one's file, line and source, the
# optimizer, and how many elements there are in all.
_COLUMNS = 14


class Late(NamedTuple):
    """A step that read what its rank had shared with no other: what would be found if the others' is another."""

    order: int
    meant: bool
    finding: Finding


class Life(NamedTuple):
    """One optimizer of one rank: two sums over its gradients' norms at each step, and its late steps."""

    rank: int | None
    columns: int
    marks: np.ndarray
    late: list[Late]
    synced: int


class Facts(NamedTuple):
    """What the comparing rules need of a ledger.

    `armed` has for each rank under DDP the backwards that synchronised: event, and the codes of file,
    line and source. `parts` has a row for each window, `ranks` whose it is; `files`, `sources` and
    `objectives` are the texts of which both have the numbers.
    """

    lives: list[Life]
    armed: dict[int, np.ndarray]
    parts: np.ndarray
    ranks: np.ndarray
    files: Sequence[str]
    sources: Sequence[str]
    objectives: Sequence[str]


def facts(case: Case, rank: int | None = None) -> Facts:
    """What a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    lives = [_life(case, loop, rank) for loop in case.loops]
    events = case.events
    codes = np.stack([np.arange(len(events)), *(events.column(name) for name in ("file", "line", "source"))], axis=1)
    knows = np.array([flag is not None for flag in case.armed], bool) & case.backward
    does = np.array([flag is True for flag in case.armed], bool)
    whose = case.ranks if rank is None else np.full(len(events), rank)
    armed = {int(one): codes[knows & does & (whose == one)] for one in np.unique(whose[knows]).tolist()}
    place: dict[int, int] = {}
    owner: dict[int, int | None] = {}
    for loop in case.loops:
        owner[loop.optimizer] = loop.rank if rank is None else rank
        place[loop.optimizer] = sum(other == owner[loop.optimizer] for other in owner.values())
    parts = [p for p in case.parts if p.known and p.many and p.optimizer in place]
    rows = [
        (
            *(place[p.optimizer], p.order, p.objective, *p.each, *p.elements),
            *(p.step, *codes[p.backwards[0]], p.optimizer, sum(p.sizes)),
        )
        for p in parts
    ]
    ranks = [-1 if (own := owner[p.optimizer]) is None else own for p in parts]
    tables = events.tables["file"], events.tables["source"], case.shares.objectives
    return Facts(lives, armed, np.array(rows, float).reshape(-1, _COLUMNS), np.array(ranks, int), *tables)


def _life(case: Case, loop: Loop, rank: int | None) -> Life:
    late: list[Late] = []
    synced = 0
    replicated = any(case.armed[b] is not None for b in loop.backwards.tolist())
    if replicated:
        mine = loop.changing(case.at("sync"))
        for order, (step, backwards) in enumerate(loop.windows.items()):
            if not backwards:
                continue
            done = mine[: np.searchsorted(mine, step)]
            # Its row comes after the backward that it ran in.
            unshared = [b for b in backwards if not done.size or b > done[-1]]
            # Averaged too early, within the very window, is averaging that was meant.
            synced += not unshared or bool((done > backwards[0]).any())
            last = backwards[-1]
            # The flag was up when backward ran, and down when its forward did.
            meant = case.armed[last] is False and case.no_sync[last] is False
            if unshared and case.armed[last] is not None:
                late.append(Late(order, meant, _unsynced(case, loop, step, unshared, meant=meant)))
    own = loop.rank if rank is None else rank
    return Life(own, loop.columns.size, _marks(case, loop) if replicated else np.zeros((0, 2)), late, synced)


def _unsynced(case: Case, loop: Loop, step: int, unshared: list[int], *, meant: bool) -> Finding:
    b = unshared[-1]
    return case.finding(
        "ddp-unsynced-step",
        "error",
        b,
        step=step,
        evidence={
            "backwards not averaged": unshared,
            "armed by its forward": bool(case.armed[b]),
            "flag at its backward": not case.no_sync[b],
            "line of the forward": case.ledger[b].details.get("armed_line", 0),
        },
        cause=(
            "The step reads gradients that were not averaged over the ranks: "
            + (
                "the flag was set after the forward, which is what arms the all-reduce."
                if meant
                else "the last backward before it ran without synchronisation."
            )
        ),
        optimizer=loop.optimizer,
    )


def _marks(case: Case, loop: Loop) -> np.ndarray:
    """Two weighted sums of the norms at each step: where both are equal, so are the norms."""
    norms = case.ledger.grad[np.ix_(loop.steps, loop.columns)].astype(float)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, (loop.columns.size, 2))
    found: np.ndarray = np.where(np.isnan(norms), -1.0, norms) @ weights
    return found


def ddp_unsynced_step(every: Sequence[Facts]) -> Iterator[Finding]:
    """A step that reads what no rank has shared with the others."""
    lives = [life for facts in every for life in facts.lives]
    for life in lives:
        # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
        late = [one for one in life.late if one.meant or life.synced]
        late = [one for one in late if _differ(life, lives, one.order)]
        if late:
            yield replace(late[0].finding, times=len(late), rank=life.rank)


def _differ(life: Life, lives: list[Life], order: int) -> bool:
    """Whether the ranks' gradients differ at their steps of the same number; True where only one rank is known."""
    others = [one for one in lives if one.rank != life.rank and one.columns == life.columns]
    there = [one for one in others if order < len(one.marks)]
    return not there or any(
        not np.allclose(life.marks[order], one.marks[order], rtol=1e-5, equal_nan=True) for one in there
    )


def uneven_rank_backwards(every: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks that synchronise a different number of times, so that one waits for ever."""
    known = {rank: (found, facts) for facts in every for rank, found in facts.armed.items()}
    counts = {rank: len(found) for rank, (found, _) in known.items()}
    if len(counts) < 2 or len(set(counts.values())) == 1:
        return
    most, least = max(counts, key=lambda rank: counts[rank]), min(counts, key=lambda rank: counts[rank])
    found, facts = known[most]
    yield _found(
        "uneven-rank-backwards",
        "error",
        facts,
        found[counts[least]],
        rank=most,
        evidence={f"synchronised backwards of rank {rank}": many for rank, many in sorted(counts.items())},
        cause=(
            f"Rank {most} synchronises {counts[most]} backwards and rank {least} only {counts[least]}: the "
            "one more waits for nobody."
        ),
    )


def rank_token_weight(every: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks whose elements weigh differently, because each divides by its own count."""
    names = {name: n for n, name in enumerate(dict.fromkeys(name for facts in every for name in facts.objectives))}
    parts = np.concatenate([facts.parts for facts in every])
    ranks = np.concatenate([facts.ranks for facts in every])
    whose = np.repeat(np.arange(len(every)), [len(facts.parts) for facts in every])
    if len(np.unique(ranks)) < 2:
        return
    # What is called alike is the same objective on all ranks.
    for n, facts in enumerate(every):
        own = np.array([names[name] for name in facts.objectives] or [0], float)
        parts[whose == n, 2] = own[parts[whose == n, 2].astype(int)]
    order = np.lexsort((ranks, parts[:, 1], parts[:, 2], parts[:, 0]))
    parts, ranks, whose = parts[order], ranks[order], whose[order]
    starts = np.flatnonzero((np.diff(parts[:, :3], axis=0, prepend=-1) != 0).any(axis=1))
    many = np.diff(np.append(starts, len(parts)))
    each = parts[:, 3] > 0
    each &= near(parts[:, 3], parts[:, 4])
    even = np.logical_and.reduceat(each, starts)
    low, high = np.minimum.reduceat(parts[:, 3], starts), np.maximum.reduceat(parts[:, 4], starts)
    elements = [reduce.reduceat(parts[:, c], starts) for c in (5, 6) for reduce in (np.minimum, np.maximum)]
    other = (elements[0] != elements[1]) | (elements[2] != elements[3])
    several = many > 1
    odd = np.flatnonzero(several & even & other & ~near(low, high, 1e-2))
    if not odd.size:
        return
    i = int(odd[0])
    here = slice(starts[i], starts[i] + many[i])
    first = parts[starts[i]]
    yield _found(
        "rank-token-weight",
        "warning" if 2 * odd.size >= several.sum() else "note",
        every[whose[starts[i]]],
        first[8:12],
        rank=int(ranks[starts[i]]),
        step=int(first[7]),
        evidence={
            "weight per element on each rank": parts[here, 3].tolist(),
            "elements on each rank": parts[here, 13].tolist(),
        },
        cause=(
            f"Each rank divides by its own count, and the average over ranks treats them alike: an element of one "
            f"rank counts {high[i] / low[i]:.3g} times as much as one of another."
        ),
        times=int(odd.size),
    )


def _found(rule: str, severity: str, facts: Facts, at: np.ndarray, **about: Any) -> Finding:
    event, file, line, source = at.astype(int).tolist()
    where = {"event": event, "file": facts.files[file], "line": line, "source": facts.sources[source]}
    return Finding(rule, severity, **({"step": None, "cure": "", "chapter": CHAPTERS[rule]} | where | about))
