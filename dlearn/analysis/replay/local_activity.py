"""What ranks do by themselves between messages.

In a pipeline, a rank's spans F0 and B0 (the user's, or of hooks/pipeline_passes.py) are the passes
of micro-batch 0. What the stage keeps between the two is inferred from the names.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dlearn.analysis.ddp.bucket_times import BucketTime, bucket_times
from dlearn.analysis.replay.steps import Change, StatePanel, Step, WalkParts, program_parts
from dlearn.events.event import AutogradNode, Bucket, Collective, PhaseSpan, PointToPoint, RpcCall, RpcRun, Span
from dlearn.events.event_table import NONE, EventTable, Mask, Rows
from dlearn.join.autograd_graph import Node, join_graph
from dlearn.join.operation_messages import message_count
from dlearn.join.rpc.rpc_exchange import BACKWARD
from dlearn.join.rpc_messages import phase_of
from dlearn.join.tables.message_table import Message
from dlearn.shown import count_text
from dlearn.trace import Trace

MICRO_BATCHES = "Micro-batches kept from their forward to their backward pass (inferred)"
NOTE = "Spans F0 and B0 are taken for the forward and the backward pass of micro-batch 0; what is kept is inferred."
PASS = re.compile(r"([FBW])(\d{1,4})")
PASSES = {"F": "forward pass", "B": "backward pass", "W": "late part of a backward pass"}
_PHASES = {"forward": "its forward pass", "backward": "its backward pass", "optimizer": "the optimizer's step"}


def local_activity(trace: Trace, messages: Sequence[Message], walk: WalkParts) -> None:
    """Add a step for each phase of a training step, innermost span, and function run by RPC."""
    alone, parts = spans_without_calls(trace), program_parts(trace.whole)
    stages = stages_of(trace)  # Where a rank has several, F0 is not one micro-batch.
    pipeline = kept(span for span in alone.values() if (span.rank, span.parent) not in stages)
    of_torch = 0
    for event in trace.of(PhaseSpan, Span, RpcRun):
        changes, more = pipeline.get((event.rank, event.number), ((), ""))
        match event:
            case PhaseSpan():
                does, mark = f"begins {_PHASES.get(event.phase, event.phase)}", event.phase
            case Span() if (event.rank, event.number) in alone:
                does, mark = f"begins {event.name}", event.name
            case RpcRun():
                mark = event.function.rpartition(".")[2]
                does = f"runs {mark}()"
                if mark.startswith("_"):
                    of_torch += 1
                    continue
            case _:
                continue
        span, phase = parts.of_event(event)
        step = Step(
            rank=event.rank, at_ns=event.start_ns, until_ns=event.end_ns, mark=mark, op="work",
            changes=changes, span=span, phase=phase,
            sentence=f"{trace.label(event.rank)} {does} (observed).{more}",
        )  # fmt: skip
        walk.steps.append(step)
    if pipeline:
        walk.panels.append(StatePanel(MICRO_BATCHES, lasting=True))
        walk.notes.append(NOTE)
    if of_torch:
        runs = count_text(of_torch, "run")
        walk.notes.append(f"Not among the steps: {runs} of functions that torch calls for itself.")


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


def stages_of(trace: Trace) -> dict[tuple[int, int | None], int]:
    """Return the stage of each span "stage 1", by rank and number."""
    named = [span for span in trace.whole.of(Span) if re.fullmatch(r"stage \d{1,4}", span.name)]
    return {(span.rank, span.number): int(span.name.split()[1]) for span in named}


def kept(spans: Iterable[Span]) -> dict[tuple[int, int], tuple[tuple[Change, ...], str]]:
    """Map rank and number of a pipeline's span to what its rank keeps from then on, and a sentence."""
    passes = [span for span in spans if PASS.fullmatch(span.name)]
    names = {(span.rank, span.name) for span in passes}
    held: dict[int, set[int]] = defaultdict(set)
    changes: dict[tuple[int, int], tuple[tuple[Change, ...], str]] = {}
    for span in sorted(passes, key=lambda span: span.start_ns):
        rank, number = span.rank, int(span.name[1:])
        if {(rank, f"F{number}"), (rank, f"B{number}")} <= names:
            forward = span.name[0] == "F"
            held[rank] = held[rank] | {number} if forward else held[rank] - {number}
            state = f"micro-batch {number}" if forward else ""
            change = Change(MICRO_BATCHES, rank, number, state, float(forward))
            more = f" Kept for backward passes to come: {len(held[rank])} (inferred)."
            changes[rank, span.number] = (change,), more
    return changes


