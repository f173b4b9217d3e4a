"""By which factor hooks of the user's multiplied what a backward brings, without waiting for a device."""

from __future__ import annotations

import torch

from accumviz.recorder.transfer import readable

# As in `gains`: two numbers that came the same way; gradients in half precision are rounded once more.
_SAME, _SAME_IN_HALF = 1e-3, 2e-2
_HALF = (torch.float16, torch.bfloat16)


def scaling(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """What made the one tensor of the other: a factor, how far off it is, how far off it may be, and the size of both.

    The factor is the one that fits best; how far off is relative to what was made. None where it cannot be read.

    >>> scaling(torch.ones(2), torch.full((2,), 0.25)).tolist()[:2]
    [0.25, 0.0]
    """
    if (
        not (readable(before) and readable(after))
        or before.shape != after.shape
        or before.device != after.device
    ):
        return None
    if (
        before.layout is not torch.strided
        or after.layout is not torch.strided
        or not after.is_floating_point()
    ):
        return None
    rough = _SAME_IN_HALF if {before.dtype, after.dtype} & {*_HALF} else _SAME
    if not before.numel():
        return torch.zeros(4, device=before.device)
    was, made = before.detach().float(), after.detach().float()
    largest = torch.linalg.vector_norm(was, torch.inf).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    unit = was / largest  # its square is neither too large nor too small for a number
    factor = (made / largest * unit).sum() / unit.square().sum()
    off = torch.linalg.vector_norm(made - factor * was) / torch.linalg.vector_norm(made)
    size = largest + torch.linalg.vector_norm(made, torch.inf)
    return torch.stack([factor, off, torch.full_like(factor, rough), size])


def one_factor(found: list[torch.Tensor]) -> torch.Tensor:
    """The factor of all of these (see `scaling`); NaN where it is not one. A zero is a zero under any factor.

    >>> quarter, half = (scaling(torch.ones(2), torch.full((2,), by)) for by in (0.25, 0.5))
    >>> one_factor([quarter, quarter]).item(), one_factor([quarter, half]).item()
    (0.25, nan)
    """
    factor, off, rough, size = torch.stack(found).unbind(1)
    tiny = torch.finfo(torch.float32).tiny
    told = size > tiny
    low = torch.where(told, factor, torch.inf).amin(0)
    high = torch.where(told, factor, -torch.inf).amax(0)
    near = (high - low <= rough.amax(0) * torch.maximum(high, -high)) & (
        torch.where(told, off / rough, 0.0).amax(0) <= 1
    )
    one = torch.where(near, (low + high) / 2, torch.nan)
    return torch.where(size.amax(0) > tiny, one, 1.0)
