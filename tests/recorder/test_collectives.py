"""What DDP and FSDP do to `.grad`, on real processes, against gradients computed in one."""

import contextlib
import itertools
import math
import pickle
import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accumviz as av
from accumviz.book.distribute import World
from accumviz.ledger.ledger import Ledger

# float32, a few additions in another order
TOLERANCE = 1e-5
RANKS, MICRO, SAMPLES = 2, 3, 24


class Crossed(nn.Module):
    """What is used first stands last, so that gradients come in another order than that of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(7, 3), nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).tanh())
        return found


def make(crossed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Crossed() if crossed else nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def data(ranks: int = 1, micro: int = 1, rank: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(SAMPLES, 5, generator=generator).chunk(ranks)[rank].chunk(micro))


def whole_batch_gradient() -> dict[str, torch.Tensor]:
    return local_gradients(0, 1, 1)[0]


def local_gradients(rank: int, ranks: int = RANKS, micro: int = MICRO) -> list[dict[str, torch.Tensor]]:
    """Of each micro-batch of one rank, what its backward alone gives, computed in one process."""
    found = []
    for part in data(ranks, micro, rank):
        model = make()
        (model(part).square().mean() / micro).backward()
        found.append(gradients(model))
    return found


def window(model: Any, optimizer: Any, *, every: bool = False, micro: int = MICRO) -> dict[str, np.ndarray]:
    """One accumulation window on this rank; returns the gradients that the step sees."""
    parts = data(dist.get_world_size(), micro, dist.get_rank())
    for k, part in enumerate(parts):
        quiet = not every and k < len(parts) - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(not quiet)
            quiet = False
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = model(part).square().mean() / micro
            loss.backward()
    seen = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return seen


def local(tensor: torch.Tensor) -> np.ndarray:
    # A copy: what it shares memory with lives in another process.
    plain: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return plain.detach().numpy().copy()


def replicate(crossed: bool = False, **options: Any) -> Any:
    return DistributedDataParallel(make(crossed), **options)


def shard(kind: str) -> Any:
    model = make()
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        return model
    warnings.simplefilter("ignore")  # FSDP1 is deprecated
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def run(kind: str = "DDP", options: dict[str, Any] | None = None, steps: int = 1, record: bool = True, **given: Any):
    """What a rank does: windows with or without a recording; returns gradients of the first, and the weights."""
    model = replicate(**(options or {})) if kind == "DDP" else shard(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with av.record(model, optimizer, exact=1000) if record else contextlib.nullcontext():
        seen = [window(model, optimizer, **given) for _ in range(steps)]
    return seen[0], {name: local(p) for name, p in model.named_parameters()}


def syncs(ledger: Ledger | None, op: str = "all-reduce") -> list[Any]:
    assert ledger is not None
    return [event for event in ledger.of("sync") if event.details["op"] == op]


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors))


@pytest.fixture(scope="module")
def quiet() -> World:
    return av.distribute(run, ranks=RANKS)


@pytest.fixture(scope="module")
def every() -> World:
    return av.distribute(run, ranks=RANKS, every=True)


@pytest.mark.parametrize("which", ["quiet", "every"])
def test_a_backward_adds_the_local_contribution_and_the_all_reduce_leaves_the_mean(
    which: str, request: pytest.FixtureRequest
) -> None:
    world = request.getfixturevalue(which)
    locals_ = [local_gradients(rank) for rank in range(RANKS)]
    for rank, ledger in enumerate(world.ledgers):
        backwards = [event.index for event in ledger.of("backward")]
        for name in whole_batch_gradient():
            contributions, grads = ledger.values(name, "contribution"), ledger.values(name)
            running = np.zeros(grads.shape[1])
            for k, index in enumerate(backwards):
                mine = locals_[rank][k][name].numpy().ravel()
                np.testing.assert_allclose(contributions[index], mine, rtol=TOLERANCE, atol=1e-7)
                running = running + mine
                np.testing.assert_allclose(grads[index], running, rtol=TOLERANCE, atol=1e-6)
                if k == MICRO - 1 or which == "every":
                    assert ledger[index + 1].kind == "sync"
                    running = mean_over_ranks(locals_, name, k)
                    np.testing.assert_allclose(grads[index + 1], running, rtol=TOLERANCE, atol=1e-6)


def mean_over_ranks(locals_: list[list[dict[str, torch.Tensor]]], name: str, k: int) -> np.ndarray:
    sums = [sum(part[name].numpy().ravel() for part in parts[: k + 1]) for parts in locals_]
    return np.asarray(np.mean(sums, axis=0))


def test_backward_and_all_reduce_say_which_forward_armed_them(quiet: World) -> None:
    ledger = quiet.ledgers[0]
    assert ledger is not None
    told = [(e.details["armed"], e.details["no_sync"]) for e in ledger.of("backward")]
    assert told == [(False, True)] * (MICRO - 1) + [(True, False)]
    (event,) = syncs(ledger)
    source = ledger.sources[event.file].splitlines()
    assert source[event.details["armed_line"] - 1].strip() == "loss = model(part).square().mean() / micro"


def test_claim_26_a_backward_inside_no_sync_reduces_all_the_same_if_its_forward_ran_outside() -> None:
    def work() -> None:
        model = replicate()
        with av.record(model):
            for part in data(RANKS, MICRO, dist.get_rank()):
                loss = model(part).square().mean() / MICRO
                with model.no_sync():
                    loss.backward()

    assert [len(syncs(ledger)) for ledger in av.distribute(work, ranks=RANKS).ledgers] == [MICRO] * RANKS


def test_the_merged_ledger_has_one_event_for_what_all_ranks_do_together(quiet: World) -> None:
    merged = quiet.ledger
    (event,) = merged.of("sync")
    assert event.rank is None
    for name in whole_batch_gradient():
        ours = [merged.values(f"rank {rank} · {name}")[event.index] for rank in range(RANKS)]
        np.testing.assert_array_equal(*ours)
    assert [len(w.backwards) for w in merged.windows()] == [MICRO] * RANKS
    assert [{merged[b].rank for b in w.backwards} for w in merged.windows()] == [{0}, {1}]
    shares = merged.shares()
    assert [row.share for row in shares] == pytest.approx([1 / MICRO / RANKS] * MICRO * RANKS)


def test_each_bucket_is_an_event_and_together_they_hold_every_parameter_once() -> None:
    # In megabytes: so small that each parameter is a bucket, from the second backward on.
    world = av.distribute(run, ranks=RANKS, options={"bucket_cap_mb": 1e-5, "crossed": True}, every=True)
    sizes = {name: p.numel() * 4 for name, p in make(crossed=True).named_parameters()}
    for ledger in world.ledgers:
        assert ledger is not None
        counts = []
        for backward in ledger.of("backward"):
            following = ledger.events[backward.index + 1 :]
            ours = list(itertools.takewhile(lambda event: event.kind == "sync", following))
            counts.append(len(ours))
            assert {event.line for event in ours} == {backward.line}
            assert sorted(name for e in ours for name in e.details["parameters"]) == sorted(sizes)
            for e in ours:
                assert e.details["bytes"] == sum(sizes[name] for name in e.details["parameters"])
        assert counts[-1] > 1


def test_a_mean_over_three_ranks_is_bitwise_that_without_a_recording() -> None:
    # A mean over two is the same however it is computed; other kinds are in the zoo of nasty loops.
    with_, without = (av.distribute(run, ranks=3, steps=3, record=record, micro=2) for record in (True, False))
    assert without.ledgers == (None,) * 3
    for recorded, plain in zip(with_.returned, without.returned, strict=True):
        for ours, theirs in zip(recorded, plain, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def by_hand(way: str, recorded: bool = True) -> tuple[list[torch.Tensor], Any]:
    """Two windows whose gradients are reduced by hand, or by a comm hook of DDP; returns the weights and the ledger."""
    model: Any = make()
    parameters, ranks = list(model.parameters()), dist.get_world_size()
    works: list[Any] = []
    if way == "in a hook":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    elif way == "a comm hook":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, averaged)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, optimizer, exact=3) if recorded else contextlib.nullcontext() as recording:
        for _ in range(2):
            for k, part in enumerate(data(ranks, MICRO, dist.get_rank())):
                model.require_backward_grad_sync = k == MICRO - 1
                (model(part).square().mean() / MICRO).backward()
            for parameter in parameters if "divided" in way else []:
                parameter.grad.data /= ranks
            if "at once" in way:
                works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in parameters]
            elif "one by one" in way:
                for parameter in parameters:
                    dist.all_reduce(parameter.grad.data)
            for work in works:
                work.wait()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters], recording.ledger if recorded else None


# DDP asks for a hook without annotations, or with its own.
def averaged(_, bucket):  # type: ignore[no-untyped-def]
    sent = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
    return sent.get_future().then(lambda future: future.value()[0])


# Of calls that wait for a sum over all ranks: by how much the loss was divided beside K, and the findings.
KNOWN = {"one by one": (1.0, ["summed-over-ranks"]), "divided, one by one": (1 / RANKS, [])}


def reduced_by_hand() -> dict[str, tuple[Any, ...]]:
    """Of each way, whether weights are those without a recording, shares, findings, and why nothing is known."""
    found = {}
    for way in (*KNOWN, "divided, at once", "in a hook", "a comm hook"):
        (weights, ledger), (alone, _) = by_hand(way), by_hand(way, recorded=False)
        report, same = av.check(ledger), all(map(torch.equal, weights, alone))
        found[way] = same, [row.share for row in ledger.shares()], list(report.findings), report.reason
    return found


def test_what_is_reduced_by_hand_has_a_share_where_the_call_waits_and_training_is_the_same() -> None:
    for ways in av.distribute(reduced_by_hand, ranks=RANKS).returned:
        for way, (factor, rules) in KNOWN.items():
            same, shares, findings, _ = ways.pop(way)
            assert same
            assert np.allclose(shares, factor / MICRO)
            assert [finding.rule for finding in findings] == rules
        for same, shares, findings, reason in ways.values():
            assert same
            assert np.isnan(shares).all()
            assert findings == []
            assert "hooks of your own" in reason or "whether to a sum or a mean" in reason


def in_a_group() -> Ledger:
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    model = DistributedDataParallel(make(), process_group=groups[dist.get_rank() // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, optimizer) as recording:
        window(model, optimizer)
    return recording.ledger


def test_an_average_over_a_group_of_the_ranks_is_one_of_so_many() -> None:
    for ledger in av.distribute(in_a_group, ranks=4).returned:
        assert {event.details["ranks"] for event in syncs(ledger)} == {2}
        assert sum(row.share for row in ledger.shares()) == pytest.approx(1 / 2)


def copied() -> tuple[bool, bool, list[Any]]:
    """A model that is saved while it is recorded, and a copy of it that is called in between, as an average's is."""
    model = replicate()
    alone = pickle.dumps(model)
    with av.record(model) as recording:
        copy = deepcopy(model)
        for synced in (True, False):
            model.require_backward_grad_sync = synced
            loss = model(data()[0]).square().mean()
            copy(data()[0])
            loss.backward()
        model.require_backward_grad_sync = True
        model.zero_grad()
        same = len(pickle.dumps(model)) == len(alone)
    return same, bool(copy._forward_pre_hooks), [event.details.get("armed") for event in recording.ledger]


