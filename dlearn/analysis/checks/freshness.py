"""Is what travels new? Checksums show a ring that sends zeros, or the same chunk again.

Messages are replayed in a possible order, with what each rank had sent, received, and heard of.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dlearn.analysis.checks.grading import Unit, units
from dlearn.analysis.replay.tensor_chunks import Moments, replay
from dlearn.diagnosis.hang_report import call_text
from dlearn.errors import TrafficError
from dlearn.events.event import PointToPoint
from dlearn.join.ends import bytes_of
from dlearn.join.tables.operation_table import Operation
from dlearn.trace import Trace

_MOST_ZEROS = 1 << 30
"""Bytes of a message that are compared with zeros: a damaged trace may claim any size."""

Data = tuple[int, int]
"""Size and checksum. Equal ones are taken for the same data: by chance, one pair in 4 billion."""


def assert_fresh(trace: Trace, *, op: str | None = None) -> None:
    """Raise TrafficError unless every message brings its receiver something that it did not have.

    True of every good algorithm on data that are random, and others on each rank; ones everywhere
    look stale. Flags a message of zeros, and one whose data the receiver has received or sent
    before: a stale chunk, or a sum to which nothing was added.

    `op` selects as in `assert_traffic`, and the part should hold one run of an exercise: a second
    one on the same data is stale. Needs `record(checksums=True)`, and sends: those of an algorithm
    written by hand or of a glass-box collective. Gloo's own collectives are passed over.

    Not seen: a wrong sum of data that are new (of two ranks, even a ring that sends only what it
    had at first), and what a rank does with what it received last. Compare the results, too.
    """
    for unit, messages in _sent(trace, op):
        had: dict[tuple[int, Data], str] = {}
        for sent, arrives in _replayed(messages):
            src, dst, call = trace.label(sent.src), trace.label(sent.dst), call_text(sent.send)
            if not arrives and _is_zeros(sent.data):
                zeros = f"{sent.data[0]:,} B of zeros"
                raise TrafficError(f"{src} sends {dst} {zeros}, in {call}{unit.where}")
            if not arrives:
                had.setdefault((sent.src, sent.data), f"{src} has sent the same to {dst} in {call}")
            elif (sent.dst, sent.data) in had:
                stale = f"{src} sends {dst} {sent.data[0]:,} B of stale data, in {call}{unit.where}"
                raise TrafficError(f"{stale}: {had[sent.dst, sent.data]}")
            else:
                had[sent.dst, sent.data] = f"{dst} has received the same from {src} in {call}"


def assert_reduces(trace: Trace, *, op: str | None = None) -> None:
    """Raise TrafficError where a rank passes on, unchanged, what is not yet the sum of all.

    In an all-reduce or reduce only the complete sum is passed on as it is; to any other the rank
    adds its own part. A sum is not complete if the rank that sent it first cannot have heard from
    all others by then. (A maximum may stay what it was: use sums.) Of several runs only the first
    is judged. All else as in `assert_fresh`.
    """
    for unit, messages in _sent(trace, op):
        heard: dict[int, set[int]] = {rank: {rank} for rank in unit.members}
        known: dict[Sent, frozenset[int]] = {}
        received: dict[tuple[int, Data], Sent] = {}
        parts: dict[Data, frozenset[int]] = {}
        for sent, arrives in _replayed(messages):
            if arrives:
                heard[sent.dst] |= known[sent]
                received.setdefault((sent.dst, sent.data), sent)
                continue
            known[sent] = frozenset(heard[sent.src])
            first = received.get((sent.src, sent.data))
            if first is None:
                parts.setdefault(sent.data, known[sent])
                continue
            absent = set(unit.members) - parts[sent.data]
            if absent:
                raise TrafficError(
                    f"{trace.label(sent.src)} passes on {sent.data[0]:,} B to"
                    f" {trace.label(sent.dst)} unchanged, in {call_text(sent.send)}{unit.where}:"
                    f" they came from {trace.label(first.src)}, and"
                    f" {trace.label(min(absent))}'s part cannot be in them yet"
                )


@dataclass(frozen=True, eq=False)
class Sent:
    """A message whose data can be compared with those of others."""

    src: int
    dst: int
    send: PointToPoint
    recv: PointToPoint
    data: Data


def _sent(trace: Trace, op: str | None) -> list[tuple[Unit, list[Sent]]]:
    """Select what has sends by `op`, each with its messages that hold any data."""
    sent = []
    selected = units(trace, op)
    for unit in selected:
        steps = [step for each in unit.operations for step in (each.steps or (each,))]
        sends = [step for step in steps if step.sender is not None]
        if sends:
            sent.append((unit, [_message(send, trace) for send in sends if send.payload_bytes]))
    if not sent:
        name = selected[0].operations[0].op
        why = "its messages travel inside the backend, as no sends"
        raise TrafficError(f"no data of {name} can be compared: {why}")
    return sent


def _message(operation: Operation, trace: Trace) -> Sent:
    send, recv = operation.ends
    assert isinstance(send, PointToPoint)
    assert isinstance(recv, PointToPoint)
    if send.checksum is None:
        noted = f"{trace.label(send.rank)} has noted no checksum of {call_text(send)}"
        raise TrafficError(f"{noted}: record with `checksums=True`")
    if recv.end_ns is None:
        raise TrafficError(f"{trace.label(recv.rank)} never waits for its {call_text(recv)}")
    return Sent(send.rank, recv.rank, send, recv, (bytes_of(send.tensors), send.checksum))


def _replayed(messages: Sequence[Sent]) -> Iterator[tuple[Sent, bool]]:
    """Yield each message twice, when it leaves (False) and arrives (True), without any clock."""
    moments: list[Moments] = []
    for sent in messages:
        leaves = sent.send.start_ns, sent.send.number
        arrival = sent.recv.end_ns or 0, sent.recv.number
        moments.append((sent.src, leaves, sent.dst, arrival))
    left: set[int] = set()
    for index, arrives in replay(moments):
        if arrives and index not in left:
            early = call_text(messages[index].recv)
            raise TrafficError(f"{early} ended before its data were sent: a damaged trace")
        left.add(index)
        yield messages[index], arrives


@lru_cache
def _is_zeros(data: Data) -> bool:
    size, checksum = data
    return size <= _MOST_ZEROS and checksum == zlib.crc32(bytes(size))
