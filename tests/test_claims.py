"""A claim of the articles that the book reproduces and that no chapter asserts beside its verdict."""

import pytest
import torch

import accumviz as av


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
