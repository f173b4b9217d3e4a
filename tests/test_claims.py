"""Claims of the articles that the book reproduces, computed here from recordings and by hand."""

import pytest
import torch

import accumviz as av


def weight() -> torch.Tensor:
    return torch.tensor([1.0], requires_grad=True)


def square_error(w: torch.Tensor, *samples: float) -> torch.Tensor:
    x = torch.tensor(samples)
    return ((2 * x - w * x) ** 2).mean()


def hand_gradient(*samples: float, w: float = 1.0) -> float:
    """d/dw of the mean of (2x - wx)^2, without autograd."""
    return sum(-2 * x * (2 * x - w * x) for x in samples) / len(samples)


def test_claim_2_the_full_batch_gives_minus_20_through_four_operations() -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        loss = square_error(w, 4.0, 2.0)
        chain = av.trace(loss).chain()
        loss.backward()
        optimizer.step()
    assert chain == ["MeanBackward0", "PowBackward0", "SubBackward0", "MulBackward0", "AccumulateGrad"]
    assert recording.ledger.values("w").ravel().tolist() == [-20.0, -20.0]
    assert hand_gradient(4.0, 2.0) == -20.0
    assert w.item() == pytest.approx(1.2)


@pytest.mark.parametrize("divisor", [2, 1])
def test_claim_4_accumulation_adds_up_to_one_step_that_is_twice_too_large_undivided(divisor: int) -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        for x in (4.0, 2.0):
            (square_error(w, x) / divisor).backward()
            assert w.item() == 1.0
        optimizer.step()
    ledger = recording.ledger
    first, both = hand_gradient(4.0) / divisor, 2 * hand_gradient(4.0, 2.0) / divisor
    assert ledger.values("w").ravel().tolist() == [first, both, both]
    assert ledger.running_sum("w").ravel().tolist() == [first, both, both]
    assert w.item() == pytest.approx(1 - 0.01 * both)
    assert ledger.windows()[0].backwards == (0, 1)
    assert [row.share for row in ledger.shares()] == [1 / divisor] * 2


def test_claim_9_every_intermediate_derivative_stands_on_the_graph() -> None:
    w = weight()
    x = torch.tensor([4.0])
    y_hat = w * x
    temp1 = 2 * x - y_hat
    temp2 = temp1**2
    loss = temp2 / 2
    graph = av.trace(loss, values=True)
    by_hand = {
        "loss": 1.0,
        "temp2": 1 / 2,
        "temp1": 1 / 2 * 2 * 4,
        "y_hat": -(1 / 2 * 2 * 4),
        "w": -(1 / 2 * 2 * 4) * 4,
    }
    assert {node.name: node.grad[0] for node in graph} == by_hand
    values = {"loss": 8.0, "temp2": 16.0, "temp1": 4.0, "y_hat": 4.0, "w": 1.0}
    assert {node.name: node.value[0] for node in graph} == values
    with av.record(w) as recording:
        loss.backward()
    assert recording.ledger.values("w").item() == by_hand["w"]


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_claim_16_and_29_unscaled_once_at_the_end_a_window_is_that_without_a_scaler(scale: float) -> None:
    w = weight()
    optimizer, scaler = torch.optim.SGD([w], lr=0.01), torch.amp.GradScaler("cpu", init_scale=scale)
    with av.record(w, optimizer) as recording:
        for x in (4.0, 2.0):
            scaler.scale(square_error(w, x) / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 10.0)
        scaler.step(optimizer)
    ledger = recording.ledger
    first, both = hand_gradient(4.0) / 2, hand_gradient(4.0, 2.0)
    assert [event.kind for event in ledger] == ["backward", "backward", "unscale", "clip", "step"]
    values = ledger.values("w").ravel()
    assert values[:3].tolist() == [first * scale, both * scale, both]
    assert values[3:].tolist() == pytest.approx([-10.0] * 2)
    assert w.item() == pytest.approx(1 + 0.01 * 10)
    assert [event.details["amp_scale"] for event in ledger.events[:3]] == [scale] * 3
    shares = [row.share for row in ledger.shares()]
    assert shares == pytest.approx([10 / abs(both) / 2] * 2, rel=1e-4), "the scaler's factor is no part of a share"


def test_claim_19_the_printed_loop_names_what_is_not_there_and_steps_on_an_empty_window() -> None:
    model = torch.nn.Linear(2, 1)
    start = model.weight.clone()
    assert not hasattr(torch.nn, "losses")
    with pytest.raises(TypeError, match="parameters"):
        torch.optim.Adam(parameters=model.parameters())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unsupported operand type"):
        [p.grad / 5 for p in model.parameters()]  # type: ignore[operator]
    optimizer = torch.optim.Adam(model.parameters())
    with av.record(model, optimizer) as recording:
        model(torch.randn(8, 2)).square().mean() / 5
        optimizer.step()
    assert [window.backwards for window in recording.ledger.windows()] == [()]
    assert torch.equal(model.weight, start)
