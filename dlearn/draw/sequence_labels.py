"""One operation in a sequence diagram: a head over arrows, a bar with a text, or only a count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from dlearn.analysis.findings import pairs_text, sizes_text, stuck_reasons
from dlearn.analysis.telling.explanations import NAMES_SHOWN
from dlearn.analysis.volume.flows import flows
from dlearn.analysis.volume.rank_classes import rank_classes
from dlearn.draw.palette import Look, cut, look_of, plain, text_width
from dlearn.draw.timeline_model import ranks_shown
from dlearn.join.ends import payload_bytes
from dlearn.join.joining import operations
from dlearn.join.operation_messages import PairSum, messages_of, sums_of, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wording import tensors_text
from dlearn.shown import size_text
from dlearn.trace import Trace

MOST_LIFELINES = 16
LEVEL = 0.22  # Rows from an arrow to the next above it, if they are sent at the same time.
_FIRST, _LAST, _MOST_STUCK = 3, 2, 4  # Lifelines of more: first, last, and around who never came.
_MOST_LINES = 8  # Lines of arrows of one operation, where its steps are merged.
_LONGEST_LABEL_PT = 240.0


@dataclass(frozen=True)
class MessageArrow:
    """`count` messages from one column to another, with a label over the column `middle`."""

    src: int
    dst: int
    ends: tuple[int, int]  # The ranks.
    how: str
    payload_bytes: int | None
    count: int = 1
    label: str = ""
    middle: float = 0.0
    control: bool = False
    wraps: bool = False  # It closes a ring: leaves at one side, and comes in at the other.
    level: float = 0.0  # Rows above the lowest arrow of its row, which it would touch.


ArrowRow = tuple[MessageArrow, ...]


@dataclass(frozen=True)
class Block:
    """One operation: a head over rows of arrows, or over a `bar`. `step` is the span that it belongs to."""

    look: Look
    phase: str = ""
    heads: tuple[str, ...] = ()  # What stands above, the longest first.
    rows: tuple[ArrowRow, ...] = ()
    bar: str = ""
    over: tuple[int, int] = (0, 0)  # The first and the last column of the bar.
    stuck: bool = False
    step: str = field(default="", compare=False)
    count: int = 1  # Operations in it.

    @property
    def is_send(self) -> bool:
        """Return whether it is one message that came, as of a `send`."""
        return not (self.heads or self.bar or self.stuck) and [len(row) for row in self.rows] == [1]

    @property
    def heights(self) -> list[float]:
        """Return the heights of head, lines and the gap to the next block, in rows."""
        lines = []
        for row in self.rows:
            lowest = 1.0 if any(arrow.label for arrow in row) else 0.7
            lines.append(lowest + max((arrow.level for arrow in row), default=0.0))
        lines = lines or [1.0 if self.bar else 0.0]
        return [0.8 if self.heads else 0.0, *lines, 0.3 if self.heads else 0.15]

    @property
    def height(self) -> float:
        return sum(self.heights)


CONTROL = "that RPC sends for itself"
LEFT_OUT = "of ranks without a lifeline"
NEVER_CAME = "that never came, of ranks without a lifeline"


@dataclass(frozen=True)
class BlockBuilder:
    """How operations are drawn: by `steps`, with tags if these are `tagged`, with RPC's own `control` messages."""

    trace: Trace
    lines: Lifelines
    column_pt: float
    steps: bool
    tagged: bool
    control: bool
    many: bool  # More sends than can have a line each.
    by_dimension: bool  # Whether heads name dimensions of a mesh.
    counts: Counter[str] = field(default_factory=Counter)  # Messages without arrow, by reason.
    sizes: Counter[str] = field(default_factory=Counter)  # Their payload bytes.

    def block_of(self, operation: Operation, *, times: int) -> Block | None:
        """Return the block of an operation, None where none of its messages is drawn; count those `times`."""
        found = messages_of(operation) if operation.is_message or operation.is_call else []
        if found:
            return self._of_messages(operation, found, times)
        for pair in sums_of(operation):
            if self.lines.hides(pair.src, pair.dst):
                why = NEVER_CAME if pair.how == "missing" else LEFT_OUT
                self._count(why, times * pair.message_count, times * (pair.payload_bytes or 0))
        return self._of_pairs(operation)

    def _of_messages(self, operation: Operation, found: Sequence[Message], times: int) -> Block | None:
        arrows: list[ArrowRow] = []
        for each in found:
            if each.control and not self.control:
                self._count(CONTROL, times, times * (each.payload_bytes or 0))
            elif self.lines.hides(each.src, each.dst):
                self._count(LEFT_OUT, times, times * (each.payload_bytes or 0))
            elif self.lines.draws(each.src, each.dst):
                arrows.append((self._arrow(operation, each),))
        reasons = self._stuck(operation) if operation.pending or operation.missing else ()
        return self._block(operation, reasons, arrows) if arrows else None

    def _count(self, why: str, count: int, size: int) -> None:
        self.counts[why] += count
        self.sizes[why] += size

    def _arrow(self, operation: Operation, message: Message) -> MessageArrow:
        src, dst = self.lines.column[message.src], self.lines.column[message.dst]
        label = self._message_label(operation, message, abs(src - dst))
        return MessageArrow(
            src, dst, (message.src, message.dst), message.how, message.payload_bytes, 1, label,
            self._middle(src, dst, label), message.control,
        )  # fmt: skip

    def _message_label(self, operation: Operation, message: Message, columns: int) -> str:
        """Return what went wrong, what travels, and how much: in a narrow picture only the middle is cut."""
        before = "never came: " if message.how == "missing" else ""
        before = "to itself: " if message.src == message.dst else before
        after = f" {size_text(message.payload_bytes)}".rstrip()
        after += f", tag {operation.tag}" if self.tagged and operation.tag is not None else ""
        names = [plain(name, most=120) for name in _message_names(operation, message)]
        room = columns * self.column_pt - 8
        many = self.many and operation.is_message  # Of these, neighbours stand side by side.
        if not many:
            room = min(max(_LONGEST_LABEL_PT, room), len(self.lines.names) * self.column_pt - 8)
        left = room - text_width(before + after)
        shown = next((name for name in names if text_width(name) <= left), None)
        if shown is None and many:
            return names[-1] if operation.micro_batch is not None else f"{before}{after}".strip()
        return f"{before}{shown or cut(names[-1], left)}{after}".strip()

    def _middle(self, src: int, dst: int, label: str) -> float:
        """Return the middle of the arrow, moved so that the label stays inside of the picture."""
        half, last = self._half(label), len(self.lines.names) - 1
        return min(max((src + dst) / 2, half - 0.5), max(last + 0.5 - half, last / 2))

    def _half(self, label: str) -> float:
        return (text_width(label) / 2 + 3) / self.column_pt

    def _of_pairs(self, operation: Operation) -> Block | None:
        steps = self._steps(operation)
        pairs = [pair for step in steps for pair in step]
        mine = [pair for pair in pairs if self.lines.draws(pair.src, pair.dst)]
        if pairs and not mine:
            return None
        column = self.lines.column
        inside = [pair for pair in mine if column[pair.src] == column[pair.dst]]
        silent = not self.steps and not operation.missing and not any(pair.payload_bytes for pair in mine)
        size, reasons = payload_bytes(operation.ends[0]), self._stuck(operation)
        name = f"{operation.op} {size_text(size)}" if size else operation.op
        name += operation.group.over * self.by_dimension
        texts = reasons or _operation_names(operation, tagged=self.tagged)
        if not pairs:
            unknown = str(why_unknown(operation) or "nothing travels")
            return self._block(operation, _heads([name], texts), bar=unknown)
        apart = self._apart(mine, one_step=len(steps) == 1)
        rows = [] if silent or inside else [row for step in steps for row in self._rows(operation, step, apart)]
        if not rows or (len(rows) > _MOST_LINES and not self.steps):
            return self._block(operation, reasons, bar=f"{name}: {pairs_text(pairs)}")
        names = [name] if apart else [f"{name}, each arrow {sizes_text(mine)}", name]
        return self._block(operation, _heads(names, texts), rows)

    def _steps(self, operation: Operation) -> list[list[PairSum]]:
        if not self.steps or operation.missing:
            found = sums_of(operation)
            return [found] if found else []
        steps: dict[int, list[PairSum]] = defaultdict(list)
        ends: dict[int, frozenset[tuple[int, int]]] = defaultdict(frozenset)
        for flow in flows(messages_of(operation), by_step=True):
            steps[flow.step].append(PairSum(flow.src, flow.dst, flow.how, flow.payload_bytes, flow.count))
            ends[flow.step] |= {(flow.src, flow.dst)}
        if len(steps) > 2 * len({*ends.values()}):  # As a ring's: rounds that look the same teach nothing.
            return [sums_of(operation)]
        return list(steps.values())

    def _apart(self, pairs: Sequence[PairSum], *, one_step: bool) -> bool:
        """Return whether each arrow has its own bytes: they differ, or each pair has one arrow only."""
        labels = {self._label([pair]) for pair in pairs}
        return (one_step or len(labels) > 2) and all(2 * self._half(label) <= 1 for label in labels)

    def _label(self, pairs: Sequence[PairSum]) -> str:
        return "never came: " * (pairs[0].how == "missing") + sizes_text(pairs)

    def _rows(self, operation: Operation, step: Sequence[PairSum], apart: bool) -> list[ArrowRow]:
        closing = _closes_ring(operation.group.members, step)
        merged: dict[tuple[int, int, bool], list[PairSum]] = defaultdict(list)
        for pair in step:
            if self.lines.draws(pair.src, pair.dst):
                ends = self.lines.column[pair.src], self.lines.column[pair.dst]
                merged[*ends, (pair.src, pair.dst) == closing].append(pair)
        arrows: list[MessageArrow] = []
        for (src, dst, wraps), alike in merged.items():
            label = self._label(alike) if apart and not wraps else ""
            if len(alike) > 1:
                label = f"{len(alike)} × {label}" if label else f"{len(alike)} alike"
            arrow = MessageArrow(
                src, dst, (alike[0].src, alike[0].dst), alike[0].how, alike[0].payload_bytes,
                sum(pair.message_count for pair in alike), label, self._middle(src, dst, label), wraps=wraps,
            )  # fmt: skip
            arrows.append(arrow)
        if not apart and len({arrow.src for arrow in arrows}) == 1:  # A fan.
            return [tuple(arrows)]
        rows = self._side_by_side(arrows)
        if not self.steps or len(rows) < 2:
            return rows
        # They travel at the same time: one row, from left to right downwards.
        rise, levels = (1.0 if apart else LEVEL), enumerate(reversed(rows))
        return [tuple(replace(arrow, level=rise * level) for level, row in levels for arrow in row)]

    def _side_by_side(self, arrows: Sequence[MessageArrow]) -> list[ArrowRow]:
        """Put arrows into one row where neither they nor their labels touch."""
        rows: list[list[MessageArrow]] = []
        for arrow in arrows:
            left, right = self.extent(arrow)
            for row in rows:
                if arrow.wraps or all(right <= begin or left >= end for begin, end in map(self.extent, row)):
                    row.append(arrow)
                    break
            else:
                rows.append([arrow])
        return list(map(tuple, rows))

    def extent(self, arrow: MessageArrow) -> tuple[float, float]:
        """Return the columns from the left to the right of an arrow and its label."""
        if arrow.wraps:
            return arrow.src, arrow.src
        half = self._half(arrow.label) if arrow.label else 0.0
        return min(arrow.src, arrow.dst, arrow.middle - half), max(arrow.src, arrow.dst, arrow.middle + half)

    def _block(self, operation: Operation, heads: Sequence[str], rows: Sequence[ArrowRow] = (), bar: str = "") -> Block:
        members = {*operation.group.members, *operation.ranks} & {*self.lines.column}
        columns = {self.lines.column[rank] for rank in members}
        if heads and self.by_dimension and operation.group.dimensions:
            # The last one may be cut, and names both.
            heads = [*heads, f"{operation.group.dimension}: {operation.op}"]
        shown = tuple(plain(head, most=200) for head in heads)
        over = min(columns, default=0), max(columns, default=0)
        bar, stuck = plain(bar, most=120), bool(self._stuck(operation))
        # Messages of a pipeline say their pass themselves, and mix those of both phases.
        phase = "" if operation.micro_batch is not None else operation.ends[0].phase.removeprefix("none")
        return Block(look_of(operation), phase, shown, tuple(rows), bar, over, stuck)

    def _stuck(self, operation: Operation) -> tuple[str, ...]:
        """Return why the operation does not end, the longest text first; nothing if it did."""
        reasons = (stuck_reasons(operation, end, self.trace) for end in operation.ends)
        return next(filter(None, reasons), ())


