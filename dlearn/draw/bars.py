"""Bars: what each rank was doing in each operation, and the text that fits on it.

Where calls are too many for bars, a strip: the share of each stretch of time that a rank spends in them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from dlearn.analysis.findings import absent_texts, size_text, stuck_reasons, time_text
from dlearn.draw.canvas import Box, draw_boxes, draw_lines, points, points_per_ms, write
from dlearn.draw.palette import INK, LANE, MISSING, SERIES, WAITING_HATCH, Color, Look, look
from dlearn.draw.text import TEXT_PT, plain, text_width
from dlearn.events.event import NOT_OBSERVED, Collective
from dlearn.join.columns import disjoint, spread
from dlearn.join.ends import End, payload_bytes
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Calls
from dlearn.join.wait_times import waited_until_ns
from dlearn.trace import Trace

State = Literal["ended", "failed", "stuck", "not observed", "absent"]
ENDS_RED = {"stuck": "stuck: no end was seen", "failed": "failed: an error ended it"}
"""The red end of a bar, as the legend tells it."""
_HATCHED_FROM_PT = 6
_EDGED_FROM_PT = 2.5
THIN = 0.3
"""Share of a bar's height that waiting leaves free on either side."""
_MOST_LABELS = 400


@dataclass(frozen=True)
class Bar:
    """One rank's part in one operation: waiting until `transfer_ns`, then transferring until `end_ns`.

    A call by RPC waits for the answer all the time.

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
    look: Look
    """Of operations that are all of one kind each has a hue, the same on all ranks."""

    @property
    def waited_ns(self) -> int:
        """How long it waits, of one that came to its end."""
        return self.transfer_ns - self.start_ns if self.state == "ended" else 0

    @property
    def waited_for(self) -> int:
        """The rank that it waits for, if it waits."""
        operation = self.operation
        return operation.last_rank if operation.exchange is None else operation.ends[1].rank


def bars_of(operations: Iterable[Operation], trace: Trace, *, until_ns: int) -> list[Bar]:
    """A bar for each end of each operation and each end that never came; what has no end lasts until `until_ns`."""
    bars: list[Bar] = []
    shown = list(operations)
    kinds = {look(operation.op).family if is_collective(operation) else "" for operation in shown}
    one_kind = len(kinds) == 1 < len(shown) and kinds != {""}
    functions = _looks_of_functions(shown)
    for place, operation in enumerate(shown):
        hue = SERIES[(operation.bucket.index if operation.bucket else place) % len(SERIES)]
        own = Look(look(operation.op).family, hue) if one_kind else functions.get(function_of(operation))
        bars += [_bar(operation, end, trace, until_ns, own) for end in operation.ends]
        bars += [_absent(operation, rank, trace, until_ns) for rank in operation.missing if rank in trace.ranks]
    return sorted(bars, key=lambda bar: bar.start_ns)


def _looks_of_functions(shown: Sequence[Operation]) -> dict[str, Look]:
    """A hue for each function that is called by RPC, the program's own before torch's, as long as there are hues."""
    called = Counter(filter(None, map(function_of, shown)))
    first = sorted(called, key=lambda name: (name.startswith("_"), -called[name]))
    return {name: Look(f"call of {plain(name, most=30)}", hue) for name, hue in zip(first, SERIES[:5], strict=False)}


def function_of(operation: Operation) -> str:
    """What a call by RPC calls; "" of all others."""
    exchange = operation.exchange
    event = None if exchange is None else exchange.call or exchange.run
    return event.function if event is not None else ""


def is_collective(operation: Operation) -> bool:
    """Whether all ranks of a group call it, and wait for the last."""
    return isinstance(operation.ends[0], Collective)


def _bar(operation: Operation, end: End, trace: Trace, until_ns: int, own: Look | None) -> Bar:
    state: State = "ended"
    until = end.end_ns if end.end_ns is not None else until_ns
    if end.pending or end.failed:
        state = "stuck" if end.pending else "failed"
    elif end.ended_by == NOT_OBSERVED or end.end_ns is None:
        state, until = "not observed", end.start_ns
    waited = waited_until_ns(operation, end)
    asks = operation.exchange is not None and len(operation.ends) > 1 and end is operation.ends[0]
    if asks and state != "failed":
        waited = None  # The callee works meanwhile.
    transfer = until if waited is None else min(waited, until)
    reasons = stuck_reasons(operation, end, trace)
    labels, style = _labels(operation, end, reasons), own or look(end.op)
    return Bar(end.rank, end.op, operation, end.start_ns, transfer, until, state, labels, style)


def _labels(operation: Operation, end: End, reasons: Sequence[str]) -> tuple[str, ...]:
    size = payload_bytes(end)
    name = _name(operation, end)
    short = f"{name} {size_text(size)}" if size else name
    if reasons:
        told = [plain(text, most=160) for reason in reasons for text in (f"{short}: {reason}", reason)]
        return (*told, short)
    # Torch numbers the groups that a program makes; other names are the program's, and may be long.
    group = f"group {operation.group.name}" if operation.group.name.isdecimal() and not operation.group.default else ""
    bucket = f"bucket {operation.bucket.index}" if operation.bucket else ""
    both = ", ".join(each for each in (bucket, group) if each)
    return (*((f"{short}, {both}", both) if both else ()), short, *((size_text(size),) if size else ()))


def _name(operation: Operation, end: End) -> str:
    return "gradients" if end.op == "BACKWARD_AUTOGRAD_REQ" else plain(function_of(operation), most=30) or end.op


def wait_text(bar: Bar, trace: Trace) -> str:
    """ "Longest wait: rank 0 for rank 2, 40.0 ms in all_reduce #1"."""
    operation = bar.operation
    what = told_briefly(operation) if operation.exchange is None else _name(operation, operation.ends[0])
    who, whom = trace.label(bar.rank), trace.label(bar.waited_for)
    return f"Longest wait: {who} for {whom}, {time_text(bar.waited_ns)} in {what}"


def told_briefly(operation: Operation) -> str:
    """ "bucket 2", "all_reduce #3"."""
    return f"bucket {operation.bucket.index}" if operation.bucket else f"{operation.op} #{operation.seq}"


def _absent(operation: Operation, rank: int, trace: Trace, until_ns: int) -> Bar:
    """From the last call that did come until the others gave up, or the right edge."""
    start = operation.transfer_ns
    given_up = [end.end_ns for end in operation.ends if end.end_ns is not None]
    end = until_ns if operation.pending else max([start, *given_up])
    op = "recv" if rank == operation.receiver else operation.op
    labels = tuple(plain(text, most=160) for text in absent_texts(operation, rank, op, trace))
    return Bar(rank, op, operation, start, start, end, "absent", labels, look(op))


def draw_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """Waiting is thin and pale, transfer thick. `transfer_at[i]` is where, in ms, the i-th bar's transfer begins."""
    parts: dict[tuple[str, Look], list[Box]] = defaultdict(list)
    for (bar, (left, right, top, bottom)), transfer in zip(placed, transfer_at, strict=True):
        if bar.state == "absent":
            continue
        middle = min(max(transfer, left), right)
        if middle > left and bar.state in ENDS_RED:
            parts["stuck", bar.look].append((left, middle, top, bottom))
        elif middle > left:
            thinner = THIN * (bottom - top)
            parts["waiting", bar.look].append((left, middle, top + thinner, bottom - thinner))
        if middle < right:
            parts["transfer", bar.look].append((middle, right, top, bottom))
    for (part, style), boxes in parts.items():
        gid = f"{part} {style.family}".replace("stuck", "waiting")
        if part == "transfer":
            edge = style.ink if style.hatch else "white"
            _draw_boxes(ax, boxes, style.color, edge, style.hatch, zorder=2.1, gid=gid)
        else:
            hatch, narrow = (WAITING_HATCH, None) if part == "stuck" else ("", style.line)
            _draw_boxes(ax, boxes, style.pale, style.line, hatch, zorder=2, gid=gid, narrow=narrow)
    _draw_faults(ax, placed)


