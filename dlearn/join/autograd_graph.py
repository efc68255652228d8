"""The graph that distributed autograd goes through in one context: pieces of all workers, joined.

Where a value went to another worker, the forward pass left a send there and a recv here; in the
backward pass the recv sends the gradient, and the send takes it in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from dlearn.errors import optional
from dlearn.events.event import AutogradNode, AutogradRun, TensorInfo
from dlearn.join.rpc.rpc_exchange import BACKWARD, RpcExchange, workers
from dlearn.join.selection import Selection
from dlearn.shown import size_text

if TYPE_CHECKING:
    import networkx

WORKER_BITS = 48
"""The number of a message is that of the worker which sent the value, and below these bits a counter of its own."""


class Key(NamedTuple):
    rank: int
    number: int


@dataclass(frozen=True)
class Node:
    """`shapes` are those of the gradients that come in. `timed_by` tells who saw it run: our "hook" saw start and end;
    of a send that was made too late for one, the agents' "log" saw the gradient arrive and be taken up, or else the
    "next" node tells at which moment it was over. "": not seen to run."""

    key: Key
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    parameter: str = ""
    message: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    timed_by: Literal["hook", "log", "next", ""] = ""

    @property
    def short(self) -> str:
        """Return "Addmm" for "AddmmBackward0", "send" and "recv" for the ends of a message of the forward pass."""
        name = self.name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        return {"SendRpc": "send", "RecvRpc": "recv"}.get(name, name)


@dataclass(frozen=True)
class Edge:
    """A gradient's way from node to node, inside a worker or over the "wire", where `tensors` are what was sent."""

    src: Key
    dst: Key
    kind: Literal["local", "wire"] = "local"
    tensors: tuple[TensorInfo, ...] = ()

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.payload_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class AutogradGraph:
    """All nodes and edges of one context, in the direction of the backward pass. `problems`: what is missing of it."""

    context: int | None
    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def wires(self) -> tuple[Edge, ...]:
        """Return the edges over the wire, in the order in which the gradients went."""
        start = {node.key: node.start_ns for node in self.nodes}
        wires = [edge for edge in self.edges if edge.kind == "wire"]
        return tuple(sorted(wires, key=lambda edge: (start[edge.src] is None, start[edge.src] or 0, edge.src)))

    @property
    def finding(self) -> str:
        """Write "The backward pass crosses 4 times: 160 B each"."""
        sizes = [wire.payload_bytes for wire in self.wires]
        if not sizes:
            return "The backward pass crosses to no other worker"
        times = {1: "once", 2: "twice"}.get(len(sizes), f"{len(sizes):,} times")
        text = f"{size_text(sum(sizes))} in all"
        if len(set(sizes)) == 1:
            text = size_text(sizes[0]) + " each" * (len(sizes) > 1)
        return f"The backward pass crosses {times}: {text}"

    def condensed(self) -> AutogradGraph:
        """Merge each node into the only one that leads to it, on its worker; crossings stay as they are."""
        crossing = {node.key for node in self.nodes if node.short in ("send", "recv")}
        ways = Counter(edge.dst for edge in self.edges)
        into: dict[Key, Key] = {}
        for edge in self.edges:
            if ways[edge.dst] == 1 and edge.kind == "local" and not crossing & {edge.src, edge.dst}:
                into[edge.dst] = edge.src

        def home(key: Key) -> Key:
            while key in into:
                key = into[key]
            return key

        sizes = Counter(home(node.key) for node in self.nodes)
        kept = [
            replace(node, name=f"{node.short} (+{sizes[node.key] - 1})") if sizes[node.key] > 1 else node
            for node in self.nodes
            if node.key not in into
        ]
        ends = {(home(edge.src), home(edge.dst)): edge for edge in self.edges}
        edges = [Edge(src, dst, edge.kind, edge.tensors) for (src, dst), edge in ends.items() if src != dst]
        return AutogradGraph(self.context, tuple(kept), tuple(edges), self.problems)


def contexts_with_graph(trace: Selection) -> list[int | None]:
    """Return the contexts of this selection that have a graph, in the order of their first node."""
    chosen = set(trace.table.column("context")[trace.rows.rows].tolist())
    return list(dict.fromkeys(event.context for event in trace.whole.of(AutogradNode) if event.context in chosen))


