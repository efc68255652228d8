"""Bytes from each rank to each other rank: payload, and on the wire."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Literal

from dlearn.errors import optional
from dlearn.join.ends import How, payload_bytes
from dlearn.join.joining import operations
from dlearn.join.ledger import counted_together, ledger_of, predicted_on_the_wire
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.join.wire import why_not_measured
from dlearn.join.wording import Reason
from dlearn.shown import Paragraph, RankNames, Result, Table, count_text
from dlearn.trace import Trace

if TYPE_CHECKING:
    import pandas

Edge = tuple[int, int]  # Sender and receiver.
_COLUMNS = 16
_PAIRS_SHOWN = 40


class Matrix(Result, frozen=True):
    """Bytes of any kind by (sender, receiver), as a table."""

    ranks: tuple[int, ...]
    labels: RankNames

    @property
    def sizes(self) -> dict[Edge, int]:
        raise NotImplementedError

    def not_known(self) -> Iterator[str]:
        """Say what the numbers leave out, a sentence each."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def bytes_from(self, *, rank: int) -> int:
        return sum(size for (src, _), size in self.sizes.items() if src == rank)

    def bytes_to(self, *, rank: int) -> int:
        return sum(size for (_, dst), size in self.sizes.items() if dst == rank)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each pair of ranks between which bytes are known."""
        for (src, dst), size in self.sizes.items():
            yield {"src": self.labels[src], "dst": self.labels[dst], "bytes": size}

    def to_frame(self) -> pandas.DataFrame:
        """Return bytes with senders as rows and receivers as columns (needs pandas)."""
        pandas = optional("pandas", needed_by="to_frame")
        names = [self.labels[rank] for rank in self.ranks]
        rows = []
        for src in self.ranks:
            rows.append([self.sizes.get((src, dst), 0) for dst in self.ranks])
        return pandas.DataFrame(rows, index=pandas.Index(names, name="from"), columns=pandas.Index(names, name="to"))

    def rows(self) -> list[list[str]]:
        """Return a head and a row per sender; of many ranks, the pairs that sent most."""
        if len(self.ranks) > _COLUMNS:
            return self._pair_rows()
        names = [self.labels[rank] for rank in self.ranks]
        table = [["bytes from \\ to", *names, "sent in all"]]
        for name, src in zip(names, self.ranks, strict=True):
            row = [name]
            for dst in self.ranks:
                size = self.sizes.get((src, dst), None if src == dst else 0)
                row.append("." if size is None else f"{size:,}")
            table.append([*row, f"{self.bytes_from(rank=src):,}"])
        return table

    def _pair_rows(self) -> list[list[str]]:
        pairs = sorted(self.sizes.items(), key=lambda pair: (-pair[1], pair[0]))
        table = [["from", "to", "bytes"]]
        for (src, dst), size in pairs[:_PAIRS_SHOWN]:
            table.append([self.labels[src], self.labels[dst], f"{size:,}"])
        if len(pairs) > _PAIRS_SHOWN:
            rest = sum(size for _, size in pairs[_PAIRS_SHOWN:])
            table.append([f"{len(pairs) - _PAIRS_SHOWN:,} more pairs", "", f"{rest:,}"])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        return Table(self.rows()), *self.not_known()


class Traffic(Matrix, frozen=True):
    """Payload bytes and messages by (sender, receiver), leaves only.

    `by_how` splits the bytes: observed, derived, ... Messages that never came are counted there and in
    `never_came`, not in `payload_bytes`. `known` lists how the bytes of a pair are known, most of them
    first; `ops` names the op of most of them. `unexplained` counts the operations whose messages are
    not known, `unsized` the messages of unknown size. `reduced_bytes` is what each rank hands to the
    all-reduces, where nothing else was asked for; else 0. `derived_from` names the backends whose
    algorithms give derived bytes.
    """

    payload_bytes: dict[Edge, int]
    message_count: dict[Edge, int]
    by_how: dict[str, int]
    known: dict[Edge, tuple[How, ...]]
    never_came: dict[Edge, int]
    ops: dict[Edge, str]
    unexplained: int
    unsized: int = 0
    reduced_bytes: int = 0
    derived_from: str = ""

    @property
    def sizes(self) -> dict[Edge, int]:
        return self.payload_bytes

    def not_known(self) -> Iterator[str]:
        if self.unexplained:
            asked = count_text(self.unexplained, "operation")
            yield f"not counted: {asked} whose messages are not known"
        if self.unsized:
            yield f"not counted: {count_text(self.unsized, 'message')} whose size is not known"


class WireTraffic(Matrix, frozen=True):
    """Bytes on the wire by (sender, receiver), framing included: all of them predicted, or all of them measured.

    `not_predicted` counts the operations that are not in them, by reason. `not_measured` says why the kernel's
    counters do not give the bytes of exactly this part of the trace; `wire_bytes` is empty then. `observer_bytes` of
    them are what the recorder adds; a prediction leaves these out.
    """

    counted: Literal["predicted", "measured"]
    wire_bytes: dict[Edge, int]
    not_predicted: dict[Reason, int]
    not_measured: str = ""
    observer_bytes: int = 0

    @property
    def sizes(self) -> dict[Edge, int]:
        return self.wire_bytes

    def not_known(self) -> Iterator[str]:
        for reason, count in self.not_predicted.items():
            yield f"not counted: {count_text(count, 'operation')}: {reason}"
        if self.not_measured:
            yield f"not measured: {self.not_measured}"


@once
def traffic(trace: Trace) -> Traffic:
    """Sum up the payload bytes from each rank to each other rank."""
    return traffic_of(operations(trace), trace)


def traffic_of(asked: Iterable[Operation], trace: Trace) -> Traffic:
    """Sum up the payload of these operations of `trace` alone."""
    counted = asked.group_sizes() if isinstance(asked, Operations) else [(each, 1) for each in asked]
    sizes: Counter[Edge] = Counter()
    counts: Counter[Edge] = Counter()
    by_how: Counter[str] = Counter()
    by_edge_and_how: defaultdict[Edge, Counter[How]] = defaultdict(Counter)
    by_edge_and_op: defaultdict[Edge, Counter[str]] = defaultdict(Counter)
    never_came: Counter[Edge] = Counter()
    unexplained = unsized = 0
    backends: set[str] = set()
    for one, times in counted:
        found = sums_of(one)
        unexplained += times * (not found and why_unknown(one) is not None)
        for src, dst, how, known_size, count in found:
            size, edge = times * (known_size or 0), (src, dst)
            unsized += times * count * (known_size is None)
            by_how[how] += size
            if how == "missing":
                never_came[edge] += size
                continue
            if how == "derived":
                backends.add(one.group.backend)
            sizes[edge] += size
            counts[edge] += times * count
            # Messages without data weigh by their number.
            by_edge_and_how[edge][how] += size or times * count
            by_edge_and_op[edge][one.op] += size or times * count
    known = {edge: tuple(dict(hows.most_common())) for edge, hows in by_edge_and_how.items()}
    ops = {edge: weights.most_common(1)[0][0] for edge, weights in by_edge_and_op.items()}
    by_edge = dict(sizes), dict(counts), dict(by_how), known, dict(never_came), ops
    not_known, backend = (unexplained, unsized), " and ".join(sorted(backends))
    ranks, reduced_bytes = _ranks(trace, sizes), _reduced_bytes(counted)
    return Traffic(ranks, trace.labels, *by_edge, *not_known, reduced_bytes, backend)


def _reduced_bytes(counted: Iterable[tuple[Operation, int]]) -> int:
    """Return the bytes that a rank hands to the all-reduces; 0 beside other operations."""
    reduced = 0
    for one, times in counted:
        if one.op != "all_reduce" or one.mismatch is not None:
            return 0
        if not one.missing:  # Else it never ran.
            reduced += times * payload_bytes(one.ends[0])
    return reduced


@once
def predicted_traffic(trace: Trace) -> WireTraffic:
    """Predict the bytes on the wire from each rank to each other: payload, and the backend's framing."""
    sizes: Counter[Edge] = Counter()
    not_predicted: Counter[Reason] = Counter()
    for one, times in operations(trace).group_sizes():
        predicted, reason = predicted_on_the_wire(one)
        for pair, size in predicted.items():
            sizes[pair] += times * size
        if reason is not None:
            not_predicted[reason] += times
    ranks = _ranks(trace, sizes)
    return WireTraffic(ranks, trace.labels, "predicted", dict(sizes), dict(not_predicted))