def _draw_boxes(
    ax: Axes, boxes: Sequence[Box], face: Color, edge: Color, hatch: str, *, zorder: float, gid: str,
    narrow: Color | None = None,
) -> None:  # fmt: skip
    """Edges and hatches only on boxes that are wide enough to show them: on others, `narrow`, they would hide the
    colour."""
    least = (_HATCHED_FROM_PT if hatch else _EDGED_FROM_PT) / points_per_ms(ax)
    wide = [box for box in boxes if box[1] - box[0] >= least]
    others = [box for box in boxes if box[1] - box[0] < least]
    if wide:
        draw_boxes(ax, wide, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, zorder=zorder, gid=gid)
    if others:
        draw_boxes(ax, others, facecolor=narrow or face, edgecolor="none", zorder=zorder, gid=f"{gid}, narrow")


def _draw_faults(ax: Axes, placed: Sequence[tuple[Bar, Box]]) -> None:
    """A thick red end where a rank is stuck or got an error, a dashed red box for a call that never came."""
    stuck = [[(right, top), (right, bottom)] for bar, (_, right, top, bottom) in placed if bar.state in ENDS_RED]
    if stuck:
        draw_lines(ax, stuck, colors=MISSING, linewidths=4, zorder=5, gid="stuck", clip_on=False)
    absent = [box for bar, box in placed if bar.state == "absent"]
    if absent:
        dashed: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 1.2}
        draw_boxes(ax, absent, facecolor="white", edgecolor=MISSING, zorder=2, gid="absent", **dashed)