def join_graph(trace: Selection, context: int | None = None) -> AutogradGraph:
    """Return the graph of this context, by default the last that this selection has one of."""
    if context is None:
        context = next(reversed(contexts_with_graph(trace)), None)
    found = [event for event in trace.whole.of(AutogradNode) if event.context == context]
    runs = {Key(event.rank, event.node): event for event in trace.whole.of(AutogradRun) if event.context == context}
    nodes: dict[Key, Node] = {}
    ways: dict[Edge, None] = {}
    for event in found:
        key = Key(event.rank, event.node)
        node = Node(key, event.name, event.shapes, event.parameter, event.message)
        if run := runs.get(key):
            node = replace(node, start_ns=run.start_ns, end_ns=run.end_ns, timed_by="hook")
        nodes[key] = node
        ways |= {Edge(key, Key(event.rank, following)): None for following in event.next}
    edges = [edge for edge in ways if edge.dst in nodes]
    wires, problems = _join(trace, nodes.values(), runs)
    for wire in wires:
        following = [nodes[edge.dst] for edge in edges if edge.src == wire.dst]
        nodes[wire.dst] = _arrived(nodes[wire.dst], nodes[wire.src], trace.whole.rpc.exchanges, following)
    return AutogradGraph(context, tuple(nodes.values()), (*edges, *wires), tuple(problems))


def _join(trace: Selection, nodes: Iterable[Node], runs: dict[Key, AutogradRun]) -> tuple[list[Edge], list[str]]:
    """Return the edges over the wire, and a sentence for each half whose other half is not here."""
    sends = {node.message: node for node in nodes if node.short == "send"}
    recvs = {node.message: node for node in nodes if node.short == "recv"}
    names = workers(trace.processes).by_id
    wires, problems = [], []
    for message, recv in recvs.items():
        if message in sends:
            run = runs.get(recv.key)
            wires.append(Edge(recv.key, sends[message].key, "wire", run.tensors if run is not None else ()))
        else:
            worker = names.get((message or 0) >> WORKER_BITS)
            whose = "another worker" if worker is None else trace.label(worker)
            problems.append(f"the piece of {whose} behind a recv of {trace.label(recv.key.rank)} is missing")
    for message, send in sends.items():
        if message not in recvs:
            problems.append(f"the piece of the worker that a send of {trace.label(send.key.rank)} went to is missing")
    return wires, problems


def _arrived(send: Node, recv: Node, exchanges: Iterable[RpcExchange], following: Iterable[Node]) -> Node:
    """Return the send with the agents' times, if no hook saw it: sent while the recv ran."""
    if send.timed_by or recv.start_ns is None or recv.end_ns is None:
        return send
    for each in exchanges:
        request = each.request
        if each.kind != BACKWARD or request is None or (each.src, each.dst) != (recv.key.rank, send.key.rank):
            continue
        if recv.start_ns <= (request.sending_ns or 0) <= recv.end_ns and request.received_ns is not None:
            taken_up = max(request.received_ns, request.running_ns or 0)
            return replace(send, start_ns=request.received_ns, end_ns=taken_up, timed_by="log")
    began = min((node.start_ns for node in following if node.start_ns is not None), default=None)
    return replace(send, start_ns=began, end_ns=began, timed_by="next") if began is not None else send


def autograd_graph(trace: Selection, context: int | None = None) -> networkx.DiGraph:
    """Return the graph of the last context, or of `context`, in the direction of the backward pass.

    Nodes are named "trainer1/3"; each has `worker`, `rank`, `name`, `parameter`, `shape` (of the gradient that comes
    in), `start_ns`, `end_ns` and `timed_by` (see `Node`; "": not seen to run). Edges have `kind`:
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
            label(node.key), worker=trace.label(node.key.rank), rank=node.key.rank, name=node.name,
            parameter=node.parameter, shape=node.shapes[0] if node.shapes else None,
            start_ns=node.start_ns, end_ns=node.end_ns, timed_by=node.timed_by,
        )  # fmt: skip
    for edge in joined.edges:
        sent: dict[str, object] = {}
        if edge.kind == "wire":
            shape = edge.tensors[0].shape if edge.tensors else None
            sent = {"bytes": edge.payload_bytes, "shape": shape}
        graph.add_edge(label(edge.src), label(edge.dst), kind=edge.kind, **sent)
    return graph
