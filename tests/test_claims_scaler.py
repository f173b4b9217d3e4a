"""Claims 16 and 29, and what chapter 6 says of infinite gradients, against calculations by hand."""

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import accumviz as av
from accumviz.ledger.ledger import Ledger

SAMPLES = (4.0, 2.0)
MAX_NORM = 10.0


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
