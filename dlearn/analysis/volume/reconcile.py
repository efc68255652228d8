"""Payload, predicted wire, measured wire, residue: do algorithms say what the kernel counted?"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dlearn.events.event import NO_GROUP, RPC, Counters, Span
from dlearn.join.ledger import Ledger, Pair, SampleRange, Why, counted_together, ledger_of, name_of
from dlearn.join.rpc_messages import FRAMING_ERROR, MESSAGE_BYTES
from dlearn.join.selection import once
from dlearn.join.wire import unattributed_bytes, why_not_measured
from dlearn.join.wording import Reason
from dlearn.shown import Paragraph, RankNames, Result, Table, count_text, first_few
from dlearn.trace import Trace

_PARTS_SHOWN = 12
_SIZES = "payload_bytes", "predicted_bytes", "observer_bytes", "measured_bytes", "residue_bytes"


class WirePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the recording: all, a span, an operation; `note`: why it is not exact."""

    what: str
    pairs: tuple[Pair, ...]
    note: str = ""
    measured: bool = True  # Whether anything was counted.

    @property
    def payload_bytes(self) -> int:
        return sum(pair.payload_bytes for pair in self.pairs)

    @property
    def predicted_bytes(self) -> int:
        return sum(pair.predicted_bytes for pair in self.pairs)

    @property
    def observer_bytes(self) -> int:
        """Return what the recorder itself added."""
        return sum(pair.observer_bytes for pair in self.pairs)

    @property
    def measured_bytes(self) -> int | None:
        """Return what the kernel counted; None where the counters of one sender are not known."""
        known = self.measured and all(pair.measured_bytes is not None for pair in self.pairs)
        return sum(pair.measured_bytes or 0 for pair in self.pairs) if known else None

    @property
    def residue_bytes(self) -> int | None:
        """Sum up all residues, each taken as positive: too much here does not make up for too little there."""
        residues = [pair.residue_bytes for pair in self.pairs]
        sizes = [None if residue is None else abs(residue) for residue in residues]
        return sum(size or 0 for size in sizes) if self.measured and None not in sizes else None

    @property
    def difference_bytes(self) -> int | None:
        """Sum up the residues with their signs: measured less predicted, and less what the recorder added."""
        measured = self.measured_bytes
        return None if measured is None else measured - self.predicted_bytes - self.observer_bytes

    @property
    def residue_text(self) -> str:
        """Return "-24 B"; where pairs differ in sign, "0 B (200 B, each pair's taken as positive)"."""
        more, sizes = self.difference_bytes, self.residue_bytes
        differ = more is not None and sizes != abs(more)
        aside = f" ({sizes:,} B, each pair's taken as positive)" if differ else ""
        return _size(more) + aside

    @property
    def not_seen_bytes(self) -> int:
        """Return the bytes that were written and that no recorded call accounts for."""
        return sum(pair.residue_bytes or 0 for pair in self.pairs if pair.why == "not seen")


