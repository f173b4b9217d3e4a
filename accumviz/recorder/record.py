"""`record`: choose what to record, under which names, and where to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.recorder.recording import Recording
from accumviz.recorder.targets import collect


def record(
    *objects: Any,
    path: str | Path | None = None,
    exact: int = 64,
    memory: bool | None = None,
    graphs: bool = False,
    overwrite: bool = False,
    sources: bool = False,
    **groups: Any,
) -> Recording:
    """Record what happens to the `.grad` of these parameters while the `with` block runs.

    `objects` are modules, optimizers, parameters, dicts of named tensors, or lists of these;
    keywords name groups, as in `record(G=generator, D=discriminator)`.

    With `path` the ledger is written there as it grows, with the first event after each half second,
    and leaves memory: a process that is killed loses what its last half second of training did. A file
    that is there is refused with `FileExistsError` unless `overwrite=True`, when the recording is
    opened. A full disk or a vanished folder costs the file only: a warning says so. Without `path`,
    memory holds all of it. A forked process does not write to the file.

    A file holds the names, shapes, dtypes and devices of the parameters, the events with their
    numbers (of tensors of at most `exact` elements all gradients and weights, which can give away
    data; of larger ones norms), the names and learning rates of the optimizers,
    the names of schedulers and of what `backward` was called on, the texts of errors that ended a
    `backward` or the recording, the versions of torch and accumviz, and of the source files, under
    their paths below the working folder, the lines that events stand on, those that called them, and
    the functions around the former: whoever gets the file can read these. `sources=True` stores
    those files whole.

    Tensors of at most `exact` elements keep every element, and their weights after each step, larger
    ones their 2-norm. `memory`
    measures the bytes of saved tensors alive around a backward: each one (True), none (False), or
    as many as fit into a hundredth of a second and then two thousandths of the loop's time (None). `graphs=True`
    keeps each backward's graph in `recording.graphs`, for `play`: those of at most 2,000 nodes,
    100,000 nodes in all.

    On a device, numbers follow behind the training, which never waits for them. What
    `torch.compile` makes of the model, the step or the optimizer is recorded as the eager loop
    is. A captured CUDA graph runs no Python: a warning says so, `ledger.meta["notes"]` keeps it,
    and each replay becomes an `edit`. `torch.cuda.make_graphed_callables` can be recorded, but
    refuses modules that have hooks: call it before a recording with `graphs=True`.

    Before version 2.10, torch does not say what a graph saved: factors of losses, and so shares, and
    saved bytes are unknown, and `ledger.meta["notes"]` says so.

    Raises `TypeError` for something that holds no parameters, and `ValueError` when nothing would
    be recorded. Source of the hooks used: "Backward Hooks execution" in the PyTorch note on
    autograd mechanics.

    >>> import torch, accumviz as av
    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> with av.record(w) as recording:
    ...     for x in (4.0, 2.0):
    ...         loss = (2 * x - w * x).square().mean() / 2
    ...         loss.backward()
    >>> recording.ledger.values("w", of="contribution").ravel().tolist()
    [-16.0, -4.0]
    >>> recording.ledger.values("w").ravel().tolist()
    [-16.0, -20.0]
    """
    exact = arguments.whole(
        "exact", exact, "the largest number of elements to keep one by one"
    )
    arguments.flag("memory", memory, or_none=True)
    for name, value in (
        ("graphs", graphs),
        ("overwrite", overwrite),
        ("sources", sources),
    ):
        arguments.flag(name, value)
    if path is not None:
        arguments.file("path", path)
    frame = sys._getframe(1)
    return Recording(
        collect(objects, groups, frame),
        frame,
        path=path,
        exact=exact,
        memory=memory,
        graphs=graphs,
        overwrite=overwrite,
        sources=sources,
    )
