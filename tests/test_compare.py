"""Comparing two recordings: how far their gradients are apart, where they part, and the cause, or what it is not."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accumviz as av
from accumviz.checks.comparison import Comparison
from accumviz.checks.distance import Side, between, total
from accumviz.ledger import file as ledgerfile
from accumviz.ledger.container import LedgerFileError
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.ledger.writer import Writer
from accumviz.recorder.sketches import Sums

SIZES = (3, 5, 2, 6)


def model(*extra: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), *extra, nn.Tanh(), nn.Linear(40, 5))


def batches(seed: int = 1, sizes: tuple[int, ...] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 12, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes]


Weigh = Callable[[torch.Tensor, int], torch.Tensor]


def mean_over_k(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.mean() / len(SIZES)


def each_alike(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.sum() / sum(SIZES)


def run(
    weigh: Weigh = each_alike,
    *,
    net: nn.Module | None = None,
    data: Any = None,
    windows: int = 1,
    sketch: int = 256,
    lr: float = 0.1,
    before_step: Callable[[nn.Module], Any] = lambda net: None,
    dtype: torch.dtype | None = None,
    path: Path | None = None,
) -> Ledger:
    """Windows over the same batches; dropout draws from a seed of its own each time."""
    net = model() if net is None else net
    data = batches() if data is None else data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with av.record(net, optimizer, sketch=sketch, path=path) as recording:
        for _ in range(windows):
            for x, y in data:
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    scores = net(x)
                loss = F.cross_entropy(scores.float(), y, reduction="none")
                weigh(loss, len(y)).backward()
            before_step(net)
            optimizer.step()
            optimizer.zero_grad()
    return recording.ledger


def large(**how: Any) -> Ledger:
    """The same samples as one batch."""
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return run(data=[(x, y)], **how)


def names(comparison: Comparison) -> list[str]:
    return [cause.name for cause in comparison.causes]


def gradients(weigh: Weigh) -> torch.Tensor:
    net = model()
    for x, y in batches():
        weigh(F.cross_entropy(net(x), y, reduction="none"), len(y)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


# --- the estimate ------------------------------------------------------------------------------


def heavy(seed: int, size: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    g = rng.normal(size=size)
    if kind == "few are large":
        g *= np.exp(2 * rng.normal(size=size))
    if kind == "one sign":
        g = np.abs(g) + 1
    if kind == "few rows":
        g.reshape(-1, 50)[rng.random(size // 50) > 0.01] = 0
    return g.astype(np.float32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["alike", "one sign", "few are large", "few rows"]),
    st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    st.sampled_from([20_000, 100_000]),
)
def test_the_estimate_is_within_its_error_of_the_truth(seed: int, kind: str, by: float, size: int) -> None:
    b = heavy(seed, size, kind)
    other = heavy(seed + 1, size, kind)
    a = b + np.float32(by * np.linalg.norm(b) / max(np.linalg.norm(other), 1e-9)) * other
    sums = Sums(256)
    sides = [Side(float(np.linalg.norm(g)), sums(torch.from_numpy(g)).double().numpy(), size) for g in (a, b)]
    found = total([between("w", *sides)])
    truth = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert abs(found.relative - truth) <= found.uncertainty + 1e-5
    assert found.uncertainty < truth * (0.5 if kind in ("alike", "one sign") else 3)


def test_a_sketch_is_linear_and_keeps_small_tensors_as_they_are() -> None:
    sums = Sums(64)
    x, y = torch.randn(2, 200_000).double()
    assert torch.allclose(sums(3 * x - y), 3 * sums(x) - sums(y))
    assert torch.equal(sums(x[:64]), x[:64])
    assert float(sums(x).norm() / x.norm()) == pytest.approx(1, abs=0.3)


def test_the_error_is_that_of_the_gradients_and_not_of_their_norms() -> None:
    truth = gradients(mean_over_k), gradients(each_alike)
    off = float((truth[0] - truth[1]).norm() / truth[1].norm())
    assert abs(float(truth[0].norm() / truth[1].norm()) - 1) < off / 2  # norms would say less
    found = av.compare(run(mean_over_k), run())
    assert found.relative == pytest.approx(off, abs=found.uncertainty + 1e-6)
    assert 0 < found.uncertainty < off / 2
    exact = av.compare(run(mean_over_k, sketch=1000), run(sketch=1000))
    assert exact.relative == pytest.approx(off, rel=1e-5)
    assert exact.uncertainty == 0


def test_small_tensors_are_compared_exactly_without_being_asked() -> None:
    def one(k: int) -> av.Ledger:
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        with av.record(w) as recording:
            for x in (3.0, 1.0):
                ((w * x).square().sum() / k).backward()
        return recording.ledger

    found = av.compare(one(1), one(2))
    assert (found.relative, found.uncertainty, names(found)) == (1.0, 0.0, ["×K"])


def test_equal_recordings_differ_by_nothing_at_all() -> None:
    found = av.compare(run(windows=3), run(windows=3))
    assert (found.verdict, found.relative, found.uncertainty, found.parting) == ("equal", 0.0, 0.0, None)
    assert [pair.relative for pair in found.steps] == [0.0] * 3


def test_one_large_batch_is_equal_to_rounding() -> None:
    found = av.compare(run(), large())
    assert found.verdict == "equal to rounding"
    assert found.relative < 1e-6


def test_without_sketches_the_norms_say_what_it_is_at_least() -> None:
    truth = gradients(mean_over_k), gradients(each_alike)
    off = float((truth[0] - truth[1]).norm() / truth[1].norm())
    found = av.compare(run(mean_over_k, sketch=0), run(sketch=0))
    assert math.isnan(found.relative)
    assert 0 < found.step.at_least < off
    assert names(found) == []
    assert "at least" in str(found)
    assert "sketch=N" in str(found)
    assert "accumviz run --sketch N" in str(found)
    same = av.compare(run(sketch=0), run(sketch=0))
    assert same.verdict == "not known"


def test_no_sketch_is_asked_for_that_both_have() -> None:
    def once(exact: int) -> Ledger:
        net = model()
        with av.record(net, sketch=256, exact=exact) as recording:
            net(torch.ones(3, 12)).sum().backward()
        return recording.ledger

    (note,) = av.compare(once(10_000), once(0)).notes
    assert "both were recorded with sketch=256" in note
    assert "record both" not in note


def test_a_gradient_that_is_not_finite_is_told_with_its_side() -> None:
    def spoil(net: nn.Module) -> None:
        net[0].weight.grad[0, 0] = math.nan

    spoilt, good = run(windows=2, before_step=spoil), run(windows=2)
    for pair, said in (
        ((spoilt, good), "a's gradient is not finite"),
        ((good, spoilt), "b's gradient is not finite"),
        ((spoilt, spoilt), "neither gradient is finite"),
    ):
        found = av.compare(*pair)
        assert (found.verdict, found.step.note, found.notes) == ("not known", said, ())
        assert math.isnan(found.relative)
        assert found.summary.startswith(f"not known: {said}")


def test_what_is_not_known_counts_for_more_than_equal_steps_before_it() -> None:
    def late(net: nn.Module, seen: list[int]) -> None:
        seen.append(1)
        if len(seen) == 2:
            net[0].weight.grad[0, 0] = math.inf

    found = av.compare(run(windows=2, before_step=functools.partial(late, seen=[])), run(windows=2))
    assert [pair.relative == 0 for pair in found.steps] == [True, False]
    assert found.verdict == "not known"
    assert math.isnan(found.relative)


def test_a_skipped_step_says_that_its_gradient_is_not_finite() -> None:
    def scaled(factor: float) -> Ledger:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with av.record(net, optimizer, sketch=256) as recording:
            scaler.scale(net(torch.ones(3, 12)).sum() * factor).backward()
            scaler.step(optimizer)
        return recording.ledger

    found = av.compare(scaled(math.inf), scaled(1.0))
    assert found.summary == "a's step was skipped; a's gradient is not finite at step 1 (1 step compared)"
    assert found.undecided == {"everything": "not looked at: a gradient is not finite"}
    assert "0.weight: not finite in a\n" in str(found)
    assert found.parting is not None
    assert found.parting.said == "backward 1 of the window: what a adds is not finite"
    assert found.notes == ()


def test_rounding_is_that_of_the_coarser_side_whichever_it_is() -> None:
    def one(dtype: torch.dtype) -> Ledger:
        net = model().to(dtype)
        return run(net=net, data=[(x.to(dtype), y) for x, y in batches()])

    rough, fine = one(torch.float32), one(torch.float64)
    assert av.compare(rough, fine).verdict == av.compare(fine, rough).verdict == "equal to rounding"


# --- causes ------------------------------------------------------------------------------------

EVEN = (4, 4, 4, 4)


def even(weigh: Weigh, **how: Any) -> Ledger:
    return run(weigh, data=batches(sizes=EVEN), **how)


def quarter(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.mean() / 4


def test_an_undivided_loss_is_a_factor() -> None:
    found = av.compare(even(lambda loss, n: loss.mean()), even(quarter))
    assert names(found) == ["×K"]
    assert found.causes[0].evidence["factor"] == pytest.approx(4, rel=1e-4)
    assert found.causes[0].evidence["sums of shares"] == pytest.approx([4, 1])
    assert found.relative == pytest.approx(3, rel=1e-4)
    assert found.parting is not None
    assert "backward 1 of the window: a adds 4 times" in found.parting.said


def test_a_mean_over_padding_is_a_factor_too() -> None:
    def padded(loss: torch.Tensor, n: int) -> torch.Tensor:
        return torch.cat([loss, 0 * loss]).mean() / 4

    found = av.compare(even(padded), even(quarter))
    assert names(found) == ["×K"], str(found)
    assert found.causes[0].evidence["sums of shares"] == pytest.approx([1, 1])


def test_a_loss_divided_twice_is_a_factor_also_against_one_large_batch() -> None:
    found = av.compare(run(lambda loss, n: each_alike(loss, n) / 4), large())
    assert names(found) == ["×K"]
    assert found.parting is not None
    assert "a has 4 backwards in this window, b has 1" in found.parting.said


def test_a_mean_of_unequal_means_weighs_elements_unequally() -> None:
    for other in (run(), large()):
        found = av.compare(run(mean_over_k), other)
        assert names(found) == ["element weights"], str(found)
        assert "×K" in found.ruled_out
        assert "data" not in found.undecided  # with equal weights nothing is left that data could explain


def test_a_zero_inside_the_window_is_a_matter_of_weights_too() -> None:
    def forgetful(loss: torch.Tensor, n: int) -> torch.Tensor:
        return quarter(loss, n)

    def wasteful() -> Ledger:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with av.record(net, optimizer, sketch=256) as recording:
            for x, y in batches(sizes=EVEN):
                optimizer.zero_grad()
                quarter(F.cross_entropy(net(x), y, reduction="none"), 4).backward()
            optimizer.step()
        return recording.ledger

    found = av.compare(wasteful(), even(forgetful))
    assert found.relative > 0.3
    assert names(found) == ["element weights"], str(found)


def epoch(*, by_length: bool) -> Ledger:
    """Windows of four over six batches: the last one has two."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = batches(sizes=(4,) * 6)
    with av.record(net, optimizer, sketch=256) as recording:
        for first in (0, 4):
            window = data[first : first + 4]
            for x, y in window:
                (F.cross_entropy(net(x), y) / (len(window) if by_length else 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording.ledger


def test_a_short_tail_divided_by_a_whole_window_is_a_tail() -> None:
    found = av.compare(epoch(by_length=False), epoch(by_length=True))
    assert (found.first, names(found)) == (1, ["tail"]), str(found)
    assert found.relative == pytest.approx(0.5, rel=1e-3)
    assert found.steps[0].relative == 0


def test_batchnorm_in_training_mode_sees_another_batch() -> None:
    def net() -> nn.Module:
        return model(nn.BatchNorm1d(40))

    found = av.compare(run(net=net()), large(net=net()))
    assert names(found) == ["BatchNorm"], str(found)
    still = [net().eval() for _ in range(2)]
    assert av.compare(run(net=still[0]), large(net=still[1])).verdict == "equal to rounding"


def dropping(seed: int, p: float = 0.3) -> Ledger:
    net = model(nn.Dropout(p))
    torch.manual_seed(seed)
    return run(net=net)


def test_dropout_draws_other_numbers() -> None:
    found = av.compare(dropping(1), dropping(2))
    assert names(found) == []  # inputs are not compared: other ones would look the same
    assert found.undecided["dropout"] == "it may be, and so may data"
    assert av.compare(dropping(1), dropping(1)).verdict == "equal"
    still = model(nn.Dropout(0.3)).eval()
    assert names(av.compare(dropping(1), run(net=still))) == ["dropout"]


def test_autocast_is_a_matter_of_precision() -> None:
    found = av.compare(run(dtype=torch.bfloat16), run())
    assert names(found) == ["precision"], str(found)
    assert 1e-4 < found.relative < 0.06


def test_rounding_is_not_blamed_for_what_it_cannot_do_to_a_parameter() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.kind, self.side = nn.Linear(12, 40), nn.Linear(40, 5), nn.Linear(40, 2)

    def run(x: torch.Tensor, y: torch.Tensor, k: int) -> Ledger:
        net = Heads()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with av.record(net, optimizer, sketch=256) as recording:
            for x_, y_ in zip(x.chunk(k), y.chunk(k), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    body = torch.tanh(net.body(x_))
                    kind, side = net.kind(body), net.side(body)
                aside = F.cross_entropy(side.float(), y_ % 2) / k  # and once more below
                ((F.cross_entropy(kind.float(), y_) + 0.05 * aside) / k).backward()
            optimizer.step()
        return recording.ledger

    x, y = torch.randn(16, 12, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 5
    found = av.compare(run(x, y, 4), run(x, y, 1))
    assert found.relative < 0.06  # as small as rounding, in the whole
    assert max(part.relative for part in found.step.parameters) == pytest.approx(0.75, abs=0.02)
    assert names(found) == []
    assert "side" in found.ruled_out["precision"]


def test_parameters_of_no_optimizer_are_named() -> None:
    def partly(part: str) -> Ledger:
        net = model()
        optimizer = torch.optim.SGD(net[2].parameters() if part else net.parameters(), lr=0.1)
        with av.record(net, optimizer, sketch=256) as recording:
            for x, y in batches(sizes=EVEN):
                quarter(F.cross_entropy(net(x), y, reduction="none"), 4).backward()
            optimizer.step()
        return recording.ledger

    found = av.compare(partly("head"), partly(""))
    assert names(found) == ["owner"], str(found)
    assert found.causes[0].evidence["parameters"] == ["0.weight", "0.bias"]


def test_a_clip_that_only_one_has_is_named() -> None:
    def clip(net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    found = av.compare(run(before_step=clip), run())
    assert names(found) == ["clip"], str(found)
    assert found.parting is not None
    assert "a has a clip where b has a step" in found.parting.said


# --- what must not be named --------------------------------------------------------------------


def single(*xs: float, start: float = 1.0, k: int = 2) -> Ledger:
    """A window of a model that is one number."""
    w = torch.tensor([start], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with av.record(w, optimizer, sketch=256) as recording:
        for x in xs:
            (((2 - w) * x).square().mean() / k).backward()
        optimizer.step()
    return recording.ledger


def test_any_two_numbers_have_a_ratio_which_proves_no_division() -> None:
    right = single(4.0, 2.0)
    found = av.compare(single(4.0, 3.0), right)
    assert names(found) == []
    assert found.undecided["×K"] == "one gradient is 1.25 times the other, but their sums of shares are 1 and 1"
    assert names(av.compare(single(4.0, 2.0, start=1.5), right)) == ["weights"]
    assert names(av.compare(single(4.0, 2.0, k=1), right)) == ["×K"]


def test_of_one_number_without_a_step_nobody_can_tell_a_division() -> None:
    def one(k: int) -> Ledger:
        w = torch.tensor([1.0], requires_grad=True)
        with av.record(w) as recording:
            (w.square().sum() / k).backward()
        return recording.ledger

    found = av.compare(one(1), one(2))
    assert names(found) == []
    assert found.undecided["×K"].endswith("times the other, as any one number is, and their shares are not known")


def test_a_linear_model_of_inputs_twice_as_large_is_not_divided() -> None:
    def one(times: float) -> Ledger:
        net = nn.Linear(12, 5, bias=False)
        nn.init.zeros_(net.weight)
        return run(quarter, net=net, data=[(times * x, y) for x, y in batches(sizes=EVEN)])

    found = av.compare(one(2), one(1))
    assert names(found) == []
    assert "one gradient is 2 times the other, but" in found.undecided["×K"]
    assert "inputs are not compared" in found.undecided["data"]


def test_other_inputs_with_the_same_targets_are_not_dropout() -> None:
    def one(times: float) -> Ledger:
        net = model(nn.Dropout(0.3))
        torch.manual_seed(5)
        return run(net=net, data=[(times * x, y) for x, y in batches()])

    found = av.compare(one(1.5), one(1))
    assert names(found) == []
    assert found.undecided["data"] == "it may be: the targets have the same sums, and inputs are not compared"
    assert "data" not in found.ruled_out


def test_batchnorm_is_not_cleared_where_the_samples_are_shuffled_among_batches_of_the_same_size() -> None:
    def one(order: torch.Tensor) -> Ledger:
        x, y = (torch.cat(parts)[order] for parts in zip(*batches(sizes=EVEN), strict=True))
        return run(net=model(nn.BatchNorm1d(40)), data=list(zip(x.split(4), y.split(4), strict=True)))

    found = av.compare(one(torch.randperm(16, generator=torch.Generator().manual_seed(5))), one(torch.arange(16)))
    assert names(found) == []
    assert found.undecided["BatchNorm"] == "it may be, and so may data"


def test_two_losses_of_one_batch_are_no_other_batches() -> None:
    def one(parts: int) -> Ledger:
        net = model(nn.BatchNorm1d(40))
        net[0].weight.register_hook(lambda g: g * parts)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with av.record(net, optimizer, sketch=256) as recording:
            for x, y in batches(sizes=EVEN):
                losses = F.cross_entropy(net(x), y) / 8, F.cross_entropy(net(x), y) / 8
                for loss in losses if parts == 2 else [sum(losses)]:
                    loss.backward()
            optimizer.step()
        return recording.ledger

    assert names(av.compare(one(2), one(1))) == []


def test_what_happens_after_the_backwards_is_neither_data_nor_a_layer() -> None:
    def noise(net: nn.Module) -> None:
        for p in net.parameters():
            p.grad += 0.01

    def net() -> nn.Module:
        made = model(nn.Dropout(0.3), nn.BatchNorm1d(40))
        torch.manual_seed(5)
        return made

    found = av.compare(run(net=net(), before_step=noise), run(net=net()))
    assert names(found) == []
    added = {name: found.ruled_out[name] for name in ("data", "BatchNorm", "dropout")}
    assert set(added.values()) == {"what the backwards added differs by less than a tenth of that"}


def test_a_backward_that_was_erased_is_no_part_of_the_window() -> None:
    def one(warm: bool, factor: float = 1.0) -> Ledger:
        net = model()
        net[2].bias.register_hook(lambda g: g * factor)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = batches()
        with av.record(net, optimizer, sketch=256) as recording:
            if warm:
                F.cross_entropy(net(data[0][0]), data[0][1]).backward()
                optimizer.zero_grad()
            for x, y in data:
                each_alike(F.cross_entropy(net(x), y, reduction="none"), len(y)).backward()
            optimizer.step()
        return recording.ledger

    found = av.compare(one(warm=True, factor=3.0), one(warm=False))
    assert names(found) == []
    assert "the same sums" in found.undecided["data"]
    assert found.parting is not None
    assert found.parting.said.startswith("backward 1 of the window: what a adds is off by")
    assert [event.index for event in found.parting[:2]] == [2, 0]


def test_unequal_weights_in_both_are_not_blamed_for_autocast() -> None:
    assert names(av.compare(run(mean_over_k, dtype=torch.bfloat16), run(mean_over_k))) == ["precision"]


def test_rounding_of_the_same_batches_in_the_same_precision_is_not_named() -> None:
    found = av.compare(run(dtype=torch.bfloat16, data=[(1.01 * x, y) for x, y in batches()]), run(dtype=torch.bfloat16))
    assert 1e-4 < found.relative < 0.06
    assert names(found) == []
    assert found.undecided["precision"] == "it may be, and so may data"


def test_other_data_are_not_dropout_though_there_is_dropout() -> None:
    def one(seed: int) -> Ledger:
        net = model(nn.Dropout(0.3))
        torch.manual_seed(5)
        return run(net=net, data=batches(seed))

    assert names(av.compare(one(1), one(2))) == ["data"]


def test_other_weights_are_neither_dropout_nor_batchnorm() -> None:
    def one(seed: int) -> Ledger:
        return run(net=model(nn.Dropout(0.3), nn.BatchNorm1d(40), seed=seed))

    assert names(av.compare(one(1), one(2))) == ["weights"]


def test_another_learning_rate_is_told_from_the_step_after() -> None:
    found = av.compare(run(windows=2, lr=0.5), run(windows=2, lr=0.1))
    assert (found.first, names(found)) == (1, ["weights"]), str(found)


def test_with_dropout_and_batchnorm_neither_is_named() -> None:
    def net(seed: int) -> nn.Module:
        made = model(nn.Dropout(0.3), nn.BatchNorm1d(40))
        torch.manual_seed(seed)
        return made

    found = av.compare(run(net=net(1)), large(net=net(2)))
    assert names(found) == []
    assert "so may dropout" in found.undecided["BatchNorm"]
    assert not set(found.ruled_out) & set(found.undecided)
    assert "cause: not named" in str(found)
    assert "perhaps a cause:\n" in str(found)
    assert "Perhaps a cause:" in found.to_html()
    assert [why for why in found.ruled_out.values() if "not known" in why or "may be" in why] == []


def test_an_undivided_loss_stays_a_factor_under_autocast_and_with_dropout_of_the_same_numbers() -> None:
    def one(weigh: Weigh, dtype: torch.dtype | None) -> Ledger:
        net = model(nn.Dropout(0.3))
        torch.manual_seed(5)
        return run(weigh, net=net, data=batches(sizes=EVEN), dtype=dtype)

    found = av.compare(one(lambda loss, n: loss.mean(), torch.bfloat16), one(quarter, None))
    assert names(found) == ["×K"], str(found)


def test_a_hook_on_a_gradient_is_not_named_and_what_it_is_not_is_said() -> None:
    net = model()
    net[0].weight.register_hook(lambda g: g * torch.linspace(0.5, 2, g.shape[1]))
    found = av.compare(run(net=net), run())
    assert names(found) == []
    assert {"×K", "element weights", "BatchNorm", "dropout", "precision"} <= set(found.ruled_out)
    assert "inputs are not compared" in found.undecided["data"]


def test_unequal_weights_are_not_named_where_they_do_not_explain_all_of_it() -> None:
    net = model()
    net[0].weight.register_hook(lambda g: g * torch.linspace(0.5, 2, g.shape[1]))
    found = av.compare(run(mean_over_k, net=net), run())
    assert names(found) == []
    assert "are left" in found.ruled_out["element weights"]


# --- where they part, and what is told ---------------------------------------------------------


def test_the_first_event_where_they_part_may_come_late() -> None:
    data = batches()
    other = [*data[:2], (data[2][0], (data[2][1] + 1) % 5), data[3]]
    found = av.compare(run(data=other), run(data=data))
    assert found.parting is not None
    assert found.parting.said.startswith("backward 3 of the window")
    assert (found.parting.a.index, found.parting.b.index) == (2, 2)
    assert names(found) == ["data"]


def test_missing_parameters_and_other_shapes_are_told() -> None:
    def one(width: int, *, more: bool) -> Ledger:
        ps = [Parameter("w", (1,), optimizers=(0,)), Parameter("v", (width,), optimizers=(0,))]
        ps += [Parameter("u", (1,), optimizers=(0,))] if more else []
        grads = {p.name: [1.0] * p.numel for p in ps}
        rows = [{"kind": "backward", "contribution": grads, "grad": grads}, {"kind": "step", "grad": grads}]
        return Ledger.build(ps, rows)

    found = av.compare(one(1, more=True), one(2, more=False))
    assert found.missing == ("u (a)", "v (shape (1,) in a, (2,) in b)")
    assert found.verdict == "equal"
    assert "only in one of them: u (a)" in str(found)


def test_it_prints_shows_itself_and_is_json(tmp_path: Path) -> None:
    found = av.compare(run(mean_over_k, windows=2), run(windows=2))
    page = found._repr_mimebundle_()["text/html"]
    assert "element weights" in page
    assert "<script" not in page
    assert str(found).startswith("Comparison: the gradient is off by")
    known = json.loads(found.to_json())
    assert known["verdict"] == "apart"
    assert known["causes"][0]["name"] == "element weights"
    for name in ("x.html", "x.json", "x.txt"):
        found.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100


# --- the recorder's part -----------------------------------------------------------------------


def test_a_file_has_the_sketches_to_the_bit(tmp_path: Path) -> None:
    ledger = run(windows=2, path=tmp_path / "x.ledger")
    ledger.save(tmp_path / "y.ledger")
    for name in ("x.ledger", "y.ledger"):
        again = av.load(tmp_path / name)
        assert again.sketches("0.weight").shape == (len(ledger), 256)
        assert np.array_equal(again.sketches("0.weight"), ledger.sketches("0.weight"), equal_nan=True)
    assert ledger.sketches("0.bias").size == 0  # its elements are there


@pytest.mark.parametrize(
    ("where", "elements", "said"),
    [
        ([[0], [0], [3]], [1.0, 2.0], "3 elements, and 2 are there"),
        ([[2], [0], [2]], [1.0, 2.0], "not in the order of their events"),
        ([[1, 0], [0, 0], [1, 1]], [1.0, 2.0], "not in the order of their events"),
        ([[0], [-1], [2]], [1.0, 2.0], "not in the order of their events"),
        ([[0], [9], [2]], [1.0, 2.0], "parameter 9 do not belong together"),
        ([[0, 1], [0, 0], [2, 1]], [1.0, 2.0, 3.0], "parameter 0 do not belong together"),
        ([[0, 0], [0, 0], [1, 1]], [1.0, 2.0], "parameter 0 do not belong together"),
        ([0, 0, 2], [1.0, 2.0], "sketches are of an array"),
    ],
)
def test_a_file_with_strange_sketches_is_refused_in_words(
    where: Any, elements: list[float], said: str, tmp_path: Path
) -> None:
    ledger = run(sketch=0)
    with Writer(tmp_path / "x.ledger", "ledger") as writer:
        writer.append(ledgerfile.header(ledger))
        head, arrays = ledgerfile.chunk(ledger)
        arrays |= {"sketched": np.array(where, "<i4"), "sketches": np.array(elements)}
        if np.array(where).ndim == 2 and where[0] == [2]:
            arrays["sketched"][0] = len(ledger)
        writer.append(head, arrays)
        writer.close()
    with pytest.raises(LedgerFileError, match=said):
        av.load(tmp_path / "x.ledger")


def test_training_with_sketches_is_bitwise_the_same() -> None:
    def final(*, sketch: int) -> list[torch.Tensor]:
        net = model(nn.Dropout(0.3), nn.BatchNorm1d(40))
        run(net=net, windows=3, sketch=sketch)
        return [*net.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(final(sketch=0), final(sketch=64), strict=True))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_no_operation_of_a_sketch() -> None:
    def counted(*, sketch: int) -> int:
        with Counting() as counting:
            run(sketch=sketch)
        return counting.calls

    assert counted(sketch=64) == counted(sketch=0)


def test_a_merged_ledger_keeps_the_sketches_of_each_rank() -> None:
    ranks = [run(windows=2), run(mean_over_k, windows=2)]
    for rank, ledger in enumerate(ranks):
        ledger.meta |= {"rank": rank, "ranks": 2}
    both = Ledger.merge(ranks)
    for rank, ledger in enumerate(ranks):
        own = both.sketches(f"rank {rank} · 0.weight")
        assert np.array_equal(own[~np.isnan(own[:, 0])], ledger.sketched[0][1])
    assert av.compare(both, both).verdict == "equal"


def test_under_ddp_each_rank_is_compared_with_itself() -> None:
    def train(weigh: Weigh) -> Ledger:
        ddp = nn.parallel.DistributedDataParallel(model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with av.record(ddp, optimizer, sketch=64) as recording:
            for i, (x, y) in enumerate(batches(seed=torch.distributed.get_rank(), sizes=EVEN)):
                ddp.require_backward_grad_sync = i == 3
                weigh(F.cross_entropy(ddp(x), y, reduction="none"), len(y)).backward()
            optimizer.step()
        return recording.ledger

    undivided, right = (av.distribute(functools.partial(train, weigh), ranks=2) for weigh in (_undivided, quarter))
    found = av.compare(undivided, right)
    assert len(found.steps) == 2
    assert found.relative == pytest.approx(3, rel=1e-3)
    assert names(found) == ["×K"], str(found)


def _undivided(loss: torch.Tensor, n: int) -> torch.Tensor:
    return loss.mean()


def test_of_sharded_parameters_each_rank_compares_its_shards() -> None:
    def train(weigh: Weigh) -> Ledger:
        from torch.distributed.fsdp import fully_shard

        net = model()
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with av.record(net, optimizer, sketch=64) as recording:
            for x, y in batches(seed=torch.distributed.get_rank(), sizes=EVEN):
                weigh(F.cross_entropy(net(x), y, reduction="none"), len(y)).backward()
            optimizer.step()
        return recording.ledger

    undivided, right = (av.distribute(functools.partial(train, weigh), ranks=2) for weigh in (_undivided, quarter))
    found = av.compare(undivided, right)
    assert found.relative == pytest.approx(3, rel=1e-3)
    assert names(found) == ["×K"], str(found)


# --- the chapter's loop ------------------------------------------------------------------------
