"""The traced graph against torchviz's reading of the same graph, and training that must not notice."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumviz as av
from accumviz.graph.trace import trace
from tests.thorough import examples

# torchviz uses distutils, networkx announces a changed hash: neither is what is tested here
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import networkx
    import torchviz


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))


def lstm() -> torch.Tensor:
    out, (h, c) = nn.LSTM(3, 4, num_layers=2)(torch.randn(5, 2, 3))
    return out.sum() + h.sum() * c.sum()


def transformer() -> torch.Tensor:
    return nn.TransformerEncoderLayer(8, 2, 16)(torch.randn(3, 2, 8)).mean()


def gan() -> tuple[torch.Tensor, torch.Tensor]:
    gen, disc = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    fake = gen(torch.randn(3, 2))
    return disc(fake).mean(), disc(fake.detach()).mean() - disc(torch.randn(3, 4)).mean()


def checkpointed(reentrant: bool) -> torch.Tensor:
    model, x = mlp(), torch.randn(2, 4, requires_grad=True)
    return checkpoint(model, x * 2, use_reentrant=reentrant).sum()


def views() -> torch.Tensor:
    w = torch.randn(4, 4, requires_grad=True)
    y = w * 2
    y[0] = 3.0
    y[1:].mul_(2)
    a, b = y.t().unbind(0)[:2]
    return (a * b).sum() + y.view(-1)[3]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors
        return grad * 2


def custom() -> torch.Tensor:
    out: torch.Tensor = Double.apply(torch.ones(3, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    return out


ZOO: dict[str, Callable[[], Any]] = {
    "lstm": lstm,
    "transformer": transformer,
    "gan": gan,
    "checkpoint reentrant": lambda: checkpointed(True),
    "checkpoint non-reentrant": lambda: checkpointed(False),
    "views": views,
    "custom": custom,
}


def reference(roots: Any) -> networkx.DiGraph:
    """Read torchviz's DOT, without the boxes it draws for tensors."""
    source = torchviz.make_dot(roots).source
    labels = dict(re.findall(r'^\t(\d+) \[label="?([A-Za-z]\w*)"?\]$', source, re.MULTILINE))
    graph = networkx.DiGraph()
    for key, label in labels.items():
        graph.add_node(key, op=label)
    for below, above in re.findall(r"^\t(\d+) -> (\d+)$", source, re.MULTILINE):
        if below in labels and above in labels:
            graph.add_edge(above, below)
    return graph


def same(roots: Any) -> None:
    expected = reference(roots)
    traced = trace(*roots) if isinstance(roots, tuple) else trace(roots)
    found = networkx.DiGraph()
    for node in traced:
        found.add_node(node.id, op=node.op)
    found.add_edges_from((e.source, e.target) for e in traced.edges)
    assert len(found) == len(expected) and found.number_of_edges() == expected.number_of_edges()
    hashes = [networkx.weisfeiler_lehman_graph_hash(g, node_attr="op", iterations=8) for g in (found, expected)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", ZOO)
def test_nodes_and_edges_equal_those_torchviz_draws(name: str) -> None:
    same(ZOO[name]())


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25))
def test_a_random_program_is_traced_as_torchviz_reads_it(program: list[tuple[int, int, int]]) -> None:
    pool = [torch.tensor([0.5, 1.0], requires_grad=True), torch.tensor([2.0, 0.1], requires_grad=True)]
    for kind, i, j in program:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        pool.append([a + b, a * b, a - 2.0, a.exp(), a.detach() + b, a.flip(0)][kind])
    same(pool[-1].sum() + pool[-2].sum())


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_values_and_gradients_on_the_nodes_equal_autograd_or_are_unknown(program: list[tuple[int, int, int]]) -> None:
    pool = [torch.tensor([0.5, -0.3], requires_grad=True), torch.tensor([[0.2], [0.1]], requires_grad=True)]
    for kind, i, j in program:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        pool.append([a + b, a * b, a.sin(), a - b, torch.sigmoid(a) ** 2, a.sum(), a / (2 + b * b)][kind])
    loss = sum(t.mean() for t in pool)
    assert isinstance(loss, torch.Tensor)
    by_node = {t.grad_fn: t for t in pool if t.grad_fn is not None}
    inside = dict(zip(walk(loss.grad_fn), trace(loss, values=True), strict=True))
    wanted = [t for fn, t in by_node.items() if fn in inside]
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    for tensor, gradient in zip(wanted, expected, strict=True):
        node = inside[tensor.grad_fn]
        torch.testing.assert_close(
            torch.tensor(node.grad, dtype=torch.float64), gradient.double(), rtol=1e-4, atol=1e-5
        )
        if node.value is not None:
            assert torch.equal(torch.tensor(node.value, dtype=torch.float64), tensor.detach().double())


def walk(root: Any) -> list[Any]:
    order = [root]
    seen = {root}
    for fn in order:
        for following, _ in fn.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                order.append(following)
    return order


def test_values_are_known_from_the_loss_alone_where_the_graph_holds_them() -> None:
    w = torch.tensor([3.0, 1.0], requires_grad=True)
    loss = ((w * 2 - 1) ** 2).sum()
    assert [n.value for n in trace(loss, values=True)] == [26.0, [25.0, 1.0], [5.0, 1.0], None, [3.0, 1.0]]


