"""Cures: small unified diffs of the user's own lines; empty where a line is not known."""

from __future__ import annotations

import re

from accumviz.events import Event

# Its steps stand in the user's loop, and step at the end of a window only.
_PACED = "accelerate/"


def _theirs(event: Event) -> bool:
    """Whether a library takes the steps: no line of the user's can stand beside them."""
    return event.kind == "step" and bool(event.via) and "step(" not in event.source


def replaced(event: Event, *lines: str) -> str:
    """The cure that writes other lines in the place of this one."""
    if not event.source or lines == (event.source,):
        return ""
    name = event.file or "your code"
    length = f",{len(lines)}" if len(lines) > 1 else ""
    inside = "\n".join(f"+{line}" for line in lines)
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line}{length} @@\n-{event.source}\n{inside}"


def added(after: Event, *lines: str) -> str:
    """The cure that adds lines below this one."""
    if not after.source or not lines or _theirs(after):
        return ""
    name = after.file or "your code"
    inside = "\n".join(f"+{line}" for line in lines)
    return f"--- {name}\n+++ {name}\n@@ -{after.line} +{after.line},{len(lines) + 1} @@\n {after.source}\n{inside}"


def removed(event: Event) -> str:
    """The cure that takes this line away."""
    if not event.source:
        return ""
    name = event.file or "your code"
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line - 1},0 @@\n-{event.source}"


def moved(event: Event, after: Event) -> str:
    """The cure that puts this line below the other one."""
    if not event.source or not after.source or after.via.startswith(_PACED):
        return ""
    if _theirs(after):
        return removed(event)
    name, other = event.file or "your code", after.file or "your code"
    away = f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line - 1},0 @@\n-{event.source}"
    head = f"\n--- {other}\n+++ {other}" if other != name else ""
    return f"{away}{head}\n@@ -{after.line} +{after.line},2 @@\n {after.source}\n+{event.source}"


def divided(event: Event, by: str) -> str:
    """The cure that divides the loss on which `backward` is called."""
    loss, source = event.label, event.source
    if loss and f"{loss}.backward(" in source:
        return replaced(event, source.replace(f"{loss}.backward(", f"({loss} / {by}).backward(", 1))
    if loss and f"({loss})" in source:
        return replaced(event, source.replace(f"({loss})", f"({loss} / {by})", 1))
    return ""


def zeroing(step: Event) -> str:
    """The line that zeroes what this step has read.

    >>> zeroing(Event(0, "step", source="scaler.step(optimizer)")), zeroing(Event(0, "step", source="self.opt.step()"))
    ('optimizer.zero_grad()', 'self.opt.zero_grad()')
    """
    given = re.search(r"\.step\(\s*([A-Za-z_][\w.\[\]]*)\s*\)", step.source)
    own = re.search(r"([A-Za-z_][\w.\[\]]*)\.step\(", step.source)
    name = given[1] if given else own[1] if own else "optimizer"
    return f"{name}.zero_grad()"


def again(step: Event) -> tuple[str, ...]:
    """The lines that step once more, and zero; none where the step's own line is not known."""
    if not step.source:
        return ()
    return (step.source,) if "zero_grad(" in step.source else (step.source, zeroing(step))


def before(at: Event, end: Event) -> str:
    """The cure that takes a line from where it stands, and puts it above the step's."""
    if not at.source or not end.source or at.line == end.line or end.via.startswith(_PACED):
        return ""
    if _theirs(end):
        return removed(at)
    name = at.file or "your code"
    return (
        f"--- {name}\n+++ {name}\n@@ -{at.line} +{at.line - 1},0 @@\n-{at.source}\n"
        f"@@ -{end.line} +{end.line},2 @@\n+{at.source}\n {end.source}"
    )
