"""Shares of real loops, against the least-squares solution over the gradients of single samples.

With more parameters than samples, (gradients of single samples) · a = (the gradient that a step reads) has one
solution: what each sample weighs, whatever happened on the way. Shares per element have to be that.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import Ledger
from tests.thorough import examples

SAMPLES, FEATURES, CLASSES = 10, 20, 3


class Bench:
    """A model that no step moves, so that every step's gradient is measured at the same weights."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.read: list[torch.Tensor] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.read.append(self.gradient()))
        self.single = []
        for i in range(SAMPLES):
            self.model.zero_grad()
            self.loss(i, i + 1).backward()
            self.single.append(self.gradient())
        self.model.zero_grad()

    def loss(self, start: int, stop: int, reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(self.model(self.x[start:stop]), self.y[start:stop], reduction=reduction)

    def gradient(self) -> torch.Tensor:
        there = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return torch.cat([g.flatten() for g in there]).double()

    def weights(self, step: int) -> np.ndarray:
        """What each sample weighs in the gradient that the how manyth step read."""
        return torch.linalg.lstsq(torch.stack(self.single, 1), self.read[step][:, None]).solution.flatten().numpy()


def played(bench: Bench, loop: list[tuple[Any, ...]]) -> tuple[Ledger, list[tuple[int, int]]]:
    """Record a loop over micro-batches and its last step; return the ledger, and the samples of each backward."""
    with av.record(bench.model, bench.optimizer) as recording:
        for start, stop, reduction, factor, then in loop:
            (bench.loss(start, stop, reduction) * factor).backward()
            if then == "clip":
                nn.utils.clip_grad_norm_(bench.model.parameters(), 0.2)
            elif isinstance(then, float):
                for p in bench.model.parameters():
                    assert p.grad is not None
                    p.grad *= then
            elif then == "zero":
                bench.optimizer.zero_grad()
            elif then in {"step", "step and zero"}:
                bench.optimizer.step()
                if "zero" in then:
                    bench.optimizer.zero_grad()
        bench.optimizer.step()
    return recording.ledger, [(start, stop) for start, stop, *_ in loop]


def expected(ledger: Ledger, step: int, pieces: list[tuple[int, int]]) -> np.ndarray:
    """What shares say of each sample in this step."""
    found = np.zeros(SAMPLES)
    piece = dict(zip((event.index for event in ledger.of("backward")), pieces, strict=True))
    for row in ledger.shares().of(step):
        assert not row.unknown, row
        found[slice(*piece[row.backward])] += row.per_element
    return found


def assert_shares_are_weights(bench: Bench, ledger: Ledger, pieces: list[tuple[int, int]], off: float = 0) -> None:
    for i, step in enumerate(ledger.of("step")):
        weights = bench.weights(i)
        most = max(1e-6, float(np.abs(weights).max()))
        found = expected(ledger, step.index, pieces)
        np.testing.assert_allclose(found, weights, rtol=1e-3 + off, atol=off * most or 1e-5)


_LOOPS = st.lists(
    st.tuples(
        st.integers(0, SAMPLES - 1),
        st.integers(1, 4),
        st.sampled_from(["mean", "sum"]),
        st.sampled_from([1.0, 0.25, 1 / 3, 2.0, torch.tensor(0.5) / torch.tensor(2.0)]),
        st.sampled_from(["", "", "", "clip", "zero", 0.7, "step", "step and zero"]),
    ).map(lambda one: (one[0], min(one[0] + one[1], SAMPLES), *one[2:])),
    min_size=1,
    max_size=8,
)


@given(loop=_LOOPS, seed=st.integers(0, 20))
@settings(max_examples=examples(40), deadline=None)
def test_shares_of_random_loops_are_what_the_samples_weigh(loop: list[tuple[Any, ...]], seed: int) -> None:
    bench = Bench(seed)
    assert_shares_are_weights(bench, *played(bench, loop), off=1e-3)


def in_two_groups() -> list[tuple[list[str], list[float]]]:
    """Two micro-batches on each of four ranks, sharded in groups of two, for each way to put the averages off."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for switch in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        bench = Bench()
        model: Any = fully_shard(bench.model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "shards")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with av.record(model, optimizer) as recording:
            for k in range(2):
                getattr(model, switch)(k == 1)
                part = slice(2 * dist.get_rank() + k, 2 * dist.get_rank() + k + 1)
                (F.cross_entropy(model(bench.x[part]), bench.y[part]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = recording.ledger.shares()
        found.append(([row.unknown for row in rows], [row.share for row in rows]))
    return found


def test_shares_of_shards_in_groups_of_ranks_are_unknown() -> None:
    for found in av.distribute(in_two_groups, ranks=4).returned:
        for reasons, shares in found:
            assert all("whether to a sum or a mean" in reason for reason in reasons)
            assert np.isnan(shares).all()
            assert len(shares) == 2
