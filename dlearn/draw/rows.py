"""The rows of a sequence diagram, folded before anything is placed: what repeats, what is alike, what has no room."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np

from dlearn.analysis.telling.repeats import repeats
from dlearn.analysis.volume.comparing import Amount
from dlearn.analysis.walking.steps import WalkParts
from dlearn.draw.drafts import MOST_LIFELINES, NOTHING, Block, Draft, Drafting, Lifelines, MessageArrow, lifelines
from dlearn.join.joining import operations
from dlearn.join.operation_messages import message_count, messages_of
from dlearn.join.tables.operations import Operations
from dlearn.trace import Trace

MOST_ROWS = 35
_FEW_STEPS, _FEW_ROWS = 14, 24
"""Up to this many rows, the steps of collectives are drawn, and what is repeated is drawn as often as it was."""
_FEW_CONTROL = 3
"""Up to this many control messages have arrows of their own."""
_LONGEST_CYCLE = 24
"""In operations."""


@dataclass(frozen=True)
class Cycle:
    """Blocks that stand one after the other, `times` in a row; `steps`: each time in a span of its own."""

    blocks: tuple[Block, ...]
    times: int = 1
    steps: bool = False

    @property
    def height(self) -> float:
        return sum(block.height for block in self.blocks)

    @property
    def count(self) -> int:
        """Operations."""
        return len(self.blocks) * self.times


@dataclass(frozen=True)
class Rows:
    """`merged`: an arrow may stand for several steps. `before` and `after` count operations that did not fit.

    `control` are RPC's own messages, which are not drawn, `left_out` those of ranks that have no lifeline, `never`
    those of them that never came.
    """

    lines: Lifelines
    cycles: tuple[Cycle, ...]
    merged: bool = False
    before: int = 0
    after: int = 0
    control: Amount = NOTHING
    left_out: Amount = NOTHING
    never: Amount = NOTHING

    @property
    def arrows(self) -> list[MessageArrow]:
        return [arrow for cycle in self.cycles for block in cycle.blocks for row in block.rows for arrow in row]


def rows_of(trace: Trace, width_pt: float) -> Rows:
    """Every message in a row; of many, what is repeated once, the steps of a collective together, then a cut."""
    shown = operations(trace)
    if sum(message_count(one) * times for one, times in shown.counted()) <= _FEW_ROWS * MOST_LIFELINES:
        for steps, most in ((True, _FEW_STEPS), (False, _FEW_ROWS)):
            rows = _drafted(trace, width_pt, few=True, steps=steps)
            if sum(cycle.height for cycle in rows.cycles) <= most:
                return rows
    return _drafted(trace, width_pt, few=False, steps=False)


def _drafted(trace: Trace, width_pt: float, *, few: bool, steps: bool) -> Rows:
    shown, lines = operations(trace), lifelines(trace, once=not few)
    tags = {one.tag for one, _ in shown.counted() if one.sender is not None}
    drafting = Drafting(
        trace, lines, width_pt / max(1, len(lines.names)), steps=steps, tagged=len(tags) > 1,
        control=_control_count(trace) <= _FEW_CONTROL,
    )  # fmt: skip
    drafts: list[Draft] = [Draft()] * len(shown)
    for one, places in shown.alike():
        draft = drafting.draft(one)
        for place in places.tolist():
            drafts[place] = draft
    blocks = _in_steps(trace, shown, drafts)
    whole = Rows(lines, tuple(Cycle((block,)) for block in blocks), merged=not steps)
    rows = whole if few else _cut(lines, fold(blocks, most_rows=MOST_ROWS))
    _, *not_drawn = zip(*drafts, strict=True) if drafts else ((), (), (), ())
    control, left_out, never = (Amount(*map(sum, zip(NOTHING, *amounts, strict=True))) for amounts in not_drawn)
    return replace(rows, control=control, left_out=left_out, never=never)


def _control_count(trace: Trace) -> int:
    """How many messages are the system's own: each of these is one of an RPC or of a service."""
    shown = operations(trace)
    calls = shown.at(np.flatnonzero(shown.table.is_call[shown.rows]))
    return sum(each.control for one in calls for each in messages_of(one))


