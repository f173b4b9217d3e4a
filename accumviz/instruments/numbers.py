"""Numbers on their way from a device: reduced there, sent in bulk, read later, so that training never waits."""

from __future__ import annotations

import numpy as np
import torch

_HALF = (torch.float16, torch.bfloat16)
_STRIDED = torch.strided


class Numbers:
    """A few tensors on devices that nobody else will change, copied to the host without waiting.

    >>> Numbers([torch.tensor([1.0, 2.0]), torch.tensor(3.0)]).read()
    [array([1., 2.], dtype=float32), array([3.], dtype=float32)]
    """

    __slots__ = ("_host", "_sent")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._sent: list[torch.cuda.Event] = []
        self._host: list[torch.Tensor] = []
        devices = set()
        for tensor in tensors:
            if tensor.is_cuda:
                devices.add(tensor.device)
                # Only a copy into pinned memory is asynchronous.
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.append(pinned.copy_(tensor, non_blocking=True))
            else:
                self._host.append(tensor.cpu())
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._sent.append(event)

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(bool(event.query()) for event in self._sent)  # type: ignore[no-untyped-call]

    def read(self) -> list[np.ndarray]:
        """The numbers as flat arrays; waits for the device if they are not there yet."""
        for event in self._sent:
            event.synchronize()
        # numpy knows no bfloat16
        host = [tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in self._host]
        return [np.asarray(tensor.numpy()).reshape(-1) for tensor in host]


def norms(indices: list[int], tensors: list[torch.Tensor]) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The 2-norm of each tensor, on its device, in few kernels.

    Returns pairs (indices, their norms), one for each device and dtype. Half precision is
    summed in float32, where its squares fit. Sparse gradients are coalesced first, because
    the norm of duplicate entries is not the norm of the gradient.

    >>> norms([7, 8], [torch.tensor([3.0, 4.0]), torch.ones(4)])
    [([7, 8], [tensor(5.), tensor(2.)])]
    """
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.layout is not _STRIDED:
            tensors[position] = _values(tensor)
        key = (tensor.get_device(), tensor.dtype)
        if key in groups:
            groups[key].append(position)
        else:
            groups[key] = [position]
    result = []
    for (_, dtype), positions in groups.items():
        whole = len(groups) == 1
        members = tensors if whole else [tensors[position] for position in positions]
        if dtype in _HALF:
            reduced = torch._foreach_norm(members, 2.0, dtype=torch.float32)
        else:
            reduced = torch._foreach_norm(members, 2.0)
        result.append((indices if whole else [indices[position] for position in positions], list(reduced)))
    return result


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient, each once."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor.values()