class Reconciliation(Result, frozen=True, kw_only=True):
    """Predicted and measured bytes, of the `whole` and its `parts`; or why none were measured."""

    whole: WirePart
    parts: tuple[WirePart, ...]
    labels: RankNames
    intrusive: bool
    not_measured: str = ""
    switched: dict[tuple[int, int], tuple[int, int]] = msgspec.field(default_factory=dict)
    """Of a chosen network, for each pair of ranks: TCP's payload in bytes, as the switch counted it, and what was sent
    again. Of the whole recording only."""

    @property
    def exact(self) -> bool:
        return self.whole.residue_bytes == 0 and bool(self.whole.pairs)

    @property
    def sentence(self) -> str:
        """Write "The whole recording: payload 96 B, predicted on the wire 192 B, measured ..., residue 0 B." """
        whole = self.whole
        notes = [note for note in (self.not_measured, whole.note) if note]
        aside = f" ({'; '.join(notes)})" if notes else ""
        if not whole.pairs:
            nothing = "no call was recorded whose bytes could be compared, and nothing was counted"
            return f"{whole.what}: {nothing}{aside}."
        text = "not measured"
        if whole.measured_bytes is not None and not self.not_measured:
            text = f"measured by the kernel {whole.measured_bytes:,} B, residue {whole.residue_text}"
        payload, predicted = f"payload {whole.payload_bytes:,} B", f"predicted on the wire {whole.predicted_bytes:,} B"
        if whole.observer_bytes:
            predicted += f", the recorder's own ids {whole.observer_bytes:,} B"
        return f"{whole.what}: {payload}, {predicted}, {text}{aside}."

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each connection of the whole recording; None where it was not measured."""
        for pair in self.whole.pairs:
            row: dict[str, object] = {"src": self.labels[pair.src], "dst": self.labels[pair.dst]}
            sizes = {name: getattr(pair, name) for name in _SIZES}
            yield row | {"group": pair.group, **sizes}

    def rows(self) -> list[list[str]]:
        """Return a head, a row for each pair of ranks, and the sum; columns that would be empty are left out."""
        head = ["from", "to", "group", "payload", "predicted", "observer", "measured", "residue", "switch"]
        # The switch counts all groups together: its number stands beside the first connection of two ranks.
        switched = {pair: f"{size:,}" for pair, (size, _) in self.switched.items()}
        table = [head]
        for pair in self.whole.pairs:
            names = [self.labels[pair.src], self.labels[pair.dst], pair.group or "none known"]
            by_switch = switched.pop((pair.src, pair.dst), "")
            table.append([*names, *_cells(pair, pair.residue_bytes), by_switch])
        in_all = f"{sum(size for size, _ in self.switched.values()):,}"
        table.append(["in all", "", "", *_cells(self.whole, self.whole.difference_bytes), in_all])
        several = len({pair.group for pair in self.whole.pairs}) > 1
        filled = {"group": several, "observer": bool(self.whole.observer_bytes), "switch": bool(self.switched)}
        columns = [column for column in zip(*table, strict=True) if filled.get(column[0], True)]
        return [list(row) for row in zip(*columns, strict=True)]

    def sentences(self) -> list[str]:
        """Say what the table does not: the parts, and what stands against an exact answer."""
        if self.not_measured:
            also = [f"And {self.whole.note}."] if self.whole.note else []
            return [f"Not measured: {self.not_measured}.", *also]
        said = [f"{self.whole.what}: {self.whole.note}."] if self.whole.note else []
        off = [part for part in self.parts if part.residue_bytes != 0]
        if self.parts:
            said.append(f"{len(self.parts) - len(off):,} of {len(self.parts):,} parts with residue 0.")
        for part in off[:_PARTS_SHOWN]:
            sizes = f"predicted {part.predicted_bytes:,} B, measured {_size(part.measured_bytes)}"
            note = f" ({part.note})" if part.note else ""
            said.append(f"{part.what}: {sizes}, residue {part.residue_text}{note}.")
        if len(off) > _PARTS_SHOWN:
            said.append(f"And {len(off) - _PARTS_SHOWN:,} more parts: see .parts.")
        if self.switched:
            carried, again = map(sum, zip(*self.switched.values(), strict=True))
            once = f"each byte once ({again:,} B were sent again); rank 0's with those of the store"
            said.append(f"The switch carried {carried:,} B of TCP's payload, {once}.")
        if self.intrusive:
            said.append('Measured with measure="phase", which changes the times.')
        return said

    def paragraphs(self) -> Iterator[Paragraph]:
        if not self.whole.pairs:
            yield self.sentence
            return
        table = self.rows()
        over_rpc = {pair.group == RPC for pair in self.whole.pairs}
        framing = ["framing of 96 B a message and 48 B back"] if False in over_rpc else []
        if True in over_rpc:
            framing.append(f"framing of {MESSAGE_BYTES} B a message and more for tensors")
        title = f"Bytes on the wire ({' and, for RPC, '.join(framing)} included):"
        yield Table(table, names=table[0].index("payload"), title=title)
        yield from self.sentences()


def _cells(part: Pair | WirePart, residue: int | None) -> list[str]:
    known = [f"{size:,}" for size in (part.payload_bytes, part.predicted_bytes, part.observer_bytes)]
    return [*known, _size(part.measured_bytes, ""), _size(residue, "")]


@once
def reconcile(trace: Trace) -> Reconciliation:
    """Compare payload, predicted and measured bytes on the wire of each pair of ranks."""
    ledger, switched = ledger_of(trace), dict[tuple[int, int], tuple[int, int]]()
    whole = _whole(trace, ledger)
    for process in trace.processes if trace.selected_from is None else ():
        if process.network is not None:
            switched |= {(process.rank, rank): sent for rank, sent in process.network.sent.items()}
    return Reconciliation(
        whole=whole, parts=(*_spans(trace, ledger), *_single_operations(ledger)),
        labels=trace.labels,
        intrusive=any(still is not None for meter in ledger.meters.values() for still in meter.still),
        not_measured="" if whole.measured else why_not_measured(trace), switched=switched,
    )  # fmt: skip


def _whole(trace: Trace, ledger: Ledger) -> WirePart:
    what = "The whole recording" if trace.selected_from is None else "This part of the trace"
    pairs, unexplained = ledger.pairs(ledger.whole)
    pairs += _strange_pairs(trace, ledger, pairs)
    notes = _not_predicted(unexplained)
    others = counted_together(trace, ledger)
    if trace.selected_from is None and any(each.footer and each.footer.left_out for each in trace.processes):
        # What was counted between two steps that were asked for, or before them, is not theirs.
        others = "only some steps were recorded: ask for one, as with trace.within"
    if others:
        pairs = [msgspec.structs.replace(pair, measured_bytes=None, why="") for pair in pairs]
        return WirePart(what=what, pairs=(*pairs, *ledger.unmeasured_pairs()), note="; ".join([others, *notes]))
    blind = [trace.label(rank) for rank in trace.ranks if rank not in ledger.meters]
    if blind and ledger.meters:
        shown = blind if len(blind) <= 8 else [*blind[:8], "..."]
        notes.append(f"no samples of {', '.join(shown)}")
    broken = [process for process in trace.processes if not process.complete]
    notes += [f"lines of {process.label}'s file are lost" for process in broken[:8]]
    unseen = sum(pair.measured_bytes is None for pair in pairs)
    if unseen:
        were = "connection was" if unseen == 1 else "connections were"
        notes.append(f"{unseen:,} {were} not seen when their group was made, or closed before the last sample")
    outside = [(cell, times) for cell, times in ledger.entries.outside() if cell.rank in ledger.meters]
    calls = sum(times for _, times in outside)
    if outside:
        lie = "lies" if calls == 1 else "lie"
        payload = sum(times * row.payload for cell, times in outside for row in cell.rows)
        size = f", with {payload:,} B of payload," if payload else ""
        notes.append(f"{count_text(calls, 'call')}{size} {lie} outside of the samples")
    notes += _residues(pairs)
    measured = bool(ledger.meters or pairs)
    return WirePart(what=what, pairs=(*pairs, *ledger.unmeasured_pairs()), note="; ".join(notes), measured=measured)


def _strange_pairs(trace: Trace, ledger: Ledger, pairs: Sequence[Pair]) -> list[Pair]:
    """Return what was written beside the known groups, but not between ranks whose group's connection is lost."""
    if trace.selected_from is not None:
        return []
    sought = {(pair.src, pair.dst) for pair in pairs if pair.measured_bytes is None}
    sought |= {(cell.rank, row.edge[1]) for cell, _ in ledger.entries.outside() for row in cell.rows}
    return [
        Pair(src=src, dst=dst, group=NO_GROUP, payload_bytes=0, predicted_bytes=0, measured_bytes=size, why="not seen")
        for (src, dst), size in sorted(unattributed_bytes(trace).items())
        if (src, dst) not in sought
    ]


