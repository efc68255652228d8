"""Bars: what each rank was doing in each operation, and the text that fits on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from dlearn.analysis.findings import absent_texts, size_text, stuck_reasons
from dlearn.draw.canvas import TEXT_PT, corners, plain, points, points_per_ms, text_width, write
from dlearn.draw.palette import INK, LANE, MISSING, WAITING_HATCH, Look, look
from dlearn.join.waiting import waited_until_ns
from dlearn.trace.event import NOT_OBSERVED
from dlearn.trace.message import End, Operation, payload_bytes
from dlearn.trace.trace import Trace

State = Literal["ended", "failed", "stuck", "not observed", "absent"]
ENDS_RED = {"stuck": "stuck: no end was seen", "failed": "failed: an error ended it"}
"""The red end of a bar, as the legend tells it."""
Color = str | tuple[float, ...]
Box = tuple[float, float, float, float]
"""Left and right in ms, top and bottom in inches."""

_HATCHED_FROM_PT = 6
_MOST_LABELS = 400


@dataclass(frozen=True)
class Bar:
    """One rank's part in one operation: waiting until `transfer_ns`, then transferring until `end_ns`.

    `state` says how it ended: "stuck" reaches the right edge, "absent" is the call that this rank never made.
    """

    rank: int
    op: str
    """What this rank itself called: in a broken exchange not what the others did."""
    operation: Operation
    start_ns: int
    transfer_ns: int
    end_ns: int
    state: State
    labels: tuple[str, ...]
    """What to write on it, the longest first."""


def bars_of(operations: Iterable[Operation], trace: Trace, *, until_ns: int) -> list[Bar]:
    """A bar for each end of each operation and each end that never came; what has no end lasts until `until_ns`."""
    bars: list[Bar] = []
    for operation in operations:
        bars += [_bar(operation, end, trace, until_ns) for end in operation.ends]
        bars += [_absent(operation, rank, trace, until_ns) for rank in operation.missing if rank in trace.ranks]
    return sorted(bars, key=lambda bar: bar.start_ns)


def _bar(operation: Operation, end: End, trace: Trace, until_ns: int) -> Bar:
    state: State = "ended"
    until = end.end_ns if end.end_ns is not None else until_ns
    if end.pending or end.failed:
        state = "stuck" if end.pending else "failed"
    elif end.ended_by == NOT_OBSERVED or end.end_ns is None:
        state, until = "not observed", end.start_ns
    waited = waited_until_ns(operation, end)
    transfer = until if waited is None else min(waited, until)
    reasons = stuck_reasons(operation, end, trace)
    return Bar(end.rank, end.op, operation, end.start_ns, transfer, until, state, _labels(operation, end, reasons))


def _labels(operation: Operation, end: End, reasons: Sequence[str]) -> tuple[str, ...]:
    size = payload_bytes(end)
    short = f"{end.op} {size_text(size)}" if size else end.op
    if reasons:
        told = [plain(text, most=160) for reason in reasons for text in (f"{short}: {reason}", reason)]
        return (*told, short)
    # Torch numbers the groups that a program makes; other names are the program's, and may be long.
    group = f"group {operation.group.name}" if operation.group.name.isdecimal() and not operation.group.default else ""
    bucket = f"bucket {operation.bucket.index}" if operation.bucket else ""
    both = ", ".join(each for each in (bucket, group) if each)
    return (*((f"{short}, {both}", both) if both else ()), short, *((size_text(size),) if size else ()))


def _absent(operation: Operation, rank: int, trace: Trace, until_ns: int) -> Bar:
    """From the last call that did come until the others gave up, or the right edge."""
    start = operation.transfer_ns
    given_up = [end.end_ns for end in operation.ends if end.end_ns is not None]
    end = until_ns if operation.pending else max([start, *given_up])
    op = "recv" if rank == operation.receiver else operation.op
    labels = tuple(plain(text, most=160) for text in absent_texts(operation, rank, op, trace))
    return Bar(rank, op, operation, start, start, end, "absent", labels)


# Drawing --------------------------------------------------------------------------------------------------------------


def draw_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """`transfer_at[i]` is where, in ms, the transfer of the i-th bar begins."""
    waiting: dict[Look, list[Box]] = defaultdict(list)
    moving: dict[Look, list[Box]] = defaultdict(list)
    for (bar, (left, right, top, bottom)), transfer in zip(placed, transfer_at, strict=True):
        if bar.state == "absent":
            continue
        middle = min(max(transfer, left), right)
        if middle > left:
            waiting[look(bar.op)].append((left, middle, top, bottom))
        if middle < right:
            moving[look(bar.op)].append((middle, right, top, bottom))
    for style, boxes in waiting.items():
        _draw_boxes(ax, boxes, style.pale, style.line, WAITING_HATCH, zorder=2, gid=f"waiting {style.family}")
    for style, boxes in moving.items():
        _draw_boxes(ax, boxes, style.color, style.ink, style.hatch, zorder=2.1, gid=f"transfer {style.family}")
    _draw_faults(ax, placed)


def _draw_boxes(
    ax: Axes, boxes: Sequence[Box], face: Color, edge: Color, hatch: str, *, zorder: float, gid: str
) -> None:
    """Edges and hatches only on boxes that are wide enough to show them: on others they would hide the colour."""
    narrow = _HATCHED_FROM_PT / points_per_ms(ax)
    wide = [box for box in boxes if box[1] - box[0] >= narrow]
    others = [box for box in boxes if box[1] - box[0] < narrow]
    if wide:
        ax.add_collection(
            PolyCollection(
                _outlines(wide), facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, zorder=zorder, gid=gid
            ),
            autolim=False,
        )
    if others:
        ax.add_collection(
            PolyCollection(_outlines(others), facecolor=face, edgecolor="none", zorder=zorder, gid=f"{gid}, narrow"),
            autolim=False,
        )


def _draw_faults(ax: Axes, placed: Sequence[tuple[Bar, Box]]) -> None:
    """A thick red end where a rank is stuck or got an error, a dashed red box for a call that never came."""
    stuck = [[(right, top), (right, bottom)] for bar, (_, right, top, bottom) in placed if bar.state in ENDS_RED]
    if stuck:
        ax.add_collection(LineCollection(stuck, colors=MISSING, linewidths=4, zorder=5, gid="stuck", clip_on=False))
    absent = [box for bar, box in placed if bar.state == "absent"]
    if absent:
        ax.add_collection(
            PolyCollection(
                _outlines(absent), facecolor="white", edgecolor=MISSING, linestyle=(0, (3, 2)), linewidth=1.2, zorder=2,
                gid="absent",
            )
        )  # fmt: skip


def _outlines(boxes: Iterable[Box]) -> list[list[tuple[float, float]]]:
    return [corners(*box) for box in boxes]


# Labels ---------------------------------------------------------------------------------------------------------------


def label_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """Write on each bar what fits: inside its wider part, else to the right where nothing follows, else nothing."""
    scale = points_per_ms(ax)
    row_pt = points(ax, 1.0, along="y") / max(1e-9, abs(ax.get_ylim()[1] - ax.get_ylim()[0]))
    follows = _next_in_row([box for _, box in placed], ax.get_xlim()[1])
    for (bar, box), transfer, following in zip(placed, transfer_at, follows, strict=True):
        left, right, top, bottom = box
        if (bottom - top) * row_pt < TEXT_PT * 1.1 or len(ax.texts) >= _MOST_LABELS:
            continue
        start, end, face, ink = _wider_part(bar, left, right, min(max(transfer, left), right))
        inside, beside = (end - start) * scale - 6, (following - right) * scale - 6
        y = (top + bottom) / 2
        for label in bar.labels:
            width = text_width(label, size=TEXT_PT)
            if width <= inside:
                _write(ax, (start + end) / 2, y, label, ink, face, "center")
                break
            if width <= beside:
                _write(ax, right + 3 / scale, y, label, INK, LANE, "left")
                break


def _wider_part(bar: Bar, left: float, right: float, middle: float) -> tuple[float, float, Color, str]:
    """Start and end of the bar's waiting or transferring part, its colour and the colour of text on it."""
    style = look(bar.op)
    if bar.state == "absent":
        return left, right, "white", MISSING
    if middle - left > right - middle:
        return left, middle, style.pale, INK
    return middle, right, style.color, style.ink


def _next_in_row(boxes: Sequence[Box], edge: float) -> list[float]:
    """Where the next bar of the same row begins."""
    following: dict[float, float] = {}
    nexts = [edge] * len(boxes)
    for i in sorted(range(len(boxes)), key=lambda i: -boxes[i][0]):
        left, _, top, _ = boxes[i]
        nexts[i] = following.get(top, edge)
        following[top] = left
    return nexts


def _write(ax: Axes, x: float, y: float, text: str, ink: str, behind: Color, align: Literal["left", "center"]) -> None:
    box = {"facecolor": behind, "edgecolor": "none", "pad": 1.0}
    write(ax, x, y, text, ha=align, color=ink, bbox=box, zorder=6, clip_on=True)
