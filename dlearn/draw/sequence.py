"""The sequence diagram: a lifeline per rank, messages in their order from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, repeat
from math import log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from dlearn.analysis.findings import sequence_finding
from dlearn.analysis.replay.moments import moments
from dlearn.analysis.replay.steps import program_parts
from dlearn.analysis.telling.explanations import problem_sentences
from dlearn.draw import canvas, sequence_labels
from dlearn.draw.canvas import draw_arrow, in_legend, points, write
from dlearn.draw.palette import FAINT, INK, LANE, MISSING, cut, line_color, plain, text_width
from dlearn.draw.pipeline_lanes import bubble_note
from dlearn.draw.sequence_folding import Cycle, fold, side_by_side
from dlearn.draw.sequence_labels import Block, BlockBuilder, Lifelines, MessageArrow
from dlearn.join.joining import operations
from dlearn.join.operation_messages import message_count, messages_of
from dlearn.shown import count_text, size_text
from dlearn.trace import Trace

MOST_ROWS = 45  # A step of FSDP2 with fourteen collectives on two ranks takes 44.
_FEW_STEPS, _FEW_ROWS = 14, 24  # Up to so many rows, steps have arrows each; repetitions are drawn.
_FEW_CONTROL = 3  # Up to this many control messages have arrows.
_ROW_IN = 0.3
_LEFT_IN, _RIGHT_IN = 1.2, 0.15
_PAPER: dict[str, Any] = {"on": LANE, "pad": 0.3}  # Below text: no lifeline goes through it.


@canvas.for_cells
def sequence(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a lifeline per rank and an arrow per message, downwards in the order of sending; distances mean nothing.

    What repeats, and ranks that do the same, are drawn once; the thicker an arrow, the more bytes.
    """
    rows = rows_of(trace, canvas.points_wide(ax, left_in=_LEFT_IN, right_in=_RIGHT_IN))
    height = 0.3 + sum(cycle.height for cycle in rows.cycles)
    ax = ax or canvas.new_axes(height_in=max(0.6, height * _ROW_IN), left_in=_LEFT_IN, right_in=_RIGHT_IN)
    if not rows.cycles:
        return canvas.draw_message_instead(ax, "This trace holds no operation.")
    arrows = "from line to line, in their order, an arrow for each message, with its bytes"
    canvas.describe(ax, f"A line downwards for each rank; {arrows}.")
    above_in = _draw_lifelines(ax, rows.lines, height)
    _draw_bands(ax, rows)
    top = 0.3
    for cycle in rows.cycles:
        if cycle.times > 1:
            _draw_times(ax, cycle, top, top + cycle.height - 0.15)
        top += cycle.height
    legend = [in_legend(how) for how in dict.fromkeys(arrow.how for arrow in rows.arrows)]
    sizes: dict[str, Any] = {"above_in": above_in, "below_in": 0.08}
    title, notes, red = sequence_finding(trace), _notes(trace, rows), canvas.in_red(trace)
    return canvas.frame(ax, title=title, legend=legend, notes=notes, marked=red, **sizes)


def _draw_lifelines(ax: Axes, lines: Lifelines, height: float) -> float:
    """Draw the lines, and return the inches that the names take on top."""
    count = len(lines.names)
    ax.set(xlim=(-0.5, count - 0.5), ylim=(height, 0))
    ends = [[(column, 0.0), (column, height)] for column in range(count)]
    dotted = [":" if column in lines.gaps else "-" for column in range(count)]
    canvas.draw_lines(ax, ends, colors=FAINT, linewidths=1, zorder=1, linestyles=dotted, gid="lifelines")
    ax.set_yticks([])
    names = [plain(name) for name in lines.names]
    return canvas.names_on_top(ax, range(count), names, points(ax, 1.0, along="x") / count)


def _draw_bands(ax: Axes, rows: Rows) -> None:
    """Draw the blocks of one phase on a band with its name, those of no phase on their span's."""
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
            shown = cut(plain(name), (_LEFT_IN - 0.35) * 72)
            down = top + 0.4 + 0.7 * place
            write(ax, -0.08 * inch, down, shown, transform=ax.get_yaxis_transform(), ha="right", color=FAINT)


def _band(placed: tuple[Cycle, Block]) -> tuple[Cycle | None, str, str]:
    cycle, block = placed
    return cycle if cycle.times > 1 else None, block.step, block.phase


