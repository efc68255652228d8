"""What each operation should have written to each connection, between which two samples."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dlearn.events.event import RPC
from dlearn.events.event_table import NONE, Column, Rows
from dlearn.events.source import ServiceCall
from dlearn.join import gloo
from dlearn.join.columns import is_new
from dlearn.join.joining import operations
from dlearn.join.operation_messages import messages_of, sums_of, times_of_calls, why_unknown
from dlearn.join.rpc_messages import FRAMING_ERROR, UNKNOWN, wire_bytes
from dlearn.join.selection import Selection, once
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.join.wire import Edge, Meter, meters, outer_group
from dlearn.join.wording import Reason, ReasonKind

Counted = tuple["LedgerRow", int]  # A row, and how often it is there.
Connection = tuple[int, Edge]  # A rank, and the connection into which it writes.
SampleRange = tuple[int, int, int]  # A rank, and its samples from which to which.
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
    observer_bytes: int = 0  # What the recorder itself adds: the ids behind the messages of RPC.

    @property
    def residue_bytes(self) -> int | None:
        """Return measured less predicted bytes, and less what the recorder added."""
        if self.measured_bytes is None:
            return None
        return self.measured_bytes - self.predicted_bytes - self.observer_bytes


class Pair(WireBytes, frozen=True, kw_only=True):
    """Those on the connection of one process group, measured by the sender's counters; `why` they leave a residue."""

    group: str
    payload_bytes: int
    why: Why = ""


class Written(NamedTuple):
    """Bytes that one rank writes to one connection: `predicted` on the wire, `observer` for the recorder itself."""

    edge: Edge
    payload: int
    predicted: int
    observer: int = 0


class LedgerRow(NamedTuple):
    """What `rank` writes for an operation, or all like it; `unexplained`: why that is not known."""

    rank: int
    group: str
    rows: tuple[Written, ...]
    unexplained: Reason | None
    kind: str = ""  # Of a message of RPC: a request has a row, and a reply.


@dataclass(frozen=True, eq=False)
class Entries:
    """Who has written for which operation: place i of each column is of one call, ordered by rank and section.

    `cell` is a place in `cells`, `section` the place between two samples of the rank's meter; -1: between none.
    """

    cells: list[LedgerRow]
    cell: Rows
    operation: Rows
    rank: Rows
    section: Rows

    def between(self, rank: int, first: int, last: int) -> slice:
        """Return the entries of this rank from sample `first` to sample `last`."""
        lower, upper = np.searchsorted(self.rank, [rank, rank + 1])
        mine = self.section[lower:upper]
        return slice(lower + int(np.searchsorted(mine, first)), lower + int(np.searchsorted(mine, last)))

    def sections(self) -> Iterator[tuple[int, int, slice]]:
        """Yield rank and section of each that holds any, and where its entries stand."""
        new = np.flatnonzero(is_new(self.rank, self.section))
        for begin, end in pairwise([*new.tolist(), len(self.rank)]):
            if self.section[begin] >= 0:
                yield int(self.rank[begin]), int(self.section[begin]), slice(begin, end)

    def outside(self) -> list[Counted]:
        """Return what lies between no two samples, and how often it is there."""
        cells = Counter(self.cell[self.section < 0].tolist())
        return [(self.cells[cell], times) for cell, times in cells.items()]