@once
def measured_traffic(trace: Trace) -> WireTraffic:
    """Sum up what the kernel counted, where it counted exactly this part of the trace."""
    sizes: Counter[Edge] = Counter()
    why, ledger = _why_not_exactly(trace), ledger_of(trace)
    pairs = [] if why else ledger.pairs(ledger.whole)[0]
    closed = [trace.label(pair.src) for pair in pairs if pair.measured_bytes is None]
    if closed:
        pairs = []
        why = f"a connection of {closed[0]} was closed before the last sample, or not seen"
    for pair in pairs:
        sizes[pair.src, pair.dst] += pair.measured_bytes or 0
    observer = sum(pair.observer_bytes for pair in pairs)
    ranks = _ranks(trace, sizes)
    return WireTraffic(ranks, trace.labels, "measured", dict(sizes), {}, why, observer)


def _why_not_exactly(trace: Trace) -> str:
    """Say why the counters' samples do not bracket exactly this part of the trace; "" where they do."""
    ledger = ledger_of(trace)
    if not ledger.meters:
        return why_not_measured(trace)
    if any(each.footer and each.footer.left_out for each in trace.processes):
        return "only some steps were recorded, and the kernel counted all"
    outside = [cell.rank for cell, _ in ledger.entries.outside() if cell.rows]
    if outside:
        samples = f"no two samples of {trace.label(outside[0])}'s counters"
        return f"{samples} in this part are around all that it sends"
    return counted_together(trace, ledger)


def _ranks(trace: Trace, pairs: Iterable[Edge]) -> tuple[int, ...]:
    return tuple(sorted({*trace.ranks, *chain.from_iterable(pairs)}))
