"""By which factor hooks of the user's multiplied what a backward brings, without waiting for a device."""

from __future__ import annotations

import torch

from accumviz.recorder.transfer import Quietly, readable

# As in `gains`: two numbers that came the same way; gradients in half precision are rounded once more.
_SAME, _SAME_IN_HALF = 1e-3, 2e-2
_HALF = (torch.float16, torch.bfloat16)


def scaling(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """What made the one tensor of the other: a factor, how far off it is, how far off it may be, and the size of both.

    The factor is the one that fits best; how far off is relative to what was made. None where it cannot be read.

    >>> scaling(torch.ones(2), torch.full((2,), 0.25)).tolist()[:2]
    [0.25, 0.0]
    """
    if not (readable(before) and readable(after)) or before.shape != after.shape or before.device != after.device:
        return None
    if before.layout is not torch.strided or after.layout is not torch.strided or not after.is_floating_point():
        return None
    rough = _SAME_IN_HALF if {before.dtype, after.dtype} & {*_HALF} else _SAME
    if not before.numel():
        return torch.zeros(4, device=before.device)
    with Quietly():
        was, made = before.detach().float(), after.detach().float()
        largest = was.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        unit = was / largest  # its square is neither too large nor too small for a number
        factor = (made / largest * unit).sum() / unit.square().sum()
        off = torch.linalg.vector_norm(made - factor * was) / torch.linalg.vector_norm(made)
        return torch.stack([factor, off, torch.full_like(factor, rough), largest + made.abs().max()])


def one_factor(found: list[torch.Tensor]) -> torch.Tensor:
    """The factor of all of these (see `scaling`); NaN where it is not one. A zero is a zero under any factor.

    >>> quarter, half = (scaling(torch.ones(2), torch.full((2,), by)) for by in (0.25, 0.5))
    >>> one_factor([quarter, quarter]).item(), one_factor([quarter, half]).item()
    (0.25, nan)
    """
    with Quietly():
        factor, off, rough, size = torch.stack(found).unbind(1)
        told = size > torch.finfo(torch.float32).tiny
        low = torch.where(told, factor, torch.inf).min()
        high = torch.where(told, factor, -torch.inf).max()
        near = (high - low <= rough.max() * high.abs()) & (torch.where(told, off / rough, 0.0).max() <= 1)
        one = torch.where(near, (low + high) / 2, torch.nan)
        return torch.where(told.any(), one, 1.0)