def _in_steps(trace: Trace, shown: Operations, drafts: Sequence[Draft]) -> list[Block]:
    """In the order of sending (a receive may be posted long before), each with the span that it belongs to."""
    sent_ns = shown.start_ns.copy()
    for one, places in shown.alike():
        if one.sender is not None:
            sent_ns[places] = shown.times(places)[2][:, 0]
    order = np.argsort(sent_ns, kind="stable").tolist()
    parts = WalkParts(trace) if trace.whole.spans else None
    blocks = [(place, block) for place in order if (block := drafts[place].block) is not None]
    return [replace(block, step=parts.span_of(shown[place]) if parts else "") for place, block in blocks]


def _cut(lines: Lifelines, cycles: Sequence[Cycle]) -> Rows:
    """As much as fits from the top, and at least one operation; what is repeated is kept whole or not at all.

    Where that would leave out the steps that make up the job, the picture begins with these.
    """
    steps = max((cycle for cycle in cycles if cycle.steps), key=lambda cycle: cycle.count, default=None)
    first = cycles.index(steps) if steps is not None and steps not in _that_fit(cycles) else 0
    kept = _that_fit(cycles[first:])
    before, after = (sum(cycle.count for cycle in some) for some in (cycles[:first], cycles[first + len(kept) :]))
    return Rows(lines, tuple(kept), merged=True, before=before, after=after)


def _that_fit(cycles: Sequence[Cycle]) -> Sequence[Cycle]:
    fitting = sum(height <= MOST_ROWS for height in accumulate(cycle.height for cycle in cycles))
    return cycles[: max(1, fitting)]


def fold(blocks: Sequence[Block], *, most_rows: int) -> list[Cycle]:
    """Cycles of at most `most_rows` that are drawn once: of calls that repeat, or of equal steps, whichever is less."""
    return min(
        _calls_together(blocks, most_rows), _steps_together(blocks, most_rows),
        key=lambda cycles: sum(cycle.height for cycle in cycles),
    )  # fmt: skip


def _steps_together(blocks: Sequence[Block], most_rows: int) -> list[Cycle]:
    """Steps of several ranks may lie over each other in time: each is drawn as a whole, where it begins."""
    steps: dict[Hashable, list[Block]] = defaultdict(list)
    for place, block in enumerate(blocks):
        steps[block.step or place].append(block)
    cycles: list[Cycle] = []
    for (_, named), equal in groupby(steps.values(), key=lambda step: (_kinds(step), bool(step[0].step))):
        alike = list(equal)
        if named and len(alike) > 1 and sum(block.height for block in alike[0]) <= most_rows:
            cycles.append(_cycle(alike))
        else:
            cycles += _calls_together([block for step in alike for block in step], most_rows)
    return cycles


def _kinds(blocks: Iterable[Block]) -> Hashable:
    return frozenset(Counter(blocks).items())


def _calls_together(blocks: Sequence[Block], most_rows: int) -> list[Cycle]:
    """Stretches that repeat become one, with the number of times; who sends first may change from step to step."""

    def fits(at: int, length: int) -> bool:
        return sum(block.height for block in blocks[at : at + length]) <= most_rows

    found = repeats(blocks, longest=_LONGEST_CYCLE, fits=fits, any_order=True)
    return [
        _cycle([blocks[at + n * length : at + (n + 1) * length] for n in range(times)]) for at, length, times in found
    ]


def _cycle(repeats: Sequence[Sequence[Block]]) -> Cycle:
    """The first of what repeats stands for all."""
    names = [{block.step for block in repeat} for repeat in repeats]
    each_its_own = all(len(name) == 1 for name in names) and len(set.union(*names) - {""}) == len(names)
    return Cycle(tuple(repeats[0]), len(repeats), each_its_own)