_RESIDUES: dict[Why, str] = {
    "framing": f"RPC's framing is predicted within {FRAMING_ERROR} B a message: {{size}}",
    "read early": 'counters that do not wait for the threads of RPC, as those of measure="phase" do: {size}',
    "not written yet": "predicted, and not written on {where} when the counters were read: {size}",
    "not seen": "not seen: {size} were written on {where} that no recorded call accounts for",
}
_CONNECTIONS = {
    "?": "connections older than the recording",
    "": "connections of no known group",
    RPC: "the connections of RPC",
}


def _not_predicted(unexplained: Counter[Reason]) -> list[str]:
    return [f"{count_text(count, 'call')} not predicted: {reason}" for reason, count in unexplained.most_common(3)]


def _residues(pairs: Iterable[Pair]) -> Iterator[str]:
    """Say where each residue comes from, with the bytes of all pairs of ranks."""
    sizes: Counter[tuple[Why, str]] = Counter()
    for pair in pairs:
        if pair.why in _RESIDUES:
            sizes[pair.why, pair.group] += abs(pair.residue_bytes or 0)
    for (why, group), size in sizes.items():
        where = _CONNECTIONS.get(group, f"the connections of group {group}")
        yield _RESIDUES[why].format(size=f"{size:,} B", where=where)


