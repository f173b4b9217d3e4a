"""Rules that compare ranks, over a few numbers of each: so that no two ranks' ledgers need be in memory at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.analysis import Case, Loop, Part, near
from accumviz.checks.distributed import Lone, alone, lone
from accumviz.checks.divisors import divisor
from accumviz.checks.report import CHAPTERS, Finding
from accumviz.ledger.events import CHANGED
from accumviz.ledger.gains import SAME, number

# Of a window of one rank: the how manyth optimizer and step of it, the objective; the extremes of the weights per
# element, and how many elements there are; the event of the step, and of its first backward the event and the codes of
# file, line and source; over how many ranks they were averaged, the norms before and after, and whether the losses may
# have been divided by a number of all of these ranks: of micro-batches 1, of elements 2.
_FIELDS = {
    "optimizer": int,
    "order": int,
    "objective": int,
    "rank": int,
    "least": float,
    "most": float,
}
_FIELDS |= {
    "elements": float,
    "step": int,
    "event": int,
    "file": int,
    "line": int,
    "source": int,
}
_FIELDS |= {"averaged": float, "before": float, "after": float, "counted": int}


class Late(NamedTuple):
    """A step that read what its rank had shared with no other: what would be found if the others' is another."""

    order: int
    meant: bool
    finding: Finding


class Life(NamedTuple):
    """One optimizer of one rank: two sums over its gradients' norms at each step, and its late steps.

    Of ranks that train one model, `like` is the same; `steps` has for each of them how many backwards had
    synchronised, the event, and the codes of file, line and source.
    """

    rank: int | None
    columns: int
    like: tuple[Any, ...]
    marks: np.ndarray
    steps: np.ndarray
    late: list[Late]
    synced: int
    lone: Lone | None


class Facts(NamedTuple):
    """What the comparing rules need of a ledger.

    `armed` has for each rank under DDP the backwards that synchronised: event, and the codes of file,
    line and source; `cut` are the ranks that were stopped, and might have had more; `waited` those that
    waited for others in vain. `parts` has a row for each window; `files`, `sources` and `objectives` are
    the texts of which these have the numbers.
    """

    lives: list[Life]
    armed: dict[int, np.ndarray]
    cut: frozenset[int]
    waited: frozenset[int]
    parts: np.ndarray
    files: Sequence[str]
    sources: Sequence[str]
    objectives: Sequence[str]


class Compared:
    """What ranks told of themselves, and the windows that they have in common: what they read at one step of one loss.

    `parts` are those of all windows, `whose` from which facts each is, `starts` where a window begins
    there. Of each window, `many` is of how many ranks it is, `even` whether an element weighs the same
    within each of them, `low` the least of those weights, `high` the most; `other` whether the ranks
    have other numbers of elements.
    """

    def __init__(self, facts: Sequence[Facts]) -> None:
        self.facts = facts
        self.lives = [life for one in facts for life in one.lives]
        names = {
            name: n
            for n, name in enumerate(
                dict.fromkeys(name for one in facts for name in one.objectives)
            )
        }
        parts = [one.parts.copy() for one in facts]
        # What is called alike is the same objective on all ranks.
        for own, one in zip(parts, facts, strict=True):
            own["objective"] = np.array(
                [names[name] for name in one.objectives] or [0]
            )[own["objective"]]
        every, whose = (
            np.concatenate(parts),
            np.repeat(np.arange(len(facts)), [len(own) for own in parts]),
        )
        order = np.lexsort(
            [every[name] for name in ("rank", "order", "objective", "optimizer")]
        )
        self.parts, self.whose = every, whose = every[order], whose[order]
        changes = [
            np.diff(every[name], prepend=-1) != 0
            for name in ("optimizer", "order", "objective")
        ]
        self.starts = starts = np.flatnonzero(np.any(changes, axis=0))
        self.many = np.diff(np.append(starts, len(every)))
        self.even = np.logical_and.reduceat(
            (every["least"] > 0) & near(every["least"], every["most"]), starts
        )
        self.low, self.high = (
            self.reduced(np.minimum, "least"),
            self.reduced(np.maximum, "most"),
        )
        self.other = self.reduced(np.minimum, "elements") != self.reduced(
            np.maximum, "elements"
        )

    def reduced(self, ufunc: np.ufunc, name: str) -> np.ndarray:
        """For each window, what the function makes of its ranks' numbers of this name."""
        found: np.ndarray = ufunc.reduceat(self.parts[name], self.starts)
        return found


