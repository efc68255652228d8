"""What each rank held while it trained, beside what the textbook says that it keeps.

Counted by the source "memory" (dlearn/sources/memory.py). The textbook: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models" (2020), figure 1, in multiples of the parameters' bytes P, on n ranks. It
says nothing of activations, nor of the parameters that FSDP gathers for a while.
"""

from collections.abc import Iterator
from itertools import groupby

from dlearn.events.memory_held import MemoryHeld
from dlearn.shown import Paragraph, RankNames, Result, Table, capitalized, size_text
from dlearn.trace import Trace

PARTS = {
    "parameters": "parameters",
    "buckets": "DDP's buckets",
    "state": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered parameters",
    "activations": "activations",
}
"""Columns of `MemoryHeld`, and what people call them; first what changes least."""
STATE = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1}
"""Tensors of the size of a parameter that these optimizers keep for each; of others it depends on their options."""
_ROWS_SHOWN = 24


class RankMemory(Result, frozen=True):
    """By rank, what it held after each change; the last values hold until the next. Bytes."""

    held: dict[int, tuple[MemoryHeld, ...]]
    labels: RankNames

    def most(self, rank: int, part: str) -> int:
        return max(int(getattr(each, part)) for each in self.held[rank])

    def peak(self, rank: int) -> MemoryHeld:
        return max(self.held[rank], key=total_bytes)

    @property
    def finding(self) -> str:
        if not self.held:
            return 'No memory was counted: record with sources=["memory"], or --sources memory'
        rank = max(self.held, key=lambda rank: total_bytes(self.peak(rank)))
        peak = self.peak(rank)
        part = max(PARTS, key=lambda part: getattr(peak, part))
        times = f", {total_bytes(peak) / peak.model:.1f} times its model" if peak.model else ""
        largest = f"{size_text(getattr(peak, part))} of it {PARTS[part]}"
        return f"{capitalized(self.labels[rank])} holds at most {size_text(total_bytes(peak))}{times}: {largest}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each change on each rank, with the bytes of each part from then on."""
        for rank, changes in self.held.items():
            for each in changes:
                row: dict[str, object] = {"rank": self.labels[rank], "at_ns": each.start_ns}
                yield row | {f"{part}_bytes": getattr(each, part) for part in PARTS}

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.held:
            rows = [["rank", "part", "counted, at most", "textbook"]]
            for rank in self.held:
                expected = textbook(self.peak(rank))
                for part, name in PARTS.items():
                    most = self.most(rank, part)
                    if most or expected.get(part):
                        said = size_text(round(expected[part])) if part in expected else "-"
                        rows.append([self.labels[rank], name, size_text(most), said])
            yield Table(rows[: 1 + _ROWS_SHOWN], names=2)
            if len(rows) > 1 + _ROWS_SHOWN:
                yield f"{len(rows) - 1 - _ROWS_SHOWN:,} more rows: see held."
            yield "DDP's buckets are derived: a place for each gradient. All else is counted."


def total_bytes(each: MemoryHeld) -> int:
    return sum(getattr(each, part) for part in PARTS)


def textbook(each: MemoryHeld) -> dict[str, float]:
    """Predict what stays for as long as the job trains, in bytes, by column; what depends on options is left out."""
    whole = float(each.model)
    part = whole / each.ranks
    found = {"parameters": whole, "gradients": whole}
    if each.way == "FSDP2":
        found = {"parameters": part, "gradients": part}
    multiples = [STATE[name] for name in each.optimizers.split(", ") if name in STATE]
    if len(multiples) == 1:
        found["state"] = multiples[0] * (part if each.way in ("ZeRO-1", "FSDP2") else whole)
    return found


def rank_memory(trace: Trace) -> RankMemory:
    """Count what each rank held, from what the source "memory" has recorded."""
    events = sorted(trace.of(MemoryHeld), key=lambda event: event.rank)
    by_rank = groupby(events, key=lambda event: event.rank)
    return RankMemory({rank: tuple(held) for rank, held in by_rank}, trace.labels)
