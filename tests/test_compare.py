"""Comparing two recordings: how far their gradients are apart, and where they part."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import Ledger, Parameter
from tests.toys import W, backward

SIZES = (3, 5, 2, 6)
Weigh = Callable[[torch.Tensor, int], torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))


def batches(sizes: tuple[int, ...] = SIZES, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 12, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes]


def mean_over_k(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.mean() / len(SIZES)


def each_alike(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.sum() / sum(SIZES)


def undivided(loss: torch.Tensor, n: int) -> torch.Tensor:
    return 4 * each_alike(loss, n)


def run(
    weigh: Weigh = each_alike,
    *,
    net: nn.Module | None = None,
    data: Any = None,
    windows: int = 1,
    exact: int = 10_000,
    lr: float = 0.1,
    before_step: Callable[[nn.Module], Any] = lambda net: None,
    between: Callable[[int, torch.optim.Optimizer], Any] = lambda at, optimizer: None,
) -> Ledger:
    net = model() if net is None else net
    data = batches() if data is None else data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with av.record(net, optimizer, exact=exact) as recording:
        for _ in range(windows):
            for at, (x, y) in enumerate(data):
                between(at, optimizer)
                loss = F.cross_entropy(net(x), y, reduction="none")
                weigh(loss, len(y)).backward()
            before_step(net)
            optimizer.step()
            optimizer.zero_grad()
    return recording.ledger


def gradient(weigh: Weigh) -> torch.Tensor:
    net = model()
    for x, y in batches():
        weigh(F.cross_entropy(net(x), y, reduction="none"), len(y)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def by_hand(*grads: float) -> Ledger:
    """A backward and a step for each of these gradients of one parameter."""
    rows = []
    for grad in grads:
        rows += [backward(grad, grad), {"kind": "step", "grad": {"w": grad}}, {"kind": "zero_grad"}]
    return Ledger.build([W], rows)


def test_the_error_equals_that_of_gradients_computed_without_a_recording() -> None:
    a, b = gradient(mean_over_k), gradient(each_alike)
    expected = float((a - b).norm() / b.norm())
    found = av.compare(run(mean_over_k), run(each_alike))
    assert found.relative == pytest.approx(expected, rel=1e-5)
    assert found.verdict == "apart" and found.first == 0
    assert sum(part.squared for part in found.step.parameters) == pytest.approx(float((a - b).square().sum()), rel=1e-4)


def test_equal_recordings_are_equal_and_one_large_batch_is_to_rounding() -> None:
    assert av.compare(run(), run()).verdict == "equal"
    whole = tuple(torch.cat(parts) for parts in zip(*batches(), strict=True))
    result = av.compare(run(), run(data=[whole]))
    assert result.verdict == "equal to rounding" and 0 < result.relative < 1e-6
    assert result.parting is None


def test_norms_give_a_lower_bound_and_say_what_would_make_it_exact() -> None:
    a, b = run(undivided, exact=0), run(exact=0)
    result = av.compare(a, b)
    assert math.isnan(result.relative) and result.verdict == "apart"
    assert result.step.at_least == pytest.approx(3.0, rel=1e-4)
    assert "at least 300 %" in result.summary and "exact=N" in result.notes[0]
    assert av.compare(run(exact=0), run(exact=0)).verdict == "not known"


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)])
def test_the_distance_of_what_is_not_a_number_is_not_known(a: float, b: float) -> None:
    result = av.compare(by_hand(a), by_hand(b))
    assert result.verdict == "not known" and math.isnan(result.relative)


def test_steps_are_paired_in_order_and_later_ones_are_noted() -> None:
    result = av.compare(by_hand(1.0, 2.0, 3.0), by_hand(1.0, 4.0, 3.0))
    assert [pair.relative for pair in result.steps] == [0.0, 0.5, 0.0]
    assert result.first == 1 and "the weights differ, too" in result.notes[0]
    fewer = av.compare(by_hand(1.0), by_hand(1.0, 2.0))
    assert fewer.verdict == "equal" and "1 in a, 2 in b" in fewer.notes[0]


def test_other_names_and_shapes_are_noted() -> None:
    def of(**shapes: int) -> Ledger:
        rows = [backward(1.0, 1.0), {"kind": "step", "grad": {"w": 1.0}}]
        return Ledger.build([Parameter(name, (size,), optimizers=(0,)) for name, size in shapes.items()], rows)

    result = av.compare(of(w=1, x=1, y=2), of(w=1, y=3, z=1))
    assert result.notes == ("only in a: x (1,), y (2,)", "only in b: y (3,), z (1,)")


def test_what_an_optimizer_does_not_own_counts_as_nothing() -> None:
    net = model()
    optimizer = torch.optim.SGD(list(net.parameters())[:2], lr=0.1)
    with av.record(net, optimizer, exact=10_000) as recording:
        for x, y in batches():
            each_alike(F.cross_entropy(net(x), y, reduction="none"), len(y)).backward()
        optimizer.step()
    off = {part.name: part.relative for part in av.compare(recording, run()).step.parameters}
    assert off["2.weight"] == off["2.bias"] == 1 and off["0.weight"] < 1e-4


def test_one_zero_more_is_named_as_backwards_that_the_window_lacks() -> None:
    def zero(at: int, optimizer: torch.optim.Optimizer) -> None:
        if at == 2:
            optimizer.zero_grad()

    result = av.compare(run(between=zero), run())
    assert result.parting is not None and "2 backwards in this window, b has 4" in result.parting.said


def test_the_first_backward_that_adds_something_else_is_where_they_part() -> None:
    data = batches()
    changed = [*data[:2], (data[2][0] + 1, data[2][1]), data[3]]
    result = av.compare(run(data=changed), run())
    assert result.parting is not None
    assert result.parting.said.startswith("backward 3 of the window: what a adds is off by")
    assert result.parting.a.source == "weigh(loss, len(y)).backward()"


def test_of_a_clip_that_only_one_has_the_steps_part() -> None:
    result = av.compare(run(before_step=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1)), run())
    assert result.parting is not None
    assert (result.parting.a.kind, result.parting.b.kind) == ("step", "step")
    assert "what the backwards add is the same" in result.parting.said


def test_text_page_and_json_say_the_same(tmp_path: Path) -> None:
    result = av.compare(run(undivided, windows=2), run(windows=2))
    text = str(result)
    assert text.startswith("Comparison: the gradient is off by 300 % at step 1 (2 steps compared)")
    assert "backward 1 of the window: what a adds is off by 300 %" in text
    result.save(tmp_path / "c.html")
    assert "off by 300 % at step 1" in (tmp_path / "c.html").read_text()
    data = json.loads(result.to_json())
    assert data["verdict"] == "apart" and data["first"] == 0 and len(data["steps"]) == 2