def facts(case: Case, rank: int | None = None) -> Facts:
    """What a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    events = case.events
    codes = np.stack(
        [
            np.arange(len(events)),
            *(events.column(name) for name in ("file", "line", "source")),
        ],
        axis=1,
    )
    knows = np.array([flag is not None for flag in case.armed], bool) & case.backward
    # In `join`, a rank that is done goes on to meet the others.
    does = np.array([flag is True for flag in case.armed], bool) & ~events.detail(
        "join", default=False
    )
    whose = case.ranks if rank is None else np.full(len(events), rank)
    # Who never steps may have been left behind by those who do.
    idle = {o for p in case.ledger.parameters for o in p.optimizers} - {
        loop.optimizer for loop in case.loops
    }
    every = [*case.loops, *(Loop(case, optimizer) for optimizer in sorted(idle))]
    lives = [_life(case, loop, rank, codes, np.flatnonzero(does)) for loop in every]
    armed = {
        int(one): codes[knows & does & (whose == one)]
        for one in np.unique(whose[knows]).tolist()
    }
    cut = frozenset(
        one for one, found in armed.items() if not _came_to_its_end(case, one, found)
    )
    waited = frozenset(
        one for one in armed if re.search("(?i)time[d ]*out", str(_ended(case, one)))
    )
    place: dict[int, int] = {}
    owner: dict[int, int | None] = {}
    for loop in case.loops:
        owner[loop.optimizer] = loop.rank if rank is None else rank
        place[loop.optimizer] = sum(
            other == owner[loop.optimizer] for other in owner.values()
        )
    loops = {
        loop.optimizer: (loop, loop.changing(case.at("sync"))) for loop in case.loops
    }
    rows = [
        (
            *(
                place[p.optimizer],
                p.order,
                p.objective,
                -1 if (own := owner[p.optimizer]) is None else own,
            ),
            *(*p.each, sum(p.sizes), p.step, *codes[p.backwards[0]]),
            *_averaged(case, p, *loops[p.optimizer]),
        )
        for p in case.parts
        if p.known and p.many and p.optimizer in place
    ]
    tables = events.tables["file"], events.tables["source"], case.shares.objectives
    return Facts(lives, armed, cut, waited, np.array(rows, [*_FIELDS.items()]), *tables)


def _averaged(
    case: Case, part: Part, loop: Loop, syncs: np.ndarray
) -> tuple[float, float, float, int]:
    """What became of the gradients of a part on their way to the other ranks: see `_FIELDS`."""
    rows = case.shares.of(part.step)
    many = 1 / float(
        rows.averaged[rows.backward == part.backwards[-1]].min(initial=1.0)
    )
    syncs = syncs[: syncs.searchsorted(part.step)]
    local = (
        loop.backwards[: loop.backwards.searchsorted(syncs[-1])]
        if syncs.size
        else syncs
    )
    if not local.size or not many > 1:
        return 1.0, 0.0, 0.0, 0
    before = after = 0.0
    if case.armed[part.backwards[-1]] is not None:
        before, after = (
            float(np.nansum(case.ledger.grad[e, loop.columns]))
            for e in (local[-1], syncs[-1])
        )
    single = all(
        p.objective == part.objective for p in case.parts_of[part.step] if p.many
    )
    by = divisor(case, part) if single and part.even and part.many != round(many) else 0
    # Who has multiplied by the number of ranks as well has chosen what is left.
    told = [term.get("constants") for term in case.ledger[part.backwards[0]].terms]
    multiplied = any(
        abs(number(one)) > 1
        for constants in told
        if isinstance(constants, list)
        for one in constants
    )
    return (
        many,
        before,
        after,
        1
        if by > 2 and by == part.many * round(many)
        else 2 * (not part.mean and not multiplied),
    )


def _came_to_its_end(case: Case, rank: int, synced: np.ndarray) -> bool:
    """Whether a rank has done all that it was to do, and nobody stopped it: its script, or its loader at least."""
    if case.ledger.complete and _ended(case, rank) in (None, "closed", "exit"):
        return True
    own = rank if (case.ranks >= 0).any() else None
    return bool(len(synced)) and case.ended(case.epoch(int(synced[-1, 0]), own))


def _ended(case: Case, rank: int) -> Any:
    """How a rank's recording ended."""
    ended = case.ledger.meta.get("ended")
    return ended.get(str(rank)) if isinstance(ended, Mapping) else ended


