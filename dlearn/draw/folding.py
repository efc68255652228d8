"""What is repeated is drawn once: ten equal steps become one with "× 10 steps" beside it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dlearn.analysis.telling.repeats import repeats
from dlearn.analysis.volume.flows import Flow
from dlearn.trace.message import Operation

_LONGEST_CYCLE = 24


@dataclass(frozen=True)
class Block:
    """One operation: its rows of arrows, or the `reason` why it has none. `step` is the span that it belongs to."""

    operation: Operation
    rows: tuple[tuple[Flow, ...], ...]
    reason: str = ""
    step: str = ""

    @property
    def height(self) -> int:
        return max(1, len(self.rows))

    @property
    def kind(self) -> Hashable:
        """Equal for blocks that look alike."""
        operation = self.operation
        flows = frozenset(
            Counter((f.src, f.dst, f.payload_bytes, f.count, f.how) for row in self.rows for f in row).items()
        )
        return operation.op, operation.what, operation.group.members, self.reason, operation.missing, flows


@dataclass(frozen=True)
class Cycle:
    """Blocks that stand one after the other, `times` in a row; `steps`: each time in a span of its own.

    `in_order`: in the order drawn each time, and not only the same ones.
    """

    blocks: tuple[Block, ...]
    times: int = 1
    steps: bool = False
    in_order: bool = True

    @property
    def height(self) -> int:
        return sum(block.height for block in self.blocks)


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
    return frozenset(Counter(block.kind for block in blocks).items())


def _calls_together(blocks: Sequence[Block], most_rows: int) -> list[Cycle]:
    """Stretches that repeat become one, with the number of times; who sends first may change from step to step."""

    def fits(at: int, length: int) -> bool:
        return sum(block.height for block in blocks[at : at + length]) <= most_rows

    found = repeats([block.kind for block in blocks], longest=_LONGEST_CYCLE, fits=fits, any_order=True)
    return [
        _cycle([blocks[at + n * length : at + (n + 1) * length] for n in range(times)]) for at, length, times in found
    ]


def _cycle(repeats: Sequence[Sequence[Block]]) -> Cycle:
    """The first of what repeats stands for all."""
    names = [{block.step for block in repeat} for repeat in repeats]
    each_its_own = all(len(name) == 1 for name in names) and len(set.union(*names) - {""}) == len(names)
    orders = {tuple(block.kind for block in repeat) for repeat in repeats}
    return Cycle(tuple(repeats[0]), len(repeats), each_its_own, len(orders) == 1)
