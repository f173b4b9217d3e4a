"""What FSDP shards: what deleted tensors it keeps, and the whole gradients that wait to be scattered."""

import contextlib
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import accumviz as av
from accumviz.checks.check import check_ranks
from accumviz.ledger.ledger import Ledger
from accumviz.recorder import distributed


def deleted_yet_alive(kind: str) -> list[bool]:
    """Train once, and look whether what the loop deletes is gone: a large tensor, and the model's output."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with av.record(model):
        large = torch.ones(1 << 10)
        output = model(torch.ones(4, 8))
        kept = [weakref.ref(large), weakref.ref(output)]
        loss = output.square().mean()
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        del large, output, loss
        gc.collect()
        return [reference() is not None for reference in kept]


def test_a_recording_keeps_nothing_alive_that_the_loop_deletes() -> None:
    def work() -> list[list[bool]]:
        return [deleted_yet_alive(kind) for kind in ("FSDP1", "FSDP2")]

    assert av.distribute(work).returned == ([[False, False]] * 2,) * 2


def clipped(kind: str, most: float) -> Ledger:
    """Train at norms of 0.31 and 0.62 of the shards, and of 0.7 of the whole; on one rank most shards are empty."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    if kind == "FSDP2":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with av.record(model, optimizer) as recording:
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            if kind == "FSDP1, by itself":
                model.clip_grad_norm_(most)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            optimizer.zero_grad()
    return recording.ledger


def test_a_clip_by_the_norm_of_shards_alone_is_a_condition_where_the_whole_is_beyond_the_limit() -> None:
    cases = {("FSDP1", 0.68): True, ("FSDP1", 9.0): False, ("FSDP1, by itself", 0.1): False, ("FSDP2", 0.1): False}
    world = av.distribute(lambda: [clipped(*case) for case in cases])
    for told, *ledgers in zip(cases.values(), *world.returned, strict=True):
        assert [av.check(ledger).condition for ledger in ledgers] == ["", ""]
        for report in (check_ranks(ledgers), av.check(Ledger.merge(ledgers))):
            assert ("a clip by the norm of one rank's shards alone" in report.condition) == told
            assert report.healthy and bool(report.condition) == told


def kept_beside_the_weights(width: int, each: bool) -> tuple[list[list[float]], list[list[float]], bool]:
    """Four backwards with sums in 32 bits of gradients in 16, the last one synchronised, alike on all ranks.

    Returns after each backward the norms of the whole gradients, as the ledger has them and as FSDP keeps them: of the
    last one, what it scatters. And whether the gradients are those of a training that is not recorded.
    """

    def trained(recorded: bool) -> tuple[Any, list[list[float]], list[Any]]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, width, bias=False), nn.Linear(width, 2, bias=False))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model, model) if each else (model,):
            fully_shard(part, mp_policy=precision)
        wholes = [whole.unit for whole, _ in distributed.units(model)]
        kept = []
        recording = av.record(model) if recorded else None
        with recording or contextlib.nullcontext():
            for k, part in enumerate(torch.randn(16, 6).chunk(4)):
                model.set_requires_gradient_sync(k == 3)
                model(part).float().square().mean().backward()
                if k < 3:
                    kept.append([whole.unsharded_accumulated_grad.norm().item() for whole in wholes])
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        return recording, [*kept, [grad.norm().item() for grad in grads]], grads

    recording, kept, grads = trained(True)
    ledger = recording.ledger
    columns = [ledger.index(f"{n}.weight (unsharded)") for n in (0, 1)]
    assert {ledger.parameters[column].dtype for column in columns} == {"float32"}
    told = [ledger.grad[event.index, columns].tolist() for event in ledger.of("backward")]
    alone = trained(False)[2]
    return told, kept, all(torch.equal(a, b) for a, b in zip(grads, alone, strict=True))


def test_a_sum_that_fsdp_keeps_in_another_dtype_has_what_each_backward_brought() -> None:
    def work() -> list[Any]:
        return [kept_beside_the_weights(width, each) for width in (4, 1 << 10) for each in (True, False)]

    for recorded, kept, same in itertools.chain(*av.distribute(work).returned):
        assert recorded == [pytest.approx(norms, rel=1e-5) for norms in kept]
        assert same


def zeroed_while_whole(apart: bool) -> tuple[list[str], list[list[int]], list[str], bool]:
    """Zero a model after the first of two backwards, while it has whole weights; `apart`: FSDP's sum is beside them.

    Returns the kinds of events, the windows' lengths, what `check` finds, and whether the first backward was lost.
    """

    def trained(zeroes: bool) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if apart else None)
        for part in (*model, model):
            fully_shard(part, mp_policy=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with av.record(model, optimizer) as recording:
            for _ in range(2):
                for k, part in enumerate(torch.randn(4, 6).chunk(2)):
                    model.set_requires_gradient_sync(k == 1)
                    model.set_reshard_after_backward(k == 1)
                    (model(part).float().square().mean() / 2).backward()
                    if k == 0 and zeroes:
                        model.zero_grad()
                grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        return recording, grads

    recording, grads = trained(True)
    same = all(torch.equal(a, b) for a, b in zip(grads, trained(False)[1], strict=True))
    kinds = [event.kind for event in recording.ledger if event.kind not in ("sync", "loader")]
    windows = [list(window.backwards) for window in recording.ledger.windows()]
    return kinds, windows, [finding.rule for finding in av.check(recording).findings], not same


def test_a_zeroing_of_whole_weights_is_an_event_also_where_it_reached_nothing() -> None:
    def work() -> list[Any]:
        return [zeroed_while_whole(apart) for apart in (True, False)]

    for ways in av.distribute(work).returned:
        for apart, (kinds, windows, found, lost) in zip((True, False), ways, strict=True):
            rule, length = ("fsdp2-zero-keeps-unsharded", 2) if apart else ("zero-grad-inside-window", 1)
            assert kinds == ["backward", "zero_grad", "backward", "step", "zero_grad"] * 2
            assert [len(window) for window in windows] == [length] * 2
            assert (found, lost) == ([rule], not apart)
