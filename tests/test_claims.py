"""Claims of the articles that the book reproduces, computed here from recordings and by hand."""

from __future__ import annotations

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


def test_claim_1_of_a_plus_b_only_a_is_in_the_graph() -> None:
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(4.0)
    c = a + b
    graph = av.trace(c, values=True)
    assert [(node.op, node.name, node.value) for node in graph] == [
        ("AddBackward0", "c", 6.0),
        ("AccumulateGrad", "a", 2.0),
    ]
    assert [(t.requires_grad, t.is_leaf) for t in (a, b, c)] == [(True, True), (False, True), (True, False)]


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


def test_claim_3_one_graph_of_two_samples_is_one_contribution_and_frees_nothing_in_between() -> None:
    w = weight()
    losses = [square_error(w, x) for x in (4.0, 2.0)]
    with av.record(w, memory=True) as recording:
        (sum(losses) / 2).backward()
    ledger = recording.ledger
    assert [loss.item() for loss in losses] == [16.0, 4.0]
    assert ledger.values("w", of="contribution").ravel().tolist() == [-20.0]
    with av.record(full := weight(), memory=True) as recording:
        square_error(full, 4.0, 2.0).backward()
    batch = recording.ledger
    # The same four floats for two samples; the loop adds the divisor of its mean.
    assert ledger[0].saved_before - batch[0].saved_before == 8
    assert ledger[0].saved_after == batch[0].saved_after == 0


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


@pytest.mark.parametrize("backwards", [1, 2])
def test_claim_5_the_first_zero_grad_changes_nothing_but_a_missing_later_one_does(backwards: int) -> None:
    def train(zero: bool) -> torch.Tensor:
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.01)
        for _ in range(backwards):
            if zero:
                optimizer.zero_grad()
            square_error(w, 4.0, 2.0).backward()
            optimizer.step()
        return w

    assert torch.equal(train(True), train(False)) is (backwards == 1)


def test_claim_6_backward_frees_the_graph_unless_told_to_retain_it() -> None:
    w = weight()
    loss = square_error(w, 4.0, 2.0)
    with av.record(w, memory=True) as recording:
        loss.backward(retain_graph=True)
        assert av.trace(loss).alive
        loss.backward()
        assert not av.trace(loss).alive
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    first, second, third = recording.ledger
    assert first.saved_before == first.saved_after > 0
    assert second.saved_before == first.saved_after and second.saved_after == 0
    assert "second time" in third.details["error"]
    assert recording.ledger.values("w").ravel().tolist() == [-20.0, -40.0, -40.0]


def test_claim_7_many_small_backwards_take_longer_than_one_large() -> None:
    from time import perf_counter

    model = torch.nn.Linear(64, 64)
    data = torch.randn(64, 64)

    def seconds(parts: int) -> float:
        start = perf_counter()
        for part in data.chunk(parts):
            (model(part).square().mean() / parts).backward()
        return perf_counter() - start

    # The least of several, in turns and on one thread: another process can only make a run longer.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [(seconds(1), seconds(64)) for _ in range(25)]
    finally:
        torch.set_num_threads(threads)
    one, many = map(min, zip(*turns, strict=True))
    assert many > 2 * one


def test_claim_8_the_recipe_leaves_the_last_partial_window_unconsumed() -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        for i in range(10):
            (square_error(w, 1.0 + i / 9) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    ledger = recording.ledger
    assert [len(window.backwards) for window in ledger.windows()] == [4, 4]
    assert ledger.live(-1, "w") == [12, 13]
    assert (ledger.outcomes.steps[[12, 13], 0] == 0).all()


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
