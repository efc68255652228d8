"""The rows of a sequence diagram: which arrows stand side by side, what is repeated, what has no place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dlearn.analysis.flows import Flow, by_pair, by_step
from dlearn.analysis.joining import operations
from dlearn.analysis.unrolling import answers
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace

MOST_ROWS = 40
_LONGEST_CYCLE = 24

Extent = Callable[[Flow], tuple[float, float]]
"""From where to where an arrow and its label reach, in columns."""


@dataclass(frozen=True)
class Block:
    """One operation: its rows of arrows, or the `reason` why it has none."""

    operation: Operation
    rows: tuple[tuple[Flow, ...], ...]
    reason: str = ""

    @property
    def height(self) -> int:
        return max(1, len(self.rows))


@dataclass(frozen=True)
class Cycle:
    """Blocks that stand one after the other, `times` in a row."""

    blocks: tuple[Block, ...]
    times: int = 1

    @property
    def height(self) -> int:
        return sum(block.height for block in self.blocks)


@dataclass(frozen=True)
class Rows:
    """`merged`: an arrow may stand for several steps. `left_out` counts operations that did not fit."""

    cycles: tuple[Cycle, ...]
    merged: bool
    left_out: int

    @property
    def height(self) -> int:
        return sum(cycle.height for cycle in self.cycles)


def rows_of(trace: Trace, columns: Collection[int], extent: Extent) -> Rows:
    """Every message in a row; if too many, the steps of a ring together, then repeated operations, then a cut."""
    found = [(operation, _between(columns, answer)) for operation, answer in answers(operations(trace))]
    whole = Rows(tuple(Cycle((_block(*each, by_step, extent),)) for each in found), merged=False, left_out=0)
    if whole.height <= MOST_ROWS:
        return whole
    blocks = [_block(*each, by_pair, extent) for each in found]
    return _cut(_cycles(blocks))


def _between(columns: Collection[int], answer: list[Message] | str) -> list[Message] | str:
    if isinstance(answer, str):
        return answer
    return [message for message in answer if message.src in columns and message.dst in columns]


def _block(
    operation: Operation,
    answer: list[Message] | str,
    together: Callable[[Sequence[Message]], tuple[Flow, ...]],
    extent: Extent,
) -> Block:
    if isinstance(answer, str):
        return Block(operation, (), answer)
    if not answer:
        return Block(operation, (), "nothing travels")
    # What never came needs no detail.
    flows = by_pair(answer) if answer[0].how == "missing" else together(answer)
    return Block(operation, tuple(_side_by_side(flows, extent)))


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


def _cycles(blocks: Sequence[Block]) -> list[Cycle]:
    """Stretches that repeat become one, with the number of times."""
    kinds = [_kind(block) for block in blocks]
    cycles: list[Cycle] = []
    i = 0
    while i < len(blocks):
        length, times = _longest_repeat(kinds, [block.height for block in blocks[i : i + _LONGEST_CYCLE]], i)
        cycles.append(Cycle(tuple(blocks[i : i + length]), times))
        i += length * times
    return cycles


def _longest_repeat(kinds: Sequence[object], heights: Sequence[int], start: int) -> tuple[int, int]:
    """Length and number of the repeats from here that cover most blocks and fit the picture; the shortest of equals."""
    best = (1, 1)
    for length in range(1, _LONGEST_CYCLE + 1):
        first = kinds[start : start + length]
        times = 1
        while len(first) == length and kinds[start + times * length : start + (times + 1) * length] == first:
            times += 1
        fits = sum(heights[:length]) <= MOST_ROWS
        if times > 1 and fits and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _kind(block: Block) -> tuple[object, ...]:
    operation = block.operation
    flows = tuple((f.src, f.dst, f.payload_bytes, f.count, f.how) for row in block.rows for f in row)
    return operation.op, operation.what, operation.group.members, block.reason, operation.missing, flows


def _cut(cycles: Sequence[Cycle]) -> Rows:
    """As much as fits, and at least one operation; what is repeated is kept whole or not at all."""
    kept: list[Cycle] = []
    room = MOST_ROWS
    for cycle in cycles:
        if kept and cycle.height > room:
            break
        kept.append(cycle)
        room -= cycle.height
    return Rows(tuple(kept), merged=True, left_out=_count(cycles) - _count(kept))


def _count(cycles: Sequence[Cycle]) -> int:
    return sum(len(cycle.blocks) * cycle.times for cycle in cycles)