def test_a_replica_is_copied_and_pickled_as_without_us_and_its_copy_arms_nothing() -> None:
    for same, hooked, armed in av.distribute(copied, ranks=RANKS).returned:
        assert (same, hooked) == (True, False)
        assert [each for each in armed if each is not None] == [True, False]


@pytest.fixture(scope="module", params=["FSDP2", "FSDP1"])
def sharded(request: pytest.FixtureRequest) -> tuple[str, World, World]:
    kind = request.param
    return kind, av.distribute(run, ranks=RANKS, kind=kind), av.distribute(run, ranks=RANKS, kind=kind, every=True)


def test_shards_are_gathered_always_and_scattered_after_a_synchronised_backward(sharded: Any) -> None:
    kind, quiet, every = sharded
    units = 2 if kind == "FSDP2" else 1
    for world, synchronised in ((quiet, 1), (every, MICRO)):
        assert [len(syncs(ledger, "reduce-scatter")) for ledger in world.ledgers] == [units * synchronised] * RANKS
    gathers = [len(syncs(ledger, "all-gather")) for ledger in (*quiet.ledgers, *every.ledgers)]
    if kind == "FSDP2":  # forward and backward of each layer; the last is not resharded between the two
        assert gathers[0] == gathers[-1] >= 2 * MICRO
    else:
        assert gathers == [MICRO] * (2 * RANKS)


