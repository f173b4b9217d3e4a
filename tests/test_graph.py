"""The graph as data: built by hand, without torch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accumviz.graph.graph import Edge, Graph, Node, Saved, in_order
from tests.thorough import examples

CHAIN = Graph(
    (
        Node(0, "MeanBackward0", "loss", shape=(), dtype="float32", value=2.5, grad=1.0),
        Node(1, "PowBackward0", saved=(Saved("self", (2,), "float32", 8, 0),), shape=(2,), value=[1.0, 4.0]),
        Node(
            2,
            "MulBackward0",
            "y_hat",
            saved=(Saved("self", (2,), "float32", 8, 0), Saved("other", (), "float32", 4, 1, True)),
        ),
        Node(3, "AccumulateGrad", "w", shape=(), grad=float("nan")),
    ),
    (Edge(0, 1), Edge(1, 2), Edge(2, 3)),
    (0,),
    notes=("a note",),
)


def modules() -> Graph:
    """Two layers with a residual addition between them, and a loss outside."""
    return Graph(
        (
            Node(0, "MeanBackward0", "loss"),
            Node(1, "AddBackward0", module="layers"),
            Node(2, "ReluBackward0", module="layers.1", saved=(Saved("result", (4,), "float32", 16, 0),)),
            Node(3, "AddmmBackward0", module="layers.1.fc", saved=(Saved("mat1", (4,), "float32", 16, 1),)),
            Node(4, "AccumulateGrad", "layers.1.fc.bias", module="layers.1.fc"),
            Node(5, "AddmmBackward0", module="layers.0", saved=(Saved("mat1", (4,), "float32", 16, 1),)),
            Node(6, "AccumulateGrad", "layers.0.weight", module="layers.0"),
        ),
        (Edge(0, 1), Edge(1, 2), Edge(1, 5), Edge(2, 3), Edge(3, 4), Edge(3, 5), Edge(5, 6)),
        (0,),
        classes={"layers": "ModuleList", "layers.0": "Linear", "layers.1": "Block"},
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 12))
    number = st.one_of(st.none(), st.floats(width=64))
    nodes = tuple(
        Node(
            i,
            draw(st.sampled_from(["MulBackward0", "AddBackward0", "AccumulateGrad"])),
            draw(st.text(max_size=8)),
            draw(st.sampled_from(["", "a", "a.b", "a.b.c", "d"])),
            draw(st.sampled_from([None, (), (3,), (2, 0)])),
            saved=tuple(
                Saved("self", (3,), "float32", 12, s, s == 2) for s in draw(st.lists(st.integers(0, 4), max_size=3))
            ),
            alive=draw(st.booleans()),
            value=draw(number),
            grad=draw(st.one_of(st.none(), st.lists(st.floats(), max_size=3))),
        )
        for i in range(count)
    )
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] < p[1])
    edges = draw(st.lists(pairs, max_size=20, unique=True)) if count > 1 else []
    return Graph(nodes, tuple(Edge(a, b) for a, b in edges), (0,))


def test_a_chain_is_named_from_the_root_down() -> None:
    assert CHAIN.chain() == ["MeanBackward0", "PowBackward0", "MulBackward0", "AccumulateGrad"]


def test_a_branching_graph_has_no_chain() -> None:
    with pytest.raises(ValueError, match="not a single path"):
        modules().chain()


def test_a_storage_saved_twice_counts_once_and_parameters_not_at_all() -> None:
    assert CHAIN.saved_bytes == 8
    assert CHAIN.nodes[2].saved_bytes == 8


def test_modules_fold_with_their_parameters_and_what_runs_between_them_stays() -> None:
    folded = modules().collapse_modules(2)
    assert [(n.op, n.module, n.operations, n.parameters) for n in folded] == [
        ("MeanBackward0", "", 1, 0),
        ("AddBackward0", "layers", 1, 0),
        ("Block", "layers.1", 2, 1),
        ("Linear", "layers.0", 1, 1),
    ]
    assert {(e.source, e.target) for e in folded.edges} == {(0, 1), (1, 2), (1, 3), (2, 3)}


@settings(max_examples=examples(60), deadline=None)
@given(graphs())
def test_folding_loses_no_operation_no_parameter_and_no_byte(graph: Graph) -> None:
    leaves = sum(n.kind == "accumulate" for n in graph)
    for folded in (graph.collapse_modules(1), graph.collapse_modules(3)):
        assert sum(n.operations for n in folded if n.kind != "accumulate") == len(graph) - leaves
        assert sum(n.parameters if n.kind == "fold" else n.kind == "accumulate" for n in folded) == leaves
        assert folded.saved_bytes == graph.saved_bytes
        assert [n.id for n in folded] == list(range(len(folded)))
        assert all(e.source != e.target for e in folded.edges)


def test_the_repr_is_a_table_with_the_notes_below() -> None:
    text = repr(CHAIN)
    assert text.startswith("Graph: 4 nodes, 3 edges, saves 8 B; root loss")
    assert text.endswith("note: a note")
    assert "nan" in text


@given(st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))))
def test_an_order_has_each_node_once_and_sources_before_their_targets(edges: set[tuple[int, int]]) -> None:
    forward = [(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]]
    order = in_order(12, forward)
    assert sorted(order) == list(range(12))
    assert all(order.index(source) < order.index(target) for source, target in forward)