def test_two_models_lead_their_paths_with_their_own_names() -> None:
    gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)
    g_loss = disc(gen(torch.ones(1, 2))).sum()
    names = {n.name for n in trace(g_loss) if n.op == "AccumulateGrad"}
    assert names == {"gen.weight", "gen.bias", "disc.weight", "disc.bias"}


def test_a_large_graph_has_modules_around_those_that_ran_its_operations() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(5, 8), nn.Sequential(*layers), nn.Linear(8, 5))

    def loss() -> torch.Tensor:
        return model(torch.arange(10).view(5, 2) % 5).logsumexp(-1).mean()

    traced = trace(loss())
    with av.record(model, graphs=True) as recording:
        loss().backward()
    ran = recording.graphs[0]
    assert [node.op for node in traced] == [node.op for node in ran]
    used = {edge.source for edge in traced.edges if traced.nodes[edge.target].kind == "accumulate"}
    for node, its in zip(traced, ran, strict=True):
        # Attention runs the product of its `out_proj` itself.
        assert its.is_in(node.module) or not node.module or (node.is_in(its.module) and node.id in used)
    assert {"0", "1.0", "1.1", "2"} <= {node.module for node in traced.collapse_modules(2) if node.kind == "fold"}
    few = trace(model[2](torch.randn(2, 8)))
    assert {node.module for node in few if node.kind == "operation"} == {""}


def test_a_deep_graph_is_refused_and_can_still_be_freed() -> None:
    w = torch.ones(1, requires_grad=True)
    a = w
    for number in range(60_000):
        a = a + 1
        if number == 9_000:
            assert len(trace(a)) == 9_002
    with pytest.raises(ValueError, match="more than 10,000 operations"):
        trace(a)
    with av.record(w, memory=True) as recording:
        a.backward(retain_graph=True)
    assert math.isnan(recording.ledger.of("backward")[0].saved_before)
    del a  # a graph this deep ends the process here if Python has seen all of its nodes


def test_a_freed_graph_is_read_and_says_so() -> None:
    w = torch.ones(2, requires_grad=True)
    loss = (w**2).sum()
    loss.backward(retain_graph=True)
    assert trace(loss).alive and not trace(loss).notes
    loss.backward()
    graph = trace(loss, values=True)
    assert [n.alive for n in graph] == [True, False, True]
    assert not graph.alive and "freed" in graph.notes[0]
    assert graph.saved_bytes == 0


def test_a_checkpoint_is_not_recomputed_by_looking() -> None:
    runs = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (x * 2).exp()

    x = torch.ones(2, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=False).sum()
    graph = trace(loss, values=True)
    assert len(runs) == 1
    assert all(n.grad is None for n in graph)
    assert "gradients are left out: ExpBackward0" in graph.notes[0]
    loss.backward()
    assert x.grad is not None


def test_a_custom_function_is_not_run_and_gradients_are_unknown() -> None:
    graph = trace(custom(), values=True)
    assert graph.nodes[1].op == "DoubleBackward" and all(n.grad is None for n in graph)
    assert "gradients are left out: DoubleBackward" in graph.notes[0]
    assert graph.nodes[1].saved_bytes == 0  # it saved a leaf


def test_a_value_changed_in_place_since_is_unknown() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def build() -> torch.Tensor:
        y = w * 2
        z = y.pow(3)
        y.data.mul_(5)  # silent: autograd cannot see it either
        with torch.no_grad():
            y.add_(1)
        return z.sum()

    graph = trace(build(), values=True)
    assert [n.value for n in graph if n.op == "MulBackward0"] == [None]


def test_training_is_bitwise_the_same_with_and_without_tracing() -> None:
    def train(looking: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        fired = []
        for p in model.parameters():
            p.register_hook(lambda g: fired.append(1))
        for _ in range(4):
            loss = model(torch.randn(6, 4)).square().mean()
            versions = [p._version for p in model.parameters()]
            if looking:
                assert trace(loss, values=True).nodes[-1].grad is not None
            assert not fired
            assert versions == [p._version for p in model.parameters()]
            loss.backward()
            fired.clear()
            optimizer.step()
        return [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_a_trace_keeps_no_tensor_alive() -> None:
    import weakref

    y = torch.ones(1000, requires_grad=True).exp()
    gone = weakref.ref(y)
    graph = trace(y.sum())
    del y
    assert gone() is None
    assert graph.saved_bytes == 4000


@pytest.mark.parametrize("make", [lambda w: w.detach() * 2, lambda w: torch.ones(1).long()])
def test_a_tensor_without_a_graph_is_refused_by_its_name(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    cut = make(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match=r"cut has no grad_fn: it was computed under torch.no_grad\(\)"):
        trace(cut)


def test_odd_gradients_do_not_break_the_trace() -> None:
    z = torch.randn(2, dtype=torch.complex64, requires_grad=True)
    assert trace((z * z.conj()).real.sum(), values=True).nodes[-1].value is None
    half = torch.tensor([1.0], dtype=torch.float16, requires_grad=True)
    assert trace((half * 7e4).sum(), values=True).nodes[0].value == float("inf")
    nan = torch.tensor([float("nan")], requires_grad=True)
    assert trace((nan * 2).sum(), values=True).nodes[-1].grad == [2.0]
    table = nn.Embedding(5, 2, sparse=True)
    assert trace(table(torch.tensor([1, 1])).sum(), values=True).nodes[-1].grad is None
    vector = torch.ones(3, requires_grad=True) * 2
    assert "gradients are left out" in trace(vector, values=True).notes[0]
