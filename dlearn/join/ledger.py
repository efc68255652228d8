"""What each operation should have written to each connection, and between which two samples of the counters.

Gloo frames every message: 48 B tell the receiver that it comes and 48 B say what it is, both from the sender, and 48 B
come back when the receiver is ready. So what a rank writes to another is the payload of its messages, 96 B for each,
and 48 B for each that comes from there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from dlearn.join import gloo
from dlearn.join.joining import once, operations
from dlearn.join.rpc_messages import FRAMING_ERROR, UNKNOWN, wire_bytes
from dlearn.join.unrolling import messages_of, sums_of, why_unknown
from dlearn.join.wire import RPC, Edge, Meter, home, meters
from dlearn.trace.message import Message, Operation
from dlearn.trace.source import ServiceCall
from dlearn.trace.trace import Trace
from dlearn.trace.wording import Reason, ReasonKind

OperationKey = tuple[int, int]
"""Rank and number of an operation's first end."""
Stretch = tuple[int, int, int]
"""A rank, and its samples from which to which."""
Why = Literal["", "not predicted", "framing", "read early", "not written yet", "not seen"]
"""Where a residue comes from, if there is one: calls whose bytes are not predicted · the prediction of RPC's framing,
within its error · counters that were read while RPC's threads were writing · bytes that were written only after that,
or never · bytes that no recorded call accounts for."""


class WireBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the wire from one rank to another, framing included; `measured_bytes` is None where not known."""

    src: int
    dst: int
    predicted_bytes: int
    measured_bytes: int | None
    observer_bytes: int = 0
    """What the recorder itself adds: the ids behind the messages of RPC."""

    @property
    def residue_bytes(self) -> int | None:
        """Measured less predicted, and less what the recorder added."""
        if self.measured_bytes is None:
            return None
        return self.measured_bytes - self.predicted_bytes - self.observer_bytes


class Pair(WireBytes, frozen=True, kw_only=True):
    """Those on the connection of one process group, measured by the sender's counters; `why` they leave a residue."""

    group: str
    payload_bytes: int
    why: Why = ""

    @property
    def whose(self) -> str:
        """The name of its group, in a table."""
        return self.group or "none known"


class Written(NamedTuple):
    """Bytes that one rank writes to one connection: `predicted` on the wire, `observer` for the recorder itself."""

    edge: Edge
    payload: int
    predicted: int
    observer: int = 0


class _Entry(NamedTuple):
    """What one rank writes for one operation."""

    key: OperationKey
    name: str
    group: str
    rows: tuple[Written, ...]
    unexplained: Reason | None


