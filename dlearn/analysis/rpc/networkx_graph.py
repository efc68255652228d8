"""The graph of distributed autograd as a networkx graph, for questions of one's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dlearn.errors import optional
from dlearn.join.autograd_graph import AutogradGraph, Edge, Key, join_graph
from dlearn.shown import size_text
from dlearn.trace import Trace

if TYPE_CHECKING:
    import networkx


def autograd_graph(trace: Trace, context: int | None = None) -> networkx.DiGraph:
    """Return the graph of the last context, or of `context`, in the direction of the backward pass.

    Nodes are named "trainer1/3"; each has `worker`, `rank`, `name`, `parameter`, `shape` (of the gradient that comes
    in), `start_ns`, `end_ns` and `timed_by` (see `join.autograd_graph.Node`; "": not seen to run). Edges have `kind`:
    "local", or "wire" with `bytes` and `shape` of what was sent. `graph.graph["problems"]` says what is missing.
    Recorded with `graph=True` only; needs networkx.
    """
    networkx = optional("networkx", needed_by="autograd_graph")
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
        sent: dict[str, object] = {}
        if edge.kind == "wire":
            shape = edge.tensors[0].shape if edge.tensors else None
            sent = {"bytes": edge.payload_bytes, "shape": shape}
        graph.add_edge(label(edge.src), label(edge.dst), kind=edge.kind, **sent)
    return graph


def graph_finding(graph: AutogradGraph) -> str:
    """Write "The backward pass crosses 4 times: 160 B each"."""
    sizes = [wire.payload_bytes for wire in graph.wires]
    if not sizes:
        return "The backward pass crosses to no other worker"
    times = {1: "once", 2: "twice"}.get(len(sizes), f"{len(sizes):,} times")
    text = f"{size_text(sum(sizes))} in all"
    if len(set(sizes)) == 1:
        text = size_text(sizes[0]) + " each" * (len(sizes) > 1)
    return f"The backward pass crosses {times}: {text}"


def condense(graph: AutogradGraph) -> AutogradGraph:
    """Merge each node into the only one that leads to it, on its worker; crossings stay as they are."""
    crossing = {node.key for node in graph.nodes if node.short in ("send", "recv")}
    ways = Counter(edge.dst for edge in graph.edges)
    into: dict[Key, Key] = {}
    for edge in graph.edges:
        if ways[edge.dst] == 1 and edge.kind == "local" and not crossing & {edge.src, edge.dst}:
            into[edge.dst] = edge.src

    def home(key: Key) -> Key:
        while key in into:
            key = into[key]
        return key

    sizes = Counter(home(node.key) for node in graph.nodes)
    kept = [
        replace(node, name=f"{node.short} (+{sizes[node.key] - 1})") if sizes[node.key] > 1 else node
        for node in graph.nodes
        if node.key not in into
    ]
    ends = {(home(edge.src), home(edge.dst)): edge for edge in graph.edges}
    edges = [Edge(src, dst, edge.kind, edge.tensors) for (src, dst), edge in ends.items() if src != dst]
    return AutogradGraph(graph.context, tuple(kept), tuple(edges), graph.problems)
