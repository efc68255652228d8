"""What one operation looks like: a head over arrows, a bar that says it all, or nothing but a count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from dlearn.analysis.findings import in_words, size_text, sizes_text, stuck_reasons
from dlearn.analysis.telling.words import NAMES_SHOWN
from dlearn.analysis.volume.alike_ranks import alike_ranks
from dlearn.analysis.volume.comparing import Amount
from dlearn.analysis.volume.flows import flows
from dlearn.draw.scene import ranks_shown
from dlearn.draw.text import TEXT_PT, cut, plain, text_width
from dlearn.join.ends import payload_bytes
from dlearn.join.joining import operations
from dlearn.join.operation_messages import PairSum, messages_of, sums_of, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.trace import Trace

MOST_LIFELINES = 16
LEVEL = 0.22
"""From an arrow of a round to the next above it, in rows."""
_FIRST, _LAST, _MOST_STUCK = 3, 2, 4
"""Of more ranks, how many are shown from the front, from the back, and, with their neighbours, because of a hang."""
_MOST_LINES = 8
"""Of arrows for one operation, where its steps are taken together."""
_LONGEST_LABEL_PT = 240.0


@dataclass(frozen=True)
class MessageArrow:
    """From one column to another: `count` messages, with what stands over the column `middle`.

    `ends` are the ranks. `wraps`: it closes a ring, so it leaves at one side and comes in at the other.
    """

    src: int
    dst: int
    ends: tuple[int, int]
    how: str
    payload_bytes: int | None
    count: int = 1
    label: str = ""
    middle: float = 0.0
    control: bool = False
    wraps: bool = False
    level: float = 0.0  # So far it stands above the lowest of its row, which it would touch.


ArrowRow = tuple[MessageArrow, ...]


@dataclass(frozen=True)
class Block:
    """One operation: a head over rows of arrows, or over a `bar`. `step` is the span that it belongs to."""

    op: str = ""
    phase: str = ""
    heads: tuple[str, ...] = ()
    """What stands above, the longest first."""
    rows: tuple[ArrowRow, ...] = ()
    bar: str = ""
    over: tuple[int, int] = (0, 0)
    """The first and the last column of the bar."""
    stuck: bool = False
    step: str = field(default="", compare=False)

    @property
    def heights(self) -> list[float]:
        """Of the head, of each line below it, and of the gap to the next block, in rows."""
        lines = [_height(row) for row in self.rows] or [1.0 if self.bar else 0.0]
        return [0.8 if self.heads else 0.0, *lines, 0.3 if self.heads else 0.15]

    @property
    def height(self) -> float:
        return sum(self.heights)


def _height(row: ArrowRow) -> float:
    lowest = 1.0 if any(arrow.label for arrow in row) else 0.7
    return lowest + max((arrow.level for arrow in row), default=0.0)


NOTHING = Amount()


class Draft(NamedTuple):
    """What is drawn of an operation, and what is not: RPC's own messages, and those of ranks without a lifeline."""

    block: Block | None = None
    control: Amount = NOTHING
    left_out: Amount = NOTHING
    never: Amount = NOTHING