@dataclass
class Ledger:
    """All that was written, and all that should have been."""

    meters: dict[int, Meter]
    ranks: set[int] = field(default_factory=set)
    entries: dict[tuple[int, int], list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    """By rank and section: the place between two samples."""
    outside: dict[int, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    """By rank: those that lie between no two samples."""

    def called(self, rank: int, first: int, last: int) -> set[OperationKey]:
        """The operations that this rank called between these two of its events."""
        meter = self.meters[rank]
        return {
            entry.key
            for section, (start, end) in enumerate(pairwise(meter.numbers))
            if first <= start and end <= last
            for entry in self.entries.get((rank, section), ())
        }

    @property
    def whole(self) -> list[Stretch]:
        """From the first sample of each rank to its last."""
        return [(rank, 0, len(meter.numbers) - 1) for rank, meter in self.meters.items()]

    def pairs(self, stretches: Iterable[Stretch]) -> tuple[list[Pair], Counter[Reason]]:
        """Each (rank, first sample, last sample) -> pairs of ranks, and why operations in there are not explained."""
        sums = _Sums()
        measured: Counter[tuple[int, Edge]] = Counter()
        not_measured: set[tuple[int, Edge]] = set()
        settled = True
        for rank, first, last in stretches:
            meter = self.meters[rank]
            settled &= bool(meter.still[first]) and bool(meter.still[last])
            for edge, grown in meter.between(first, last).items():
                measured[rank, edge] += grown
            for section in range(first, last):
                for entry in self.entries.get((rank, section), ()):
                    sums.add(entry, rank)
                    # Closed before the section's end: how much was written after the last sample nobody knows.
                    not_measured |= {
                        (rank, row.edge) for row in entry.rows if meter.known_until.get(row.edge, 0) <= section
                    }
        seen = sorted({key for key in (*sums.predicted, *measured) if sums.predicted[key] or measured[key]}, key=_order)
        pairs = [sums.pair(key, None if key in not_measured else measured[key], settled=settled) for key in seen]
        return pairs, sums.unexplained

    def unmeasured_pairs(self) -> list[Pair]:
        """What ranks without samples should have written."""
        sums = _Sums()
        for rank, entries in self.outside.items():
            for entry in entries if rank not in self.meters else ():
                sums.add(entry, rank)
        return [sums.pair(key, None) for key in sorted(sums.predicted, key=_order)]


@dataclass
class _Sums:
    """Entries added up, by sender and connection."""

    payload: Counter[tuple[int, Edge]] = field(default_factory=Counter)
    predicted: Counter[tuple[int, Edge]] = field(default_factory=Counter)
    observer: Counter[tuple[int, Edge]] = field(default_factory=Counter)
    unexplained: Counter[Reason] = field(default_factory=Counter)
    not_predicted: set[tuple[int, str]] = field(default_factory=set)
    """Ranks and groups with calls of which that is so."""
    message_count: Counter[tuple[int, Edge]] = field(default_factory=Counter)
    """Of RPC."""

    def add(self, entry: _Entry, rank: int) -> None:
        for edge, payload, predicted, observer in entry.rows:
            self.predicted[rank, edge] += predicted
            self.payload[rank, edge] += payload
            self.observer[rank, edge] += observer
            self.message_count[rank, edge] += 1
        if entry.unexplained is not None:
            self.unexplained[entry.unexplained] += 1
            self.not_predicted.add((rank, entry.group))

    def pair(self, key: tuple[int, Edge], measured: int | None, *, settled: bool = True) -> Pair:
        rank, (group, dst) = key
        pair = Pair(
            src=rank,
            dst=dst,
            group=group,
            payload_bytes=self.payload[key],
            predicted_bytes=self.predicted[key],
            observer_bytes=self.observer[key],
            measured_bytes=measured,
        )
        return msgspec.structs.replace(pair, why=self._why(key, pair.residue_bytes, settled))

    def _why(self, key: tuple[int, Edge], residue: int | None, settled: bool) -> Why:
        rank, (group, _) = key
        if not residue:
            return ""
        if (rank, group) in self.not_predicted:
            return "not predicted"
        if group == RPC and abs(residue) <= FRAMING_ERROR * self.message_count[key]:
            return "framing"
        if group == RPC and not settled:
            return "read early"
        return "not seen" if residue > 0 else "not written yet"


def _order(key: tuple[int, Edge]) -> tuple[str, int, int]:
    rank, (group, dst) = key
    return group, rank, dst


@once
def ledger_of(trace: Trace) -> Ledger:
    """What every operation of this trace should have written, by rank and section."""
    known = meters(trace)
    ledger = Ledger(known, ranks=set(trace.ranks))
    processes = {process.rank: process for process in trace.processes}
    for operation in operations(trace):
        if operation.exchange is not None:
            _enter_rpc(ledger, operation)
            continue
        if isinstance(operation.ends[0], ServiceCall):
            continue  # Its connections are no process group's, and not counted.
        payload, predicted, reason = _prediction(operation)
        ledger.ranks |= {rank for edge in predicted for rank in edge}
        for rank, numbers in _calls(operation).items():
            meter = known.get(rank)
            # The connections are those of the group as this rank's file calls it.
            group = home(processes[rank], (operation.steps or (operation,))[0].group.name)
            rows = tuple(
                Written((group, dst), payload[src, dst], size) for (src, dst), size in predicted.items() if src == rank
            )
            entry = _Entry(_key(operation), _name(operation), group, rows, reason)
            section = meter.section_of(numbers) if meter is not None else None
            if section is None:
                ledger.outside[rank].append(entry)
            else:
                ledger.entries[rank, section].append(entry)
    return ledger


def _enter_rpc(ledger: Ledger, operation: Operation) -> None:
    """A message of RPC is sent by threads of C++: it lies between two samples by its time."""
    for message in messages_of(operation):
        ledger.ranks |= {message.src, message.dst}
        if message.src == message.dst:
            continue  # It never leaves the process.
        size = wire_bytes(message)
        row = Written((RPC, message.dst), message.payload_bytes or 0, size or 0, message.observer_bytes)
        reason = _how_it_is_packed(message) if size is None else None
        entry = _Entry(_key(operation), f"{message.op} #{operation.seq}", RPC, (row,), reason)
        meter = ledger.meters.get(message.src)
        section = meter.section_at(message.sent_ns) if meter is not None and message.sent_ns is not None else None
        if section is None or (meter is not None and section < meter.known_from):
            ledger.outside[message.src].append(entry)
        else:
            ledger.entries[message.src, section].append(entry)


def predicted_on_the_wire(operation: Operation) -> tuple[Counter[tuple[int, int]], Reason | None]:
    """Bytes with framing for each (src, dst), and why some are not known; what a rank sends itself never leaves it."""
    if operation.exchange is None:
        _, predicted, reason = _prediction(operation)
        return predicted, reason
    predicted, reason = Counter(), why_unknown(operation)
    for message in messages_of(operation):
        size = wire_bytes(message)
        if message.src == message.dst:
            continue
        if size is None:
            reason = _how_it_is_packed(message)
        else:
            predicted[message.src, message.dst] += size
    return predicted, reason


def _how_it_is_packed(message: Message) -> Reason:
    if message.op == UNKNOWN:
        return Reason(ReasonKind.KIND_UNKNOWN)
    return Reason.of(ReasonKind.PACKED_BY_CPP, message.op)


def _prediction(operation: Operation) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]], Reason | None]:
    """Payload and bytes on the wire for each (src, dst), or why they are not known."""
    payload: Counter[tuple[int, int]] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    sums = sums_of(operation)
    backend = (operation.steps or (operation,))[0].group.backend
    reason = None if sums else why_unknown(operation)
    if reason is None and backend != "gloo":
        reason = Reason.of(ReasonKind.FRAMING, backend)
    elif any(pair.how == "missing" for pair in sums):
        reason = Reason(ReasonKind.NEVER_CAME)
    if reason is not None:
        return payload, counts, reason
    for pair in sums:
        payload[pair.src, pair.dst] += pair.payload_bytes or 0  # Of no message over gloo it is unknown.
        counts[pair.src, pair.dst] += pair.message_count
    return payload, gloo.wire_bytes(payload, counts), None