# DDP's backward pass: gradients become ready, fill their buckets, and these travel -----------------------------------


BUCKETS = "Buckets of gradients"
_MOST_STEPS = 120
"""Where there would be more gradients, a step is the last one of a bucket."""
_Names = dict[tuple[int, int], tuple[int, str]]
"""Model and index of a bucket -> its index in the panel, and its name there."""


def gradients(trace: Trace, messages: Sequence[Message], walk: WalkParts) -> None:
    """Add a step for each gradient, or each full bucket, with the state of all buckets."""
    names: _Names = {}
    keys = sorted({(bucket.model, bucket.index) for bucket in trace.whole.of(Bucket)})
    several = len({model for model, _ in keys}) > 1
    for row, (model, index) in enumerate(keys):
        name = f"model {model}, bucket {index}" if several else f"bucket {index}"
        names[model, index] = row, name
    filled = [bucket for bucket in bucket_times(trace).items if bucket.ready]
    every = sum(len(bucket.ready) for bucket in filled) <= _MOST_STEPS
    for bucket in filled:
        walk.steps += _filling(bucket, trace, names, every=every)
    travelled = _travelling(messages, names, walk)
    if filled or travelled:
        walk.panels.append(StatePanel(BUCKETS, lasting=True))
    if not every:
        last = "A step is the last gradient of a bucket; the others before it are not steps."
        walk.notes.append(last)


def _filling(bucket: BucketTime, trace: Trace, names: _Names, *, every: bool) -> Iterator[Step]:
    """Yield a step for each gradient of a bucket, or, unless `every`, for the last one only."""
    count = len(bucket.parameters)
    row, name = names[bucket.model, bucket.index]
    numbered = [*enumerate(bucket.ready, 1)]
    for number, (parameter, at_ns) in numbered if every else numbered[-1:]:
        ready = f"the gradient of {parameter} is ready: {number} of {count} in {name}"
        full = ", which is full" if number == count else ""
        state = f"{name}: {number} of {count} ready"
        change = Change(BUCKETS, bucket.rank, row, state, number / count / 2)
        yield Step(
            rank=bucket.rank, at_ns=at_ns, op="gradient", mark=parameter, changes=(change,),
            span=bucket.step, phase="backward",
            sentence=f"{trace.label(bucket.rank)}: {ready}{full} (observed).",
        )  # fmt: skip


