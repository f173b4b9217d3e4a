"""Numbers on their way from a device: reduced there, sent in bulk, read later, so that training never waits."""

from __future__ import annotations

import numpy as np
import torch

_HALF = (torch.float16, torch.bfloat16)
_STRIDED = torch.strided


class Numbers:
    """A few tensors that nobody else will change, copied to the host without waiting for the device.

    >>> Numbers([torch.tensor([1.0, 2.0]), torch.tensor(3.0)]).read()
    [array([1., 2.], dtype=float32), array([3.], dtype=float32)]
    """

    __slots__ = ("_host", "_sent")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._sent: list[torch.cuda.Event] = []
        self._host = tensors
        for tensor in tensors:
            if not tensor.is_cpu:
                self._host = self._send(tensors)
                break

    def _send(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        host: list[torch.Tensor] = []
        devices = set()
        for tensor in tensors:
            if tensor.is_cuda:
                devices.add(tensor.device)
                # Only a copy into pinned memory is asynchronous.
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.append(pinned.copy_(tensor, non_blocking=True))
            else:
                host.append(tensor.cpu())
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._sent.append(event)
        return host

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(bool(event.query()) for event in self._sent)  # type: ignore[no-untyped-call]

    def read(self) -> list[np.ndarray]:
        """The numbers as flat arrays; waits for the device if they are not there yet."""
        for event in self._sent:
            event.synchronize()
        return [_array(tensor) for tensor in self._host]


def _array(tensor: torch.Tensor) -> np.ndarray:
    # numpy knows no bfloat16
    return np.asarray((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()).reshape(-1)


def norms(tensors: list[torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """The 2-norm of each tensor, on its device, in few kernels.

    Returns pairs (positions in the list, one-dimensional tensor of norms). Half precision is
    summed in float32, where its squares fit. Sparse gradients are coalesced first, because
    the norm of duplicate entries is not the norm of the gradient.

    >>> norms([torch.tensor([3.0, 4.0]), torch.ones(4)])
    [([0, 1], tensor([5., 2.]))]
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    result: list[tuple[list[int], torch.Tensor]] = []
    for position, tensor in enumerate(tensors):
        if tensor.layout is _STRIDED:
            groups.setdefault((tensor.device, tensor.dtype), []).append(position)
        else:
            result.append(([position], torch.linalg.vector_norm(_values(tensor)).reshape(1)))
    for (_, dtype), positions in groups.items():
        members = tensors if len(positions) == len(tensors) else [tensors[position] for position in positions]
        reduced = torch._foreach_norm(members, 2.0, dtype=torch.float32 if dtype in _HALF else None)
        result.append((positions, torch.stack(reduced)))
    return result


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient, each once."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor.values()
