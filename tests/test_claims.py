"""The claims of the articles that the book reproduces, computed here from recordings and by hand."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint_sequential

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


# --- the claims that the audit's own chapter decides -----------------------------------------------------------------


def test_claim_30_31_and_35_what_is_tracked_has_an_edge_to_what_is_and_gives_it_a_gradient() -> None:
    a, b, unused = weight(), torch.ones(1), weight()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert (a * b).grad_fn is None
    assert (b * b).grad_fn is None and (a > b).grad_fn is None and a.argmax().grad_fn is None
    product = a * b
    assert product.grad_fn is not None
    assert [edge[0] is None for edge in product.grad_fn.next_functions] == [False, True]
    (product * unused.detach()).backward()
    assert [p.grad is None for p in (a, b, unused)] == [False, True, True]


def test_claim_32_the_data_stays_as_long_as_the_loss_and_no_longer() -> None:
    import gc
    import weakref

    def forward(tracked: bool) -> tuple[torch.Tensor, weakref.ref[torch.Tensor]]:
        w, x = weight().requires_grad_(tracked), torch.ones(3)
        return (w * x).square().mean(), weakref.ref(x)

    gc.disable()
    try:
        loss, held = forward(tracked=True)
        assert held() is not None and loss.grad_fn is not None
        loss.backward()
        assert held() is None
        loss, held = forward(tracked=True)
        del loss
        assert held() is None
        _, held = forward(tracked=False)
        assert held() is None
    finally:
        gc.enable()


def test_claim_33_the_first_gradient_is_stored_and_not_added_to_zero() -> None:
    def sign_of_the_sum(grad: torch.Tensor | None) -> bool:
        w = weight()
        w.grad = grad
        w.backward(torch.tensor([-0.0]))
        assert w.grad is not None and w.grad.item() == 0
        return bool(w.grad.signbit())

    assert sign_of_the_sum(None) and not sign_of_the_sum(torch.zeros(1))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)])
def test_claim_34_zero_grad_leaves_none_and_a_step_passes_over_it_but_not_over_zero(optimizer: Any) -> None:
    moved = []
    for none in (True, False):
        w = weight()
        square_error(w, 1.0).backward()
        made = optimizer([w])
        made.zero_grad(set_to_none=none)
        assert (w.grad is None) is none
        made.step()
        moved.append(w.item() != 1.0)
    assert moved == [False, True]


def test_claim_36_a_second_backward_can_make_a_gradient_smaller() -> None:
    w = weight()
    with av.record(w) as recording:
        for target in (1.125, 0.875):
            (w - target).square().sum().backward()
    assert recording.ledger.values("w").ravel().tolist() == [2 * (1 - 1.125), 0.0]


def _one_device(divide: float, lr: float, size: int, K: int, decay: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient that the only step of the article's loop reads, and the weights after it."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 10), torch.randn(64, 1)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    for part, target in zip(x.split(size), y.split(size), strict=True):
        (torch.nn.functional.mse_loss(model(part), target) / divide).backward()
    assert model.weight.grad is not None
    grad = model.weight.grad.clone()
    optimizer.step()
    return grad, model.weight.detach()


def test_claim_37_without_the_division_plain_sgd_needs_a_rate_that_is_divided_instead() -> None:
    divided, weights = _one_device(4, 0.01, 16, 4)
    undivided, far = _one_device(1, 0.01, 16, 4)
    torch.testing.assert_close(undivided, 4 * divided)
    torch.testing.assert_close(_one_device(1, 0.0025, 16, 4)[1], weights)
    assert not torch.allclose(far, weights, rtol=1e-3)
    decayed = [_one_device(divide, lr, 16, 4, decay=0.1)[1] for divide, lr in ((4, 0.01), (1, 0.0025))]
    assert not torch.allclose(*decayed, rtol=1e-4)


def test_claim_38_with_the_division_the_loop_for_one_device_reads_the_full_batchs_gradient() -> None:
    torch.testing.assert_close(_one_device(4, 0.01, 16, 4)[0], _one_device(1, 0.01, 64, 1)[0])


@pytest.mark.parametrize(("batches", "sums"), [(4, [1.0, 1.0, 1.0]), (5, [1.0, 1.25, 1.25]), (6, [1.0, 1.5, 1.5])])
def test_claim_39_a_tail_joins_the_next_window_where_rounds_are_counted_anew_in_each_epoch(
    batches: int, sums: list[float]
) -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        for _ in range(3):
            for i in range(batches):
                (square_error(w, 1.0) / 4).backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    shares = recording.ledger.shares()
    found = [sum(row.share for row in shares.of(window.step)) for window in recording.ledger.windows()]
    assert found == sums


def _kept(depth: int, samples: int, lower: bool = False) -> int:
    """The bytes that autograd saves of one forward pass, counted without a recording."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    own = {p.data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # or another tensor could get its address
        if tensor.data_ptr() not in own:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(samples, 64)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=lower):
        model(x).float().square().mean()
    return sum(seen.values())