def _travelling(messages: Sequence[Message], names: _Names, walk: WalkParts) -> bool:
    """Mark a bucket's travel with its first message, and its average with the last, if all came."""
    sent: dict[int, list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        operation = message.operation
        is_bucket = operation.bucket is not None and isinstance(operation.ends[0], Collective)
        if is_bucket and message.how != "missing":
            sent[id(operation)].append(index)
    for indices in sent.values():
        operation = messages[indices[0]].operation
        assert operation.bucket is not None
        row, name = names[operation.bucket.model, operation.bucket.index]
        for rank in operation.group.members:
            travels = Change(BUCKETS, rank, row, f"{name}: travels", 0.75)
            walk.changes[indices[0]].append(travels)
            if len(indices) == message_count(operation):
                averaged = Change(BUCKETS, rank, row, f"{name}: averaged", 1.0)
                walk.changes[indices[-1]].append(averaged)
    return bool(sent)


# Distributed autograd: which contexts each worker holds -------------------------------------------


CONTEXTS = "Contexts of distributed autograd (what is in them is inferred)"
_MOST_NODES = 150  # In one graph: more cannot be told apart in a player.
_SHARES = {"": 0.0, "open": 0.3, "has gradients": 1.0, "step is done": 0.6}


def contexts(trace: Trace, messages: Sequence[Message], walk: WalkParts) -> None:
    """Follow which contexts each worker holds, from the first call on, and which have gradients."""
    begun = _from_the_first_on(trace, messages)
    numbers: dict[int, int] = {}
    held: dict[tuple[int, int], str] = defaultdict(str)
    changed = False
    for row, message in enumerate(messages):
        exchange = message.operation.exchange
        if exchange is None or exchange.context is None:
            continue
        index = numbers.setdefault(exchange.context, len(numbers))
        if exchange.context not in begun or message.how == "missing":
            continue
        for rank, text in _after(message, held[message.dst, index], held[message.src, index]):
            if held[rank, index] != text:
                held[rank, index], changed = text, True
                state = f"context {index}: {text}" if text else ""
                change = Change(CONTEXTS, rank, index, state, _SHARES[text])
                walk.changes[row].append(change)
    if changed:
        walk.panels.append(StatePanel(CONTEXTS, lasting=True))
        numbered = "Contexts are numbered in the order of their first message"
        walk.notes.append(f"{numbered}; what is in them is inferred from the messages.")


def _from_the_first_on(trace: Trace, messages: Sequence[Message]) -> set[int]:
    """Return the contexts whose first request is among these; others have unknown contents."""
    exchanges = trace.whole.rpc.exchanges.table
    sent = np.flatnonzero((exchanges.context != NONE) & (exchanges.sent_ns != NONE))
    sent = sent[np.argsort(exchanges.sent_ns[sent], kind="stable")]
    known, first = np.unique(exchanges.context[sent], return_index=True)
    # Their requests: a reply alone does not count.
    requested = [message.operation.exchange for message in messages if not message.step]
    here = [exchange.number for exchange in requested if exchange is not None]
    return {*known[np.isin(sent[first], here)].tolist()}


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


def nodes(trace: Trace, messages: Sequence[Message], walk: WalkParts) -> None:
    """Add a step for each node of the contexts that these messages belong to."""
    known = {event.context for event in trace.of(AutogradNode)}
    parts, spans = program_parts(trace.whole), dict[int, str]()
    for message in messages:
        exchange = message.operation.exchange
        if exchange is not None and exchange.context in known and exchange.context not in spans:
            spans[exchange.context] = parts.span_of(message.operation)
    for context, span in spans.items():
        graph = join_graph(trace, context)
        if len(graph.nodes) > _MOST_NODES:
            too_large = f"A graph of {len(graph.nodes)} nodes is too large to be played"
            walk.notes.append(f"{too_large}: draw.autograd shows it.")
            continue
        for row, node in enumerate(graph.nodes):
            if node.start_ns is None:
                continue
            step = Step(
                rank=node.key.rank, at_ns=node.start_ns, until_ns=node.end_ns, mark=node.short,
                op="node", sentence=_node_sentence(node, trace), span=span, phase="backward",
                highlighted=(len(walk.graphs), row),
            )  # fmt: skip
            walk.steps.append(step)
        walk.graphs.append(graph)


def _node_sentence(node: Node, trace: Trace) -> str:
    who = trace.label(node.key.rank)
    seen = {"hook": "observed", "log": "observed in the agent's log"}
    known = seen.get(node.timed_by, "inferred from the next node")
    does = {
        "recv": ", which sends the gradient back to where the value came from",
        "send": ", which takes in the gradient of a value that was sent",
        "AccumulateGrad": f", which adds the gradient of {node.parameter or 'a parameter'} to its context",
    }
    return f"{who} runs {node.short}{does.get(node.short, '')} ({known})."
