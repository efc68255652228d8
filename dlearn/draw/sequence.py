"""The sequence diagram: a lifeline per rank, messages in their order from top to bottom."""

from __future__ import annotations

from itertools import groupby
from math import log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from dlearn.analysis.findings import sequence_finding, size_text
from dlearn.analysis.telling.words import problem_sentences
from dlearn.draw import canvas
from dlearn.draw.arrows import draw_arrow, in_legend
from dlearn.draw.canvas import points, write
from dlearn.draw.drafts import Block, Lifelines, MessageArrow
from dlearn.draw.palette import FAINT, INK, LANE, MISSING, line_color, look
from dlearn.draw.rows import Cycle, Rows, rows_of
from dlearn.draw.text import TEXT_PT, cut, plain, text_width
from dlearn.shown import count_text
from dlearn.trace import Trace

_ROW_IN = 0.3
_LEFT_IN, _RIGHT_IN = 1.2, 0.15
_PAPER: dict[str, Any] = {"on": LANE, "pad": 0.3}
"""Below text, so that no lifeline goes through it."""


def sequence(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a lifeline per rank and an arrow per message, downwards in the order of sending; distances mean nothing.

    What repeats, and ranks that do the same, are drawn once; the thicker an arrow, the more bytes.
    """
    rows = rows_of(trace, canvas.points_wide(ax, left_in=_LEFT_IN, right_in=_RIGHT_IN))
    height = 0.3 + sum(cycle.height for cycle in rows.cycles)
    ax = ax or canvas.new_axes(height_in=max(0.6, height * _ROW_IN), left_in=_LEFT_IN, right_in=_RIGHT_IN)
    if not rows.cycles:
        return canvas.say_empty(ax, "This trace holds no operation.")
    canvas.describe(
        ax,
        "A line downwards for each rank; from line to line, in their order, an arrow for each message, with its bytes.",
    )
    above_in = draw_lifelines(ax, rows.lines, height)
    _draw_bands(ax, rows)
    top = 0.3
    for cycle in rows.cycles:
        if cycle.times > 1:
            _draw_times(ax, cycle, top, top + cycle.height - 0.15)
        top += cycle.height
    legend = [in_legend(how) for how in dict.fromkeys(arrow.how for arrow in rows.arrows)]
    return canvas.frame(
        ax, title=sequence_finding(trace), legend=legend, notes=notes(trace, rows), above_in=above_in,
        below_in=0.08, marked=canvas.in_red(trace),
    )  # fmt: skip


def draw_lifelines(ax: Axes, lines: Lifelines, height: float) -> float:
    """Returns the inches that the names take on top."""
    count = len(lines.names)
    ax.set(xlim=(-0.5, count - 0.5), ylim=(height, 0))
    ends = [[(column, 0.0), (column, height)] for column in range(count)]
    dotted = [":" if column in lines.gaps else "-" for column in range(count)]
    canvas.draw_lines(ax, ends, colors=FAINT, linewidths=1, zorder=1, linestyles=dotted, gid="lifelines")
    ax.set_yticks([])
    names = [plain(name) for name in lines.names]
    return canvas.names_on_top(ax, range(count), names, points(ax, 1.0, along="x") / count)


def _draw_bands(ax: Axes, rows: Rows) -> None:
    """The blocks of one phase stand on a band, with its name at the left; those of no phase on that of their span."""
    inch, y, last = 72 / points(ax, 1.0, along="x"), 0.3, ""
    all_blocks = [(cycle, block) for cycle in rows.cycles for block in cycle.blocks]
    for (cycle, step, phase), band in groupby(all_blocks, key=_band):
        top = y
        for _, block in band:
            _draw_block(ax, block, y)
            y += sum(block.heights)
        canvas.draw_lanes(ax, [(top - 0.05, y - 0.1)])
        names = [name for name in (step if cycle is None and step != last else "", phase) if name]
        last = step
        for place, name in enumerate(names[-max(1, int(y - top)) :]):
            shown = cut(plain(name), (_LEFT_IN - 0.35) * 72, size=TEXT_PT)
            down = top + 0.4 + 0.7 * place
            write(ax, -0.08 * inch, down, shown, transform=ax.get_yaxis_transform(), ha="right", color=FAINT)


def _band(placed: tuple[Cycle, Block]) -> tuple[Cycle | None, str, str]:
    cycle, block = placed
    return cycle if cycle.times > 1 else None, block.step, block.phase


def _draw_block(ax: Axes, block: Block, y: float) -> None:
    """What the program asked for, over its arrows."""
    count = round(ax.get_xlim()[1] + 0.5)
    column_pt = points(ax, 1.0, along="x") / count
    if block.heads:
        left, size = block.over[0] - 0.4, count * column_pt - 4
        room = size - (left + 0.5) * column_pt
        fitting = (head for head in block.heads if text_width(head, size=TEXT_PT) <= room)
        head = next(fitting, None) or cut(block.heads[-1], room, size=TEXT_PT)
        write(ax, left, y + 0.4, head, color=MISSING if block.stuck else INK, zorder=5, **_PAPER)
    at = y + block.heights[0]
    for row, height in zip(block.rows, block.heights[1:], strict=False):
        for arrow in row:
            _draw_arrow(ax, arrow, block, at + height - 0.3 - arrow.level)
        at += height
    if block.bar:
        left, right = block.over[0] - 0.4, block.over[1] + 0.4
        style, stuck = look(block.op), block.stuck
        ax.add_patch(
            Rectangle(
                (left, at + 0.1), right - left, 0.8, facecolor=style.pale, linewidth=1.2 if stuck else 0.6, zorder=2,
                edgecolor=MISSING if stuck else style.line, gid="bar",
            )
        )  # fmt: skip
        text = cut(block.bar, (right - left) * column_pt - 8, size=TEXT_PT)
        write(ax, (left + right) / 2, at + 0.5, text, ha="center", zorder=5)


def _draw_arrow(ax: Axes, arrow: MessageArrow, block: Block, y: float) -> None:
    src, dst, color = arrow.src, arrow.dst, FAINT if arrow.control else look(block.op).line
    ends: list[tuple[float, float]] = [(src, dst)] if src != dst else []
    if arrow.wraps:
        side = 0.45 if src > dst else -0.45
        ends = [(src, src + side), (dst - side, dst)]
    for place, (begin, end) in enumerate(ends):
        draw_arrow(
            ax, (begin, y), (end, y), how=arrow.how, color=MISSING if arrow.how == "missing" else color,
            width=0.7 + 0.5 * max(0.0, log10(arrow.payload_bytes or 1) - 1),
            gid="comes in" if place else "message {} to {}".format(*arrow.ends),
        )  # fmt: skip
    if arrow.label:
        ink = FAINT if arrow.control else line_color(arrow.how)
        write(ax, arrow.middle, y - 0.14, arrow.label, ha="center", va="bottom", color=ink, zorder=5, **_PAPER)


def _draw_times(ax: Axes, cycle: Cycle, top: float, bottom: float) -> None:
    """A bracket at the far left: all this, so many times."""
    inch = 72 / points(ax, 1.0, along="x")
    x = -(_LEFT_IN - 0.22) * inch
    bracket = [x + 0.05 * inch, x, x, x + 0.05 * inch], [top, top, bottom, bottom]
    ax.add_line(Line2D(*bracket, transform=ax.get_yaxis_transform(), color=INK, linewidth=1, clip_on=False))
    room = (bottom - top) * _ROW_IN * 72 + 6
    told = f"× {cycle.times:,} steps" if cycle.steps else ""
    told = told if told and text_width(told, size=TEXT_PT) <= room else f"× {cycle.times:,}"
    upright: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center"}
    write(ax, x - 0.04 * inch, (top + bottom) / 2, told, transform=ax.get_yaxis_transform(), **upright)


def notes(trace: Trace, rows: Rows) -> list[str]:
    told = problem_sentences(trace, canvas.MOST_PROBLEMS)
    told += ["Downwards is the order of sending, step by step; distances are no times. The thicker, the more bytes."]
    if any(arrow.wraps for arrow in rows.arrows):
        told.append("The ring is closed: the arrow that leaves at one side comes in at the other.")
    if rows.merged and any(arrow.count > 1 for arrow in rows.arrows):
        told.append("An arrow stands for all messages of one operation between two ranks.")
    whose = {
        "that RPC sends for itself": rows.control,
        "of ranks without a lifeline": rows.left_out,
        "that never came, of ranks without a lifeline": rows.never,
    }
    for what, (count, size) in whose.items():
        told += [f"Not drawn: {count_text(count, 'message')} {what}, {size_text(size)}."] if count else []
    if rows.lines.stands_for:
        told.append("What several ranks do alike is drawn once, with the bytes of one of them.")
    if any(cycle.times > 1 for cycle in rows.cycles):
        told.append("What is repeated is drawn as it was the first time; who sends first may change.")
    left_out = [f"{count:,} {when}" for when, count in (("earlier", rows.before), ("later", rows.after)) if count]
    if left_out:
        told.append(f"{' and '.join(left_out)} operations not drawn: choose a part with trace.within(...).")
    return told
