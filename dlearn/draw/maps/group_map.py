"""The map of process groups: which rank is in which group, as data, tensor and pipeline parallelism divide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from dlearn.draw import canvas
from dlearn.draw.canvas import points
from dlearn.draw.palette import FAINT, SERIES, TO_ITSELF, ink_on
from dlearn.draw.text import SMALLEST_PT, plain, text_width
from dlearn.join.ends import Group
from dlearn.join.matching import join_groups
from dlearn.shown import count_text
from dlearn.trace import Trace

_LINE_IN, _NAME_IN = 0.3, 0.24
"""A line of cells, and the name of a row above it."""
_GAP = 0.12
"""Between lines, in lines."""
_KINDS_NAMED = 4


@dataclass(frozen=True)
class GroupRow:
    """Groups of one kind that share no rank: of equal size, their members equally far apart."""

    text: str
    groups: tuple[Group, ...]


def groups(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw ranks from left to right, and a row for each kind of process group, a colour and a number for each group.

    Where a line has no room for all ranks, each row goes on in the lines below.
    """
    rows = rows_of(groups_of(trace))
    ranks = sorted({*trace.ranks, *(rank for row in rows for group in row.groups for rank in group.members)})
    names = {rank: plain(trace.label(rank)) for rank in ranks}
    left_in = canvas.left_margin_in(names.values())
    lines = lines_of(ranks, rows, canvas.points_wide(ax, left_in=left_in))
    row_in = _NAME_IN + _LINE_IN * len(lines)
    ax = ax or canvas.new_axes(height_in=row_in * max(len(rows), 1), left_in=left_in if lines[1:] else 0.2)
    if not rows:
        return canvas.draw_message_instead(ax, "No process group was recorded.")
    told = (_sentence(trace, group) for row in rows for group in row.groups)
    canvas.describe(ax, "A row for each kind of process group, a cell for each member.", *told)
    ax.set(xlim=(0, len(lines[0])), ylim=(row_in * len(rows), 0))
    tops = [row_in * at + _NAME_IN for at in range(len(rows))]
    for top, row in zip(tops, rows, strict=True):
        canvas.write(ax, 0, top - _NAME_IN / 2, row.text)
        _draw_row(ax, top, row, lines)
    if not lines[1:]:
        ax.set_yticks([])
        wide = points(ax, 1 / len(ranks), along="x")
        above_in = canvas.names_on_top(ax, [at + 0.5 for at in range(len(ranks))], [*names.values()], wide)
        return canvas.frame(ax, title=title(rows, ranks), above_in=above_in, below_in=0.08)
    middles = [top + _LINE_IN * (at + (1 - _GAP) / 2) for top in tops for at in range(len(lines))]
    canvas.name_rows(ax, middles, [names[line[0]] for line in lines] * len(rows))
    ax.set_xticks([])
    canvas.names_only(ax)
    notes = [f"A line has {len(lines[0])} ranks, from the one that is named."]
    return canvas.frame(ax, title=title(rows, ranks), notes=notes, below_in=0.08)


def lines_of(ranks: Sequence[int], rows: Sequence[GroupRow], width: float) -> list[Sequence[int]]:
    """Put all ranks in one line, if `width` points have room for the groups' numbers; else a power of two a line."""
    most = max((len(row.groups) for row in rows), default=1) - 1
    room = max(1, int(width / (text_width(str(most), size=SMALLEST_PT) + 4)))
    length = max(1, len(ranks)) if len(ranks) <= room else 2 ** (room.bit_length() - 1)
    return [ranks[at : at + length] for at in range(0, len(ranks), length)]


def groups_of(trace: Trace) -> list[Group]:
    """Return the groups that the program made or was given, the largest first; none inside a glass-box backend."""
    inner = {fact.name for process in trace.processes for fact in process.groups.values() if fact.within}
    found = dict.fromkeys(join_groups(trace.processes).values())
    asked = [group for group in found if group.name not in inner]
    return sorted(asked, key=lambda each: (not each.default, -len(each.members), _steps(each), each.members))


def rows_of(found: Sequence[Group]) -> list[GroupRow]:
    """Put groups of one kind in one row, or in more where they share ranks."""
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


def _draw_row(ax: Axes, top: float, row: GroupRow, lines: Sequence[Sequence[int]]) -> None:
    """Draw a cell for each member, with its group's number if there are several."""
    place = {rank: (x, top + _LINE_IN * at) for at, line in enumerate(lines) for x, rank in enumerate(line)}
    boxes, colors = [], []
    for number, group in enumerate(row.groups):
        color = TO_ITSELF if group.default else SERIES[number % len(SERIES)]
        for rank in group.members:
            x, y = place[rank]
            boxes.append((x, x + 1, y, y + _LINE_IN * (1 - _GAP)))
            colors.append(color)
            if len(row.groups) > 1:
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALLEST_PT}
                canvas.write(ax, x + 0.5, y + _LINE_IN * (1 - _GAP) / 2, str(number), color=ink_on(color), **style)
    edge = FAINT if row.groups[0].default else "white"
    canvas.draw_boxes(ax, boxes, facecolors=colors, edgecolors=edge, linewidths=0.8, gid=f"groups {row.text}")


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
    count = count_text(len(row), "group")
    apart = "" if not step else ", side by side" if step == 1 else f", {step} apart"
    return f"{count} of {size}{apart}"


def _sentence(trace: Trace, group: Group) -> str:
    names = ", ".join(plain(trace.label(rank)) for rank in group.members)
    return f"Group {group.name} ({group.backend}): {names}."
