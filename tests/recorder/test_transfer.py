"""The wire from a device to the host, with the CPU in the device's part, and norms that ask the device nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accumviz.recorder import transfer
from accumviz.recorder.transfer import Wire


class Stream:
    def __init__(self) -> None:
        self.done = False

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found, pieces = Stream(), []

    def pinned(size: int) -> torch.Tensor:
        pieces.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(transfer, "ASYNCHRONOUS", {"cpu"})
    monkeypatch.setattr(transfer, "pinned", pinned)
    monkeypatch.setattr(transfer, "current_stream", lambda _: found)
    found.pieces = pieces
    return found


def test_parts_of_all_dtypes_arrive_each_as_it_was(stream: Any) -> None:
    parts = [
        [torch.tensor(1.5), torch.tensor([2.5, 3.5])],
        [torch.tensor([1 / 3], dtype=torch.float64)],
        [torch.tensor([0.5, -2.0], dtype=torch.bfloat16)],
        [torch.tensor([7.0])],
        [torch.tensor([9], dtype=torch.int64)],
    ]
    sent = Wire().send(parts)
    told = [transfer.numbers(host).tolist() for host in sent]
    assert told == [[1.5, 2.5, 3.5], [1 / 3], [0.5, -2.0], [7.0], [9]]


def test_what_was_sent_is_what_it_was_then(stream: Any) -> None:
    for given in ([torch.ones(3)], [torch.ones(3), torch.ones(2)]):
        (host,) = Wire().send([given])
        given[0].zero_()
        assert transfer.numbers(host)[:3].tolist() == [1, 1, 1]


def test_many_events_share_a_piece_of_pinned_memory_and_none_is_written_twice(stream: Any) -> None:
    wire = Wire()
    wire.open({torch.device("cpu")})
    assert stream.pieces == [transfer._PIECE]
    values = [torch.full((1000,), float(n)) for n in range(600)]
    sent = [wire.send([[value]])[0] for value in values]
    assert len(stream.pieces) == -(-600 * 4000 // (transfer._PIECE // 4000 * 4000))
    assert all(torch.equal(a, b) for a, b in zip(sent, values, strict=True))
    large = torch.arange(transfer._PIECE, dtype=torch.float32)
    assert torch.equal(wire.send([[large]])[0], large)


def test_nothing_has_arrived_until_the_stream_is_done(stream: Any) -> None:
    wire = Wire()
    assert wire.arrived() == 0
    for _ in range(3):
        wire.send([[torch.ones(1)]])
    assert wire.arrived() == 0
    wire.send([[torch.ones(1)]])
    stream.done = True
    assert wire.arrived() == 3  # those before the mark
    assert wire.wait() == 4
    assert wire.arrived() == 4


def test_where_a_copy_cannot_run_by_itself_it_waits_until_somebody_reads() -> None:
    wire, given = Wire(), torch.ones(3)
    (kept,) = wire.send([[given]])
    given.zero_()
    assert wire.arrived() == 1
    assert transfer.numbers(kept).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("indices", "size"), [(1, (9, 4)), (2, (5, 6)), (2, (5, 6, 3)), (1, (7,))])
def test_the_norm_of_a_sparse_gradient_adds_its_duplicates_first(indices: int, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    where = torch.stack([torch.randint(0, n, (20,)) for n in size[:indices]])
    sparse = torch.sparse_coo_tensor(where, torch.randn(20, *size[indices:]), size, check_invariants=True)
    np.testing.assert_allclose(transfer.summed(sparse).norm(), sparse.to_dense().norm(), rtol=1e-6)
    once = transfer.summed(sparse).reshape(20, -1).abs().sum(1).count_nonzero()
    assert once == sparse.coalesce().indices().shape[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_is_a_single_precision_number(dtype: torch.dtype) -> None:
    half = torch.tensor([60000.0, 60000.0, 1 / 3], dtype=dtype), torch.tensor([1 / 3, 1 / 7], dtype=dtype)
    ((_, found),) = transfer.norms([0, 1], list(half))
    assert [transfer.norm(tensor) for tensor in half] == pytest.approx([float(n) for n in found], rel=1e-6)
    np.testing.assert_allclose([float(n) for n in found], [float(x.double().norm()) for x in half], rtol=1e-6)


def test_an_empty_sparse_gradient_has_norm_zero() -> None:
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0), (3,), check_invariants=True)
    assert transfer.summed(sparse).norm() == 0


def test_a_part_that_lies_behind_the_end_of_its_storage_is_not_read() -> None:
    whole = torch.ones(4)
    front, back = whole[:2], whole[2:]
    assert transfer.readable(front) and transfer.readable(back)
    whole.untyped_storage().resize_(2 * whole.element_size())
    assert transfer.readable(front)
    assert not transfer.readable(back)