def label_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """Write on a bar what fits: inside of it, else to the right where nothing follows, else nothing."""
    scale = points_per_ms(ax)
    row_pt = points(ax, 1.0, along="y") / max(1e-9, abs(ax.get_ylim()[1] - ax.get_ylim()[0]))
    follows = _next_in_row([box for _, box in placed], ax.get_xlim()[1])
    said: set[Hashable] = set()
    shared = look("rpc_sync")
    absent = {id(bar.operation) for bar, _ in placed if bar.state == "absent"}
    from_the_top = sorted(zip(placed, transfer_at, follows, strict=True), key=lambda each: each[0][1][2])
    for (bar, box), transfer, following in from_the_top:
        left, right, top, bottom = box
        if (bottom - top) * row_pt < TEXT_PT * 1.1 or len(ax.texts) >= _MOST_LABELS:
            continue
        # What all ranks do in an operation is said once, and who never came to it where it is missing.
        once = bar.state == "ended" and is_collective(bar.operation)
        if (once and id(bar.operation) in said) or (bar.state == "ended" and transfer >= right > left):
            continue
        labels = bar.labels[-1:] if bar.state == "stuck" and id(bar.operation) in absent else bar.labels
        start, end, face, ink = _wider_part(bar, left, right, min(max(transfer, left), right))
        inside, beside = (end - start) * scale - 6, (following - right) * scale - 6
        y = (top + bottom) / 2
        for label in labels:
            width = text_width(label, size=TEXT_PT)
            # The legend names its colour, or its name was said in this lane.
            told = bar.look != shared or (bar.rank, label) in said
            if width <= inside:
                write(ax, (start + end) / 2, y, label, on=face, ha="center", color=ink, zorder=6, clip_on=True)
            elif width <= beside and not (told and bar.state == "ended" and bar.operation.exchange is not None):
                write(ax, right + 3 / scale, y, label, on=LANE, zorder=6, clip_on=True)
            else:
                continue
            said |= {id(bar.operation), (bar.rank, label)}
            break