def _draw_block(ax: Axes, block: Block, y: float) -> None:
    count = round(ax.get_xlim()[1] + 0.5)
    column_pt = points(ax, 1.0, along="x") / count
    if block.heads:
        left, size = block.over[0] - 0.4, count * column_pt - 4
        room = size - (left + 0.5) * column_pt
        fitting = (head for head in block.heads if text_width(head) <= room)
        head = next(fitting, None) or cut(block.heads[-1], room)
        write(ax, left, y + 0.4, head, color=MISSING if block.stuck else INK, zorder=5, **_PAPER)
    at = y + block.heights[0]
    for row, height in zip(block.rows, block.heights[1:], strict=False):
        for arrow in row:
            _draw_arrow(ax, arrow, block, at + height - 0.3 - arrow.level)
        at += height
    if block.bar:
        left, right = block.over[0] - 0.4, block.over[1] + 0.4
        edge, wide = (MISSING, 1.2) if block.stuck else (block.look.line, 0.6)
        style: dict[str, Any] = {"facecolor": block.look.pale, "edgecolor": edge, "linewidth": wide}
        ax.add_patch(Rectangle((left, at + 0.1), right - left, 0.8, zorder=2, gid="bar", **style))
        text = cut(block.bar, (right - left) * column_pt - 8)
        write(ax, (left + right) / 2, at + 0.5, text, ha="center", zorder=5)


def _draw_arrow(ax: Axes, arrow: MessageArrow, block: Block, y: float) -> None:
    src, dst, color = arrow.src, arrow.dst, FAINT if arrow.control else block.look.line
    ends: list[tuple[float, float]] = [(src, dst)] if src != dst else []
    if arrow.wraps:
        side = 0.45 if src > dst else -0.45
        ends = [(src, src + side), (dst - side, dst)]
    color = MISSING if arrow.how == "missing" else color
    width = 0.7 + 0.5 * max(0.0, log10(arrow.payload_bytes or 1) - 1)
    for (begin, end), gid in zip(ends, ("message {} to {}".format(*arrow.ends), "comes in"), strict=False):
        draw_arrow(ax, (begin, y), (end, y), how=arrow.how, color=color, linewidth=width, gid=gid)
    if arrow.label:
        ink = FAINT if arrow.control else line_color(arrow.how)
        write(ax, arrow.middle, y - 0.14, arrow.label, ha="center", va="bottom", color=ink, zorder=5, **_PAPER)


def _draw_times(ax: Axes, cycle: Cycle, top: float, bottom: float) -> None:
    """Draw a bracket at the far left, with the number of repetitions."""
    inch = 72 / points(ax, 1.0, along="x")
    x = -(_LEFT_IN - 0.22) * inch
    bracket = [x + 0.05 * inch, x, x, x + 0.05 * inch], [top, top, bottom, bottom]
    ax.add_line(Line2D(*bracket, transform=ax.get_yaxis_transform(), color=INK, linewidth=1, clip_on=False))
    room = (bottom - top) * _ROW_IN * 72 + 6
    text = f"× {cycle.times:,} steps" if cycle.steps else ""
    text = text if text and text_width(text) <= room else f"× {cycle.times:,}"
    upright: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center"}
    write(ax, x - 0.04 * inch, (top + bottom) / 2, text, transform=ax.get_yaxis_transform(), **upright)


def _notes(trace: Trace, rows: Rows) -> list[str]:
    notes = problem_sentences(trace, canvas.MOST_PROBLEMS)
    notes += ["Downwards is the order of sending, step by step; distances are no times. The thicker, the more bytes."]
    if any(arrow.wraps for arrow in rows.arrows):
        notes.append("The ring is closed: the arrow that leaves at one side comes in at the other.")
    if rows.merged and any(arrow.count > 1 for arrow in rows.arrows):
        notes.append("An arrow stands for all messages of one operation between two ranks.")
    for why in (sequence_labels.CONTROL, sequence_labels.LEFT_OUT, sequence_labels.NEVER_CAME):
        if rows.not_drawn[why]:
            count, size = count_text(rows.not_drawn[why], "message"), size_text(rows.bytes_not_drawn[why])
            notes.append(f"Not drawn: {count} {why}, {size}.")
    if len(operations(trace)) == 1 and not isinstance(found := moments(trace), str):
        rounds = count_text(len(found.held) - 1, "round")
        notes.append(f"draw.film shows its pieces, in {rounds}.")
    notes += bubble_note(trace)
    if rows.lines.stands_for:
        notes.append("What several ranks do alike is drawn once, with the bytes of one of them.")
    if any(cycle.times > 1 for cycle in rows.cycles):
        notes.append("What is repeated is drawn as it was the first time; who sends first may change.")
    counts = {"earlier operation": rows.before, "later operation": rows.after}
    left_out = [count_text(count, what) for what, count in counts.items() if count]
    if left_out:
        notes.append(f"{' and '.join(left_out)} not drawn: choose a shorter part, as one phase.")
    return notes


