"""Claims 15, 16 and 29, and what chapter 6 says besides, against calculations made without accumviz."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

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


def test_the_ledgers_saved_bytes_are_those_that_autograd_packs() -> None:
    model, x, micro_batches = deep(), samples(), 4
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


def scaled_window(scale: float) -> tuple[torch.Tensor, Ledger]:
    w = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with av.record(w, optimizer) as recording:
        for x in SAMPLES:
            scaler.scale((2 * x - w * x).square() / len(SAMPLES)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_([w], MAX_NORM)
        scaler.step(optimizer)
    return w, recording.ledger


def hand(scale: float = 1.0) -> list[float]:
    """The contributions of the two samples at w = 1: d/dw of (2x - wx)^2 / 2, times the scale."""
    return [-2 * x * (2 * x - x) / len(SAMPLES) * scale for x in SAMPLES]


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_claim_16_and_29_unscaled_once_at_the_end_a_window_is_that_without_a_scaler(scale: float) -> None:
    w, ledger = scaled_window(scale)
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
