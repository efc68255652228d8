"""The sequence diagram: a lifeline per rank, messages in their order from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from dlearn.analysis.findings import sequence_finding, size_text, stuck_reasons
from dlearn.analysis.telling.words import NAMES_SHOWN, problem_sentences
from dlearn.analysis.volume.flows import Flow
from dlearn.draw import canvas
from dlearn.draw.arrows import draw_arrow, in_legend
from dlearn.draw.canvas import TEXT_PT, cut, fit_names, plain, points, text_width, write
from dlearn.draw.folding import Block, Cycle
from dlearn.draw.palette import FAINT, INK, MISSING, line_color, look
from dlearn.draw.rows import Rows, rows_of
from dlearn.draw.scene import ranks_shown
from dlearn.join.joining import operations
from dlearn.trace.message import Operation, payload_bytes
from dlearn.trace.trace import Trace

_ROW_IN = 0.34
_GAP = 0.3
"""Between two operations, in rows."""
_LEFT_IN = 2.6


def sequence(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a lifeline per rank and an arrow per message, downwards in the order of sending; distances mean nothing."""
    fit = ax is None
    shown = operations(trace)
    columns = {rank: column for column, rank in enumerate(ranks_shown(trace))}
    tags = {each.tag for each in shown if each.sender is not None}
    labels = Labels(columns, _width_pt(ax) / max(1, len(columns)), tagged=len(tags) > 1)
    rows = rows_of(trace, columns, labels.extent)
    ax = ax or canvas.new_axes(height_in=max(1.2, _height(rows) * _ROW_IN), left_in=_LEFT_IN)
    if not rows.cycles:
        return canvas.say_empty(ax, "This trace holds no operation.", fit=fit)
    canvas.describe(
        ax,
        "A line downwards for each rank; from line to line, in their order, an arrow for each message, with its bytes.",
    )
    above_in = draw_lifelines(ax, trace, columns, _height(rows))
    draw_rows(ax, trace, rows, labels)
    canvas.frame(
        ax, title=sequence_finding(trace), legend=legend(rows), notes=notes(trace, rows), above_in=above_in,
        below_in=0.08, fit=fit,
    )  # fmt: skip
    return ax


def _width_pt(ax: Axes | None) -> float:
    return points(ax, 1.0, along="x") if ax else (canvas.WIDTH_IN - _LEFT_IN - 0.15) * 72


def _height(rows: Rows) -> float:
    """In rows, with the gaps between operations."""
    return rows.height + _GAP * sum(len(cycle.blocks) for cycle in rows.cycles) + 0.3


@dataclass(frozen=True)
class Labels:
    """What stands at each arrow, and where. `tagged`: with its tag, as that tells messages apart."""

    columns: dict[int, int]
    column_pt: float
    tagged: bool

    def text(self, flow: Flow) -> str:
        tag = flow.operation.tag if self.tagged else None
        size = size_text(flow.payload_bytes) + (f" in {flow.count} parts" if flow.count > 1 else "")
        text = size if tag is None else f"{size}, tag {tag}"
        return f"never came: {text}" if flow.how == "missing" else text

    def middle(self, flow: Flow) -> float:
        """Over the middle of its arrow, but not beyond the picture."""
        half, last = self.half(flow), len(self.columns) - 1
        middle = (self.columns[flow.src] + self.columns[flow.dst]) / 2
        return min(max(middle, half - 0.5), max(last + 0.5 - half, last / 2))

    def half(self, flow: Flow) -> float:
        return (text_width(self.text(flow), size=TEXT_PT) / 2 + 3) / self.column_pt

    def extent(self, flow: Flow) -> tuple[float, float]:
        """From where to where the arrow and its label reach, in columns."""
        src, dst, middle, half = self.columns[flow.src], self.columns[flow.dst], self.middle(flow), self.half(flow)
        return min(src, dst, middle - half), max(src, dst, middle + half)


def draw_lifelines(ax: Axes, trace: Trace, columns: dict[int, int], height: float) -> float:
    """Returns the inches that the names take on top."""
    names = [plain(trace.label(rank)) for rank in columns]
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(height, 0)
    lines = [[(column, 0.0), (column, height)] for column in columns.values()]
    ax.add_collection(LineCollection(lines, colors=FAINT, linewidths=1, zorder=1, gid="lifelines"), autolim=False)
    short, upright = fit_names(names, points(ax, 1.0, along="x") / len(columns))
    ax.xaxis.tick_top()
    ax.set_xticks(list(columns.values()), short, parse_math=False, rotation=90 if upright else 0)
    ax.set_yticks([])
    canvas.names_only(ax)
    return (max(text_width(name, size=TEXT_PT) for name in short) if upright else TEXT_PT * 1.4) / 72 + 0.08


def draw_rows(ax: Axes, trace: Trace, rows: Rows, labels: Labels) -> None:
    y = 0.3
    for cycle in rows.cycles:
        start = y
        for block in cycle.blocks:
            _name_block(ax, block, trace, y, labels)
            if block.rows:
                for i, row in enumerate(block.rows):
                    for flow in row:
                        _draw_flow(ax, flow, labels, y + i + 0.55)
            else:
                _draw_bar(ax, block, trace, labels.columns, y + 0.5)
            y += block.height + _GAP
        if cycle.times > 1:
            _draw_times(ax, cycle, start, y - _GAP)


