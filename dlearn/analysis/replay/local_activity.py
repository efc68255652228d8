"""What ranks do by themselves between messages: parts of a training step, the user's spans, functions called by RPC,
gradients that fill DDP's buckets, and contexts and nodes of distributed autograd.

In a pipeline, a rank's spans F0, F1, ... and B0, B1, ... are the forward and the backward passes of micro-batch 0, 1,
... Between the two the stage keeps what the backward pass needs. This is inferred from the names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from dlearn.analysis.ddp.bucket_times import BucketTime, bucket_times
from dlearn.analysis.replay.steps import Change, ProgramParts, StatePanel, Step, WalkSource
from dlearn.events.event import AutogradNode, Bucket, Collective, PhaseSpan, PointToPoint, RpcCall, RpcRun, Span
from dlearn.events.event_table import EventTable, Mask, Rows
from dlearn.join.autograd_graph import Node, join_graph
from dlearn.join.operation_messages import message_count
from dlearn.join.rpc.rpc_exchange import BACKWARD, RpcExchange
from dlearn.join.rpc_messages import phase_of
from dlearn.join.tables.message_table import Message
from dlearn.shown import count_text
from dlearn.trace import Trace

BOARD = "Micro-batches kept from their forward to their backward pass (inferred)"
NOTE = "Spans F0 and B0 are taken for the forward and the backward pass of micro-batch 0; what is kept is inferred."
_NAME = re.compile(r"([FB])(\d{1,4})")
_STRETCHES = {"forward": "its forward pass", "backward": "its backward pass", "optimizer": "the optimizer's step"}


def local_activity(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    """Make a step for each phase of a training step, innermost span, and function run by RPC."""
    source = WalkSource()
    alone, parts = spans_without_calls(trace), ProgramParts(trace)
    pipeline = kept(alone.values())
    of_torch = 0
    for event in trace.of(PhaseSpan, Span, RpcRun):
        changes: tuple[Change, ...] = ()
        more = ""
        match event:
            case PhaseSpan():
                told, mark = f"begins {_STRETCHES.get(event.phase, event.phase)}", event.phase
            case Span() if (event.rank, event.number) in alone:
                told, mark = f"begins {event.name}", event.name
                if (event.rank, event.number) in pipeline:
                    change, more = pipeline[event.rank, event.number]
                    changes = (change,)
            case RpcRun():
                mark = event.function.rpartition(".")[2]
                told = f"runs {mark}()"
                if mark.startswith("_"):
                    of_torch += 1
                    continue
            case _:
                continue
        span, phase = parts.of_event(event)
        source.steps.append(
            Step(
                rank=event.rank, at_ns=event.start_ns, until_ns=event.end_ns, mark=mark, op="work", changes=changes,
                span=span, phase=phase, sentence=f"{trace.label(event.rank)} {told} (observed).{more}",
            )
        )  # fmt: skip
    if pipeline:
        source.panels.append(StatePanel(BOARD, lasting=True))
        source.notes.append(NOTE)
    if of_torch:
        runs = count_text(of_torch, "run")
        source.notes.append(f"Not among the steps: {runs} of functions that torch calls for itself.")
    return source


def spans_without_calls(trace: Trace) -> dict[tuple[int, int], Span]:
    """Find the innermost spans without communication, by rank and number."""
    table = trace.table
    is_span = table.is_a(Span)
    outer = _around(table, np.flatnonzero(is_span & trace.rows.chosen), is_span)
    talking = _around(table, np.flatnonzero(table.is_a(Collective, PointToPoint, RpcCall)), is_span)
    alone = trace.rows.where(is_span & ~outer & ~talking).of(Span)
    return {(span.rank, span.number): span for span in alone}


def _around(table: EventTable, inner: Rows, is_span: Mask) -> Mask:
    """Return which are spans around these events, or around those spans."""
    found = np.zeros(len(table), bool)
    while len(inner):
        outer = np.unique(table.parent_row[inner])
        inner = outer[(outer >= 0) & is_span[outer] & ~found[outer]]
        found[inner] = True
    return found


def kept(local_activity: Iterable[Span]) -> dict[tuple[int, int], tuple[Change, str]]:
    """Map rank and number of a pipeline's span to what its rank keeps from then on, and that in words."""
    passes = sorted((each for each in local_activity if _NAME.fullmatch(each.name)), key=lambda each: each.start_ns)
    names = {(each.rank, each.name) for each in passes}
    held: dict[int, set[int]] = defaultdict(set)
    found: dict[tuple[int, int], tuple[Change, str]] = {}
    for each in passes:
        way, number = each.name[0], int(each.name[1:])
        if not {(each.rank, f"F{number}"), (each.rank, f"B{number}")} <= names:
            continue
        now = held[each.rank]
        if way == "F":
            now.add(number)
        else:
            now.discard(number)
        text, share = (f"micro-batch {number}", 1.0) if way == "F" else ("", 0.0)
        change = Change(BOARD, each.rank, number, text, share)
        found[each.rank, each.number] = change, f" Kept for backward passes to come: {len(now)} (inferred)."
    return found


# DDP's backward pass: gradients become ready, fill their buckets, and these travel -----------------------------------


BUCKETS = "Buckets of gradients"
_MOST_STEPS = 120
"""Where there would be more gradients, a step is the last one of a bucket."""
_Names = dict[tuple[int, int], tuple[int, str]]


