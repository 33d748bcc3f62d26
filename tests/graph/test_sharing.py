"""What shares memory, and what is overwritten, also by way of views."""

from __future__ import annotations

from lightning_accept.graph.ops import get_op
from lightning_accept.graph.sharing import memory_roots, overwritten_memory
from lightning_accept.graph.values import Node, Ref

X, TABLE, COUNT = Ref("value", "x"), Ref("buffer", "table"), Ref("buffer", "count")


def value(name: str) -> Ref:
    return Ref("value", name)


def test_views_lead_back_to_what_was_allocated() -> None:
    nodes = [
        Node("row", "aten.select.int", (TABLE, 0, 1)),
        Node("part", "aten.slice.Tensor", (value("row"), 0, 0, 2)),
        Node("sum", "aten.add.Tensor", (X, value("part"))),
        Node("written", "aten.copy_.default", (value("part"), X)),
        Node("pieces", "aten.split.Tensor", (value("sum"), 1)),
        Node("piece", "operator.getitem", (value("pieces"), 0)),
        Node("more", "aten.add_.Tensor", (value("piece"), 1.0)),
        Node("counted", "aten.add_.Tensor", (COUNT, 1)),
    ]
    bound = [get_op(node.op).bind(node.args, node.kwargs) for node in nodes]
    roots = memory_roots(nodes, bound)
    assert roots[value("part")] == {TABLE}
    assert roots[value("sum")] == {value("sum")}
    assert roots[value("piece")] == {value("sum")}
    assert overwritten_memory(nodes, bound, roots) == {TABLE: [3], value("sum"): [6], COUNT: [7]}
