"""`record(..., graphs=True)`: the graph of each backward, the engine's order, and training left as it was."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import accumviz as av
from accumviz.instruments import graphs


def toy() -> tuple[torch.Tensor, av.Ledger, dict[int, av.Graph]]:
    w = torch.tensor([1.0], requires_grad=True)
    with av.record(w, graphs=True) as recording:
        for x in (4.0, 2.0):
            y_hat = w * torch.tensor([x])
            loss = (torch.tensor([2 * x]) - y_hat).pow(2).mean() / 2
            loss.backward()
        w.grad = None
    return w, recording.ledger, recording.graphs


def test_each_backward_keeps_its_graph_with_the_callers_names_values_and_gradients() -> None:
    _, ledger, kept = toy()
    assert list(kept) == [event.index for event in ledger.of("backward")]
    assert [node.name for node in kept[0]] == ["loss", "", "", "", "y_hat", "w"]
    assert [graph.nodes[-1].grad for graph in kept.values()] == [[-16.0], [-4.0]]
    assert kept[0].alive


def test_the_order_is_the_one_that_the_engine_took() -> None:
    a = torch.ones(2, requires_grad=True)
    ran: list[str] = []
    with av.record({"a": a}, graphs=True) as recording:
        loss = (a.exp() + a.sin() * a).sum()
        todo, seen = [loss.grad_fn], {loss.grad_fn}
        for node in todo:
            node.register_hook(lambda *_, ran_node=node: ran.append(ran_node.name()))
            new = [fn for fn, _ in node.next_functions if fn is not None and fn not in seen]
            seen.update(new)
            todo += new
        loss.backward()
    graph = recording.graphs[0]
    told = [graph.nodes[i].op for i in graph.meta["order"]]
    assert [name for name in told if name != "AccumulateGrad"] == [n for n in ran if "AccumulateGrad" not in n]
    assert sorted(graph.meta["order"]) == list(range(len(graph)))


def test_operations_know_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with av.record(model, graphs=True) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert {node.module for node in recording.graphs[0] if "Relu" in node.op} == {"1"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_training_is_bitwise_the_same_and_no_hook_stays_on_the_nodes() -> None:
    def train(keep: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with av.record(model, optimizer, graphs=keep):
            for _ in range(3):
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters()), torch.rand(3)

    (plain, random), (watched, same) = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)) and torch.equal(random, same)


def test_a_graph_over_the_limit_is_left_out_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "GRAPH_NODES", 4)
    _, ledger, kept = toy()
    assert kept == {} and ledger.meta["graphs_left_out"] == 2
    assert ledger.values("w", of="contribution").ravel().tolist()[:2] == [-16.0, -4.0]


def test_without_graphs_nothing_is_kept_and_a_failing_backward_keeps_what_was_there() -> None:
    w = torch.ones(1, requires_grad=True)
    with av.record(w) as recording:
        (w * 2).sum().backward()
    assert recording.graphs == {}
    with av.record(w, graphs=True) as recording:
        loss = w.exp().sum()
        loss.backward()
        with contextlib.suppress(RuntimeError):
            loss.backward()
    assert list(recording.graphs) == [0, 1]
    assert recording.graphs[0].alive and not recording.graphs[1].alive


def test_a_recording_with_graphs_plays() -> None:
    _, ledger, kept = toy()
    assert "AccumulateGrad" in av.play(ledger, kept).to_html()