def _spans(trace: Trace, ledger: Ledger) -> Iterator[WirePart]:
    """Yield each span that has a sample at both ends, with the same span on the other ranks."""
    together: dict[tuple[str, int], list[SampleRange]] = defaultdict(list)
    samples: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for sample in trace.of(Counters):
        samples[sample.rank, sample.parent].append(sample.number)
    times: Counter[tuple[int, str]] = Counter()
    for event in sorted(trace.of(Span), key=lambda event: event.number):
        numbers = samples[event.rank, event.number]
        if event.rank in ledger.meters and len(numbers) > 1:
            known = ledger.meters[event.rank].numbers
            between = event.rank, bisect_left(known, min(numbers)), bisect_left(known, max(numbers))
            together[event.name, times[event.rank, event.name]].append(between)
            times[event.rank, event.name] += 1
    for (name, _), ranges in together.items():
        yield _part(name, ranges, ledger)


def _single_operations(ledger: Ledger) -> Iterator[WirePart]:
    """Yield each section between two samples of `measure="phase"`, joined over the ranks."""
    together: dict[Sequence[int], list[SampleRange]] = defaultdict(list)
    names: dict[int, str] = {}
    keys, entries = ledger.operations.rows.tolist(), ledger.entries
    written = [*zip(entries.operation.tolist(), entries.cell.tolist(), strict=True)]
    # In the order in which the operations were called.
    for rank, section, part in sorted(entries.sections(), key=lambda each: written[each[2].start]):
        if ledger.meters[rank].still[section + 1] is None:
            continue
        for index, cell in written[part]:
            names[keys[index]] = name_of(ledger.operations[index], entries.cells[cell])
        called = tuple(sorted(keys[index] for index, _ in written[part]))
        together[called].append((rank, section, section + 1))
    for met, ranges in together.items():
        yield _part(first_few([names[key] for key in met], 3, between=" and "), ranges, ledger)


def _part(what: str, ranges: Sequence[SampleRange], ledger: Ledger) -> WirePart:
    pairs, unexplained = ledger.pairs(ranges)
    return WirePart(what=what, pairs=tuple(pairs), note="; ".join([*_not_predicted(unexplained), *_residues(pairs)]))


def _size(size: int | None, unit: str = " B") -> str:
    return "not measured" if size is None else f"{size:,}{unit}"