def test_claim_40_a_quarter_of_the_samples_saves_a_quarter_of_the_bytes() -> None:
    assert _kept(16, 16) == _kept(16, 64) / 4


def _checkpointed(depth: int, parts: int) -> tuple[float, list[torch.Tensor | None]]:
    """The bytes that are saved before a backward through so many checkpoints (0: none), and the gradients."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(depth)]
    model, x = torch.nn.Sequential(*layers), torch.randn(64, 64)
    with av.record(model, memory=True) as recording:
        out = checkpoint_sequential(model, parts, x, use_reentrant=False) if parts else model(x)
        out.square().mean().backward()
    return recording.ledger[0].saved_before, [p.grad for p in model.parameters()]


def test_claim_41_and_42_checkpoints_save_more_in_deep_models_and_change_no_gradient() -> None:
    left = []
    for depth, parts in ((64, 8), (16, 4), (2, 2)):
        (saved, grads), (plain, expected) = _checkpointed(depth, parts), _checkpointed(depth, 0)
        left.append(saved / plain)
        assert all(one is not None and torch.equal(one, other) for one, other in zip(grads, expected, strict=True))
    assert left[0] < left[1] < 0.6 < left[2]


def test_claim_43_gradients_arrive_scaled_up_and_are_applied_scaled_down() -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale((2 * w).sum()).backward()
    assert w.grad is not None and w.grad.item() == 128.0
    scaler.step(optimizer)
    assert (w.grad.item(), w.item()) == (2.0, 1.0 - 0.5 * 2.0)


def test_claim_44_and_45_and_46_ten_to_a_step_lead_by_little_at_constant_rates_and_not_at_falling_ones() -> None:
    """All seeds at once, and the gradient of a linear model by hand."""
    data = []
    for seed in range(64):
        torch.manual_seed(seed)
        x, true = torch.randn(1040, 8), torch.randn(8, 1)
        data.append((x, x @ true + torch.randn(1040, 1)))
    x, y = (torch.stack(part) for part in zip(*data, strict=True))

    def ends(K: int, lr: float, micro_batches: int, falls: bool) -> tuple[float, float]:
        w, grad = torch.zeros(64, 8, 1), torch.zeros(64, 8, 1)
        for i in range(micro_batches):
            part = slice(4 * i % 40, 4 * i % 40 + 4)
            grad += x[:, part].mT @ (x[:, part] @ w - y[:, part]) * 2 / 4 / K
            if (i + 1) % K == 0:
                left = 1 - (i + 1 - K) / micro_batches if falls else 1
                w, grad = w - lr * left * grad, torch.zeros_like(grad)
        error = (x @ w - y).square()
        return float(error[:, :40].mean().nan_to_num(9, 9)), float(error[:, 40:].mean().nan_to_num(9, 9))

    def best(K: int, micro_batches: int, falls: bool = False) -> tuple[float, float]:
        return min(ends(K, lr, micro_batches, falls) for lr in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4))

    assert best(10, 20)[0] > 1.05 * best(1, 20)[0]  # 44: behind at first,
    assert 0.95 * best(1, 100)[0] < best(10, 100)[0] < best(1, 100)[0]  # a little ahead at constant rates,
    assert best(1, 100, falls=True)[0] < best(10, 100, falls=True)[0]  # and a little behind at falling ones
    assert best(10, 100)[1] == pytest.approx(best(1, 100)[1], rel=0.05)  # 45, 46: and no better on new samples.


def test_claim_47_no_other_framework_is_here_to_be_asked() -> None:
    assert find_spec("tensorflow") is None, "it is: let the cell of claim 47 ask it"


def test_claim_48_sixteen_bits_save_less_than_half_of_the_bytes_as_weights_are_kept_in_both() -> None:
    assert 0.5 < _kept(16, 512, lower=True) / _kept(16, 512) < 0.7
    assert _kept(16, 64, lower=True) / _kept(16, 64) > 0.9
