"""The map of process groups: which rank is in which group, as data, tensor and pipeline parallelism divide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from dlearn.draw import canvas
from dlearn.draw.canvas import points
from dlearn.draw.palette import FAINT, SERIES, TO_ITSELF, ink_on
from dlearn.draw.text import SMALLEST_PT, TEXT_PT, plain, text_width
from dlearn.join.ends import Group
from dlearn.join.process_groups import join_groups
from dlearn.shown import count_text
from dlearn.trace import Trace

_CELL_IN, _NAME_IN, _ROW_IN = 0.264, 0.24, 0.54
"""A cell, the name of a row above it, and both with a gap below."""
_KINDS_NAMED = 4

GroupRow = list[Group]
"""Groups of one kind that share no rank: of equal size, their members equally far apart."""


def groups(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw ranks from left to right, and a row for each kind of process group, a colour and a number for each group."""
    rows = rows_of(groups_of(trace))
    ranks = sorted({*trace.ranks, *(rank for row in rows for group in row for rank in group.members)})
    names = {rank: plain(trace.label(rank)) for rank in ranks}
    ax = ax or canvas.new_axes(height_in=_ROW_IN * max(len(rows), 1), left_in=0.2)
    if not rows:
        return canvas.draw_message_instead(ax, "No process group was recorded.")
    wide = points(ax, 1 / len(ranks), along="x")
    if wide < TEXT_PT:
        return canvas.draw_message_instead(ax, f"{len(ranks)} ranks are too many for cells in this width.")
    told = (_sentence(trace, group) for row in rows for group in row)
    canvas.describe(ax, "A row for each kind of process group, a cell for each member.", *told)
    ax.set(xlim=(0, len(ranks)), ylim=(_ROW_IN * len(rows), 0), yticks=[])
    for number, row in enumerate(rows):
        top = _ROW_IN * number + _NAME_IN
        canvas.write(ax, 0, top - _NAME_IN / 2, _row_text(row))
        _draw_row(ax, top, row, ranks, wide)
    above_in = canvas.names_on_top(ax, [at + 0.5 for at in range(len(ranks))], [*names.values()], wide)
    return canvas.frame(ax, title=title(rows, ranks), above_in=above_in, below_in=0.08)


def groups_of(trace: Trace) -> list[Group]:
    """Return the groups that the program made or was given, the largest first; none inside a glass-box backend."""
    inner = {fact.name for process in trace.processes for fact in process.groups.values() if fact.within}
    found = dict.fromkeys(join_groups(trace.processes).values())
    asked = [group for group in found if group.name not in inner]
    return sorted(asked, key=lambda each: (not each.default, -len(each.members), _steps(each), each.members))


def rows_of(found: Sequence[Group]) -> list[GroupRow]:
    """Put groups of one kind in one row, or in more where they share ranks."""
    rows: list[GroupRow] = []
    for group in found:
        for row in rows:
            taken = {rank for each in row for rank in each.members}
            if _kind(row[0]) == _kind(group) and not taken & {*group.members}:
                row.append(group)
                break
        else:
            rows.append([group])
    return rows


def title(rows: Sequence[GroupRow], ranks: Sequence[int]) -> str:
    """Say how many groups of which size there are: "8 ranks in 3 kinds of groups: 4 of 2, 4 of 2, 4 of 2"."""
    kinds = Counter(_kind(group) for row in rows for group in row if not group.default)
    if not kinds:
        return f"{count_text(len(ranks), 'rank')} in one group"
    sizes = [f"{count} of {size}" for (_, size, _), count in kinds.items()]
    told = ", ".join(sizes[:_KINDS_NAMED]) + ", ..." * bool(sizes[_KINDS_NAMED:])
    return f"{count_text(len(ranks), 'rank')} in {count_text(len(kinds), 'kind')} of groups: {told}"


def _draw_row(ax: Axes, top: float, row: GroupRow, ranks: Sequence[int], wide: float) -> None:
    """Draw a cell for each member, with its group's number if there are several and cells are wide enough."""
    numbered = len(row) > 1 and text_width(str(len(row) - 1), size=SMALLEST_PT) + 4 <= wide
    boxes, colors = [], []
    for number, group in enumerate(row):
        color = TO_ITSELF if group.default else SERIES[number % len(SERIES)]
        for rank in group.members:
            x = ranks.index(rank)
            boxes.append((x, x + 1, top, top + _CELL_IN))
            colors.append(color)
            if numbered:
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALLEST_PT}
                canvas.write(ax, x + 0.5, top + _CELL_IN / 2, str(number), color=ink_on(color), **style)
    edge = FAINT if row[0].default else "white"
    canvas.draw_boxes(ax, boxes, facecolors=colors, edgecolors=edge, linewidths=0.8, gid=f"groups {_row_text(row)}")


def _steps(group: Group) -> tuple[int, ...]:
    """Return how far each member is from the one before it."""
    return tuple(b - a for a, b in zip(group.members, group.members[1:], strict=False))


def _kind(group: Group) -> tuple[bool, int, int]:
    steps = {*_steps(group)}
    return group.default, len(group.members), steps.pop() if len(steps) == 1 else 0


def _row_text(row: Sequence[Group]) -> str:
    default, size, step = _kind(row[0])
    if default:
        return "default group"
    apart = {0: "", 1: ", side by side"}.get(step, f", {step} apart")
    return f"{count_text(len(row), 'group')} of {size}{apart}"


def _sentence(trace: Trace, group: Group) -> str:
    names = ", ".join(plain(trace.label(rank)) for rank in group.members)
    return f"Group {group.name} ({group.backend}): {names}."