def _wider_part(bar: Bar, left: float, right: float, middle: float) -> tuple[float, float, Color, str]:
    """Start and end of the bar's waiting or transferring part, its colour and the colour of text on it."""
    style = bar.look
    if bar.state == "absent":
        return left, right, "white", MISSING
    if middle - left > right - middle and bar.state in ENDS_RED:
        return left, middle, style.pale, INK
    return middle, right, style.color, style.ink


def _next_in_row(boxes: Sequence[Box], edge: float) -> list[float]:
    """Where the next bar of the same row begins."""
    following: dict[float, float] = defaultdict(lambda: edge)
    nexts = [edge] * len(boxes)
    for i in sorted(range(len(boxes)), key=lambda i: -boxes[i][0]):
        left, _, top, _ = boxes[i]
        nexts[i], following[top] = following[top], left
    return nexts


@dataclass(frozen=True)
class Busy:
    """For each rank and look, a share from 0 to 1 for each bin. Calls at the same time count once.

    In `waiting`, all of the rank's calls of that look wait for a last rank; in `transfer`, one or more do not.
    """

    calls: int
    transfer: dict[tuple[int, Look], np.ndarray]
    waiting: dict[tuple[int, Look], np.ndarray]


def busy_of(calls: Calls, *, start_ns: int, end_ns: int, bins: int) -> Busy:
    """Of the calls whose end was seen; all of the time from `start_ns` to `end_ns`, in `bins`."""
    width_ns = (end_ns - start_ns) / bins
    until_ns = np.where(calls.ended, calls.end_ns, calls.start_ns)
    start, end = (calls.start_ns - start_ns) / width_ns, (until_ns - start_ns) / width_ns
    middle = (calls.transfer_ns - start_ns) / width_ns
    # A call that was done before the last rank came has waited for nobody.
    middle = np.where(end <= middle, start, middle)
    transfer: dict[tuple[int, Look], np.ndarray] = {}
    waiting: dict[tuple[int, Look], np.ndarray] = {}
    looks = list(dict.fromkeys(map(look, calls.ops)))
    number = np.array([looks.index(look(name)) for name in calls.ops])
    kind = calls.rank * len(looks) + number[calls.op]
    for each in np.unique(kind[calls.ended]):
        mine = np.flatnonzero((kind == each) & calls.ended)
        key = (int(each) // len(looks), looks[int(each) % len(looks)])
        inside = _covered(start[mine], end[mine], bins)
        transfer[key] = _covered(middle[mine], end[mine], bins)
        waiting[key] = np.maximum(inside - transfer[key], 0)
    return Busy(len(calls), transfer, waiting)


def _covered(start: np.ndarray, end: np.ndarray, bins: int) -> np.ndarray:
    begun, over = disjoint(start, end)
    return spread(begun, over, over - begun, bins=bins)


def draw_busy(ax: Axes, busy: Busy, *, rank: int, right: float, box: tuple[float, float]) -> None:
    """Stacked from the bottom: what is transferred in its colour, what waits paler. A full strip is all of the time."""
    mine = {look: shares for (owner, look), shares in busy.transfer.items() if owner == rank}
    everything: list[tuple[Color, np.ndarray, str]] = []
    everything += [(look.color, shares, f"time in {look.family}") for look, shares in mine.items()]
    everything += [(look.pale, busy.waiting[rank, look], f"time waiting in {look.family}") for look in mine]
    # Calls of several kinds at the same time share the strip.
    whole = np.maximum(1, sum(shares for _, shares, _ in everything))
    lower, (top, bottom) = np.zeros_like(whole), box
    for color, shares, gid in everything:
        upper = lower + shares / whole
        at = np.linspace(0, right, len(upper) + 1).repeat(2)[1:-1]
        above, below = (np.column_stack([at, bottom - edge.repeat(2) * (bottom - top)]) for edge in (upper, lower))
        outline = np.concatenate([above, below[::-1]])
        ax.add_collection(
            PolyCollection([outline], facecolor=color, edgecolor="none", zorder=2, gid=gid), autolim=False
        )
        lower = upper