def _heads(names: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    """Return what may stand above an operation, the longest first: its op, with or without more."""
    more = dict.fromkeys(filter(None, (*texts[:1], *texts[-1:])))
    return (*(f"{name}: {what}" for what in more for name in names), *names)


def _operation_names(operation: Operation, *, tagged: bool) -> tuple[str, ...]:
    """Return what travels in an operation, the longest text first."""
    whole = operation.describe(most=NAMES_SHOWN, tagged=tagged)
    return (whole,) if operation.bucket is None else (whole, f"gradient of bucket {operation.bucket.index}")


def _message_names(operation: Operation, message: Message) -> tuple[str, ...]:
    """Return what travels in a message, the longest text first."""
    exchange = operation.exchange
    if operation.micro_batch is not None:
        brief = f"{operation.ends[0].phase[0].upper()}{operation.micro_batch}"
        return f"{brief}: {tensors_text(operation.tensors)}", brief
    if exchange is None:
        return _operation_names(operation, tagged=False)
    whole = message.describe(most=NAMES_SHOWN)
    if operation.failed or not message.step or not (message.tensors or exchange.reply):
        return (whole,)
    return whole, f"result of {exchange.call.function}" if exchange.call is not None else "the value"


def _closes_ring(members: Sequence[int], step: Sequence[PairSum]) -> tuple[int, int] | None:
    """Return the message that goes from one end of a ring to the other; None if the step is no ring."""
    count = len(members)
    index = {rank: number for number, rank in enumerate(members)}
    shifts = {(index[pair.dst] - index[pair.src]) % count for pair in step if pair.src in index and pair.dst in index}
    if count < 3 or len(step) < count or shifts not in ({1}, {count - 1}):
        return None
    ends = members[0], members[-1]
    return ends if shifts == {count - 1} else ends[::-1]


@dataclass(frozen=True)
class Lifelines:
    """The column of each rank, and the names above; those in `gaps` stand for ranks without one."""

    column: dict[int, int]
    names: tuple[str, ...]
    gaps: frozenset[int] = frozenset()
    stands_for: dict[int, int] = field(default_factory=dict)  # The first that does the same.

    def hides(self, src: int, dst: int) -> bool:
        """Return whether one end of the message has no lifeline."""
        return src not in self.column or dst not in self.column

    def draws(self, src: int, dst: int) -> bool:
        """Return whether this message is drawn: of ranks that do the same, the first one's."""
        if self.hides(src, dst) or self.stands_for.get(src, src) != src:
            return False
        return src in self.stands_for or self.stands_for.get(dst, dst) == dst


def lifelines(trace: Trace, *, once: bool) -> Lifelines:
    """Return the lifelines of all ranks; if `once`, one for all ranks that send and receive the same."""
    ranks = ranks_shown(trace)
    first = rank_classes(trace, ranks) if once else {}
    shown = [rank for rank in ranks if first.get(rank, rank) == rank]
    own = {*shown}
    if len(shown) > MOST_LIFELINES:
        missing = dict.fromkeys(rank for each in operations(trace).unusual() for rank in each.missing)
        own = {*shown[:_FIRST], *shown[-_LAST:]}
        for rank in [*missing][:_MOST_STUCK]:
            own |= {rank - 1, rank, rank + 1}
    names: list[str] = []
    column: dict[int, int] = {}
    gaps: set[int] = set()
    for has_one, some in groupby(shown, key=own.__contains__):
        together = list(some)
        if not has_one:
            gaps.add(len(names))
            names.append(f"… {len(together)} more")
            continue
        for rank in together:
            column[rank] = len(names)
            equal = [trace.label(each) for each in ranks if first.get(each, each) == rank]
            label = ", ".join(equal[:2]) + ", …" * (len(equal) > 2)
            names.append(f"each of {len(equal)}: {label}" if len(equal) > 1 else label)
    column |= {rank: column[stand_in] for rank, stand_in in first.items() if stand_in in column}
    return Lifelines(column, tuple(names), frozenset(gaps), first)
