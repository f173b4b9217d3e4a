"""Claims 15, 16 and 29, and what chapter 6 says besides, against calculations made without accumviz."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import accumviz as av
from accumviz.ledger.ledger import Ledger

BLOCKS, WIDTH, BATCH = 6, 32, 256
SAMPLES = (4.0, 2.0)
MAX_NORM = 10.0


def block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))


def deep() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(block() for _ in range(BLOCKS)))


def samples() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def forward(model: torch.nn.Sequential, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
    for part in model:
        x = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
    return x


def step(model: torch.nn.Sequential, x: torch.Tensor, micro_batches: int = 1, checkpointed: bool = False) -> None:
    for part in x.chunk(micro_batches):
        (forward(model, part, checkpointed).square().mean() / micro_batches).backward()


class Alive(TorchDispatchMode):
    """Bytes of the storages made while it is open and not yet let go, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for new in _storages(out) - _storages((args, kwargs)):
            self.add(new.nbytes())
            weakref.finalize(new, self.add, -new.nbytes())
        return out

    def add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


def _storages(tree: Any) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def packed(model: torch.nn.Sequential, x: torch.Tensor, checkpointed: bool) -> dict[int, int]:
    """What autograd itself says it saves: the bytes of each distinct storage."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The result is returned to nobody: all that lives on is in `found`.
        forward(model, x, checkpointed).square().mean()
    return found


def test_claim_15_a_checkpoint_keeps_the_inputs_of_its_parts_and_no_parameter() -> None:
    model, x = deep(), samples()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inputs: list[torch.Tensor] = []
    for part in model:
        part.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    kept = packed(model, x, checkpointed=True)
    assert own.isdisjoint(kept)
    # The inputs of the parts, and what the loss after the last of them saves.
    assert {one.data_ptr() for one in inputs} < kept.keys() and len(kept) == BLOCKS + 1
    assert not own.isdisjoint(packed(model, x, checkpointed=False))


def test_claim_15_gradients_are_computed_for_all_layers_and_are_those_of_the_plain_pass() -> None:
    plain, model = deep(), deep()
    step(plain, samples())
    calls: list[torch.nn.Module] = []
    for part in model:
        part.register_forward_pre_hook(lambda part, _: calls.append(part))
    with av.record(model) as recording:
        step(model, samples(), checkpointed=True)
    assert [event.kind for event in recording.ledger] == ["backward"]
    assert np.isfinite(recording.ledger.contribution).all()
    assert calls == [*model, *reversed(model)], "each part once forward, and once on the way back"
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_claim_15_a_module_that_counts_its_calls_counts_a_checkpointed_one_twice() -> None:
    norm = torch.nn.BatchNorm1d(WIDTH)
    checkpoint(norm, samples(), use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked.item() == 2


def test_checkpoints_and_micro_batches_each_lower_the_peak_and_together_most() -> None:
    most, rest = {}, {}
    for way in ((1, False), (8, False), (1, True), (8, True)):
        model, x = deep(), samples()
        with Alive() as alive:
            step(model, x, *way)
        most[way], rest[way] = alive.most, alive.now
    gradients = sum(p.nbytes for p in deep().parameters())
    assert set(rest.values()) == {gradients}, "whatever the way, the gradients stay"
    assert max(most[8, False], most[1, True]) < most[1, False] / 2
    assert gradients < most[8, True] < min(most[8, False], most[1, True])


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_the_ledgers_saved_bytes_are_those_that_autograd_packs(micro_batches: int) -> None:
    model, x = deep(), samples()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # As in a data loader, a micro-batch is a tensor of its own, not a view of a larger one.
    parts = [part.clone() for part in x.chunk(micro_batches)]
    told = packed(model, parts[0], checkpointed=False)
    expected = sum(count for place, count in told.items() if place not in own)
    with av.record(model, memory=True) as recording:
        for part in parts:
            forward(model, part, False).square().mean().backward()
    assert [event.saved_before for event in recording.ledger] == [expected] * micro_batches
    assert [event.saved_after for event in recording.ledger] == [0] * micro_batches


def scaled_window(order: str, scale: float, *, clip: bool = True) -> tuple[torch.Tensor, Ledger]:
    w = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with av.record(w, optimizer) as recording:
        for done, x in enumerate(SAMPLES, start=1):
            loss = (2 * x - w * x).square() / len(SAMPLES)
            scaler.scale(loss).backward()
            if order == "unscale after each" or (order == "unscale after the first" and done == 1):
                scaler.unscale_(optimizer)
        if order == "clip, unscale":
            clip_grad_norm_([w], MAX_NORM)
        if "unscale after" not in order:
            scaler.unscale_(optimizer)
        if order != "clip, unscale" and clip:
            clip_grad_norm_([w], MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return w, recording.ledger


def hand(scale: float = 1.0) -> list[float]:
    """The contributions of the two samples at w = 1: d/dw of (2x - wx)^2 / 2, times the scale."""
    return [-2 * x * (2 * x - x) / len(SAMPLES) * scale for x in SAMPLES]


@pytest.mark.parametrize("scale", [1.0, 4.0, 1024.0, 65536.0])
def test_claim_16_and_29_unscaled_once_at_the_end_a_window_is_that_without_a_scaler(scale: float) -> None:
    w, ledger = scaled_window("unscale, clip", scale)
    first, second = hand(scale)
    assert [event.kind for event in ledger] == ["backward", "backward", "unscale", "clip", "step"]
    values = ledger.values("w").ravel()
    assert values[:3].tolist() == [first, first + second, sum(hand())]
    assert values[3:].tolist() == pytest.approx([-MAX_NORM] * 2)
    assert w.item() == pytest.approx(1 + 0.01 * MAX_NORM)
    assert [event.details["amp_scale"] for event in ledger.events[:3]] == [scale] * 3
    clipped = MAX_NORM / abs(sum(hand()))
    shares = [row.share for row in ledger.shares()]
    assert shares == pytest.approx([clipped / 2] * 2, rel=1e-4), "the scaler's factor is no part of a share"


@pytest.mark.parametrize("scale", [4.0, 1024.0])
def test_clipped_before_it_is_unscaled_a_gradient_shrinks_with_the_scale(scale: float) -> None:
    w, _ = scaled_window("clip, unscale", scale)
    assert w.item() == pytest.approx(1 + 0.01 * MAX_NORM / scale)


@pytest.mark.parametrize("scale", [4.0, 1024.0])
def test_a_backward_after_unscale_adds_a_scaled_contribution_to_an_unscaled_sum(scale: float) -> None:
    w, ledger = scaled_window("unscale after the first", scale, clip=False)
    wrong = hand()[0] + hand(scale)[1]
    assert ledger.values("w").ravel()[2:].tolist() == [wrong, wrong]
    assert w.item() == pytest.approx(1 - 0.01 * wrong) and w.item() != pytest.approx(1 - 0.01 * sum(hand()))


def test_a_second_unscale_in_one_window_raises() -> None:
    with pytest.raises(RuntimeError, match="already been called"):
        scaled_window("unscale after each", 4.0)


def test_claim_29_a_scaled_accumulated_model_takes_the_step_of_the_unscaled_one() -> None:
    def train(enabled: bool) -> list[torch.Tensor]:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for part in samples().chunk(4):
            scaler.scale(forward(model, part, False).square().mean() / 4).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        return list(model.parameters())

    for one, other in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("zeroed", [True, False])
def test_one_infinite_contribution_skips_its_window_and_all_later_ones_unless_it_is_zeroed(zeroed: bool) -> None:
    w = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with av.record(w, optimizer) as recording:
        for factor in (float("inf"), 1.0):
            for x, times in zip(SAMPLES, (factor, 1.0), strict=True):
                scaler.scale((2 * x - w * x).square() / len(SAMPLES) * times).backward()
            before = w.item()
            scaler.step(optimizer)
            scaler.update()
            if zeroed:
                optimizer.zero_grad()
    steps = recording.ledger.of("step")
    assert [event.skipped for event in steps] == [True, not zeroed]
    assert before == 1.0 and (w.item() != 1.0) is zeroed
    assert scaler.get_scale() == (4.0 if zeroed else 2.0)
    contributions = recording.ledger.values("w", of="contribution").ravel()
    backwards = [event.index for event in recording.ledger.of("backward")]
    assert contributions[backwards[:2]].tolist() == [-np.inf, hand(8.0)[1]]
    assert len(recording.ledger.windows()) == zeroed


def test_a_sum_in_bfloat16_stops_growing_where_its_next_number_is_too_far_away() -> None:
    w = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    total = torch.zeros(1)
    with av.record(w) as recording:
        for _ in range(300):
            w.sum().backward()
    for _ in range(300):
        total += torch.ones(1, dtype=torch.bfloat16)
    ledger = recording.ledger
    # 8 significant bits: beyond 2**8 the numbers are 2 apart, and a tie goes to the even one.
    assert ledger.values("w")[-1].item() == 2**8
    assert ledger.running_sum("w")[-1].item() == total.item() == 300


def test_a_grad_of_another_type_adds_exactly_and_adamw_refuses_it() -> None:
    w = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    w.grad_dtype = torch.float32
    for _ in range(300):
        w.sum().backward()
    assert w.grad is not None and w.grad.tolist() == [300.0] * 4
    with pytest.raises(RuntimeError, match="dtype"):
        torch.optim.AdamW([w]).step()


def test_only_accumulation_has_gradients_alive_during_a_forward() -> None:
    def during_forward(micro_batches: int) -> int:
        model, seen = deep(), [0]

        def look(*_: Any) -> None:
            seen.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

        model[0].register_forward_pre_hook(look)
        step(model, samples(), micro_batches)
        return max(seen)

    assert during_forward(1) == 0
    assert during_forward(8) == sum(p.nbytes for p in deep().parameters())


def test_without_update_the_next_step_of_a_scaler_raises() -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], lr=0.01), torch.amp.GradScaler("cpu")
    scaler.scale(w.sum() * float("inf")).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"since the last update\(\)"):
        scaler.step(optimizer)


def test_the_scaler_that_an_article_names_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler"):
        torch.cuda.amp.GradScaler(enabled=False)


def products(checkpointed: bool, early_stop: bool = True) -> int:
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early_stop):
        # Data that need a gradient, so that every layer's backward is two products.
        step(deep(), samples().requires_grad_(), checkpointed=checkpointed)
    return counter.get_total_flops()


def test_a_checkpoint_costs_a_third_of_the_step_and_half_of_that_where_it_stops_early() -> None:
    plain = products(checkpointed=False)
    assert products(checkpointed=True, early_stop=False) * 3 == plain * 4
    assert products(checkpointed=True) * 6 == plain * 7


@pytest.mark.parametrize(("preserve", "each"), [(True, 1), (False, 0)])
def test_each_checkpoint_keeps_a_state_of_the_random_numbers_unless_told_not_to(preserve: bool, each: int) -> None:
    size = torch.get_rng_state().numel()

    def states() -> int:
        held = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.uint8]
        return sum(one.numel() == size for one in held)

    x, before = samples(), states()
    kept = [checkpoint(part, x, use_reentrant=False, preserve_rng_state=preserve) for part in deep()]
    assert states() - before == each * BLOCKS == each * len(kept)


def test_a_scale_that_changes_within_a_window_gives_its_contributions_other_weights() -> None:
    w = torch.tensor([1.0], requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    for x in SAMPLES:
        scaler.scale((2 * x - w * x).square().sum() / len(SAMPLES)).backward()
        scaler.update(8.0)
    scaler.unscale_(optimizer)
    assert w.grad is not None and w.grad.item() == (4 * hand()[0] + 8 * hand()[1]) / 8 != sum(hand())


def test_an_update_between_two_backwards_is_refused_until_an_unscale_hides_it() -> None:
    w = torch.tensor([1.0], requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(w.sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.update()
    assert w.grad is not None and w.grad.item() == 1 / 4  # divided twice by 4, where once was due


@pytest.mark.filterwarnings("ignore:Detected call of")  # where the first window is skipped, PyTorch sees it, too
@pytest.mark.parametrize(("guarded", "first_rate"), [(False, 0.0125), (True, 0.1)])
def test_a_scheduler_goes_on_through_skipped_windows_unless_the_scale_is_asked(
    guarded: bool, first_rate: float
) -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    moved = []
    for slope in [float("inf")] * 3 + [1.0]:
        before, scale = w.item(), scaler.get_scale()
        scaler.scale((slope * w).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(before - w.item())
        if not guarded or scaler.get_scale() >= scale:
            schedule.step()
    assert moved == pytest.approx([0, 0, 0, first_rate])


def test_steps_inside_the_backward_free_each_gradient_and_accumulate_nothing() -> None:
    model = deep()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def at_once(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(at_once)
    few = samples()[:4]
    with Alive() as alive:
        step(model, few)
    assert alive.most < sum(p.nbytes for p in model.parameters()) / 2
    with av.record(model, *optimizers.values()) as recording:
        step(model, few, micro_batches=2)
    windows = recording.ledger.windows()
    assert len(windows) == 2 * len(optimizers) and all(len(window.backwards) == 1 for window in windows)
    assert [row.share for row in recording.ledger.shares()] == [0.5] * len(windows)


def test_a_compiled_loop_compiles_again_when_the_size_or_the_divisor_first_changes() -> None:
    made = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    model = deep()
    torch._dynamo.reset()

    @torch.compile(backend=counting)
    def part_of(x: torch.Tensor, divisor: int) -> torch.Tensor:
        return model(x).square().mean() / divisor

    counts = []
    for size, divisor in ((8, 4), (8, 4), (4, 4), (8, 3), (8, 2), (5, 2)):
        part_of(torch.randn(size, WIDTH), divisor).backward()
        counts.append(len(made))
    torch._dynamo.reset()
    assert counts == [1, 1, 2, 3, 3, 3]
