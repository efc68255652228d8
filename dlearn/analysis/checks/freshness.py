"""Is what travels new? Bytes alone cannot show a ring that sends zeros, or the same chunk again; checksums can.

The messages are replayed, in an order in which they can have happened, and with them what each rank knew: which data it
had sent or received, and which ranks it had heard of.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dlearn.analysis.checks.grading import Unit, units
from dlearn.analysis.hanging.hang_words import call_text
from dlearn.analysis.walking.pieces import replay
from dlearn.errors import TrafficError
from dlearn.trace.event import PointToPoint
from dlearn.trace.message import Operation
from dlearn.trace.trace import Trace

_MOST_ZEROS = 1 << 30
"""Bytes of a message of which it is asked whether they are zeros: a damaged trace may claim any size."""


def assert_fresh(trace: Trace, *, op: str | None = None) -> None:
    """Raise TrafficError unless every message brings its receiver something that it did not have yet.

    True of every good algorithm on data that are random, and others on each rank; ones everywhere look stale. Flags a
    message of zeros, and one whose data the receiver has received or sent before: a stale chunk, or a sum to which
    nothing was added.

    `op` selects as in `assert_traffic`, and the part should hold one run of an exercise: a second one on the same data
    is stale. Needs `record(checksums=True)`, and sends: those of a hand-written algorithm or of a glass-box collective.
    Gloo's own collectives are passed over.

    Not seen: a wrong sum of data that are new (of two ranks, even a ring that sends nothing but what it had at first),
    and what a rank does with what it received last. Compare the results, too.
    """
    for unit, messages in _sent(trace, op):
        had: dict[int, dict[_Data, str]] = defaultdict(dict)
        for sent, arrives in _replayed(messages):
            src, dst, call = trace.label(sent.src), trace.label(sent.dst), call_text(sent.send)
            if not arrives:
                if sent.data.size <= _MOST_ZEROS and sent.data.checksum == _checksum_of_zeros(sent.data.size):
                    raise TrafficError(f"{src} sends {dst} {sent.data.size:,} B of zeros, in {call}{unit.where}")
                had[sent.src].setdefault(sent.data, f"{src} has sent the same to {dst} in {call}")
            elif sent.data in had[sent.dst]:
                raise TrafficError(
                    f"{src} sends {dst} {sent.data.size:,} B of stale data, in {call}{unit.where}:"
                    f" {had[sent.dst][sent.data]}"
                )
            else:
                had[sent.dst][sent.data] = f"{dst} has received the same from {src} in {call}"


def assert_reduces(trace: Trace, *, op: str | None = None) -> None:
    """Raise TrafficError where a rank of an all-reduce or reduce passes on, unchanged, what is not yet the sum of all.

    Only the complete sum is passed on as it is; to any other the rank adds its own part. A sum is not complete if the
    rank that sent it first cannot have heard from all others by then. (A maximum may stay what it was: use sums.) Of
    several runs only the first is judged. All else as in `assert_fresh`.
    """
    for unit, messages in _sent(trace, op):
        heard: dict[int, set[int]] = {rank: {rank} for rank in unit.members}
        told: dict[Sent, frozenset[int]] = {}
        received: dict[int, dict[_Data, Sent]] = defaultdict(dict)
        parts: dict[_Data, frozenset[int]] = {}
        for sent, arrives in _replayed(messages):
            if arrives:
                heard[sent.dst] |= told[sent]
                received[sent.dst].setdefault(sent.data, sent)
                continue
            told[sent] = frozenset(heard[sent.src])
            first = received[sent.src].get(sent.data)
            if first is None:
                parts.setdefault(sent.data, told[sent])
            elif parts[sent.data] != set(unit.members):
                absent = min(set(unit.members) - parts[sent.data])
                raise TrafficError(
                    f"{trace.label(sent.src)} passes on {sent.data.size:,} B to {trace.label(sent.dst)} unchanged, in"
                    f" {call_text(sent.send)}{unit.where}: they came from {trace.label(first.src)}, and"
                    f" {trace.label(absent)}'s part cannot be in them yet"
                )


# The messages, and their replay ---------------------------------------------------------------------------------------


class _Data(NamedTuple):
    """Data of the same size and checksum are taken for the same: by chance, one pair in four billion is not."""

    size: int
    checksum: int


@dataclass(frozen=True, eq=False)
class Sent:
    """A message whose data can be compared."""

    src: int
    dst: int
    send: PointToPoint
    recv: PointToPoint
    data: _Data


def _sent(trace: Trace, op: str | None) -> list[tuple[Unit, list[Sent]]]:
    """What `op` selects of which the sends are known, each with its messages that hold any data."""
    found = []
    selected = units(trace, op)
    for unit in selected:
        sends = [step for each in unit.operations for step in (each.steps or (each,)) if step.sender is not None]
        if sends:
            found.append((unit, [_message(each, trace) for each in sends if _size(each)]))
    if not found:
        name = selected[0].operations[0].op
        raise TrafficError(f"no data of {name} can be compared: its messages travel inside the backend, as no sends")
    return found


def _size(send: Operation) -> int:
    end = send.ends[0]
    return sum(each.payload_bytes for each in end.tensors) if isinstance(end, PointToPoint) else 0


def _message(operation: Operation, trace: Trace) -> Sent:
    send, recv = operation.ends
    assert isinstance(send, PointToPoint)
    assert isinstance(recv, PointToPoint)
    if send.checksum is None:
        raise TrafficError(
            f"{trace.label(send.rank)} has noted no checksum of {call_text(send)}: record with `checksums=True`"
        )
    if recv.end_ns is None:
        raise TrafficError(f"{trace.label(recv.rank)} never waits for its {call_text(recv)}")
    return Sent(send.rank, recv.rank, send, recv, _Data(_size(operation), send.checksum))


def _replayed(messages: Sequence[Sent]) -> Iterator[tuple[Sent, bool]]:
    """Yield each message twice: when it leaves (False), and when it has arrived (True). Clocks are not compared."""
    own: dict[int, list[tuple[tuple[int, ...], int, bool]]] = defaultdict(list)
    for place, sent in enumerate(messages):
        own[sent.src].append(((sent.send.start_ns, sent.send.number), place, False))
        own[sent.dst].append(((sent.recv.end_ns or 0, sent.recv.number), place, True))
    left: set[int] = set()
    for place, arrives in replay(own):
        if arrives and place not in left:
            raise TrafficError(f"{call_text(messages[place].recv)} ended before its data were sent: a damaged trace")
        left.add(place)
        yield messages[place], arrives


@lru_cache
def _checksum_of_zeros(size: int) -> int:
    return zlib.crc32(bytes(size))
