"""Storage that is released, shortened, resized, swapped or shared under a recording: no fault, no foreign memory read.

Every case runs in a process of its own kind (`python -m tests.recorder.test_storage`), which a read past the end of a
storage would end.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import accumviz as av

DTYPES = ["float32", "bfloat16", "complex64"]
SIZES = [1, 40, 40_000, 131_072]


def _released(grad: Tensor) -> Tensor:
    given = grad.detach()
    given.untyped_storage().resize_(0)
    return given


def _shortened(grad: Tensor) -> Tensor:
    given = grad.detach()
    given.untyped_storage().resize_(given.untyped_storage().nbytes() // 2)
    return given


def _empty(grad: Tensor) -> Tensor:
    return _released(torch.empty_like(grad))


def _behind_the_end(grad: Tensor) -> Tensor:
    bucket = torch.ones(2 * grad.numel(), dtype=grad.dtype)
    given = bucket[grad.numel() :]
    bucket.untyped_storage().resize_(given.element_size() * grad.numel())
    return given


def _given_back(grad: Tensor) -> Tensor:
    given, size = grad.detach(), grad.untyped_storage().nbytes()
    given.untyped_storage().resize_(0)
    given.untyped_storage().resize_(size)
    return given.fill_(2)


def _swapped(grad: Tensor) -> Tensor:
    given = grad.detach()
    given.data = torch.full_like(grad, 2)
    return given


def _shared(grad: Tensor) -> Tensor:
    return torch.full((2 * grad.numel(),), 2, dtype=grad.dtype)[grad.numel() :]


GONE = [_released, _shortened, _empty, _behind_the_end]
THERE = [_given_back, _swapped, _shared]


def _replaced(change: Callable[[Tensor], Tensor], dtype: str, size: int) -> None:
    """Train once after `.grad` was replaced by hand: what it holds is looked at before the gradient is zeroed."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=getattr(torch, dtype)))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with av.record(weight, optimizer) as recording:
        weight.abs().sum().backward()
        assert weight.grad is not None
        weight.grad = change(weight.grad)
        optimizer.zero_grad()
        weight.abs().sum().backward()
        optimizer.step()
    ledger = recording.ledger
    if change is not _given_back:
        assert [event.kind for event in ledger] == ["backward", "edit", "zero_grad", "backward", "step"], str(ledger)
        norm = ledger.grad[1, 0]
        if change in GONE:
            assert np.isnan(norm) or (size == 1 and change is _shortened), norm
        else:
            assert abs(norm / (2 * size**0.5) - 1) < 1e-3, norm
    assert "stopped" not in ledger.meta, ledger.meta


