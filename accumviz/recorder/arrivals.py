"""Leaves of large models, read as a backward meets them: what came in their own hook, `.grad` in the next one.

So nothing is held that training could use again, and each is in a processor's cache when it is read.
"""

from __future__ import annotations

from collections.abc import Sized

from accumviz.recorder.leaves import Leaves
from accumviz.recorder.rows import Backward


def follow(leaves: Leaves, running: Backward) -> None:
    """Take what autograd has made of the `.grad` of the leaf that was met last."""
    i, running.last = running.last, -1
    if not running.had[i]:
        found = leaves.arrived(i)
        if found is None:
            running.fresh[i] = None  # of another kind, or freed
        else:
            running.came[i], running.same[i] = found, None
    elif i not in running.written:
        found = leaves.arrived(i)
        if found is None:
            leaves.read(running, [i])
            leaves.note([i])
        else:
            running.made[i] = found
        running.read[i] = None


def give(leaves: Leaves, running: Backward, rows: Sized) -> None:
    """Give a backward the numbers that were taken so far, before the next of these rows."""
    if running.last >= 0:
        follow(leaves, running)
    if running.came:
        came, running.came = running.came, {}
        made, running.made = running.made, {}
        running.give(("contribution", list(came)), came.values())
        if made:
            running.give(("grad", list(made)), made.values())
        running.settled |= dict.fromkeys(came, len(rows))