def gradients(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    """Make a step for each gradient, or each full bucket, with the state of all buckets."""
    source = WalkSource()
    found = [each for each in bucket_times(trace).items if each.ready]
    every = sum(len(each.ready) for each in found) <= _MOST_STEPS
    # (model, index) of a bucket -> its place on the board, and what it is called there.
    names: _Names = {}
    keys = sorted({(each.model, each.index) for each in trace.whole.of(Bucket)})
    several = len({model for model, _ in keys}) > 1
    for place, (model, index) in enumerate(keys):
        name = f"model {model}, bucket {index}" if several else f"bucket {index}"
        names[model, index] = place, name
    for each in found:
        source.steps += _filling(each, trace, names, every=every)
    source.changes.update(_travelling(messages, names))
    if source.steps or source.changes:
        source.panels.append(StatePanel(BUCKETS, lasting=True))
        if source.steps and not every:
            source.notes.append("A step is the last gradient of a bucket; the others before it are not steps.")
    return source


def _filling(bucket: BucketTime, trace: Trace, names: _Names, *, every: bool) -> list[Step]:
    steps = []
    count = len(bucket.parameters)
    at, name = names[bucket.model, bucket.index]
    for number, (parameter, at_ns) in enumerate(bucket.ready, 1):
        if not every and number < len(bucket.ready):
            continue
        text = f"the gradient of {parameter} is ready: {number} of {count} in {name}"
        full = ", which is full" if number == count else ""
        change = Change(BUCKETS, bucket.rank, at, f"{name}: {number} of {count} ready", number / count / 2)
        steps.append(
            Step(
                rank=bucket.rank, at_ns=at_ns, op="gradient", mark=parameter, changes=(change,),
                span=bucket.step, phase="backward",
                sentence=f"{trace.label(bucket.rank)}: {text}{full} (observed).",
            )
        )  # fmt: skip
    return steps


def _travelling(messages: Sequence[Message], names: _Names) -> dict[int, list[Change]]:
    """Mark a bucket's travel with its first message, and its average with the last one, if all came."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        carried = message.operation.bucket is not None and isinstance(message.operation.ends[0], Collective)
        if carried and message.how != "missing":
            places[id(message.operation)].append(place)
    changes: dict[int, list[Change]] = defaultdict(list)
    for of_one in places.values():
        operation = messages[of_one[0]].operation
        assert operation.bucket is not None
        at, name = names[operation.bucket.model, operation.bucket.index]
        stages = [(of_one[0], "travels", 0.75)]
        if len(of_one) == message_count(operation):
            stages.append((of_one[-1], "averaged", 1.0))
        for place, text, share in stages:
            changes[place] += [Change(BUCKETS, rank, at, f"{name}: {text}", share) for rank in operation.group.members]
    return changes


# Distributed autograd: which contexts each worker holds -------------------------------------------


CONTEXTS = "Contexts of distributed autograd (what is in them is inferred)"
_MOST_NODES = 150
"""In one graph: more cannot be told apart in a player."""
_SHARES = {"": 0.0, "open": 0.3, "has gradients": 1.0, "step is done": 0.6}


def contexts(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    """Follow which contexts each worker holds, and whether gradients are in them.

    A worker knows of a context from the first call with its number; gradients are there after a backward pass.
    """
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
            source.changes.setdefault(place, []).append(Change(CONTEXTS, rank, index, told, _SHARES[text]))
    if source.changes:
        source.panels.append(StatePanel(CONTEXTS, lasting=True))
        source.notes.append(
            "Contexts are numbered in the order of their first message; what is in them is inferred from the messages."
        )
    return source


def _from_the_first_on(trace: Trace, messages: Sequence[Message]) -> set[int]:
    """Return the contexts whose first request is among these; others have unknown contents."""
    first: dict[int, RpcExchange] = {}
    for exchange in sorted(trace.whole.rpc.exchanges, key=lambda each: each.sent_ns or 0):
        if exchange.context is not None and exchange.sent_ns is not None:
            first.setdefault(exchange.context, exchange)
    # Their requests: a reply alone does not count.
    here = {id(message.operation.exchange) for message in messages if not message.step}
    return {context for context, exchange in first.items() if id(exchange) in here}


def _after(message: Message, at_receiver: str, at_sender: str) -> list[tuple[int, str]]:
    """Return what the message leaves at its two ends."""
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
    """Make a step for each node of the contexts that these messages belong to."""
    source = WalkSource()
    known = {event.context for event in trace.of(AutogradNode)}
    parts, spans = ProgramParts(trace), dict[int, str]()
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
                    sentence=_node_sentence(node, trace), highlighted=(len(source.graphs), place), span=span,
                    phase="backward",
                )
            )  # fmt: skip
        source.graphs.append(graph)
    return source


def _node_sentence(node: Node, trace: Trace) -> str:
    who = trace.label(node.key.rank)
    seen = {"hook": "observed", "log": "observed in the agent's log"}.get(node.timed_by, "inferred from the next node")
    does = {
        "recv": ", which sends the gradient back to where the value came from",
        "send": ", which takes in the gradient of a value that was sent",
        "AccumulateGrad": f", which adds the gradient of {node.parameter or 'a parameter'} to its context",
    }
    return f"{who} runs {node.short}{does.get(node.short, '')} ({seen})."
