"""What a sequence diagram draws once: steps and calls that repeat; and sends side by side."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from math import inf
from operator import attrgetter

from dlearn.analysis.telling.repeats import repeats
from dlearn.draw.sequence_labels import Block, MessageArrow

_LONGEST_CYCLE = 24  # Operations that may repeat together.
_WORTH = 0.5  # Only what makes the picture so much shorter is folded: a fold hides who sent first.
_BELOW, _NEXT_TO = 0.7, 0.3  # Rows from a send to one that it overlaps, or meets at a lifeline.
_MOST_STAIRS = 40.0  # Rows of sends in one block: of more, a picture that is cut keeps the first.
_MOST_PLACED = 720  # Sends of one part of the program that are compared with those before.


@dataclass(frozen=True)
class Cycle:
    """Blocks one after the other, `times` in a row; `steps`: each time in a span of its own."""

    blocks: tuple[Block, ...]
    times: int = 1
    steps: bool = False

    @property
    def height(self) -> float:
        """Return the height of one time, in rows."""
        return sum(block.height for block in self.blocks)

    @property
    def count(self) -> int:
        return sum(block.count for block in self.blocks) * self.times


Extent = Callable[[MessageArrow], tuple[float, float]]
"""The columns from the left to the right of an arrow and its label."""


def fold(blocks: Sequence[Block], extent: Extent, *, most_rows: int) -> list[Cycle]:
    """Merge calls that repeat, or equal steps, whichever takes fewer of at most `most_rows`."""
    whole = side_by_side(map(_once, blocks), extent)
    ways = _calls_together(blocks, most_rows), _steps_together(blocks, most_rows)
    shortest = min((side_by_side(way, extent) for way in ways), key=_height)
    worth = _height(whole) > most_rows or _height(shortest) <= _WORTH * _height(whole)
    return shortest if worth else whole


def _height(cycles: Iterable[Cycle]) -> float:
    return sum(cycle.height for cycle in cycles)


def _steps_together(blocks: Sequence[Block], most_rows: int) -> list[Cycle]:
    """Merge equal steps; those of several ranks may overlap in time, so each is drawn where it begins."""
    steps: dict[Hashable, list[Block]] = defaultdict(list)
    for place, block in enumerate(blocks):
        steps[block.step or place].append(block)
    cycles: list[Cycle] = []
    for (_, named), equal in groupby(steps.values(), key=lambda step: (Counter(step), bool(step[0].step))):
        alike = list(equal)
        if named and len(alike) > 1 and sum(block.height for block in alike[0]) <= most_rows:
            cycles.append(_cycle(alike))
        else:
            cycles += _calls_together([block for step in alike for block in step], most_rows)
    return cycles


def _calls_together(blocks: Sequence[Block], most_rows: int) -> list[Cycle]:
    """Merge runs of calls that repeat; the order in which ranks send may change between them."""

    def fits(at: int, length: int) -> bool:
        return sum(block.height for block in blocks[at : at + length]) <= most_rows

    found = repeats(blocks, longest=_LONGEST_CYCLE, fits=fits, any_order=True)
    cycles: list[Cycle] = []
    for at, length, times in found:
        together = blocks[at : at + times * length]
        if times == 2 and all(block.is_send for block in together):  # By chance, as in a pipeline.
            cycles += map(_once, together)
        else:
            cycles.append(_cycle([together[n * length :][:length] for n in range(times)]))
    return cycles


def _cycle(repeats: Sequence[Sequence[Block]]) -> Cycle:
    """Return the first of the repetitions, which stands for all."""
    names = [{block.step for block in repeat} for repeat in repeats]
    each_its_own = all(len(name) == 1 for name in names) and len(set.union(*names) - {""}) == len(names)
    return Cycle(tuple(repeats[0]), len(repeats), each_its_own)


def _once(block: Block) -> Cycle:
    return Cycle((block,))


def side_by_side(cycles: Iterable[Cycle], extent: Extent) -> list[Cycle]:
    """Put sends that follow each other into one block, as high as their order allows."""
    found: list[Cycle] = []
    for once, some in groupby(cycles, key=lambda cycle: cycle.times == 1):
        if once:
            blocks = chain.from_iterable(cycle.blocks for cycle in some)
            found += map(_once, _stairs(blocks, extent))
        else:
            found += [replace(cycle, blocks=tuple(_stairs(cycle.blocks, extent))) for cycle in some]
    return found


def _stairs(blocks: Iterable[Block], extent: Extent) -> Iterator[Block]:
    alike = attrgetter("is_send", "step", "phase", "look")
    for (is_send, *_), some in groupby(blocks, key=alike):
        if is_send:
            yield from _stairs_of_sends(some, extent)
        else:
            yield from some


def _stairs_of_sends(blocks: Iterator[Block], extent: Extent) -> Iterator[Block]:
    """Yield blocks of many sends, each send below all earlier ones that it meets; then the rest."""
    above: list[tuple[float, tuple[float, float]]] = []
    placed: list[tuple[float, MessageArrow]] = []
    for block in islice(blocks, _MOST_PLACED):
        ((arrow,),) = block.rows
        mine = extent(arrow)
        y = max([0.0, *(y + _gap(mine, other) for y, other in above)])
        if y > _MOST_STAIRS:
            yield _block_of(block, placed)
            above, placed, y = [], [], 0.0
        above.append((y, mine))
        placed.append((y, arrow))
    yield _block_of(block, placed)
    yield from blocks


def _gap(arrow: tuple[float, float], above: tuple[float, float]) -> float:
    """Return the rows from one arrow down to the next, -inf where they do not meet."""
    between = max(arrow[0], above[0]) - min(arrow[1], above[1])
    return _BELOW if between < 0 else _NEXT_TO if between == 0 else -inf


def _block_of(block: Block, placed: Sequence[tuple[float, MessageArrow]]) -> Block:
    lowest = max(y for y, _ in placed)
    row = tuple(replace(arrow, level=lowest - y) for y, arrow in placed)
    return replace(block, rows=(row,), count=len(row))