def _life(
    case: Case,
    loop: Loop,
    rank: int | None,
    codes: np.ndarray,
    synchronised: np.ndarray,
) -> Life:
    late: list[Late] = []
    synced = 0
    replicated = not alone(case) and any(
        case.armed[b] is not None for b in loop.backwards.tolist()
    )
    if replicated:
        members = _synced_together(case, loop)
        for order, (step, backwards) in enumerate(loop.windows.items()):
            if not backwards:
                continue
            # Its row comes after the backward that it ran in.
            unshared = {
                b
                for reached, last in members
                for b in backwards
                if reached[b] and b > last[order]
            }
            # Averaged too early, within the very window, is averaging that was meant.
            synced += not unshared or any(
                last[order] > backwards[0] for _, last in members
            )
            if unshared and case.armed[max(unshared)] is not None:
                late.append(_late(case, loop, step, order, sorted(unshared)))
    whose = loop.rank if rank is None else rank
    own = lone(case, loop)
    marks = _marks(case, loop) if replicated or own else np.zeros((0, 2))
    mine = synchronised[np.isin(synchronised, loop.backwards)]
    steps = np.column_stack([np.searchsorted(mine, loop.steps), codes[loop.steps]])
    like = (
        tuple(case.ledger.parameters[p].shape for p in loop.columns),
        str(case.settings(loop.optimizer)),
    )
    return Life(whose, loop.columns.size, like, marks, steps, late, synced, own)


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
            reached: np.ndarray = np.any(
                case.contributed[:, loop.columns[places]], axis=1
            )
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


def ddp_unsynced_step(every: Compared) -> Iterator[Finding]:
    """A step that reads what no rank has shared with the others."""
    told: set[tuple[Any, ...]] = set()
    for life in every.lives:
        # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
        late = [one for one in life.late if one.meant or life.synced]
        late = [one for one in late if _differ(life, every.lives, one.order)]
        if late:
            yield replace(late[0].finding, times=len(late), rank=life.rank)
        elif life.lone is not None and life.like not in told:
            told.add(life.like)  # once for all ranks
            yield from _come_apart(life, life.lone, every.lives)


def _come_apart(life: Life, mine: Lone, lives: list[Life]) -> Iterator[Finding]:
    """Ranks that began alike and never share a gradient; not those that train a model each, or average weights."""
    others = [one for one in lives if one.rank != life.rank and one.like == life.like]
    theirs = [one.lone for one in others if one.lone is not None]
    if not others or len(theirs) < len(others):
        return
    last = min(len(one.marks) for one in others)
    orders = [order for order in mine.orders if order < last]
    if len(orders) < 2 or not all(_differ(life, lives, order) for order in orders):
        return
    every = [mine, *theirs]
    known = all(len(one.weights) for one in every)
    if known:
        many = min(len(one.weights) for one in every)
        away = [
            np.abs(one.weights[:many] - mine.weights[:many]).max(axis=1)
            for one in theirs
        ]
        back = [(one < np.maximum.accumulate(one) / 2).any() for one in away]
        proven = all(one.pulled for one in every)
        begun = all(
            np.allclose(one.weights[0], mine.weights[0], rtol=1e-5) for one in theirs
        )
        if not begun or (
            not proven and (any(back) or any(one.pulled is False for one in every))
        ):
            return
    cause = mine.finding.cause + (
        " Their weights were the same at first, and follow each rank's own gradients since."
        if known and proven
        else " Unless their weights are averaged, each rank trains a model of its own."
    )
    yield replace(
        mine.finding,
        severity="warning" if known and proven else "note",
        cause=cause,
        rank=life.rank,
    )