def test_gathers_and_scatters_carry_the_bytes_of_the_whole(sharded: Any) -> None:
    kind, quiet, _ = sharded
    bytes_ = sum(p.numel() for p in make().parameters()) * 4
    for op in ("all-gather", "reduce-scatter"):
        events = syncs(quiet.ledgers[0], op)
        units = 2 if kind == "FSDP2" else 1
        carried = sum(event.details["bytes"] for event in events[:units])
        # Padded, so that all ranks have equal shares: of each parameter, or of the flat one, aligned to 16 bytes.
        most = 4 * 5 * 4 if kind == "FSDP2" else 16 * 4 + 8
        assert bytes_ <= carried <= bytes_ + most


def test_the_whole_gradient_takes_local_contributions_until_it_is_scattered(sharded: Any) -> None:
    _, quiet, _ = sharded
    for rank, ledger in enumerate(quiet.ledgers):
        wholes = [p for p, x in enumerate(ledger.parameters) if x.unsharded_of]
        parts = local_gradients(rank)
        for k, event in enumerate(ledger.of("backward")):
            sums = [sum(part[name].double() for part in parts[: k + 1]) for name in parts[0]]
            for column, expected in ((ledger.contribution, parts[k].values()), (ledger.grad, sums)):
                held = math.hypot(*(float(column[event.index, p]) for p in wholes))
                assert held == pytest.approx(norm(expected), rel=TOLERANCE)
        assert not any(ledger.live(-1, p) for p in wholes)


