"""The map of process groups: which rank is in which group, as data, tensor and pipeline parallelism divide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from dlearn.draw import canvas
from dlearn.draw.canvas import SMALLEST_PT, plain, points, text_width
from dlearn.draw.palette import SERIES, TO_ITSELF, ink_on
from dlearn.shown import count_text
from dlearn.trace.message import Group
from dlearn.trace.process_groups import join_groups
from dlearn.trace.trace import Trace

_ROW_IN = 0.38
_GAP = 0.12
"""Between rows, in rows."""
_NARROWEST_PT = 7.0
"""A cell that holds a number, upright."""
_MOST_NAMES = 24
_KINDS_NAMED = 4


@dataclass(frozen=True)
class GroupRow:
    """Groups of one kind that share no rank: of equal size, their members equally far apart."""

    text: str
    groups: tuple[Group, ...]


def groups(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw ranks from left to right, and below them a row for each kind of process group, a colour for each group."""
    rows = rows_of(groups_of(trace))
    ranks = sorted({*trace.ranks, *(rank for row in rows for group in row.groups for rank in group.members)})
    left_in = canvas.left_margin_in([row.text for row in rows])
    ax = ax or canvas.new_axes(height_in=_ROW_IN * max(len(rows), 1), left_in=left_in)
    if not rows:
        return canvas.say_empty(ax, "No process group was recorded.")
    told = (_sentence(trace, group) for row in rows for group in row.groups)
    canvas.describe(ax, "A row for each kind of process group, a cell for each member.", *told)
    ax.set_xlim(0, len(ranks))
    ax.set_ylim(len(rows), 0)
    numbered = [_draw_row(ax, at, row, ranks) for at, row in enumerate(rows)]
    above_in = _label_sides(ax, trace, rows, ranks)
    notes = [] if all(numbered) else ["Colours repeat: there are more groups than colours, and no room for numbers."]
    return canvas.frame(ax, title=title(rows, ranks), notes=notes, above_in=above_in, below_in=0.08)


def groups_of(trace: Trace) -> list[Group]:
    """Every group that the program made or was given, the largest first; not those inside a glass-box backend."""
    inner = {fact.name for process in trace.processes for fact in process.groups.values() if fact.within}
    found = dict.fromkeys(join_groups(trace.processes).values())
    asked = [group for group in found if group.name not in inner]
    return sorted(asked, key=lambda each: (not each.default, -len(each.members), _steps(each), each.members))


def rows_of(found: Sequence[Group]) -> list[GroupRow]:
    """Groups of one kind in one row, or in more where they share ranks."""
    rows: list[list[Group]] = []
    for group in found:
        for row in rows:
            taken = {rank for each in row for rank in each.members}
            if _kind(row[0]) == _kind(group) and not taken & {*group.members}:
                row.append(group)
                break
        else:
            rows.append([group])
    return [GroupRow(_row_text(row), tuple(row)) for row in rows]


def title(rows: Sequence[GroupRow], ranks: Sequence[int]) -> str:
    """Say how many groups of which size there are: "8 ranks in 3 kinds of groups: 4 of 2, 4 of 2, 4 of 2"."""
    kinds = Counter(_kind(group) for row in rows for group in row.groups if not group.default)
    if not kinds:
        return f"{count_text(len(ranks), 'rank')} in one group"
    sizes = [f"{count} of {size}" for (_, size, _), count in kinds.items()]
    told = ", ".join(sizes[:_KINDS_NAMED]) + ", ..." * bool(sizes[_KINDS_NAMED:])
    return f"{count_text(len(ranks), 'rank')} in {count_text(len(kinds), 'kind')} of groups: {told}"


def _draw_row(ax: Axes, at: int, row: GroupRow, ranks: Sequence[int]) -> bool:
    """Draw a cell for each member; return whether groups can be told apart, by number or by colour."""
    place = {rank: number for number, rank in enumerate(ranks)}
    wide = points(ax, 1.0, along="x") / len(ranks)
    widest = text_width(str(len(row.groups) - 1), size=SMALLEST_PT) + 2
    room = wide >= _NARROWEST_PT
    boxes, colors = [], []
    for number, group in enumerate(row.groups):
        color = TO_ITSELF if group.default else SERIES[number % len(SERIES)]
        for rank in group.members:
            x = place[rank]
            boxes.append((x, x + 1, at + _GAP, at + 1 - _GAP))
            colors.append(color)
            if room and len(row.groups) > 1:
                canvas.write(
                    ax, x + 0.5, at + 0.5, str(number), ha="center", va="center", fontsize=SMALLEST_PT,
                    color=ink_on(color), rotation=0 if widest <= wide else 90,
                )  # fmt: skip
    canvas.draw_boxes(ax, boxes, facecolors=colors, edgecolors="white", linewidths=0.8, gid=f"groups {row.text}")
    return room or len(row.groups) <= len(SERIES)


def _label_sides(ax: Axes, trace: Trace, rows: Sequence[GroupRow], ranks: Sequence[int]) -> float:
    """Name the kinds at the left, the ranks on top; return the inches on top."""
    every = 1 if len(ranks) <= _MOST_NAMES else 8
    shown = range(0, len(ranks), every)
    wide = points(ax, every / len(ranks), along="x")
    ax.set_yticks([at + 0.5 for at in range(len(rows))], [row.text for row in rows], parse_math=False)
    return canvas.names_on_top(ax, [at + 0.5 for at in shown], [trace.label(ranks[at]) for at in shown], wide)


def _steps(group: Group) -> tuple[int, ...]:
    """How far each member is from the one before it."""
    return tuple(b - a for a, b in zip(group.members, group.members[1:], strict=False))


def _kind(group: Group) -> tuple[bool, int, int]:
    steps = {*_steps(group)}
    return group.default, len(group.members), steps.pop() if len(steps) == 1 else 0


def _row_text(row: Sequence[Group]) -> str:
    default, size, step = _kind(row[0])
    if default:
        return "default group"
    count = count_text(len(row), "group")
    apart = "" if not step else ", side by side" if step == 1 else f", {step} apart"
    return f"{count} of {size}{apart}"


def _sentence(trace: Trace, group: Group) -> str:
    names = ", ".join(plain(trace.label(rank)) for rank in group.members)
    return f"Group {group.name} ({group.backend}): {names}."