def _differ(life: Life, lives: list[Life], order: int) -> bool:
    """Whether the ranks' gradients differ at their steps of the same number; True where only one rank is known."""
    others = [
        one for one in lives if one.rank != life.rank and one.columns == life.columns
    ]
    there = [one for one in others if order < len(one.marks)]
    return not there or any(
        not np.allclose(life.marks[order], one.marks[order], rtol=1e-5, equal_nan=True)
        for one in there
    )


def uneven_rank_backwards(every: Compared) -> Iterator[Finding]:
    """Ranks that synchronise a different number of times, so that one waits for ever."""
    known = {
        rank: (found, facts)
        for facts in every.facts
        for rank, found in facts.armed.items()
    }
    counts = {rank: len(found) for rank, (found, _) in known.items()}
    if len(counts) < 2 or len(set(counts.values())) == 1:
        yield from _uneven_steps(every.facts)
        return
    most, least = (
        max(counts, key=lambda rank: counts[rank]),
        min(counts, key=lambda rank: counts[rank]),
    )
    # Where both of them wait for others, the one that has less is not waited for in vain.
    waited = {rank for facts in every.facts for rank in facts.waited}
    if any(least in facts.cut for facts in every.facts) and not {most, least} <= waited:
        return
    found, facts = known[most]
    yield _found(
        "uneven-rank-backwards",
        "error",
        facts,
        found[counts[least]],
        rank=most,
        evidence={
            f"synchronised backwards of rank {rank}": many
            for rank, many in sorted(counts.items())
        },
        cause=(
            f"Rank {most} synchronises {counts[most]} backwards and rank {least} only {counts[least]}: the "
            "one more waits for nobody."
        ),
    )


def _uneven_steps(every: Sequence[Facts]) -> Iterator[Finding]:
    """A step that some ranks take after a backward that they all have synchronised, and others do not."""
    alike: dict[tuple[Any, ...], list[tuple[Life, Facts]]] = {}
    seen: list[tuple[Any, ...]] = []
    for facts in every:
        for life in facts.lives:
            seen.append((life.rank, life.like))
            if life.rank in facts.armed and life.rank not in facts.cut:
                alike.setdefault((seen.count(seen[-1]), life.like), []).append(
                    (life, facts)
                )
    for pairs in alike.values():
        most, facts = max(pairs, key=lambda pair: len(pair[0].steps))
        least, _ = min(pairs, key=lambda pair: len(pair[0].steps))
        extra = most.steps[~np.isin(most.steps[:, 0], least.steps[:, 0])]
        if len(extra) and len(most.steps) > len(least.steps):
            # Who never steps may be sent the weights of one who does.
            never = not len(least.steps)
            does, then = (
                ("never does", "unless it is sent the weights, they differ")
                if never
                else ("does not", "from then on their weights differ")
            )
            yield _found(
                "uneven-rank-backwards",
                "note" if never else "error",
                facts,
                extra[0, 1:],
                rank=most.rank,
                step=int(extra[0, 1]),
                evidence={
                    f"steps of rank {life.rank}": len(life.steps) for life, _ in pairs
                },
                cause=(
                    f"Rank {most.rank} steps here and rank {least.rank} {does}, after a backward that both have "
                    f"synchronised: {then}."
                ),
                times=len(extra),
            )