def _name_block(ax: Axes, block: Block, trace: Trace, y: float, labels: Labels) -> None:
    """What the program asked for, at the left of its first row, with the colour of its op."""
    operation, style = block.operation, look(block.operation.op)
    # Up to the first lifeline, or to what stands before it.
    until = min([-0.2, *(labels.extent(flow)[0] for row in block.rows for flow in row)])
    width = _LEFT_IN * 72 - 34 + (until + 0.5) * labels.column_pt
    size = payload_bytes(operation.ends[0])
    head = plain(f"{operation.op} {size_text(size)}" if size else operation.op)
    reason = _stuck(operation, trace)
    # A tag that tells messages apart stands at the arrow.
    what = plain(reason or operation.describe(most=NAMES_SHOWN, tagged=not labels.tagged), most=200)
    inch = 1 / points(ax, 1.0, along="x") * 72
    left = -(_LEFT_IN - 0.42) * inch
    ax.add_patch(
        Rectangle(
            (left - 0.14 * inch, y + 0.08), 0.08 * inch, block.height - 0.16, transform=ax.get_yaxis_transform(),
            facecolor=style.color, edgecolor=style.ink, hatch=style.hatch, linewidth=0.4, clip_on=False,
            gid="operation",
        )
    )  # fmt: skip
    for text, down, ink in ((head, 0.28, INK), (what, 0.72, MISSING if reason else INK)):
        write(ax, left, y + down, cut(text, width, size=TEXT_PT), transform=ax.get_yaxis_transform(), color=ink)


def _stuck(operation: Operation, trace: Trace) -> str:
    return next((reasons[0] for end in operation.ends if (reasons := stuck_reasons(operation, end, trace))), "")


def _draw_flow(ax: Axes, flow: Flow, labels: Labels, y: float) -> None:
    src, dst = labels.columns[flow.src], labels.columns[flow.dst]
    draw_arrow(ax, (src, y), (dst, y), how=flow.how, gid=f"message {flow.src} to {flow.dst}")
    write(
        ax, labels.middle(flow), y - 0.1, labels.text(flow), ha="center", va="bottom", color=line_color(flow.how),
        zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
    )  # fmt: skip


def _draw_bar(ax: Axes, block: Block, trace: Trace, columns: dict[int, int], y: float) -> None:
    """A collective whose messages are not known: a bar across its members, with the reason."""
    operation = block.operation
    members = [columns[rank] for rank in {*operation.group.members, *operation.ranks} if rank in columns]
    left, right = min(members) - 0.12, max(members) + 0.12
    stuck = bool(_stuck(operation, trace))
    style = look(operation.op)
    ax.add_patch(
        Rectangle(
            (left, y - 0.36), right - left, 0.72, facecolor=style.pale, linewidth=1.2 if stuck else 0.6, zorder=2,
            edgecolor=MISSING if stuck else style.line, gid="bar",
        )
    )  # fmt: skip
    width = points(ax, 1.0, along="x") * (right - left) / len(columns) - 8
    reason = cut(plain(block.reason, most=120), width, size=TEXT_PT)
    write(ax, (left + right) / 2, y, reason, ha="center", zorder=5)


def _draw_times(ax: Axes, cycle: Cycle, top: float, bottom: float) -> None:
    """A bracket at the far left: all this, so many times."""
    inch = 1 / points(ax, 1.0, along="x") * 72
    x = -(_LEFT_IN - 0.22) * inch
    ax.add_line(
        Line2D(
            [x + 0.05 * inch, x, x, x + 0.05 * inch], [top, top, bottom, bottom], transform=ax.get_yaxis_transform(),
            color=INK, linewidth=1, clip_on=False,
        )
    )  # fmt: skip
    room = (bottom - top) * _ROW_IN * 72
    texts = [f"× {cycle.times:,} steps"] if cycle.steps else []
    shown = next((text for text in texts if text_width(text, size=TEXT_PT) <= room), f"× {cycle.times:,}")
    write(
        ax, x - 0.04 * inch, (top + bottom) / 2, shown, transform=ax.get_yaxis_transform(), rotation=90,
        ha="right", va="center",
    )  # fmt: skip


def legend(rows: Rows) -> list[Artist]:
    hows = dict.fromkeys(
        flow.how for cycle in rows.cycles for block in cycle.blocks for row in block.rows for flow in row
    )
    return [in_legend(how) for how in hows]


def notes(trace: Trace, rows: Rows) -> list[str]:
    told = problem_sentences(trace, canvas.MOST_PROBLEMS)
    told += ["Downwards is the order of sending, step by step; distances are no times."]
    flows = [flow for cycle in rows.cycles for block in cycle.blocks for row in block.rows for flow in row]
    if rows.merged and any(flow.count > 1 for flow in flows):
        told.append("An arrow stands for all messages of one operation between two ranks.")
    if not all(cycle.in_order for cycle in rows.cycles):
        told.append("What is repeated is drawn as it was the first time; who sends first may change.")
    left_out = [f"{count:,} {when}" for when, count in (("earlier", rows.before), ("later", rows.after)) if count]
    if left_out:
        told.append(f"{' and '.join(left_out)} operations not drawn: choose a part with trace.within(...).")
    return told