@dataclass(frozen=True)
class Drafting:
    """How operations are drawn. `steps`: step by step; `tagged`: with tags, as these tell messages apart.

    `control`: torch's own messages are drawn, too, and not counted.
    """

    trace: Trace
    lines: Lifelines
    column_pt: float
    steps: bool
    tagged: bool
    control: bool

    def draft(self, operation: Operation) -> Draft:
        found = messages_of(operation) if operation.is_message or operation.is_call else []
        if found:
            return self._of_messages(operation, found)
        out = [pair for pair in sums_of(operation) if self.lines.hides(pair.src, pair.dst)]
        came, never = (_amount(pair for pair in out if (pair.how == "missing") is gone) for gone in (False, True))
        return Draft(self._of_pairs(operation), left_out=came, never=never)

    # A message has its name on its arrow ------------------------------------------------------------------------------

    def _of_messages(self, operation: Operation, found: Sequence[Message]) -> Draft:
        mine = [each for each in found if self.control or not each.control]
        drawn = [each for each in mine if self.lines.draws(each.src, each.dst)]
        arrows = [(self._arrow(each, self._name(operation, each)),) for each in drawn]
        reasons = self._stuck(operation) if operation.pending or operation.missing else ()
        return Draft(
            self._block(operation, reasons, arrows) if arrows else None,
            control=_amount([each for each in found if each.control and not self.control]),
            left_out=_amount([each for each in mine if self.lines.hides(each.src, each.dst)]),
        )

    def _name(self, operation: Operation, message: Message) -> tuple[str, str, str]:
        """What went wrong, what travels, and how much: in a narrow picture only the middle is cut."""
        alone = operation.exchange is None
        what = operation.describe(most=NAMES_SHOWN, tagged=False) if alone else message.describe(most=NAMES_SHOWN)
        more = f" {size_text(message.payload_bytes)}".rstrip()
        more += f", tag {operation.tag}" if self.tagged and operation.tag is not None else ""
        wrong = "never came: " if message.how == "missing" else ""
        return "to itself: " if message.src == message.dst else wrong, plain(what, most=120), more

    def _arrow(self, message: Message, name: tuple[str, str, str]) -> MessageArrow:
        src, dst = self.lines.column[message.src], self.lines.column[message.dst]
        room = max(_LONGEST_LABEL_PT, abs(src - dst) * self.column_pt - 8)
        room = min(room, len(self.lines.names) * self.column_pt - 8)
        before, what, more = name
        left = room - text_width(before + more, size=TEXT_PT)
        whats = what, what.split(": ")[0]
        shown = next((each for each in whats if text_width(each, size=TEXT_PT) <= left), None)
        label = f"{before}{shown or cut(whats[-1], left, size=TEXT_PT)}{more}".strip()
        return MessageArrow(
            src, dst, (message.src, message.dst), message.how, message.payload_bytes, 1, label,
            self._middle(src, dst, label), message.control,
        )  # fmt: skip

    def _middle(self, src: int, dst: int, label: str) -> float:
        """That of the arrow, but where the label does not leave the picture."""
        half, last = self._half(label), len(self.lines.names) - 1
        return min(max((src + dst) / 2, half - 0.5), max(last + 0.5 - half, last / 2))

    def _half(self, label: str) -> float:
        return (text_width(label, size=TEXT_PT) / 2 + 3) / self.column_pt

    # A collective has its name above its arrows -----------------------------------------------------------------------

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
        what = operation.describe(most=NAMES_SHOWN, tagged=self.tagged)
        told = reasons or tuple(dict.fromkeys((what, what.split(":")[0])))
        if not pairs:
            unknown = str(why_unknown(operation) or "nothing travels")
            return self._block(operation, _heads([name], told), bar=unknown)
        apart = self._apart(mine, one_step=len(steps) == 1)
        rows = [] if silent or inside else [row for step in steps for row in self._rows(operation, step, apart)]
        if not rows or (len(rows) > _MOST_LINES and not self.steps):
            return self._block(operation, reasons, bar=f"{name}: {in_words(pairs)}")
        names = [name] if apart else [f"{name}, each arrow {sizes_text(mine)}", name]
        return self._block(operation, _heads(names, told), rows)

    def _steps(self, operation: Operation) -> list[list[PairSum]]:
        if not self.steps or operation.missing:
            found = sums_of(operation)
            return [found] if found else []
        steps: dict[int, list[PairSum]] = defaultdict(list)
        for flow in flows(messages_of(operation), by_step=True):
            steps[flow.step].append(PairSum(flow.src, flow.dst, flow.how, flow.payload_bytes, flow.count))
        return list(steps.values())

    def _apart(self, pairs: Sequence[PairSum], *, one_step: bool) -> bool:
        """Whether each arrow has its own bytes beside it: they differ, or there is but one arrow for each pair."""
        labels = {self._label([pair]) for pair in pairs}
        return (one_step or len(labels) > 2) and all(2 * self._half(label) <= 1 for label in labels)

    def _label(self, pairs: Sequence[PairSum]) -> str:
        return ("never came: " if pairs[0].how == "missing" else "") + sizes_text(pairs)

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
        fan = not apart and len({arrow.src for arrow in arrows}) == 1
        if fan:
            return [tuple(arrows)]
        rows = self._side_by_side(arrows)
        if not self.steps or len(rows) < 2:
            return rows
        # They travel at the same time: one row, from left to right downwards.
        rise, levels = (1.0 if apart else LEVEL), enumerate(reversed(rows))
        return [tuple(replace(arrow, level=rise * level) for level, row in levels for arrow in row)]

    def _side_by_side(self, arrows: Sequence[MessageArrow]) -> list[ArrowRow]:
        """Arrows share a row where neither they nor their labels touch."""
        rows: list[list[MessageArrow]] = []
        for arrow in arrows:
            left, right = self._extent(arrow)
            for row in rows:
                if arrow.wraps or all(right <= begin or left >= end for begin, end in map(self._extent, row)):
                    row.append(arrow)
                    break
            else:
                rows.append([arrow])
        return [tuple(row) for row in rows]

    def _extent(self, arrow: MessageArrow) -> tuple[float, float]:
        if arrow.wraps:
            return arrow.src, arrow.src
        half = self._half(arrow.label) if arrow.label else 0.0
        return min(arrow.src, arrow.dst, arrow.middle - half), max(arrow.src, arrow.dst, arrow.middle + half)

    # Both -------------------------------------------------------------------------------------------------------------

    def _block(self, operation: Operation, heads: Sequence[str], rows: Sequence[ArrowRow] = (), bar: str = "") -> Block:
        members = {*operation.group.members, *operation.ranks} & {*self.lines.column}
        columns = {self.lines.column[rank] for rank in members}
        shown = tuple(plain(head, most=200) for head in heads)
        over = min(columns, default=0), max(columns, default=0)
        bar, stuck = plain(bar, most=120), bool(self._stuck(operation))
        return Block(operation.op, _phase(operation), shown, tuple(rows), bar, over, stuck)

    def _stuck(self, operation: Operation) -> tuple[str, ...]:
        """Why it does not end, the longest first; nothing if it did."""
        reasons = (stuck_reasons(operation, end, self.trace) for end in operation.ends)
        return next(filter(None, reasons), ())


