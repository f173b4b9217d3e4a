"""The drawing of a graph, on graphs built by hand."""

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from accumviz.book.charts import svg_from_dot
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.views import graph as drawing
from tests.toys import chain

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    '<b onclick="x()">',
    "</script><script>alert(1)</script>",
    "]]>--><!--",
    'quote" \\ back\\n \\N',
    "&amp; &lt;",
    "\u202egnp.exe",
    "اسم المتغير",
    "控制",
    "nul\x00 bell\x07 lone\ud800",
    "x" * 500,
]


def hostile() -> Graph:
    nodes = [Node(i, "MulBackward0", name, module=name) for i, name in enumerate(HOSTILE)]
    return Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(len(nodes) - 1)), (0,), notes=HOSTILE[:3])


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def svg_of(graph: Graph) -> str:
    return re.findall(r"<svg.*?</svg>", drawing.graph_html(graph), re.DOTALL)[0]


class Tags(HTMLParser):
    """Collect the tags and attributes that a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(name for name, _ in attrs)}


def test_a_node_shows_operation_name_shape_saved_bytes_value_and_gradient() -> None:
    shown = texts(svg_of(chain()))
    assert {"loss", "PowBackward0", "[1]", "saves 4 B _saved_self", "[16]", "w", "[−16]"} <= set(shown)
    nodes = Node(0, "MeanBackward0", shape=(), value=30.0), Node(1, "Op", shape=(4,), value=[4.0, 16.0, 36.0, 64.0])
    assert {"scalar", "30", "[4]", "[4, 16, 36, 64]"} <= set(texts(svg_of(Graph(nodes, (Edge(0, 1),), (0,)))))


def test_data_flows_down_so_the_leaf_stands_above_the_loss() -> None:
    tops = {}
    for group in re.findall(r"<g .*?</g>", svg_of(chain()), re.DOTALL):
        (top,) = re.findall(r"translate\(\S+ (\S+)\)", group)
        (title,) = re.findall(r'class="av-title"[^>]*>(\w+)<', group)
        tops[title] = float(top)
    assert tops["w"] < tops["SubBackward0"] < tops["loss"]


def test_a_freed_node_is_hollow_and_says_so() -> None:
    graph = Graph((Node(0, "PowBackward0", alive=False),), (), (0,), notes=["freed graph"])
    assert "av-freed" in svg_of(graph)
    assert "freed" in texts(svg_of(graph))
    assert "freed graph" in drawing.graph_html(graph)


def test_hostile_names_stay_text_in_svg_and_html() -> None:
    graph = hostile()
    ET.fromstring(svg_of(graph))
    tags = Tags()
    fragment = drawing.graph_html(graph)
    tags.feed(fragment)
    assert not tags.seen & {"script", "b", "onclick"}
    fragment.encode("utf-8")
    assert "\u202e" not in fragment


def test_the_same_content_stands_as_a_list_when_the_drawing_is_stripped() -> None:
    left = re.sub(r"<svg.*?</svg>|<style.*?</style>", "", drawing.graph_html(chain()), flags=re.DOTALL)
    items = re.findall(r"<li>(.*?)</li>", left)
    assert len(items) == 3
    assert "PowBackward0" in items[0] and "saves 4 B" in items[0] and "from 2" in items[0]


def large(modules: bool) -> Graph:
    nodes = [Node(i, "MulBackward0", module=f"layers.{i // 20}" if modules else "") for i in range(2000)]
    edges = [Edge(i, j) for i in range(2000) for j in (i + 1, i + 7) if j < 2000]
    return Graph(tuple(nodes), tuple(edges), (0,))


def test_a_large_graph_is_folded_by_module_and_says_so() -> None:
    folded = drawing.readable(large(modules=True))
    assert sum(n.operations for n in folded) == 2000
    assert folded.notes[-1] == "2,000 nodes drawn as 100"


def test_of_a_large_graph_without_modules_what_is_nearest_the_loss_is_drawn() -> None:
    shown = drawing.readable(large(modules=False))
    assert [node.id for node in shown] == list(range(drawing.NODES_LIMIT))
    assert shown.notes[-1] == "2,000 nodes drawn as 150, those nearest the loss"
    assert all(max(edge.source, edge.target) < 150 for edge in shown.edges) and shown.roots == (0,)


def test_without_a_layout_engine_a_notebook_still_shows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    bundle = chain()._repr_mimebundle_()
    assert "PowBackward0" in bundle["text/plain"] and "pip install pygraphviz" in bundle["text/plain"]


def test_source_that_is_not_dot_is_refused() -> None:
    with pytest.raises(drawing.LayoutError, match="could not draw"):
        svg_from_dot("not dot at all {", "a")


def test_a_foreign_drawing_follows_the_page_and_keeps_its_own_colours() -> None:
    dot = 'digraph { node [style=filled, fontname=monospace]; a [fillcolor=lightblue, label="<w>"]; a -> b }'
    drawn = svg_from_dot(dot, "<w> and b")
    ET.fromstring(drawn.svg)
    assert 'fill="lightblue"' in drawn.svg
    assert not re.search(r"\sid=|<title>", drawn.svg)
    assert drawn.alt == "<w> and b"
    assert 'aria-label="&lt;w&gt; and b"' in drawn._repr_html_()


def modules(layers: int, each: int) -> Graph:
    """A loss over layers of several operations."""
    total = layers * each
    nodes = [Node(0, "MeanBackward0", "loss")]
    nodes += [Node(i + 1, "MulBackward0", module=f"layers.{i // each}") for i in range(total)]
    return Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(total)), (0,))


def test_a_graph_of_few_nodes_is_drawn_whole() -> None:
    small = drawing.graph_html(modules(3, 4))
    assert small.count("<svg") == 1 and "several operations" not in small


def test_a_graph_of_more_nodes_than_can_be_looked_at_is_folded() -> None:
    large = drawing.graph_html(modules(8, 6))
    assert "Autograd graph of loss: 9 nodes" in large
    assert "The graph as text (9 nodes)" in large
    assert "<br>49 nodes drawn as 9</figcaption>" in large
    nodes = [Node(i, "MulBackward0", module=f"layers.{i // 20}.{i % 20 // 5}") for i in range(400)]
    deep = Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(399)), (0,))
    assert "<br>400 nodes drawn as 20</figcaption>" in drawing.graph_html(deep)


def nested() -> Graph:
    """A loss over a stack of 14 blocks, each with two modules of four operations and an addition between them."""
    homes = [""]
    for block in range(14):
        homes += [f"stack.{block}.mlp"] * 4 + [f"stack.{block}"] + [f"stack.{block}.attn"] * 4
    nodes = [Node(i, f"Op{i}", module=home) for i, home in enumerate(homes)]
    return Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(len(nodes) - 1)), (0,))


def insides(graph: Graph) -> dict[str, list[str]]:
    """The titles of what is drawn inside each module."""
    found = re.findall(r'<div data-inside="(.*?)">.*?(<svg.*?</svg>)', drawing.graph_html(graph), re.DOTALL)
    return {name: re.findall(r'class="av-title"[^>]*>(.*?)<', svg) for name, svg in found}


def test_each_folded_module_of_a_large_graph_has_its_inside_with_what_is_next_to_it() -> None:
    drawn = insides(nested())
    blocks = [f"stack.{i}" for i in range(14)]
    parts = [f"{block}.{part}" for block in blocks for part in ("mlp", "attn")]
    assert sorted(drawn) == sorted([*blocks, *parts])
    assert drawn["stack.1"] == ["stack.2", "stack.1.attn", "Op14", "stack.1.mlp", "stack.0"]
    assert drawn["stack.1.attn"] == ["stack.2", "Op18", "Op17", "Op16", "Op15", "Op14"]


def test_what_is_outside_an_open_module_looks_so_and_the_legend_says_it() -> None:
    html = drawing.graph_html(nested())
    (inside,) = re.findall(r'data-inside="stack.1">.*?</svg>', html, re.DOTALL)
    assert re.findall(r'class="av-fold av-outside" data-module="(.*?)"', inside) == ["stack.2", "stack.0"]
    assert 'aria-label="Inside stack.1: 5 nodes"' in inside
    assert "outside the module that is open" in html


def test_a_module_that_holds_one_module_alone_opens_to_what_is_in_that() -> None:
    nodes = [Node(i, f"Op{i}", module="a.b") for i in range(3)]
    graph = Graph(tuple(nodes), (Edge(0, 1), Edge(1, 2)), (0,))
    assert [node.op for node in graph.inside("a")] == ["Op0", "Op1", "Op2"]
    assert len(graph.inside("c")) == 0


def test_a_small_graph_carries_no_script_and_no_insides() -> None:
    assert "<script" not in drawing.graph_html(modules(3, 4))
    assert not insides(modules(3, 4))


@pytest.mark.parametrize("graph", [modules(2, 160), nested()], ids=["nodes", "bytes"])
def test_what_is_too_large_does_not_unfold_and_says_so(graph: Graph) -> None:
    said = "some modules do not unfold here: their drawings are too large"
    wide = [replace(node, name="x" * 400_000) if node.module == "stack.0" else node for node in graph]
    html = drawing.graph_html(replace(graph, nodes=tuple(wide)))
    assert said in html
    assert len(html) < 4_000_000
    assert said not in drawing.graph_html(nested())


def test_each_node_of_a_drawing_is_named_where_a_pointer_rests() -> None:
    names = re.findall(r"<title>(.*?)</title>", svg_of(chain()))
    assert names == ["w", "SubBackward0", "loss"], "from the top down"
