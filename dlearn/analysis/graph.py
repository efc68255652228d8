"""The graph of distributed autograd as a networkx graph, for questions of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlearn.analysis.findings import size_text
from dlearn.errors import DlearnError
from dlearn.trace.graph import AutogradGraph, Key, join_graph
from dlearn.trace.trace import Trace

if TYPE_CHECKING:
    import networkx


def autograd_graph(trace: Trace, context: int | None = None) -> networkx.DiGraph:
    """The graph of the last context, or of `context`, in the direction of the backward pass.

    Nodes are named "trainer1/3"; each has `worker`, `rank`, `name`, `parameter`, `shape` (of the gradient that comes
    in), `start_ns`, `end_ns` and `timed_by` ("hook", "log" or "", where nobody saw it run). Edges have `kind`: "local",
    or "wire" with `bytes` and `shape` of what was sent. `graph.graph["problems"]` says what is missing. Recorded with
    `graph=True` only; needs networkx.
    """
    try:
        import networkx
    except ImportError:
        raise DlearnError("autograd_graph makes a networkx graph: pip install networkx") from None
    joined = join_graph(trace, context)
    graph = networkx.DiGraph(context=joined.context, problems=joined.problems)

    def label(key: Key) -> str:
        return f"{trace.label(key.rank)}/{key.number}"

    for node in joined.nodes:
        graph.add_node(
            label(node.key),
            worker=trace.label(node.key.rank),
            rank=node.key.rank,
            name=node.name,
            parameter=node.parameter,
            shape=node.shapes[0] if node.shapes else None,
            start_ns=node.start_ns,
            end_ns=node.end_ns,
            timed_by=node.timed_by,
        )
    for edge in joined.edges:
        graph.add_edge(label(edge.src), label(edge.dst), kind=edge.kind)
        if edge.kind == "wire":
            shape = edge.tensors[0].shape if edge.tensors else None
            graph.edges[label(edge.src), label(edge.dst)].update(bytes=edge.payload_bytes, shape=shape)
    return graph


def graph_finding(graph: AutogradGraph) -> str:
    """ "The backward pass crosses 4 times: 160 B each"."""
    wires = graph.wires
    if not wires:
        return "The backward pass crosses to no other worker"
    sizes = [wire.payload_bytes for wire in wires]
    times = {1: "once", 2: "twice"}.get(len(wires), f"{len(wires):,} times")
    if len(set(sizes)) == 1:
        told = f"{size_text(sizes[0])} each" if len(sizes) > 1 else size_text(sizes[0])
    else:
        told = f"{size_text(sum(sizes))} in all"
    return f"The backward pass crosses {times}: {told}"
