"""One collective as a film: moments from left to right, in each pieces across, ranks downwards."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.patches import Patch

from dlearn.analysis.findings import hang_finding
from dlearn.analysis.replay.moments import Moments, moments
from dlearn.draw import canvas
from dlearn.draw.canvas import Box, draw_boxes, draw_lines, points, write
from dlearn.draw.palette import FAINT, LINES, TEXT_PT, WHOLE, at_night, look_of, plain, wrap
from dlearn.join.ends import family_of_op
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import count_text
from dlearn.trace import Trace

_NARROWEST_IN, _WIDEST_IN, _GAP_IN = 0.9, 1.7, 0.14  # Narrower ones stand in two rows.
_LOWEST_IN, _TALLEST_IN, _ROW_IN = 0.6, 1.7, 0.28
_LINE_IN = 1.35 * TEXT_PT / 72
_FAINTEST = 0.25


@canvas.for_cells
def film(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw what each rank holds of each piece at the start, at the end, and at moments between.

    It is the collective that sends most in this trace, or part of a trace. A cell is the stronger
    the more ranks' parts are in it, gold once it is the result, and empty before there are data.
    """
    found = moments(trace)
    if isinstance(found, str):
        return canvas.draw_message_instead(ax, found)
    operation, last, half = found.sent[0].operation, len(found.held) - 1, found.halfway
    at_halves = (0, half / 4, half / 2, half, (half + last) / 2, last)
    shown = sorted({int(at + 0.5) for at in (at_halves if half else np.linspace(0, last, 6))})
    names = [plain(trace.label(rank), most=16) for rank in operation.group.members]
    left_in = canvas.left_margin_in(names)
    wide = canvas.points_wide(ax, left_in=left_in) / 72
    in_a_row = len(shown) if wide / len(shown) >= _NARROWEST_IN else -(-len(shown) // 2)
    rows, across = -(-len(shown) // in_a_row), min(_WIDEST_IN, wide / in_a_row - _GAP_IN)
    captions = [wrap(_caption(found, at, names), 72 * across + 4) for at in shown]
    above, below = _LINE_IN * max(map(len, captions)) + 0.05, (2.6 if half else 1.4) * _LINE_IN
    high = min(_TALLEST_IN, max(_LOWEST_IN, _ROW_IN * len(names)))
    if ax is not None:
        high = max(0.2, points(ax, 1.0, along="y") / 72 / rows - above - below)
    each = above + high + below
    ax = ax or canvas.new_axes(height_in=rows * each, left_in=left_in)
    boxes: list[Box] = []
    for place, (at, lines) in enumerate(zip(shown, captions, strict=True)):
        left, top = place % in_a_row * (across + _GAP_IN), place // in_a_row * each + above
        boxes.append((left, left + across, top, top + high))
        draw_cells(ax, found.held[at], hue_of(operation), boxes[-1])
        for line, text in enumerate(reversed(lines)):
            write(ax, left + across / 2, top - 0.1 - _LINE_IN * line, text, ha="center")
    style = {"edgecolor": FAINT, "linewidth": 0.8, "linestyle": LINES[found.sent[0].how]}
    draw_boxes(ax, boxes, facecolor="none", **style)
    _name_halves(ax, found, shown, boxes)
    whose = ", a column for each sender" * (family_of_op(operation.op) == "all_to_all")
    count = count_text(found.held.shape[2], "piece")
    write(ax, 0.0, boxes[0][3] + 0.65 * _LINE_IN, f"{count}{whose} →", ha="left")
    every = 1 if high / len(names) >= _LINE_IN else max(1, len(names) - 1)
    middles = high * (np.arange(len(names)) + 0.5) / len(names)
    heights = np.add.outer([box[2] for box in boxes[::in_a_row]], middles[::every])
    canvas.name_rows(ax, heights.ravel(), names[::every] * len(heights))
    canvas.names_only(ax)
    ax.set(xlim=(0, wide), ylim=(rows * each, 0), xticks=[])
    canvas.describe(ax, *(f"{' '.join(lines)}." for lines in captions))
    part = "a part of the result: the stronger, the more"
    keys = [Patch(color=hue_of(operation), alpha=0.5, label=part)] * bool((found.held < 1).any())
    keys.append(Patch(color=WHOLE, label="the whole result"))
    hang = [f"Of this trace: {hang}." for hang in [hang_finding(trace)] if hang]
    return canvas.frame(ax, title=_title(found), legend=keys, notes=_notes(found) + hang, below_in=0.06)


def hue_of(operation: Operation) -> str:
    """Return the operation's or its bucket's colour, as dark pages can show it, too."""
    return at_night(look_of(operation).color, least=3)


def draw_cells(ax: Axes, held: np.ndarray, hue: str, box: Box) -> None:
    """Draw a cell for each share of the result; where it is nan the page shows through."""
    left, right, top, bottom = box
    colors = np.full((*held.shape, 4), to_rgba(WHOLE))
    colors[held != 1, :3] = to_rgb(hue)
    colors[..., 3] = np.nan_to_num(_FAINTEST + (1 - _FAINTEST) * held**0.8)
    extent = (left, right, bottom, top)
    ax.imshow(colors, extent=extent, aspect="auto", interpolation="none", zorder=6)


def _caption(found: Moments, at: int, names: Sequence[str]) -> str:
    """Say when it is, and what ranks hold then, where this is short to say."""
    last, half, op = len(found.held) - 1, found.halfway, family_of_op(found.sent[0].op)
    when = {0: "start", last: "end"}.get(at, f"round {at} of {last}")
    have = (found.held[at] == 1).all(axis=1) if at else ~np.isnan(found.held[0]).all(axis=1)
    states = {len(names): "every rank has all", 1: f"{names[have.argmax()]} has all"}
    if at == 0:
        states[len(names)] = "each rank has its own part" if half else "each rank has its own data"
    elif op == "all_to_all":
        states[len(names)] = "each rank has its pieces"
    state = states.get(have.sum(), "each rank has its piece")
    if at == half > 0:
        state = "each piece is whole on one rank"
    elif 0 < at < last:
        state = "parts add up" * (at < half <= 2 * at) + "whole pieces go on" * (at > half > 0)
    return f"{when}: {state}" if state else when


def _name_halves(ax: Axes, found: Moments, shown: Sequence[int], boxes: Sequence[Box]) -> None:
    """Draw a line with its name below the moments of each half, if the algorithm has halves."""
    names = ["reduce-scatter", "all-gather" if (found.held[-1] == 1).all() else "gather"]
    if (found.held[found.halfway] == 1).any(axis=1).sum() == 1:
        names = ["reduce", "broadcast"]
    rows: dict[tuple[float, bool], list[Box]] = {}
    for at, box in zip(shown, boxes, strict=True):
        rows.setdefault((box[3] + 1.4 * _LINE_IN, at >= found.halfway), []).append(box)
    for (y, is_second), row in rows.items() if found.halfway else ():
        left, right = row[0][0], row[-1][1]
        draw_lines(ax, [[(left, y), (right, y)]], color=FAINT, linewidth=0.8)
        write(ax, (left + right) / 2, y + 0.6 * _LINE_IN, names[is_second], ha="center")


def title_of(operation: Operation, messages: int, *, only: bool = True) -> str:
    """Return "One all-reduce of 4 ranks in 48 messages", or which it is of several."""
    op = family_of_op(operation.op).replace("_", "-")
    name = f"One {op}" if only else f"{op} #{operation.seq}"
    name += f" (bucket {operation.bucket.index})" if operation.bucket else ""
    ranks = len(operation.group.members)
    return f"{name} of {ranks} ranks in {count_text(messages, 'message')}"


def _title(found: Moments) -> str:
    last, half, only = len(found.held) - 1, found.halfway, found.collectives == 1
    end = f", in {count_text(last, 'round')}"
    if half:
        when = "halfway" if 2 * half == last else f"after round {half} of {last}"
        end = f": {when} each piece is whole on one rank"
    return title_of(found.sent[0].operation, len(found.sent), only=only) + end


def _notes(found: Moments) -> list[str]:
    how, backend = found.sent[0].how, found.sent[0].operation.group.backend
    known = "were observed" if how == "observed" else f"are {how} from {backend}'s algorithm"
    which = f"The largest of {found.collectives:,} collectives, torch's own last"
    inferred = "What a rank holds is inferred from them, as values are never recorded."
    more = [f"{which}: trace.where(...) selects another."] * (found.collectives > 1)
    return [f"Its messages {known}. {inferred}", *more]
