"""Distributed autograd: which contexts each worker holds, whether gradients are in them, and its nodes, as they run.

A worker knows of a context from the first call that comes with its number; a backward pass leaves the gradients there,
never in `param.grad`; the optimizer's step uses them; at the context's end they are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.analysis.walking.steps import Board, Change, Step, WalkParts, WalkSource
from dlearn.events.event import AutogradNode
from dlearn.join.autograd_graph import Node, join_graph
from dlearn.join.rpc.rpc_exchange import BACKWARD, RpcExchange
from dlearn.join.rpc_messages import phase_of
from dlearn.join.tables.message_table import Message
from dlearn.trace import Trace

BOARD = "Contexts of distributed autograd (what is in them is inferred)"
_MOST_NODES = 150
"""In one graph: more cannot be told apart in a player."""
_SHARES = {"": 0.0, "open": 0.3, "has gradients": 1.0, "step is done": 0.6}


def contexts(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    source = WalkSource()
    begun = _from_the_first_on(trace, messages)
    numbers: dict[int, int] = {}
    held: dict[tuple[int, int], str] = {}
    for place, message in enumerate(messages):
        exchange = message.operation.exchange
        if exchange is None or exchange.context is None:
            continue
        index = numbers.setdefault(exchange.context, len(numbers))
        if exchange.context not in begun or message.how == "missing":
            continue
        for rank, text in _after(message, held.get((message.dst, index), ""), held.get((message.src, index), "")):
            if held.get((rank, index), "") == text:
                continue
            held[rank, index] = text
            told = f"context {index}: {text}" if text else ""
            source.changes.setdefault(place, []).append(Change(BOARD, rank, index, told, _SHARES[text]))
    if source.changes:
        source.boards.append(Board(BOARD, lasting=True))
        source.notes.append(
            "Contexts are numbered in the order of their first message; what is in them is inferred from the messages."
        )
    return source


def _from_the_first_on(trace: Trace, messages: Sequence[Message]) -> set[int]:
    """The contexts whose first request is among these: from the middle on nobody can say what was there already."""
    first: dict[int, RpcExchange] = {}
    for exchange in sorted(trace.whole.rpc.exchanges, key=lambda each: each.sent_ns or 0):
        if exchange.context is not None and exchange.sent_ns is not None:
            first.setdefault(exchange.context, exchange)
    # Their requests: a reply alone does not count.
    here = {id(message.operation.exchange) for message in messages if not message.step}
    return {context for context, exchange in first.items() if id(exchange) in here}


def _after(message: Message, at_receiver: str, at_sender: str) -> list[tuple[int, str]]:
    """What the message leaves at its two ends."""
    exchange = message.operation.exchange
    assert exchange is not None
    phase, reply = phase_of(exchange), message.step > 0
    if phase == "cleanup":
        return [(message.src, "")] if reply else []
    if exchange.kind == BACKWARD:
        return [(message.dst, "has gradients")] if not reply else [(message.src, "has gradients")]
    if phase == "optimizer":
        return [(message.src, "step is done")] if reply and exchange.call is not None and at_sender else []
    if phase == "forward" and not message.control:
        sides = [(message.src, at_sender), (message.dst, at_receiver)]
        return [(rank, "open") for rank, now in sides if not now]
    return []


# The distributed backward pass: the nodes of the autograd graph -------------------------------------------------------


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
    does = {
        "recv": ", which sends the gradient back to where the value came from",
        "send": ", which takes in the gradient of a value that was sent",
        "AccumulateGrad": f", which adds the gradient of {node.parameter or 'a parameter'} to its context",
    }
    return f"{who} runs {node.short}{does.get(node.short, '')} ({seen})."
