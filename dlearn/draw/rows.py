"""The rows of a sequence diagram: which arrows stand side by side, what is repeated, what has no place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dlearn.analysis.volume.flows import Flow, by_pair, by_step
from dlearn.analysis.walking.parts import WalkParts
from dlearn.draw.folding import Block, Cycle, fold
from dlearn.join.joining import operations
from dlearn.join.unrolling import messages_of, why_unknown
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace

MOST_ROWS = 40
_FEW_ROWS = 24
"""Up to this many, what is repeated is drawn as often as it was."""

Together = Callable[[Sequence[Message]], tuple[Flow, ...]]
Extent = Callable[[Flow], tuple[float, float]]
"""From where to where an arrow and its label reach, in columns."""


@dataclass(frozen=True)
class Rows:
    """`merged`: an arrow may stand for several steps. `before` and `after` count operations that did not fit."""

    cycles: tuple[Cycle, ...]
    merged: bool = False
    before: int = 0
    after: int = 0

    @property
    def height(self) -> int:
        return _height(self.cycles)


def rows_of(trace: Trace, columns: Collection[int], extent: Extent) -> Rows:
    """Every message in a row; of many, what is repeated once; of too many, the steps of a ring together, then a cut."""
    in_order = sorted(operations(trace), key=_sent_ns)
    parts = WalkParts(trace)
    found = [(each, _between(columns, messages_of(each)), parts.span_of(each)) for each in in_order]

    def blocks(together: Together) -> list[Block]:
        return [_block(*each, together, extent) for each in found]

    whole = [Cycle((block,)) for block in blocks(by_step)]
    if _height(whole) > MOST_ROWS:
        return _cut(fold(blocks(by_pair), most_rows=MOST_ROWS))
    return Rows(tuple(whole if _height(whole) <= _FEW_ROWS else fold(blocks(by_step), most_rows=MOST_ROWS)))


def _height(cycles: Iterable[Cycle]) -> int:
    return sum(cycle.height for cycle in cycles)


def _sent_ns(operation: Operation) -> int:
    """A receive may be posted long before."""
    return operation.ends[0].start_ns if operation.sender is not None else operation.start_ns


def _between(columns: Collection[int], messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.src in columns and message.dst in columns]


def _block(operation: Operation, messages: Sequence[Message], step: str, together: Together, extent: Extent) -> Block:
    if not messages:
        return Block(operation, (), str(why_unknown(operation) or "nothing travels"), step)
    # What never came needs no detail.
    flows = by_pair(messages) if messages[0].how == "missing" else together(messages)
    return Block(operation, tuple(_side_by_side(flows, extent)), step=step)


def _side_by_side(flows: Sequence[Flow], extent: Extent) -> list[tuple[Flow, ...]]:
    """Arrows of the same step share a row where they do not touch."""
    rows: list[list[Flow]] = []
    for flow in flows:
        left, right = extent(flow)
        fitting = (
            row
            for row in rows
            if row[0].step == flow.step and all(right <= extent(other)[0] or left >= extent(other)[1] for other in row)
        )
        row = next(fitting, None)
        if row is None:
            rows.append([flow])
        else:
            row.append(flow)
    return [tuple(row) for row in rows]


def _cut(cycles: Sequence[Cycle]) -> Rows:
    """As much as fits from the top, and at least one operation; what is repeated is kept whole or not at all.

    Where that would leave out the steps that make up the job, the picture begins with these.
    """
    steps = max((cycle for cycle in cycles if cycle.steps), key=_count_of, default=None)
    first = cycles.index(steps) if steps is not None and steps not in _that_fit(cycles) else 0
    kept = _that_fit(cycles[first:])
    return Rows(tuple(kept), merged=True, before=_count(cycles[:first]), after=_count(cycles[first + len(kept) :]))


def _that_fit(cycles: Sequence[Cycle]) -> list[Cycle]:
    kept: list[Cycle] = []
    for cycle in cycles:
        if kept and _height([*kept, cycle]) > MOST_ROWS:
            break
        kept.append(cycle)
    return kept


def _count(cycles: Iterable[Cycle]) -> int:
    return sum(_count_of(cycle) for cycle in cycles)


def _count_of(cycle: Cycle) -> int:
    return len(cycle.blocks) * cycle.times
