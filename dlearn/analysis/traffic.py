"""How many bytes each rank sent to each other rank."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from dlearn.analysis.joining import once, operations, payload_bytes
from dlearn.analysis.unrolling import how_sent, sums_of
from dlearn.trace.message import How, Operation
from dlearn.trace.trace import Trace

if TYPE_CHECKING:
    import pandas

_COLUMNS = 16
_PAIRS_SHOWN = 40


class Traffic(msgspec.Struct, frozen=True):
    """Payload bytes and messages by (sender, receiver), leaves only. `by_how` splits the bytes: observed, derived, ...

    `missing` messages were expected and never came: they are counted in `by_how` and `never_came`, not in
    `payload_bytes`. `known` says how the bytes of a pair are known, most of them first. `unexplained` is the number of
    operations whose messages are not known. `reduced_bytes` is what each rank hands to the all-reduces, where
    nothing else was asked for; else 0.
    """

    ranks: tuple[int, ...]
    labels: dict[int, str]
    payload_bytes: dict[tuple[int, int], int]
    message_count: dict[tuple[int, int], int]
    by_how: dict[str, int]
    known: dict[tuple[int, int], tuple[How, ...]]
    never_came: dict[tuple[int, int], int]
    unexplained: int
    reduced_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values())

    @property
    def not_counted(self) -> str:
        noun = "operation" if self.unexplained == 1 else "operations"
        return f"not counted: {self.unexplained:,} {noun} whose messages are not known"

    def bytes_from(self, *, rank: int) -> int:
        """Payload bytes that this rank sent."""
        return sum(size for (src, _), size in self.payload_bytes.items() if src == rank)

    def bytes_to(self, *, rank: int) -> int:
        """Payload bytes that were sent to this rank."""
        return sum(size for (_, dst), size in self.payload_bytes.items() if dst == rank)

    def to_frame(self) -> pandas.DataFrame:
        """Senders as rows, receivers as columns, payload bytes (needs pandas: `pip install pandas`)."""
        import pandas

        names = [self.labels.get(rank, f"rank {rank}") for rank in self.ranks]
        rows = [[self.payload_bytes.get((src, dst), 0) for dst in self.ranks] for src in self.ranks]
        return pandas.DataFrame(rows, index=pandas.Index(names, name="from"), columns=pandas.Index(names, name="to"))

    def rows(self) -> list[list[str]]:
        """The table as text: a head, then a row per sender; of many ranks, the pairs that sent most."""
        if len(self.ranks) > _COLUMNS:
            return self._pair_rows()
        names = [self.labels.get(rank, f"rank {rank}") for rank in self.ranks]
        table = [["bytes from \\ to", *names, "sent in all"]]
        for name, src in zip(names, self.ranks, strict=True):
            cells = [
                f"{self.payload_bytes.get((src, dst), 0):,}" if src != dst or (src, dst) in self.payload_bytes else "."
                for dst in self.ranks
            ]
            table.append([name, *cells, f"{self.bytes_from(rank=src):,}"])
        return table

    def _pair_rows(self) -> list[list[str]]:
        pairs = sorted(self.payload_bytes.items(), key=lambda pair: (-pair[1], pair[0]))
        table = [["from", "to", "bytes"]]
        for (src, dst), size in pairs[:_PAIRS_SHOWN]:
            table.append([self.labels.get(src, f"rank {src}"), self.labels.get(dst, f"rank {dst}"), f"{size:,}"])
        rest = sum(size for _, size in pairs[_PAIRS_SHOWN:])
        if len(pairs) > _PAIRS_SHOWN:
            table.append([f"{len(pairs) - _PAIRS_SHOWN:,} more pairs", "", f"{rest:,}"])
        return table

    def __str__(self) -> str:
        table = self.rows()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
                ]
            )
            for row in table
        ]
        if self.unexplained:
            lines.append(self.not_counted)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@once
def traffic(trace: Trace) -> Traffic:
    """Payload bytes from each rank to each other rank."""
    return traffic_of(operations(trace), trace)


def traffic_of(asked: Iterable[Operation], trace: Trace) -> Traffic:
    """The traffic of these operations of `trace` alone."""
    sums: Counter[tuple[int, int, How, int, int]] = Counter()  # Counted first: most of many operations are alike.
    unexplained = reduced = 0
    only_all_reduces = True
    for operation in asked:
        if operation.op == "all_reduce" and not operation.problem:
            reduced += payload_bytes(operation.ends[0])
        else:
            only_all_reduces = False
        if operation.sender is not None and operation.receiver is not None and not operation.steps:
            sums[operation.sender, operation.receiver, how_sent(operation), operation.payload_bytes, 1] += 1
            continue
        answer = sums_of(operation)
        if isinstance(answer, str):
            unexplained += 1
        else:
            sums.update(answer)
    sizes: Counter[tuple[int, int]] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    by_how: Counter[str] = Counter()
    weights: defaultdict[tuple[int, int], Counter[How]] = defaultdict(Counter)
    never_came: Counter[tuple[int, int]] = Counter()
    for (src, dst, how, size, count), times in sums.items():
        by_how[how] += size * times
        if how == "missing":
            never_came[src, dst] += size * times
            continue
        sizes[src, dst] += size * times
        counts[src, dst] += count * times
        # Of messages without data their number counts.
        weights[src, dst][how] += size * times or count * times
    known = {pair: tuple(how for how, _ in found.most_common()) for pair, found in weights.items()}
    ranks = tuple(sorted({*trace.ranks, *(rank for pair in sizes for rank in pair)}))
    labels = {rank: trace.label(rank) for rank in {*ranks, *(rank for pair in never_came for rank in pair)}}
    reduced_bytes = reduced if only_all_reduces else 0
    return Traffic(
        ranks, labels, dict(sizes), dict(counts), dict(by_how), known, dict(never_came), unexplained, reduced_bytes
    )
