"""Rules that compare ranks, over a few numbers of each: so that no two ranks' ledgers need be in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.evidence import Case, Loop, near
from accumviz.checks.ranks import alone
from accumviz.checks.report import CHAPTERS, Finding
from accumviz.events import CHANGED

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
    line and source; `cut` are the ranks that were stopped, and might have had more. `parts` has a row
    for each window, `ranks` whose it is; `files`, `sources` and `objectives` are the texts of which
    both have the numbers.
    """

    lives: list[Life]
    armed: dict[int, np.ndarray]
    cut: frozenset[int]
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
    # In `join`, a rank that is done goes on to meet the others.
    does = np.array([flag is True for flag in case.armed], bool) & ~events.detail("join", default=False)
    whose = case.ranks if rank is None else np.full(len(events), rank)
    armed = {int(one): codes[knows & does & (whose == one)] for one in np.unique(whose[knows]).tolist()}
    cut = frozenset(one for one, found in armed.items() if not _came_to_its_end(case, one, found))
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
    return Facts(lives, armed, cut, np.array(rows, float).reshape(-1, _COLUMNS), np.array(ranks, int), *tables)


def _came_to_its_end(case: Case, rank: int, synced: np.ndarray) -> bool:
    """Whether a rank has done all that it was to do, and nobody stopped it: its script, or its loader at least."""
    ended = case.ledger.meta.get("ended")
    ended = ended.get(str(rank)) if isinstance(ended, Mapping) else ended
    if case.ledger.complete and ended in (None, "closed", "exit"):
        return True
    own = rank if (case.ranks >= 0).any() else None
    return bool(len(synced)) and case.ended(case.epoch(int(synced[-1, 0]), own))


def _life(case: Case, loop: Loop, rank: int | None) -> Life:
    late: list[Late] = []
    synced = 0
    replicated = not alone(case) and any(case.armed[b] is not None for b in loop.backwards.tolist())
    if replicated:
        members = _synced_together(case, loop)
        for order, (step, backwards) in enumerate(loop.windows.items()):
            if not backwards:
                continue
            # Its row comes after the backward that it ran in.
            unshared = {b for reached, last in members for b in backwards if reached[b] and b > last[order]}
            # Averaged too early, within the very window, is averaging that was meant.
            synced += not unshared or any(last[order] > backwards[0] for _, last in members)
            if unshared and case.armed[max(unshared)] is not None:
                late.append(_late(case, loop, step, order, sorted(unshared)))
    whose = loop.rank if rank is None else rank
    return Life(whose, loop.columns.size, _marks(case, loop) if replicated else np.zeros((0, 2)), late, synced)


def _synced_together(case: Case, loop: Loop) -> list[tuple[list[bool], list[int]]]:
    """For each group of parameters that are synchronised together: which events reach it; before each step, the last.

    Such are the buckets of a module. Parameters that never are do not count, unless that is all of them.
    """
    mine = loop.changing(case.at("sync"))
    changed = (case.ledger.state[np.ix_(mine, loop.columns)] & CHANGED).astype(bool)
    groups: dict[bytes, list[int]] = {}
    for place, when in enumerate(np.packbits(changed, axis=0).T):
        groups.setdefault(when.tobytes(), []).append(place)
    found: list[tuple[list[bool], list[int]]] = []
    for places in groups.values():
        when = mine[changed[:, places[0]]]
        if when.size or len(groups) == 1:
            last = np.append(-1, when)[np.searchsorted(when, loop.steps)]
            reached: np.ndarray = np.any(case.contributed[:, loop.columns[places]], axis=1)
            found.append((reached.tolist(), last.tolist()))
    return found


def _late(case: Case, loop: Loop, step: int, order: int, unshared: list[int]) -> Late:
    b = unshared[-1]
    # The flag was up when backward ran, and down when its forward did.
    spent = bool(case.ledger[b].details.get("spent"))
    meant = case.armed[b] is False and case.no_sync[b] is False
    finding = case.finding(
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
                "an earlier backward had run since the forward, and DDP averages in the first one after it only."
                if spent and meant
                else "the flag was set after the forward, which is what arms the all-reduce."
                if meant
                else "the last backward before it ran without synchronisation."
            )
        ),
        optimizer=loop.optimizer,
    )
    return Late(order, meant, finding)


def _marks(case: Case, loop: Loop) -> np.ndarray:
    """Two weighted sums of the norms at each step: where both are equal, so are the norms."""
    norms = case.ledger.grad[np.ix_(loop.steps, loop.columns)].astype(float)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, (loop.columns.size, 2))
    # What is infinite gets a place among numbers: a product of it may warn.
    found: np.ndarray = np.clip(np.nan_to_num(norms, nan=-1.0), -1e300, 1e300) @ weights
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
    if any(least in facts.cut for facts in every):
        return
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