def _heads(names: Sequence[str], told: Sequence[str]) -> tuple[str, ...]:
    """What may stand above an operation, the longest first: its name, with what is told of it as long as there is
    room."""
    whole, brief = next(iter(told), ""), next(iter(told[-1:]), "")
    named = [f"{name}: {what}" for what in dict.fromkeys((whole, brief)) if what for name in names]
    return (*named, *names)


def _amount(found: Iterable[Message | PairSum]) -> Amount:
    counts = [(each.message_count if isinstance(each, PairSum) else 1, each.payload_bytes or 0) for each in found]
    return Amount(sum(count for count, _ in counts), sum(size for _, size in counts))


def _phase(operation: Operation) -> str:
    phase = operation.ends[0].phase
    return "" if phase == "none" else phase


def _closes_ring(members: Sequence[int], step: Sequence[PairSum]) -> tuple[int, int] | None:
    """Of a ring that goes to the left or to the right, the message from one end to the other."""
    count = len(members)
    place = {rank: index for index, rank in enumerate(members)}
    shifts = {(place[pair.dst] - place[pair.src]) % count for pair in step if pair.src in place and pair.dst in place}
    if count < 3 or len(step) < count or shifts not in ({1}, {count - 1}):
        return None
    ends = members[0], members[-1]
    return ends if shifts == {count - 1} else ends[::-1]


# Lifelines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lifelines:
    """The column of each rank, and the names above. `stands_for`: rank -> the first of those that do the same.

    The columns in `gaps` stand for ranks that have no lifeline.
    """

    column: dict[int, int]
    names: tuple[str, ...]
    gaps: frozenset[int] = frozenset()
    stands_for: dict[int, int] = field(default_factory=dict)

    def hides(self, src: int, dst: int) -> bool:
        """Whether one of its ends has no lifeline."""
        return src not in self.column or dst not in self.column

    def draws(self, src: int, dst: int) -> bool:
        """Whether this message is drawn: of those that do the same, the first one's."""
        if self.hides(src, dst) or self.stands_for.get(src, src) != src:
            return False
        return src in self.stands_for or self.stands_for.get(dst, dst) == dst


def lifelines(trace: Trace, *, once: bool) -> Lifelines:
    """Those of all ranks; `once`: ranks that send and receive the same get one for all of them."""
    ranks = ranks_shown(trace)
    first = alike_ranks(trace, ranks) if once else {}
    shown = [rank for rank in ranks if first.get(rank, rank) == rank]
    own = {*shown}
    if len(shown) > MOST_LIFELINES:
        own = {*shown[:_FIRST], *shown[-_LAST:], *(rank + by for rank in _stuck(trace) for by in (-1, 0, 1))}
    names: list[str] = []
    column: dict[int, int] = {}
    gaps: set[int] = set()
    for has_one, some in groupby(shown, key=own.__contains__):
        together = list(some)
        if not has_one:
            gaps.add(len(names))
            names.append(f"… {len(together)} more")
            continue
        column |= {rank: len(names) + place for place, rank in enumerate(together)}
        names += [_name(trace, [each for each in ranks if first.get(each) == rank] or [rank]) for rank in together]
    column |= {rank: column[stand_in] for rank, stand_in in first.items() if stand_in in column}
    return Lifelines(column, tuple(names), frozenset(gaps), first)


def _name(trace: Trace, ranks: Sequence[int]) -> str:
    """ "rank 0"; "each of 4: rank 1, rank 2, …"."""
    told = ", ".join(trace.label(rank) for rank in ranks[:2]) + (", …" if len(ranks) > 2 else "")
    return f"each of {len(ranks)}: {told}" if len(ranks) > 1 else told


def _stuck(trace: Trace) -> list[int]:
    """Because of whom something never ended."""
    missing = [rank for each in operations(trace).unusual() for rank in each.missing]
    return [*dict.fromkeys(missing)][:_MOST_STUCK]