def _calls(operation: Operation) -> dict[int, int]:
    """Rank -> the number of its call."""
    return {end.rank: end.number for end in operation.ends}


def _key(operation: Operation) -> OperationKey:
    first = operation.ends[0]
    return first.rank, first.number


def _name(operation: Operation) -> str:
    if operation.sender is not None and operation.receiver is not None:
        return f"{operation.op} #{operation.seq} (rank {operation.sender} to rank {operation.receiver})"
    site = operation.ends[0].site
    return f"{operation.op} #{operation.seq}{f' ({site})' if site else ''}"


# Agreement ------------------------------------------------------------------------------------------------------------


def confirmed(operation: Operation, trace: Trace) -> frozenset[tuple[int, int]]:
    """The (src, dst) whose bytes of this operation the sender's counters confirm."""
    return _agreements(trace.whole).get(_key(operation), frozenset())


@once
def _agreements(whole: Trace) -> dict[OperationKey, frozenset[tuple[int, int]]]:
    """Where counters and predictions agree: in the shortest stretch around an operation, else in the whole.

    Asked of the whole trace: a selection has fewer samples.
    """
    if not meters(whole):
        return {}
    ledger = ledger_of(whole)
    overall = _exact_edges(ledger, ledger.whole)
    found: dict[OperationKey, set[tuple[int, int]]] = defaultdict(set)
    for (rank, section), entries in ledger.entries.items():
        exact = _exact_edges(ledger, [(rank, section, section + 1)]) | overall
        for entry in entries:
            found[entry.key] |= {(rank, dst) for (_, dst), *_ in entry.rows if (rank, dst) in exact}
    return {key: frozenset(edges) for key, edges in found.items()}


def _exact_edges(ledger: Ledger, stretches: Iterable[Stretch]) -> set[tuple[int, int]]:
    """The (src, dst) that are explained to the byte within these stretches of the ranks' samples."""
    pairs, _ = ledger.pairs(stretches)
    by_edge: dict[tuple[int, int], list[int | None]] = defaultdict(list)
    for pair in pairs:
        by_edge[pair.src, pair.dst].append(pair.residue_bytes)
    return {edge for edge, residues in by_edge.items() if set(residues) == {0}}


def counted_together(trace: Trace, ledger: Ledger) -> str:
    """Who sent what for operations that are not in this part of a trace between its samples; empty where nobody did."""
    if trace.selected_from is None:
        return ""
    everything = ledger_of(trace.whole)
    for rank, meter in ledger.meters.items():
        first, last = meter.numbers[0], meter.numbers[-1]
        if everything.called(rank, first, last) - ledger.called(rank, first, last):
            return f"what {trace.label(rank)} sent for other operations was counted with it"
    return ""
