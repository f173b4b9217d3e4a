"""The claims about several processes, on real processes, against gradients computed in one."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accumviz as av
from accumviz.ledger.ledger import Ledger

DATA = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False))


def whole_batch() -> np.ndarray:
    model = make()
    model(DATA).square().mean().backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])


def replica(K: int, no_sync: str = "around both", divide: bool = True) -> np.ndarray:
    """One window with DDP on this rank; returns the gradients at its end."""
    model = DistributedDataParallel(make())
    mine = DATA.chunk(dist.get_world_size())[dist.get_rank()]
    with av.record(model):
        for k, part in enumerate(mine.chunk(K)):
            inside = no_sync != "nowhere" and k < K - 1
            with model.no_sync() if inside and no_sync == "around both" else contextlib.nullcontext():
                loss = model(part).square().mean() / (K if divide else 1)
                with model.no_sync() if inside else contextlib.nullcontext():
                    loss.backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])


def bytes_by(ledger: Ledger | None, op: str) -> list[int]:
    assert ledger is not None
    return [event.details["bytes"] for event in ledger.of("sync") if event.details["op"] == op]


def test_claim_23_accumulation_sends_less_only_inside_no_sync() -> None:
    size = sum(4 * p.numel() for p in make().parameters())
    for K in (1, 2, 4):
        quiet = av.distribute(replica, ranks=2, K=K)
        loud = av.distribute(replica, ranks=2, K=K, no_sync="nowhere")
        assert [bytes_by(ledger, "all-reduce") for ledger in quiet.ledgers] == [[size]] * 2
        assert [bytes_by(ledger, "all-reduce") for ledger in loud.ledgers] == [[size] * K] * 2


def test_claim_24_the_effective_batch_is_ranks_times_micro_batch_times_steps() -> None:
    expected = whole_batch()
    for found in av.distribute(replica, ranks=4, K=4).returned:
        # float32, a few additions in another order
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_claim_25_ddp_averages_and_does_not_divide_by_the_micro_batches() -> None:
    for found in av.distribute(replica, ranks=2, K=4, divide=False).returned:
        np.testing.assert_allclose(found, 4 * whole_batch(), rtol=1e-5, atol=1e-7)


def test_claim_25_the_tail_of_the_articles_loop_waits_on_each_rank_and_joins_the_next_window() -> None:
    def article() -> np.ndarray:
        model = DistributedDataParallel(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with av.record(model, optimizer):
            for i, part in [*enumerate(DATA[:30].chunk(2)[dist.get_rank()].chunk(3))] * 2:
                with model.no_sync() if (i + 1) % 2 != 0 else contextlib.nullcontext():
                    loss = model(part).square().mean()
                    loss.backward()
                if (i + 1) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])

    world = av.distribute(article, ranks=2)
    for ledger in world.ledgers:
        assert ledger is not None
        assert [len(window.backwards) for window in ledger.windows()] == [2, 3]
        assert ledger.live(-1, 0) == [ledger.of("backward")[-1].index]
    assert not np.allclose(*world.returned)


def test_claim_26_a_backward_inside_no_sync_reduces_all_the_same_if_its_forward_ran_outside() -> None:
    world = av.distribute(replica, ranks=2, K=4, no_sync="around the backward")
    for ledger in world.ledgers:
        assert len(bytes_by(ledger, "all-reduce")) == 4
    for found in world.returned:
        np.testing.assert_allclose(found, whole_batch(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "ranks"), [("FSDP1", 2), ("FSDP2", 4)])
def test_claim_27_without_synchronising_each_rank_holds_the_gradient_of_the_whole_model(kind: str, ranks: int) -> None:
    def window(sync: bool) -> None:
        model: Any = make()
        if kind == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        else:
            warnings.simplefilter("ignore")  # deprecated
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        first, second = DATA.chunk(ranks)[dist.get_rank()].chunk(2)
        with av.record(model):
            for last, part in ((False, first), (True, second)):
                if kind == "FSDP2":
                    model.set_requires_gradient_sync(sync or last)
                quiet = kind == "FSDP1" and not (sync or last)
                with model.no_sync() if quiet else contextlib.nullcontext():
                    (model(part).square().mean() / 2).backward()

    size = sum(4 * p.numel() for p in make().parameters())
    for sync in (True, False):
        for ledger in av.distribute(window, ranks=ranks, sync=sync).ledgers:
            assert ledger is not None
            second = ledger.of("backward")[-1].index
            before = max(e.index for e in ledger if e.index < second and (e.kind == "backward" or e.within))
            held = [4 * p.numel for i, p in enumerate(ledger.parameters) if ledger.live(before, i)]
            assert sum(held) == (size // ranks if sync else size)
            assert len(bytes_by(ledger, "reduce-scatter")) == (2 if sync else 1)


@pytest.mark.parametrize(("strategy", "gathers"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 1)])
def test_claim_27_no_sync_saves_all_gathers_only_where_the_weights_stay_whole(strategy: str, gathers: int) -> None:
    def window(quiet: bool) -> None:
        warnings.simplefilter("ignore")  # deprecated
        sharding = ShardingStrategy[strategy]
        model = FullyShardedDataParallel(make(), device_id=torch.device("cpu"), sharding_strategy=sharding)
        with av.record(model):
            for k, part in enumerate(DATA.chunk(2)[dist.get_rank()].chunk(3)):
                with model.no_sync() if quiet and k < 2 else contextlib.nullcontext():
                    (model(part).square().mean() / 3).backward()

    for quiet, expected in ((False, [3, 3]), (True, [gathers, 1])):
        for ledger in av.distribute(window, ranks=2, quiet=quiet).ledgers:
            assert [len(bytes_by(ledger, op)) for op in ("all-gather", "reduce-scatter")] == expected