@dataclass(frozen=True)
class Rows:
    """If `merged`, an arrow may stand for several steps. `before` and `after` count operations that did not fit."""

    lines: Lifelines
    cycles: tuple[Cycle, ...]
    merged: bool = False
    before: int = 0
    after: int = 0
    not_drawn: Counter[str] = field(default_factory=Counter)  # Messages without arrow, by reason.
    bytes_not_drawn: Counter[str] = field(default_factory=Counter)

    @property
    def arrows(self) -> list[MessageArrow]:
        return [arrow for cycle in self.cycles for block in cycle.blocks for row in block.rows for arrow in row]


def rows_of(trace: Trace, width_pt: float) -> Rows:
    """Return a row for each message; of many, merge steps and what repeats, then cut."""
    count = sum(message_count(one) * times for one, times in operations(trace).group_sizes())
    if count <= _FEW_ROWS * sequence_labels.MOST_LIFELINES:
        for steps, most in ((True, _FEW_STEPS), (False, _FEW_ROWS)):
            rows = _rows(trace, width_pt, few=True, steps=steps)
            if sum(cycle.height for cycle in rows.cycles) <= most:
                return rows
    return _rows(trace, width_pt, few=False, steps=False)


def _rows(trace: Trace, width_pt: float, *, few: bool, steps: bool) -> Rows:
    """Return blocks in the order of sending, each with its span; unless they are `few`, folded and cut."""
    shown, lines = operations(trace), sequence_labels.lifelines(trace, once=not few)
    sends = [(one.tag, times) for one, times in shown.group_sizes() if one.sender is not None]
    calls = [(one, times) for one, times in shown.group_sizes() if one.is_call]
    control = sum([times * message.control for one, times in calls for message in messages_of(one)])
    builder = BlockBuilder(
        trace, lines, width_pt / max(1, len(lines.names)), steps=steps, tagged=len({tag for tag, _ in sends}) > 1,
        control=control <= _FEW_CONTROL, many=sum(times for _, times in sends) > _FEW_ROWS,
        by_dimension=shown.several_dimensions,
    )  # fmt: skip
    built = np.full(len(shown), None, object)
    sent_ns = shown.start_ns.copy()
    for operation, rows in shown.groups():
        built[rows] = builder.block_of(operation, times=len(rows))
        if operation.sender is not None:  # A receive may be posted long before.
            sent_ns[rows] = shown.times(rows)[2][:, 0]
    parts = program_parts(trace.whole) if trace.whole.spans else None
    order = np.argsort(sent_ns, kind="stable")
    steps_of = map(parts.span_of, shown.at(order)) if parts else repeat("")
    in_order = zip(built[order], steps_of, strict=False)
    blocks = [replace(block, step=step) for block, step in in_order if block is not None]
    if few:
        cycles = side_by_side([Cycle((block,)) for block in blocks], builder.extent)
        whole = Rows(lines, tuple(cycles), merged=not steps)
    else:
        whole = _cut(lines, fold(blocks, builder.extent, most_rows=MOST_ROWS))
    return replace(whole, not_drawn=builder.counts, bytes_not_drawn=builder.sizes)


def _cut(lines: Lifelines, cycles: Sequence[Cycle]) -> Rows:
    """Keep whole cycles that fit, at least one, from the top or from the steps of the job."""
    steps = max((cycle for cycle in cycles if cycle.steps), key=lambda cycle: cycle.count, default=None)
    first = cycles.index(steps) if steps is not None and steps not in _that_fit(cycles) else 0
    kept = _that_fit(cycles[first:])
    before, after = (sum(cycle.count for cycle in some) for some in (cycles[:first], cycles[first + len(kept) :]))
    return Rows(lines, tuple(kept), merged=True, before=before, after=after)


def _that_fit(cycles: Sequence[Cycle]) -> Sequence[Cycle]:
    fitting = sum(height <= MOST_ROWS for height in accumulate(cycle.height for cycle in cycles))
    return cycles[: max(1, fitting)]
