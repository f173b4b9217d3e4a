"""Every test of an instrument must leave torch as it found it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optim

from accumviz.recorder import patches


def _patchable() -> dict[str, Any]:
    return {
        "torch.autograd.backward": torch.autograd.backward,
        **{f"Optimizer.{name}": getattr(torch.optim.Optimizer, name) for name in ("zero_grad", "step")},
        "torch.compile": torch.compile,
        "CUDAGraph.replay": torch.cuda.CUDAGraph.replay,
        "Module.zero_grad": torch.nn.Module.zero_grad,
        "Module.__call__": vars(torch.nn.Module)["__call__"],
        **{
            f"GradScaler.{name}": getattr(torch.amp.GradScaler, name)
            for name in ("scale", "unscale_", "step", "update", "_unscale_grads_", "_maybe_opt_step")
        },
        **{f"clip_grad.{name}": value for name, value in vars(clip_grad).items() if callable(value)},
        **{
            f"nn.utils.{name}": getattr(torch.nn.utils, name)
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
        },
        **{f"{each.__name__}.step": each.step for each in patches._schedulers(torch.optim.lr_scheduler.LRScheduler)},
        "DDP": dict(vars(torch.nn.parallel.DistributedDataParallel)),
        "DataLoader.__iter__": torch.utils.data.DataLoader.__iter__,
        "DataLoader's iterator": patches.Iterating.__next__,
        "step pre-hooks": dict(optim._global_optimizer_pre_hooks),
        "step post-hooks": dict(optim._global_optimizer_post_hooks),
    }


# Tensors that were there before a module's tests began.
_older: list[weakref.ref[torch.Tensor]] = []


def _tensors() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]


def _hooks_of_ours() -> list[Any]:
    """On tensors that are new, and on those from before."""
    return [
        hook
        for tensor in (*_tensors(), *(one() for one in _older))
        if tensor is not None
        for hook in (tensor._backward_hooks or {}).values()
        if getattr(hook, "__module__", "").startswith("accumviz.")
    ]


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_is_passed_over() -> None:
    """Looking through all that torch has made takes a tenth of a second, and each test of a recorder does."""
    gc.unfreeze()  # what is frozen is not listed
    gc.collect()
    _older[:] = map(weakref.ref, _tensors())
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail when a hook or a wrapper outlives its recording."""
    before = _patchable()
    yield
    after = _patchable()
    # A class of schedulers that a test made may be gone by now.
    assert [name for name in before.keys() & after.keys() if after[name] != before[name]] == []
    assert patches.listening == ()
    assert patches.undoing == []
    assert _hooks_of_ours() == []