def divided_by_ranks(every: Compared) -> Iterator[Finding]:
    """Losses divided by what all ranks have together, where their average divides by the number of ranks as well."""
    parts, starts, many, counted = (
        every.parts,
        every.starts,
        every.many,
        every.reduced(np.minimum, "counted"),
    )
    total = np.add.reduceat(parts["least"] * parts["elements"], starts)
    # A hook may add up what ranks have: then more is left than there was on average.
    more = every.reduced(np.add, "after") > every.reduced(np.add, "before") * (1 + SAME)
    same = (
        every.even
        & near(every.low, every.high)
        & (every.reduced(np.minimum, "averaged") == many)
    )
    whole = same & near(total, 1.0)
    keys = parts[starts][["optimizer", "objective"]]
    for key in np.unique(keys):
        own = np.flatnonzero(keys == key)
        found = own[whole[own] & (many[own] > 1)]
        # What is the same on ranks with other numbers of elements is divided by all of them; else it may be a weight.
        proof = (counted[found] == 1).all() or (
            (counted[found] == 2).all() and every.other[found].sum() > 1
        )
        if len(found) < 2 or 2 * len(found) < len(own) or not proof or more[own].any():
            continue
        i, ranks = int(starts[found[0]]), int(many[found[0]])
        # Half a loss is a choice that people make.
        half = ranks == 2 and bool((counted[found] == 1).all())
        yield _of_window(
            "wrong-divisor",
            "note" if half else "warning",
            every.facts[every.whose[i]],
            parts[i],
            evidence={
                "weight per element, before the average": float(parts["least"][i]),
                "elements on each rank": parts["elements"][i : i + ranks].tolist(),
                "sum of shares of all ranks": 1 / ranks,
            },
            cause=(
                f"Each loss is divided by what {ranks} ranks have together, and the average over the ranks "
                f"divides by {ranks} again: the step reads 1/{ranks} of the gradient of one large "
                f"batch. {'Unless a half is meant, the' if half else 'The'} loss has to be multiplied by the number "
                "of ranks."
            ),
            times=len(found),
        )


def rank_token_weight(every: Compared) -> Iterator[Finding]:
    """Ranks whose elements weigh differently, because each divides by its own count."""
    several = (every.many > 1) & (every.reduced(np.minimum, "averaged") == every.many)
    odd = np.flatnonzero(
        several & every.even & every.other & ~near(every.low, every.high, 1e-2)
    )
    if not odd.size:
        return
    first, i = odd[0], int(every.starts[odd[0]])
    here = every.parts[i : i + int(every.many[first])]
    yield _of_window(
        "rank-token-weight",
        "warning" if 2 * odd.size >= several.sum() else "note",
        every.facts[every.whose[i]],
        here[0],
        evidence={
            "weight per element on each rank, before the average": here[
                "least"
            ].tolist(),
            "elements on each rank": here["elements"].tolist(),
        },
        cause=(
            "Each rank divides by its own count, and the average over ranks treats them alike: an element of one "
            f"rank counts {every.high[first] / every.low[first]:.3g} times as much as one of another."
        ),
        times=int(odd.size),
    )


def _of_window(
    rule: str, severity: str, facts: Facts, part: Any, **about: Any
) -> Finding:
    at = np.array([part[name] for name in ("event", "file", "line", "source")])
    return _found(
        rule,
        severity,
        facts,
        at,
        rank=int(part["rank"]),
        step=int(part["step"]),
        **about,
    )


def _found(
    rule: str, severity: str, facts: Facts, at: np.ndarray, **about: Any
) -> Finding:
    event, file, line, source = at.astype(int).tolist()
    where = {
        "event": event,
        "file": facts.files[file],
        "line": line,
        "source": facts.sources[source],
    }
    return Finding(
        rule,
        severity,
        **({"step": None, "cure": "", "chapter": CHAPTERS[rule]} | where | about),
    )