def test_the_shards_hold_the_mean_and_the_window_is_the_backwards(sharded: Any) -> None:
    _, quiet, every = sharded
    for world in (quiet, every):
        squares = 0.0
        for ledger in world.ledgers:
            (step,) = ledger.of("step")
            shards = [p for p, x in enumerate(ledger.parameters) if not x.unsharded_of]
            squares += float(np.nansum(ledger.grad[step.index, shards].astype(float) ** 2))
            (found,) = ledger.windows()
            assert found.backwards == tuple(event.index for event in ledger.of("backward"))
            assert [row.share for row in ledger.shares()] == pytest.approx([1 / MICRO / RANKS] * MICRO)
            assert not any(ledger.unconsumed(event.index) for event in ledger)
        assert math.sqrt(squares) == pytest.approx(norm(whole_batch_gradient().values()), rel=TOLERANCE)
        assert [len(w.backwards) for w in world.ledger.windows()] == [MICRO] * RANKS


def test_what_is_scattered_reaches_the_shard_of_its_own_parameter(sharded: Any) -> None:
    _, quiet, every = sharded
    for ledger in (*quiet.ledgers, *every.ledgers):
        (step,) = ledger.of("step")
        shards = [x.name for x in ledger.parameters if not x.unsharded_of and x.numel]
        assert shards
        for name in shards:
            held, added = ledger.values(name)[step.index], ledger.running_sum(name)[step.index]
            np.testing.assert_allclose(added, held, rtol=TOLERANCE, atol=1e-7)


def test_an_all_reduce_that_raises_is_no_event() -> None:
    w = torch.tensor([1.0], requires_grad=True)
    with av.record(w) as recording:
        w.square().sum().backward()
        with pytest.raises(TypeError):
            dist.all_reduce(w.grad, timeout=3)  # type: ignore[call-arg]
    assert [event.kind for event in recording.ledger] == ["backward"]
    assert recording.ledger.complete and "stopped" not in recording.ledger.meta