@dataclass(frozen=True, eq=False)
class Ledger:
    """All that was written, and all that should have been."""

    meters: dict[int, Meter]
    operations: Operations
    entries: Entries

    def called(self, rank: int, first: int, last: int) -> set[int]:
        """Return the operations, as rows, that this rank called between these two of its events."""
        begin, end = np.searchsorted(self.meters[rank].numbers, [first, last + 1])
        part = self.entries.between(rank, int(begin), int(end) - 1)
        return set(self.operations.rows[self.entries.operation[part]].tolist())

    @property
    def whole(self) -> list[SampleRange]:
        return [(rank, 0, len(meter.numbers) - 1) for rank, meter in self.meters.items()]

    def pairs(self, ranges: Iterable[SampleRange]) -> tuple[list[Pair], Counter[Reason]]:
        """Return the pairs of ranks in these ranges of samples, and why operations in them are not explained."""
        cells: list[Counted] = []
        grown: Counter[Connection] = Counter()
        not_measured: set[Connection] = set()
        unexplained: Counter[Reason] = Counter()
        settled = True
        for rank, first, last in ranges:
            meter, part = self.meters[rank], self.entries.between(rank, first, last)
            settled &= bool(meter.still[first]) and bool(meter.still[last])
            sizes = meter.between(first, last)
            grown.update({(rank, edge): size for edge, size in sizes.items()})
            # Entries stand in the order of sections: the last one of a cell is in the latest section.
            numbers, sections = self.entries.cell[part], self.entries.section[part].tolist()
            latest = dict(zip(numbers.tolist(), sections, strict=True))
            for number, times in Counter(numbers.tolist()).items():
                cell = self.entries.cells[number]
                cells.append((cell, times))
                if cell.unexplained is not None:
                    unexplained[cell.unexplained] += times
                for edge in [row.edge for row in cell.rows]:
                    # Closed before the section's end: what was written after the last sample is not known.
                    if meter.known_until.get(edge, 0) <= latest[number]:
                        not_measured.add((rank, edge))
        pairs = _pairs(cells, {**grown, **dict.fromkeys(not_measured)}, settled=settled)
        return [each for each in pairs if each.predicted_bytes or grown[each.src, (each.group, each.dst)]], unexplained

    def unmeasured_pairs(self) -> list[Pair]:
        """Return what ranks without samples should have written."""
        return _pairs([each for each in self.entries.outside() if each[0].rank not in self.meters], {}, settled=True)


def _pairs(cells: Iterable[Counted], measured: Mapping[Connection, int | None], *, settled: bool) -> list[Pair]:
    """Return what cells, each so many times, and counters say of each connection."""
    written: dict[Connection, list[tuple[Written, int]]] = {at: [] for at, size in measured.items() if size}
    not_predicted = set()
    for cell, times in cells:
        for row in cell.rows:
            written.setdefault((cell.rank, row.edge), []).append((row, times))
        if cell.unexplained is not None:
            not_predicted.add((cell.rank, cell.group))
    pairs = []
    for (rank, (group, dst)), rows in written.items():
        pair = Pair(
            src=rank,
            dst=dst,
            group=group,
            payload_bytes=sum([times * row.payload for row, times in rows]),
            predicted_bytes=sum([times * row.predicted for row, times in rows]),
            observer_bytes=sum([times * row.observer for row, times in rows]),
            measured_bytes=measured.get((rank, (group, dst))),
        )
        why = _why(pair, sum([times for _, times in rows]), (rank, group) not in not_predicted, settled)
        pairs.append(msgspec.structs.replace(pair, why=why))
    return sorted(pairs, key=lambda pair: (pair.group, pair.src, pair.dst))


def _why(pair: Pair, message_count: int, is_predicted: bool, settled: bool) -> Why:
    """Return where a residue comes from; `message_count` is that of RPC."""
    residue = pair.residue_bytes
    if not residue:
        return ""
    if not is_predicted:
        return "not predicted"
    if pair.group == RPC and abs(residue) <= FRAMING_ERROR * message_count:
        return "framing"
    if pair.group == RPC and not settled:
        return "read early"
    return "not seen" if residue > 0 else "not written yet"


@once
def ledger_of(trace: Selection) -> Ledger:
    """Return what every operation of this trace should have written, by rank and section."""
    asked, known = operations(trace), meters(trace)
    processes = {process.rank: process for process in trace.processes}
    cells: list[LedgerRow] = []
    columns = [(np.empty(0, np.intp), np.empty(0, np.intp))]
    sent_ns = times_of_calls(asked)[:, :, 0]
    for one, places in asked.groups():
        if one.exchange is not None:
            for message in messages_of(one):
                if message.src != message.dst:
                    cells.append(_of_rpc(message))
                    columns.append((places, _sections_at(known.get(message.src), sent_ns[places, message.step])))
            continue
        if isinstance(one.ends[0], ServiceCall):
            continue  # Its connections are no process group's, and not counted.
        payload, predicted, reason = _prediction(one)
        numbers = asked.table.events.number[asked.table.end_rows(asked.rows[places])]
        for rank, column in {end.rank: column for column, end in enumerate(one.ends)}.items():
            # The connections are those of the group as this rank's file calls it.
            group = outer_group(processes[rank], (one.steps or (one,))[0].group.name)
            sizes = [(dst, payload[src, dst], size) for (src, dst), size in predicted.items() if src == rank]
            cells.append(LedgerRow(rank, group, tuple(Written((group, dst), *both) for dst, *both in sizes), reason))
            samples = known[rank].numbers if rank in known else ()
            columns.append((places, _sections(samples, numbers[:, column])))
    called, sections = map(np.concatenate, zip(*columns, strict=True))
    numbers = np.repeat(np.arange(-1, len(cells)), [len(places) for places, _ in columns])
    ranks = np.array([each.rank for each in cells], np.intp)[numbers]
    order = np.lexsort((called, sections, ranks))
    entries = Entries(cells, numbers[order], called[order], ranks[order], sections[order])
    return Ledger(known, asked, entries)