def _released_in_a_hook() -> None:
    """An offloader copies each gradient away as it is accumulated, and leaves a placeholder."""
    weights = [torch.nn.Parameter(torch.ones(40_000)) for _ in range(3)]

    def offload(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.untyped_storage().resize_(0)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(offload)
    with av.record(weights):
        for _ in range(3):
            sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
            for weight in weights:
                weight.grad = None


def _incoming_released_by_a_later_hook() -> None:
    weights = [torch.nn.Parameter(torch.ones(40_000)) for _ in range(6)]
    others = [torch.randn(40_000) for _ in weights]
    came: list[Tensor] = []

    def release(_: Tensor) -> None:
        for grad in came:
            grad.untyped_storage().resize_(0)

    with av.record(weights):
        sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
        for weight in weights:
            weight.register_hook(came.append)
            weight.register_post_accumulate_grad_hook(release)
        for _ in range(2):
            came.clear()
            sum((weight * other).sum() for weight, other in zip(weights, others, strict=True)).backward()  # type: ignore[union-attr]


def _placeholders_at_the_opening() -> None:
    weight = torch.nn.Parameter(torch.ones(40_000))
    weight.square().sum().backward()
    assert weight.grad is not None
    weight.grad.untyped_storage().resize_(0)
    with av.record(weight):
        weight.grad = None
        weight.square().sum().backward()


def _touched_after_it_was_released() -> None:
    weight = torch.nn.Parameter(torch.ones(40_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with av.record(weight, optimizer):
        weight.square().sum().backward()
        assert weight.grad is not None
        weight.grad.untyped_storage().resize_(0)
        torch._C._autograd._unsafe_set_version_counter((weight.grad,), (weight.grad._version + 1,))
        optimizer.zero_grad()


def _larger_than_its_memory() -> None:
    weight = torch.nn.Parameter(torch.ones(30_000_000))
    with av.record(weight) as recording:
        weight.sum().backward()
        grad = torch.zeros(30_000_000)
        grad.untyped_storage().resize_(64 << 20)
        weight.grad = grad
        assert np.isnan(recording.ledger.grad[-1, 0])
        weight.grad = None


def _small_weights_released() -> None:
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights[:2], lr=0.1)
    with av.record(weights, optimizer) as recording:
        for release in (weights[2].data.untyped_storage(), weights[2].data.untyped_storage()):
            sum(weight.sum() for weight in weights[:2]).backward()  # type: ignore[union-attr]
            optimizer.step()
            release.resize_(0)
    assert len(recording.ledger.of("step")) == 2


def _loss_released() -> None:
    weight = torch.nn.Parameter(torch.ones(40))
    with av.record(weight, graphs=True, memory=True) as recording:
        for size in (0, 2):
            loss = weight.sum()
            loss.detach().untyped_storage().resize_(size)
            loss.backward(torch.tensor(1.0))
    assert all(np.isnan(event.loss) for event in recording.ledger)


class _Still(torch.optim.Optimizer):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change nothing, and read nothing."""


def _scalars_released() -> None:
    """What events keep besides gradients: a learning rate, and a gradient scaler's finding."""
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = _Still([weight], {"lr": torch.tensor(0.1)})
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    with av.record(weight, optimizer) as recording:
        for held in (optimizer.found_inf, optimizer.param_groups[0]["lr"]):  # type: ignore[attr-defined]
            held.untyped_storage().resize_(0)
        weight.sum().backward()
        optimizer.step()
    assert "stopped" not in recording.ledger.meta, recording.ledger.meta
    assert recording.ledger.of("step")[0].details["lr"] == [None]


PROGRAMS: list[Callable[[], None]] = [
    _released_in_a_hook,
    _incoming_released_by_a_later_hook,
    _placeholders_at_the_opening,
    _touched_after_it_was_released,
    _larger_than_its_memory,
    _small_weights_released,
    _loss_released,
    _scalars_released,
]


def main() -> None:
    warnings.simplefilter("error", RuntimeWarning)
    for change in (*GONE, *THERE):
        for dtype in DTYPES:
            for size in SIZES:
                print(change.__name__, dtype, size, flush=True)
                _replaced(change, dtype, size)
    for program in PROGRAMS:
        print(program.__name__, flush=True)
        program()
    print("all read")


def test_no_tensor_is_read_that_its_storage_does_not_hold() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.recorder.test_storage"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert ran.returncode == 0, f"{ran.stdout[-200:]}\n{ran.stderr[-3000:]}"
    assert ran.stdout.splitlines()[-1] == "all read"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("size", [3, 30])
def test_a_sparse_parameter_is_recorded(layout: str, size: int) -> None:
    weight = getattr(torch.eye(size), layout)().requires_grad_()
    with av.record(weight) as recording:
        for _ in range(2):
            weight.mm(torch.ones(size, size)).sum().backward()
            weight.grad = None
    assert "stopped" not in recording.ledger.meta
    assert len(recording.ledger.of("backward")) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_parameter_is_passed_over_with_a_note(layout: torch.layout) -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    with av.record({"nested": nested, "weight": weight}) as recording:
        (weight * 2).sum().backward()
    assert [parameter.name for parameter in recording.ledger.parameters] == ["weight"]
    assert any("`nested` is a nested tensor" in note for note in recording.ledger.meta["notes"])
    with pytest.raises(ValueError, match="nothing to record"):
        av.record({"nested": nested})


if __name__ == "__main__":
    main()
