"""Rules that look at what mixes the samples of a batch, of which no accumulation makes a large one. They give notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accumviz.checks.analysis import Case
from accumviz.checks.report import Finding
from accumviz.ledger.events import listed


def micro_batch_side_effects(case: Case) -> Iterator[Finding]:
    """BatchNorm in a window of several micro-batches: its statistics are theirs."""
    counted = case.ledger.meta.get("batch_norms")
    if not isinstance(counted, Mapping) or not counted:
        return
    for loop in case.loops:
        windows = {
            step: backwards
            for step, backwards in loop.windows.items()
            if len(set(backwards)) > 1
        }
        # Layers that are in eval() while it trains count nothing, and copies of the model at most its steps.
        least = max(loop.steps.size + 1, loop.backwards.size / 2)
        layers = {
            name: n for name, n in counted.items() if isinstance(n, int) and n >= least
        }
        if not windows or not layers:
            continue
        step, backwards = next(iter(windows.items()))
        yield case.finding(
            "micro-batch-side-effects",
            "note",
            backwards[0],
            step=step,
            evidence={
                "layers": list(layers)[:4],
                "in all": len(layers),
                "batches in their statistics": max(layers.values()),
                "optimizer steps": int(loop.steps.size),
            },
            cause=(
                f"BatchNorm normalises each of {len(backwards)} micro-batches by itself, and its running statistics "
                "move with each: the gradient is not that of one large batch."
            ),
            times=len(windows),
            optimizer=loop.optimizer,
        )


def contrastive_accumulation(case: Case) -> Iterator[Finding]:
    """Losses that compare the samples of a batch with each other, accumulated over small batches."""
    here = {
        code for code, details in enumerate(case.events.details) if _in_batch(details)
    }
    if not here:
        return
    codes = case.events.column("details")
    for parts in case.objectives.values():
        several = [
            p
            for p in parts
            if len(set(p.backwards)) > 1
            and all(int(codes[b]) in here for b in p.backwards)
        ]
        if not several:
            continue
        part = several[0]
        yield case.of_part(
            "contrastive-accumulation",
            "note",
            part,
            evidence={
                "micro-batches": len(set(part.backwards)),
                "samples compared": part.sizes[0],
            },
            cause=(
                f"The loss compares the samples of a batch with each other: {len(set(part.backwards))} micro-batches "
                f"of {part.sizes[0]:g} have {part.sizes[0] - 1:g} negatives each, and not those of one large batch."
            ),
            times=len(several),
        )


def _in_batch(details: Mapping[str, Any]) -> bool:
    return any(term.get("in_batch") is True for term in listed(details))
