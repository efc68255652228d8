"""The traffic matrix: how many bytes each rank sent to each other rank."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from dlearn import analysis
from dlearn.analysis.findings import hang_title, pair_sentences, traffic_finding, wire_finding
from dlearn.analysis.volume.traffic import Matrix, Traffic, WireTraffic
from dlearn.draw import canvas, palette
from dlearn.draw.canvas import Box, points
from dlearn.draw.palette import FAINT, INK, SMALLEST_PT, TEXT_PT, plain, text_width
from dlearn.errors import DlearnError
from dlearn.shown import Scale, size_text, three_digits, unit_of
from dlearn.trace import Trace

_ROW_IN = 0.36
_COLUMN_IN = 1.3
_TALLEST_IN = 9.0
_SUM = 1.15  # Width of the column of sums and height of the row of sums, in cells.
_MOST_NAMES = 24
_SHADES = LinearSegmentedColormap.from_list("bytes", palette.BYTE_SHADES)

Bytes = Literal["payload", "predicted", "measured"]
_BYTES: dict[Bytes, Callable[[Trace], Traffic | WireTraffic]] = {
    "payload": analysis.traffic,
    "predicted": analysis.predicted_traffic,
    "measured": analysis.measured_traffic,
}


@canvas.for_cells
def traffic(trace: Trace, *, bytes: Bytes = "payload", ax: Axes | None = None) -> Axes:
    """Draw bytes as a matrix: a row for each sender, a column for each receiver, the number in each cell.

    Payload, or those on the wire: "predicted", or "measured" where the kernel counted exactly this part of the trace.
    """
    if bytes not in _BYTES:
        raise DlearnError(f"there are no bytes {bytes!r} to draw; there are: {', '.join(_BYTES)}.")
    return draw_matrix(trace, _BYTES[bytes](trace), ax)


def draw_matrix(trace: Trace, sent: Traffic | WireTraffic, ax: Axes | None, *why: str) -> Axes:
    """Draw it, with the hang as its title if there is one; `why` it is no other picture stands below."""
    hang, marked = hang_title(trace), canvas.in_red(trace)
    if ax is None:
        cells = len(sent.ranks) + _margin(len(sent.ranks))
        left = canvas.left_margin_in([plain(sent.labels[rank]) for rank in sent.ranks]) + 0.25
        most = canvas.width_in() - left
        right = most - min(cells * _COLUMN_IN, most - 0.15)
        ax = canvas.new_axes(height_in=min(cells * _ROW_IN, _TALLEST_IN), left_in=left, right_in=right)
    if not sent.ranks:
        return canvas.draw_message_instead(ax, "This trace holds no process.")
    if isinstance(sent, WireTraffic) and sent.not_measured:
        return canvas.draw_message_instead(ax, f"Not measured: {sent.not_measured}.")
    canvas.describe(ax, *pair_sentences(sent))
    draw_cells(ax, sent)
    unit = write_numbers(ax, sent)
    above_in = label_sides(ax, sent, canvas.never_came(trace))
    finding = wire_finding(sent) if isinstance(sent, WireTraffic) else traffic_finding(sent)
    notes = [*why, *([f"{finding}."] if hang else []), *unit, *traffic_notes(sent)]
    return canvas.frame(ax, title=hang or finding, notes=notes, above_in=above_in, below_in=0.08, marked=marked)


def draw_cells(ax: Axes, sent: Matrix) -> None:
    """Draw the cells, the darker the more bytes, red around what never came; white for none to itself."""
    count = len(sent.ranks)
    awaited = sent.never_came if isinstance(sent, Traffic) else {}
    boxes, faces, red = [], [], list[Box]()
    for (row, src), (column, dst) in product(enumerate(sent.ranks), repeat=2):
        boxes.append((column, column + 1, row, row + 1))
        faces.append(_shade(sent, src, dst))
        if awaited.get((src, dst)):
            red.append(boxes[-1])
    canvas.draw_boxes(ax, boxes, facecolors=faces, edgecolors="white", linewidths=1, gid="cells")
    if red:
        dashed: dict[str, Any] = {"edgecolor": palette.MISSING, "linestyle": (0, (3, 2))}
        canvas.draw_boxes(ax, red, facecolor="none", linewidth=1.2, gid="never came", **dashed)
    ax.set(xlim=(0, count + _margin(count)), ylim=(count + _margin(count), 0))


def _margin(count: int) -> float:
    """Return the width of the sums in cells: of many ranks a tenth of the matrix, for bars."""
    return _SUM if count <= _MOST_NAMES else count / 10


def _shade(sent: Matrix, src: int, dst: int) -> str | tuple[float, float, float]:
    size = sent.sizes.get((src, dst), 0)
    if not size:
        return "white" if src == dst else palette.LANE
    red, green, blue, _ = _SHADES(size / max(sent.sizes.values()))
    return red, green, blue


def write_numbers(ax: Axes, sent: Matrix) -> list[str]:
    """Write bytes in each cell, sums at the right and below, and return what to say of them.

    Where cells are narrow, all are in one unit: that of the largest cell, or of the sums, where these would not fit.
    Where no number fits, the sums are bars.
    """
    most = max(sent.sizes.values(), default=0)
    units = dict.fromkeys(unit_of(size) for size in (most, sent.total_bytes))
    ways: list[tuple[Callable[[int], str], str]] = [(size_text, "")]
    ways += [(partial(_in_unit, unit), f"Numbers in {unit[0]}. ") for unit in units]
    for text, unit in ways:
        size = _size_that_fits(ax, sent, text)
        if size >= SMALLEST_PT:
            _write_all(ax, sent, text, size)
            all_send = sum(src != dst for src, dst in sent.sizes) == len(sent.ranks) * (len(sent.ranks) - 1)
            return [] if all_send and not unit else [f"{unit}{'' if all_send else 'A dot: nothing sent.'}"]
    draw_sums(ax, sent)
    longest = max(map(max, _sums(sent)))
    ends = f"to {size_text(most)}; the longest bar is {size_text(longest)}"
    return [f"The shade grows with the bytes, {ends}. analysis.traffic has each number."]


def _sums(sent: Matrix) -> tuple[list[int], list[int]]:
    """Return what each rank sends, and what each receives."""
    out = [sent.bytes_from(rank=rank) for rank in sent.ranks]
    return out, [sent.bytes_to(rank=rank) for rank in sent.ranks]


def draw_sums(ax: Axes, sent: Matrix) -> None:
    """Draw a bar for each sum: at the right what a rank sends, below what it receives, on one scale."""
    out, into = _sums(sent)
    count, longest = len(sent.ranks), max([*out, *into]) or 1
    places, start = [place + 0.5 for place in range(count)], count + _margin(count) / 8
    scale = 0.8 * _margin(count) / longest
    style: dict[str, Any] = {"color": FAINT, "zorder": 2}
    ax.barh(places, [size * scale for size in out], 0.7, left=start, gid="sent", **style)
    ax.bar(places, [size * scale for size in into], 0.7, bottom=start, gid="received", **style)


def _in_unit(unit: Scale, size: int) -> str:
    """Return "1.50", three digits in this unit, and "<0.01" of less."""
    if unit[1] == 1 or not size:
        return f"{size:,}"
    return three_digits(size / unit[1]) if size >= 0.005 * unit[1] else "<0.01"


def _size_that_fits(ax: Axes, sent: Matrix, text: Callable[[int], str]) -> float:
    """Return the largest font size up to the usual one at which each number fits its cell."""
    wide, high = (points(ax, 1.0, along=axis) / (len(sent.ranks) + _margin(len(sent.ranks))) for axis in ("x", "y"))
    sums = [sent.total_bytes, *(size for side in _sums(sent) for size in side)]
    cells = [text_width(text(size)) / (wide - 4) for size in (0, *sent.sizes.values())]
    beside = [text_width(text(size), bold=True) / (_SUM * wide - 4) for size in sums]
    return min(TEXT_PT, TEXT_PT / max(*cells, *beside), high / 1.3) if wide > 4 else 0.0


def _write_all(ax: Axes, sent: Matrix, text: Callable[[int], str], size: float) -> None:
    count = len(sent.ranks)
    style: dict[str, Any] = {"ha": "center", "fontsize": size}
    for (row, src), (column, dst) in product(enumerate(sent.ranks), repeat=2):
        sent_bytes = sent.sizes.get((src, dst), 0)
        if src != dst or (src, dst) in sent.sizes:
            ink = palette.black_or_white(_shade(sent, src, dst), palette.ON_SHADE) if sent_bytes else FAINT
            shown = text(sent_bytes) if sent_bytes else "·"
            canvas.write(ax, column + 0.5, row + 0.5, shown, color=ink, **style)
    beside = count + _SUM / 2
    for place, (out, into) in enumerate(zip(*_sums(sent), strict=True)):
        canvas.write(ax, beside, place + 0.5, text(out), **style)
        canvas.write(ax, place + 0.5, beside, text(into), **style)
    canvas.write(ax, beside, beside, text(sent.total_bytes), fontweight="bold", **style)


def label_sides(ax: Axes, sent: Matrix, wanted: Collection[int]) -> float:
    """Name senders and receivers, of many every eighth and those `wanted`; return inches on top."""
    count, margin = len(sent.ranks), _margin(len(sent.ranks))
    every = 1 if count <= _MOST_NAMES else 8
    own = [place for place, rank in enumerate(sent.ranks) if rank in wanted and every > 1]
    near = {at for place in own for at in range(place - every // 2, place + every // 2)}
    named = sorted({*own, *range(0, count, every)} - (near - {*own}))
    names = [plain(sent.labels[sent.ranks[place]]) for place in named]
    places = [place + 0.5 for place in named] + [count + margin / 2]
    wide = points(ax, min(every, margin) / (count + margin), along="x")
    ax.set_yticks(places, [*names, "received"], parse_math=False)
    ax.set_ylabel("from", y=1 - count / 2 / (count + margin), fontsize=TEXT_PT, color=INK)
    above_in = canvas.names_on_top(ax, places, [*names, "sent in all"], wide)
    first = ax.get_xticklabels()[0]
    name_pt = TEXT_PT if first.get_rotation() else text_width(first.get_text())
    beside = max(0.0, name_pt - points(ax, 1 / (count + margin), along="x")) / 2
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "color": INK}
    ax.annotate("to:", (0, 1), (-6 - beside, 3), ha="right", va="bottom", fontsize=TEXT_PT, **style)
    return above_in


def traffic_notes(sent: Matrix) -> list[str]:
    notes = []
    if isinstance(sent, Traffic) and sent.by_how:
        derived, never = f"derived from {sent.derived_from}'s algorithm", "expected that never came (not counted)"
        words = {"derived": derived, "missing": never}
        parts = ", ".join(f"{size_text(size)} {words.get(how, how)}" for how, size in sent.by_how.items())
        notes.append(f"Payload bytes: {parts}.")
    if isinstance(sent, WireTraffic) and sent.counted == "predicted":
        notes.append("Predicted: payload, its framing, and what the receiver sends back. Not measured.")
    if isinstance(sent, WireTraffic) and sent.observer_bytes:
        notes.append(f"{size_text(sent.observer_bytes)} of it are the recorder's own ids.")
    return notes + [f"{line[:1].upper()}{line[1:]}." for line in sent.not_known()]
