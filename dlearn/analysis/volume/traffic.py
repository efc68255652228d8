"""How many bytes each rank sent to each other rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from dlearn.errors import optional
from dlearn.join.ends import How, payload_bytes
from dlearn.join.joining import operations
from dlearn.join.ledger import counted_together, ledger_of, predicted_on_the_wire
from dlearn.join.operation_messages import PairSum, sums_of, why_unknown
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.join.wire import why_not_measured
from dlearn.join.wording import Reason
from dlearn.shown import Answer, Paragraph, RankNames, Table, count_text
from dlearn.trace import Trace

if TYPE_CHECKING:
    import pandas

_COLUMNS = 16
_PAIRS_SHOWN = 40


class Matrix(Answer, frozen=True):
    """Bytes by (sender, receiver): what the tables and pictures of all kinds of bytes share."""

    ranks: tuple[int, ...]
    labels: RankNames

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Bytes by (sender, receiver), whatever kind of bytes these are."""
        raise NotImplementedError

    def not_known(self) -> list[str]:
        """What the numbers leave out, in sentences."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def bytes_from(self, *, rank: int) -> int:
        """Bytes that this rank sent."""
        return sum(size for (src, _), size in self.sizes.items() if src == rank)

    def bytes_to(self, *, rank: int) -> int:
        """Bytes that were sent to this rank."""
        return sum(size for (_, dst), size in self.sizes.items() if dst == rank)

    def to_frame(self) -> pandas.DataFrame:
        """Senders as rows, receivers as columns, bytes (needs pandas)."""
        pandas = optional("pandas", needed_by="to_frame")

        names = [self.labels[rank] for rank in self.ranks]
        rows = [[self.sizes.get((src, dst), 0) for dst in self.ranks] for src in self.ranks]
        return pandas.DataFrame(rows, index=pandas.Index(names, name="from"), columns=pandas.Index(names, name="to"))

    def rows(self) -> list[list[str]]:
        """The table as text: a head, then a row per sender; of many ranks, the pairs that sent most."""
        if len(self.ranks) > _COLUMNS:
            return self._pair_rows()
        names = [self.labels[rank] for rank in self.ranks]
        table = [["bytes from \\ to", *names, "sent in all"]]
        for name, src in zip(names, self.ranks, strict=True):
            cells = [
                f"{self.sizes.get((src, dst), 0):,}" if src != dst or (src, dst) in self.sizes else "."
                for dst in self.ranks
            ]
            table.append([name, *cells, f"{self.bytes_from(rank=src):,}"])
        return table

    def _pair_rows(self) -> list[list[str]]:
        pairs = sorted(self.sizes.items(), key=lambda pair: (-pair[1], pair[0]))
        table = [["from", "to", "bytes"]]
        table += [[self.labels[src], self.labels[dst], f"{size:,}"] for (src, dst), size in pairs[:_PAIRS_SHOWN]]
        if len(pairs) > _PAIRS_SHOWN:
            rest = sum(size for _, size in pairs[_PAIRS_SHOWN:])
            table.append([f"{len(pairs) - _PAIRS_SHOWN:,} more pairs", "", f"{rest:,}"])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        return Table(self.rows()), *self.not_known()


class Traffic(Matrix, frozen=True):
    """Payload bytes and messages by (sender, receiver), leaves only. `by_how` splits the bytes: observed, derived, ...

    `missing` messages were expected and never came: they are counted in `by_how` and `never_came`, not in
    `payload_bytes`. `known` says how the bytes of a pair are known, most of them first. `unexplained` is the number of
    operations whose messages are not known, `unsized` that of messages whose size is not. `reduced_bytes` is what each
    rank hands to the all-reduces, where nothing else was asked for; else 0. `ops` names the op of most of a pair's
    bytes, `derived_from` the backends by whose algorithms it follows who sends them.
    """

    payload_bytes: dict[tuple[int, int], int]
    message_count: dict[tuple[int, int], int]
    by_how: dict[str, int]
    known: dict[tuple[int, int], tuple[How, ...]]
    never_came: dict[tuple[int, int], int]
    ops: dict[tuple[int, int], str]
    unexplained: int
    unsized: int = 0
    reduced_bytes: int = 0
    derived_from: str = ""

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        return self.payload_bytes

    def not_known(self) -> list[str]:
        told = []
        if self.unexplained:
            told.append(f"not counted: {count_text(self.unexplained, 'operation')} whose messages are not known")
        if self.unsized:
            told.append(f"not counted: {count_text(self.unsized, 'message')} whose size is not known")
        return told


class WireTraffic(Matrix, frozen=True):
    """Bytes on the wire by (sender, receiver), framing included: all of them predicted, or all of them measured.

    `not_predicted` counts the operations that are not in them, by reason. `not_measured` says why the kernel's
    counters do not give the bytes of exactly this part of the trace; `wire_bytes` is empty then. `observer_bytes` of
    them are what the recorder adds; a prediction leaves these out.
    """

    counted: Literal["predicted", "measured"]
    wire_bytes: dict[tuple[int, int], int]
    not_predicted: dict[Reason, int]
    not_measured: str = ""
    observer_bytes: int = 0

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        return self.wire_bytes

    def not_known(self) -> list[str]:
        left_out = [
            f"not counted: {count_text(count, 'operation')}: {reason}" for reason, count in self.not_predicted.items()
        ]
        return left_out + ([f"not measured: {self.not_measured}"] if self.not_measured else [])


@once
def traffic(trace: Trace) -> Traffic:
    """Payload bytes from each rank to each other rank."""
    return traffic_of(operations(trace), trace)


def traffic_of(asked: Iterable[Operation], trace: Trace) -> Traffic:
    """The traffic of these operations of `trace` alone."""
    alike = asked.counted() if isinstance(asked, Operations) else [(each, 1) for each in asked]
    sums: Counter[tuple[PairSum, str]] = Counter()
    unexplained = unsized = reduced = 0
    only_all_reduces = True
    backends: set[str] = set()
    for one, times in alike:
        found = sums_of(one)
        if one.op == "all_reduce" and one.misfit is None:
            reduced += times * payload_bytes(one.ends[0]) * (not one.missing)  # else it never ran
        else:
            only_all_reduces = False
        for each in found:
            sums[each, one.op] += times
        backends |= {one.group.backend for each in found if each.how == "derived"}
        unexplained += times * (not found and why_unknown(one) is not None)
    sizes: Counter[tuple[int, int]] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    by_how: Counter[str] = Counter()
    weights: defaultdict[tuple[int, int], Counter[How]] = defaultdict(Counter)
    op_weights: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    never_came: Counter[tuple[int, int]] = Counter()
    for ((src, dst, how, known_size, count), op), times in sums.items():
        size = known_size or 0
        unsized += count * times * (known_size is None)
        by_how[how] += size * times
        if how == "missing":
            never_came[src, dst] += size * times
            continue
        sizes[src, dst] += size * times
        counts[src, dst] += count * times
        # Of messages without data their number counts.
        weights[src, dst][how] += size * times or count * times
        op_weights[src, dst][op] += size * times or count * times
    known = {pair: tuple(how for how, _ in found.most_common()) for pair, found in weights.items()}
    ranks, labels = _sides(trace, sizes)
    labels.update({rank: trace.label(rank) for pair in never_came for rank in pair})
    reduced_bytes = reduced if only_all_reduces else 0
    return Traffic(
        ranks,
        labels,
        dict(sizes),
        dict(counts),
        dict(by_how),
        known,
        dict(never_came),
        {pair: found.most_common(1)[0][0] for pair, found in op_weights.items()},
        unexplained,
        unsized,
        reduced_bytes,
        " and ".join(sorted(backends)),
    )


# On the wire ----------------------------------------------------------------------------------------------------------


@once
def predicted_traffic(trace: Trace) -> WireTraffic:
    """Bytes on the wire from each rank to each other, as the backend frames its messages: payload and more."""
    sizes: Counter[tuple[int, int]] = Counter()
    not_predicted: Counter[Reason] = Counter()
    for one, times in operations(trace).counted():
        predicted, reason = predicted_on_the_wire(one)
        for pair, size in predicted.items():
            sizes[pair] += times * size
        if reason is not None:
            not_predicted[reason] += times
    return WireTraffic(*_sides(trace, sizes), "predicted", dict(sizes), dict(not_predicted))


@once
def measured_traffic(trace: Trace) -> WireTraffic:
    """Bytes on the wire as the kernel counted them, where it counted this part of the trace and nothing else."""
    why = why_not_exactly(trace)
    if why:
        return WireTraffic(*_sides(trace, ()), "measured", {}, {}, why)
    ledger = ledger_of(trace)
    pairs, _ = ledger.pairs(ledger.whole)
    sizes: Counter[tuple[int, int]] = Counter()
    for pair in pairs:
        if pair.measured_bytes is None:
            closed = f"a connection of {trace.label(pair.src)} was closed before the last sample, or not seen"
            return WireTraffic(*_sides(trace, ()), "measured", {}, {}, closed)
        sizes[pair.src, pair.dst] += pair.measured_bytes
    observer = sum(pair.observer_bytes for pair in pairs)
    return WireTraffic(*_sides(trace, sizes), "measured", dict(sizes), {}, observer_bytes=observer)


def why_not_exactly(trace: Trace) -> str:
    """Why the counters' samples do not bracket just this part of the trace; empty where they do."""
    ledger = ledger_of(trace)
    if not ledger.meters:
        return why_not_measured(trace)
    if any(each.footer and each.footer.left_out for each in trace.processes):
        return "only some steps were recorded, and the kernel counted all"
    outside = [cell.rank for cell, _ in ledger.entries.outside() if cell.rows]
    if outside:
        return f"no two samples of {trace.label(outside[0])}'s counters in this part are around all that it sends"
    return counted_together(trace, ledger)


def _sides(trace: Trace, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], RankNames]:
    ranks = tuple(sorted({*trace.ranks, *(rank for pair in pairs for rank in pair)}))
    return ranks, RankNames((rank, trace.label(rank)) for rank in ranks)
