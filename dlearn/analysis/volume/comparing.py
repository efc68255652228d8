"""The traffic of two runs side by side, in bytes and in messages."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from dlearn.analysis.ddp.step_times import shares_text, step_times
from dlearn.analysis.volume.traffic import Traffic, traffic
from dlearn.join.joining import operations
from dlearn.join.operation_messages import sums_of
from dlearn.join.rpc_messages import phase_of
from dlearn.shown import Paragraph, Result, Table, count_text
from dlearn.trace import Trace

_ROWS_SHOWN = 40


class Amount(NamedTuple):
    """A number of messages, and their payload in bytes."""

    message_count: int = 0
    payload_bytes: int = 0


class Difference(msgspec.Struct, frozen=True):
    a: Amount
    b: Amount

    @property
    def added_bytes(self) -> int:
        """Return how many payload bytes `b` has more than `a`."""
        return self.b.payload_bytes - self.a.payload_bytes

    @property
    def added_messages(self) -> int:
        return self.b.message_count - self.a.message_count


class Comparison(Result, frozen=True, kw_only=True):
    """The traffic of two runs: in all, by (phase, operation), and by (sender, receiver).

    `unexplained` operations, and messages that never came, are in no count. `waiting` has, of each
    step, the share of its ranks' time that waited for others.
    """

    names: tuple[str, str]
    total: Difference
    by_kind: dict[tuple[str, str], Difference]
    by_pair: dict[tuple[str, str], Difference]
    unexplained: tuple[int, int]
    waiting: tuple[list[float], list[float]]

    @property
    def came(self) -> tuple[tuple[str, str], ...]:
        """Return the kinds that only `b` has."""
        return tuple(kind for kind, each in self.by_kind.items() if not each.a.message_count)

    @property
    def went(self) -> tuple[tuple[str, str], ...]:
        """Return the kinds that only `a` has."""
        return tuple(kind for kind, each in self.by_kind.items() if not each.b.message_count)

    @property
    def sentence(self) -> str:
        """Write "fp16 sends 2,600 B less than plain (2,600 instead of 5,200 B), in as many messages"."""
        pairs = zip(self.names, self.unexplained, strict=True)
        unknown = [f"{count_text(count, 'operation')} of {name}" for name, count in pairs if count]
        not_counted = f"; not counted: {' and '.join(unknown)} whose messages are not known" if unknown else ""
        return self._difference() + not_counted

    def _difference(self) -> str:
        a, b = self.names
        size, count = self.total.added_bytes, self.total.added_messages
        if not size and not count:
            equal = all(each.a == each.b for each in (*self.by_kind.values(), *self.by_pair.values()))
            spread = "" if equal else ", but not of the same kinds, or not between the same ranks"
            return f"{b} sends as many bytes in as many messages as {a}{spread}"
        sizes = f"({self.total.b.payload_bytes:,} instead of {self.total.a.payload_bytes:,} B)"
        bytes_text, messages_text = f"as many bytes as {a}", "as many messages"
        if size:
            more = "more" if size > 0 else "less"
            bytes_text = f"{abs(size):,} B {more} than {a} {sizes}"
        if count:
            messages_text = count_text(abs(count), "message") + (" more" if count > 0 else " fewer")
        return f"{b} sends {bytes_text}, in {messages_text}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each phase and operation, with the messages and bytes of both runs."""
        for (phase, op), each in self.by_kind.items():
            row: dict[str, object] = {"phase": phase, "op": op}
            for name, amount in (("a", each.a), ("b", each.b)):
                row[f"messages_{name}"] = amount.message_count
                row[f"bytes_{name}"] = amount.payload_bytes
            yield row

    def rows(self) -> list[list[str]]:
        """Return a head, a row for each kind, one for all, then a row for each pair of ranks."""
        a, b = self.names
        head = [f"messages {a}", b, "+/-", f"bytes {a}", b, "+/-"]
        table = [["phase", "operation", *head]]
        table += [[*kind, *_cells(each)] for kind, each in self.by_kind.items()]
        table.append(["in all", "", *_cells(self.total)])
        pairs = sorted(self.by_pair.items(), key=lambda pair: -abs(pair[1].added_bytes))[:_ROWS_SHOWN]
        table += [["from", "to", *head], *([*pair, *_cells(each)] for pair, each in sorted(pairs))]
        if len(self.by_pair) > _ROWS_SHOWN:
            table.append([f"{len(self.by_pair) - _ROWS_SHOWN:,} more pairs", *[""] * 7])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        waits = [f"{name} {shares_text(each)}" for name, each in zip(self.names, self.waiting, strict=True)]
        seen = f"Waiting for other ranks: {', '.join(waits)}" if any(self.waiting) else ""
        return self.sentence, *filter(None, [seen]), Table(self.rows(), names=2)


def compare(a: Trace, b: Trace, *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare the payload that two runs, or selections of them, send; `names` are those in the table."""
    sent = traffic(a), traffic(b)
    totals = [Amount(sum(each.message_count.values()), each.total_bytes) for each in sent]
    return Comparison(
        names=names, total=Difference(*totals), by_kind=_side_by_side(_by_kind(a), _by_kind(b)),
        by_pair=_side_by_side(_by_pair(sent[0]), _by_pair(sent[1])),
        unexplained=(sent[0].unexplained, sent[1].unexplained),
        waiting=(step_times(a).wait_shares, step_times(b).wait_shares),
    )  # fmt: skip


Amounts = dict[tuple[str, str], Amount]


def _by_kind(trace: Trace) -> Amounts:
    amounts: Amounts = {}
    for one, times in operations(trace).group_sizes():
        phase = phase_of(one.exchange) if one.exchange is not None else one.ends[0].phase
        for pair in sums_of(one):
            if pair.how != "missing":
                count, size = amounts.get((phase, one.op), Amount())
                size += times * (pair.payload_bytes or 0)
                amounts[phase, one.op] = Amount(count + times * pair.message_count, size)
    return amounts


def _by_pair(sent: Traffic) -> Amounts:
    return {
        (sent.labels[src], sent.labels[dst]): Amount(sent.message_count[src, dst], size)
        for (src, dst), size in sent.payload_bytes.items()
    }


def _side_by_side(a: Amounts, b: Amounts) -> dict[tuple[str, str], Difference]:
    return {key: Difference(a.get(key, Amount()), b.get(key, Amount())) for key in {**a, **b}}


def _cells(each: Difference) -> list[str]:
    counts = [f"{each.a.message_count:,}", f"{each.b.message_count:,}", f"{each.added_messages:+,}"]
    return [*counts, f"{each.a.payload_bytes:,}", f"{each.b.payload_bytes:,}", f"{each.added_bytes:+,}"]
