"""`record(..., graphs=True)`: the graph of each backward, the engine's order, and training left as it was."""

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import accumviz as av
from accumviz.recorder.transfer import readable
from tests.recorder.loops import Doubled


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
    told = [graph.nodes[i].op for i in graph.order]
    assert [name for name in told if name != "AccumulateGrad"] == [n for n in ran if "AccumulateGrad" not in n]
    assert sorted(graph.order) == list(range(len(graph)))


def test_operations_know_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with av.record(model, graphs=True) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert {node.module for node in recording.graphs[0] if "Relu" in node.op} == {"1"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_graph_of_more_than_2000_nodes_is_left_out() -> None:
    w = torch.ones(1, requires_grad=True)
    with av.record(w, graphs=True) as recording:
        y = w
        for _ in range(2001):
            y = y + 1
        y.backward()
        (w * 2).backward()
    assert [*recording.graphs] == [1]
    assert recording.ledger.values("w", of="contribution").ravel().tolist() == [1.0, 2.0]


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


class Products(TorchDispatchMode):
    """Sees every operation of the block it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_sees_the_operations_of_the_backward_and_none_of_ours() -> None:
    def ran(keep: bool) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
        loss = model(torch.ones(2, 6)).sum()
        with av.record(model, exact=0, graphs=keep, memory=False), Products() as mode:
            loss.backward()
        return mode.seen

    assert sum("mm" in name for name in ran(True)) == 9
    assert ran(True) == ran(False)


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.ones(3), True),
        (lambda: torch.ones(4)[1::2], True),
        (lambda: torch.eye(3).to_sparse(), True),
        (lambda: torch.eye(3).to_sparse_csc(), False),
        (lambda: torch.ones(3).as_subclass(Tagged), False),
        (lambda: torch.ones(3, device="meta"), False),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), False),
        (lambda: torch._efficientzerotensor((3,)), False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_known_of_which_tensors_the_numbers_can_be_read(make: Callable[[], Any], expected: bool) -> None:
    assert readable(make()) is expected


@pytest.mark.filterwarnings("ignore")
def test_a_module_is_copied_pickled_and_scripted_as_without_us() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    with av.record(model, graphs=True):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert pickle.dumps(nn.Linear(1, 1))
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.jit.script(nn.Sequential(nn.Linear(4, 2)))(torch.ones(1, 4)).shape == (1, 2)
        by_example = torch.jit.trace(model, torch.ones(1, 4))
        exported = torch.export.export(model, (torch.ones(1, 4),))
        assert torch.equal(by_example(torch.ones(1, 4)), exported.module()(torch.ones(1, 4)))
        assert [*inspect.signature(model).parameters] == ["args", "kwargs"]
        traced = torch.fx.symbolic_trace(model[:2])
        assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
        model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_any_keyword_reaches_the_module_and_what_it_raises_reaches_the_caller() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, module: int = 0, door: int = 0) -> torch.Tensor:
            if module > 1:
                raise KeyError("mine")
            return x * module + door

    odd, w = Odd(), torch.ones(1, requires_grad=True)
    with av.record({"w": w}, nn.ModuleDict({"odd": odd, "linear": nn.Linear(1, 1)}), graphs=True) as recording:
        with pytest.raises(KeyError, match="mine"):
            odd(w, module=2)
        after = w * 5
        (odd(after, module=1, door=2)).sum().backward()
    assert [(n.op, n.module) for n in recording.graphs[0]] == [
        ("SumBackward0", ""),
        ("AddBackward0", "odd"),
        ("MulBackward0", "odd"),
        ("MulBackward0", ""),
        ("AccumulateGrad", ""),
    ]


def test_what_went_through_custom_functions_checkpoints_and_hooks_is_known() -> None:
    w = torch.tensor([3.0], requires_grad=True)
    with av.record(w, graphs=True) as recording:
        Doubled.apply(w * 2).sum().backward()  # type: ignore[no-untyped-call]
        checkpoint(lambda x: (x * 2).exp(), w * 0, use_reentrant=False).sum().backward()
        y = w * 2
        y.register_hook(lambda grad: grad * 10)
        (y * 3).backward(gradient=torch.tensor([0.5]))
    first, second, third = recording.graphs.values()
    assert [(n.op, n.grad) for n in first] == [
        ("SumBackward0", 1.0),
        ("DoubledBackward", [1.0]),
        ("MulBackward0", [2.0]),
        ("AccumulateGrad", [4.0]),
    ]
    assert [n.grad for n in second] == [1.0, [1.0], [1.0], [2.0], [0.0]]
    # what flowed: from the gradient that was given, through the hook
    assert [n.grad for n in third] == [[0.5], [15.0], [30.0]]


def test_a_backward_that_goes_to_some_inputs_leaves_the_others_unknown() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with av.record({"a": a, "b": b}, graphs=True) as recording:
        (a * 2 + b * 3).sum().backward(inputs=[a])
    graph = recording.graphs[0]
    assert {n.name: n.grad for n in graph if n.op == "AccumulateGrad"} == {"a": [2.0], "b": None}
    assert [graph.nodes[i].name for i in graph.order].count("b") == 0


def test_the_gradient_of_a_leaf_that_a_backward_inside_this_one_reaches_is_unknown() -> None:
    w = torch.ones(1, requires_grad=True)
    with av.record({"w": w}, graphs=True) as recording:
        y = w * 2
        loss = (y * 3).sum()
        inner = (y * 100).sum()
        handle = y.register_hook(lambda grad: handle.remove() or inner.backward(retain_graph=True))
        loss.backward()
    graph = recording.graphs[0]
    assert w.grad is not None and w.grad.tolist() == [206.0]
    assert [n.grad for n in graph] == [1.0, [1.0], [3.0], None]
    assert len(graph.order) == len(graph)