def _sections(samples: Sequence[int], events: np.ndarray) -> np.ndarray:
    """Return between which samples each event lies: 0 is between the first two, -1 outside."""
    after = np.searchsorted(samples, events)
    return np.where(after < len(samples), after - 1, -1)


def _sections_at(meter: Meter | None, sent_ns: Column) -> Rows:
    """Return the section of each message of RPC by its time, as threads of C++ send it."""
    if meter is None:
        return np.full(len(sent_ns), -1)
    before = np.searchsorted(meter.times_ns, sent_ns) - 1
    inside = (before >= meter.known_from) & (before < len(meter.times_ns) - 1)
    return np.where(inside & (sent_ns != NONE), before, -1)


def _of_rpc(message: Message) -> LedgerRow:
    """Return the cell of a message of RPC, unless it is to its own rank: that stays in the process."""
    size = wire_bytes(message)
    row = Written((RPC, message.dst), message.payload_bytes or 0, size or 0, message.observer_bytes)
    reason = None
    if size is None:
        unknown = message.op == UNKNOWN
        reason = Reason(ReasonKind.KIND_UNKNOWN) if unknown else Reason.of(ReasonKind.PACKED_BY_CPP, message.op)
    return LedgerRow(message.src, RPC, (row,), reason, message.op)


def predicted_on_the_wire(operation: Operation) -> tuple[Counter[tuple[int, int]], Reason | None]:
    """Return the bytes with framing for each (src, dst), and why some are not known."""
    if operation.exchange is None:
        _, predicted, reason = _prediction(operation)
        return predicted, reason
    predicted, reason = Counter(), why_unknown(operation)
    for cell in [_of_rpc(each) for each in messages_of(operation) if each.src != each.dst]:
        reason = cell.unexplained or reason
        predicted.update({(cell.rank, row.edge[1]): row.predicted for row in cell.rows if row.predicted})
    return predicted, reason


def _prediction(operation: Operation) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]], Reason | None]:
    """Return payload and bytes on the wire for each (src, dst), or why they are not known."""
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
        return Counter(), Counter(), reason
    for pair in sums:
        payload[pair.src, pair.dst] += pair.payload_bytes or 0  # Of no message over gloo it is unknown.
        counts[pair.src, pair.dst] += pair.message_count
    return payload, gloo.framed_bytes(payload, counts), None


def name_of(operation: Operation, cell: LedgerRow) -> str:
    """Return what is written there, in words: "all_reduce #3 (train.py:14)"."""
    if cell.kind:
        return f"{cell.kind} #{operation.seq}"
    if operation.sender is not None and operation.receiver is not None:
        return f"{operation.op} #{operation.seq} (rank {operation.sender} to rank {operation.receiver})"
    name, site = f"{operation.op} #{operation.seq}", operation.ends[0].site
    return f"{name} ({site})" if site else name


def counted_together(trace: Selection, ledger: Ledger) -> str:
    """Say whose bytes for operations outside this part of a trace lie between its samples; "" where there are none."""
    if trace.selected_from is None:
        return ""
    everything = ledger_of(trace.whole)
    for rank, meter in ledger.meters.items():
        first, last = meter.numbers[0], meter.numbers[-1]
        if everything.called(rank, first, last) - ledger.called(rank, first, last):
            return f"what {trace.label(rank)} sent for other operations was counted with it"
    return ""
