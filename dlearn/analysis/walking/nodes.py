"""The distributed backward pass: the nodes of the autograd graph, as they run."""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.analysis.walking.parts import WalkParts
from dlearn.analysis.walking.steps import Step, WalkSource
from dlearn.join.autograd_graph import Node, join_graph
from dlearn.trace.event import AutogradNode
from dlearn.trace.message import Message
from dlearn.trace.trace import Trace

_MOST_NODES = 150
"""In one graph: more cannot be told apart in a player."""


def nodes(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    """A step for each node of the contexts that these messages belong to."""
    source = WalkSource()
    known = {event.context for event in trace.of(AutogradNode)}
    parts, spans = WalkParts(trace), dict[int, str]()
    for each in messages:
        exchange = each.operation.exchange
        if exchange is not None and exchange.context in known and exchange.context not in spans:
            spans[exchange.context] = parts.span_of(each.operation)
    for context, span in spans.items():
        graph = join_graph(trace, context)
        if len(graph.nodes) > _MOST_NODES:
            source.notes.append(
                f"A graph of {len(graph.nodes)} nodes is too large to be played: draw.autograd shows it."
            )
            continue
        for place, node in enumerate(graph.nodes):
            if node.start_ns is None:
                continue
            source.steps.append(
                Step(
                    rank=node.key.rank, at_ns=node.start_ns, until_ns=node.end_ns, mark=node.short, op="node",
                    sentence=_sentence(node, trace), lit=(len(source.graphs), place), span=span, phase="backward",
                )
            )  # fmt: skip
        source.graphs.append(graph)
    return source


def _sentence(node: Node, trace: Trace) -> str:
    who = trace.label(node.key.rank)
    seen = {"hook": "observed", "log": "observed in the agent's log"}.get(node.timed_by, "inferred from the next node")
    match node.short:
        case "recv":
            told = ", which sends the gradient back to where the value came from"
        case "send":
            told = ", which takes in the gradient of a value that was sent"
        case "AccumulateGrad":
            told = f", which adds the gradient of {node.parameter or 'a parameter'} to its context"
        case _:
            told = ""
    return f"{who} runs {node.short}{told} ({seen})."
