"""Predicted against measured: for each pair of ranks what its messages should take on the wire, and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn import analysis
from dlearn.analysis.volume.reconcile import Reconciliation
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, cut, plain, points, text_width
from dlearn.draw.palette import COUNTED, FRAMING, INK, LINES, MISSING, SERIES, STRIP
from dlearn.join.ledger import Pair
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_HEAD_IN, _BAR_IN, _GAP_IN = 0.24, 0.25, 0.16
_ROW_IN = _HEAD_IN + 2 * _BAR_IN + _GAP_IN
_MOST_PAIRS = 8
_LEAST_BARS = 0.3
"""Share of the width that the bars need beside their numbers."""
_PAYLOAD, _FRAMING, _MEASURED = SERIES[0], FRAMING, COUNTED
_RESIDUE_HATCH = "xxxx"


class PairRow(NamedTuple):
    """Two bars of one pair of ranks: what was predicted, and below it what was measured, with their texts."""

    name: str
    pair: Pair
    predicted: str
    measured: str


def reconcile(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw for each pair of ranks the payload, what it takes on the wire, and what the kernel counted, in bytes."""
    found = analysis.reconcile(trace)
    fit = ax is None
    pairs = pairs_shown(found, _MOST_PAIRS if ax is None else max(1, int(points(ax, 1.0, along="y") / 72 / _ROW_IN)))
    ax = ax or canvas.new_axes(height_in=max(len(pairs) * _ROW_IN, 1.0), left_in=0.15)
    if not pairs:
        return canvas.say_empty(ax, "This trace holds no messages whose bytes could be compared.", fit=fit)
    canvas.describe(ax, *(f"{row.name}: {row.predicted}; {row.measured}." for row in rows_of(found, pairs)))
    rows = set_scale(ax, found, pairs)
    for place, row in enumerate(rows):
        draw_row(ax, row, top=place * _ROW_IN)
    canvas.frame(ax, title=found.finding, legend=legend(found), notes=notes(found, len(rows)), below_in=0.08, fit=fit)
    return ax


def pairs_shown(found: Reconciliation, most: int) -> list[Pair]:
    """Of too many those with the largest residue, then those with the most bytes."""
    pairs = list(found.whole.pairs)
    if len(pairs) <= most:
        return pairs
    return sorted(pairs, key=lambda pair: (-abs(pair.residue_bytes or 0), -pair.predicted_bytes))[:most]


def rows_of(found: Reconciliation, pairs: Sequence[Pair], *, brief: int = 0) -> list[PairRow]:
    """With their texts in full; `brief`: 1 without the parts of what was predicted, 2 numbers only."""
    several = len({pair.group for pair in found.whole.pairs}) > 1
    return [
        PairRow(_name(found, pair, several), pair, predicted_text(pair, brief), measured_text(pair, brief))
        for pair in pairs
    ]


def _name(found: Reconciliation, pair: Pair, several: bool) -> str:
    src, dst = (plain(found.labels[rank]) for rank in (pair.src, pair.dst))
    return f"{src} to {dst}" + (f", group {plain(pair.whose)}" if several else "")


def predicted_text(pair: Pair, brief: int = 0) -> str:
    """ "payload 200 B + framing 576 B = 776 B predicted"."""
    if brief:
        return f"{_predicted(pair):,} B" + (" predicted" if brief == 1 else "")
    parts = [f"payload {pair.payload_bytes:,} B", f"framing {pair.predicted_bytes - pair.payload_bytes:,} B"]
    if pair.observer_bytes:
        parts.append(f"the recorder's ids {pair.observer_bytes:,} B")
    return f"{' + '.join(parts)} = {_predicted(pair):,} B predicted"


def measured_text(pair: Pair, brief: int = 0) -> str:
    """ "776 B measured, residue 0 B"; why it was not stands in the title and below."""
    if pair.measured_bytes is None:
        return "not measured"
    return f"{pair.measured_bytes:,} B{' measured' if brief < 2 else ''}, residue {pair.residue_bytes or 0:,} B"


def _predicted(pair: Pair) -> int:
    return pair.predicted_bytes + pair.observer_bytes


def set_scale(ax: Axes, found: Reconciliation, pairs: Sequence[Pair]) -> list[PairRow]:
    """Bytes to the right; the bars leave room for the numbers behind them, which are as long as there is room."""
    width = points(ax, 1.0, along="x")
    for brief in (0, 1, 2):
        rows = rows_of(found, pairs, brief=brief)
        widest = max(text_width(text, size=TEXT_PT) for row in rows for text in (row.predicted, row.measured)) + 12
        if widest <= (1 - _LEAST_BARS) * width:
            break
    most = max(max(_predicted(pair), pair.measured_bytes or 0) for pair in pairs) or 1
    ax.set_xlim(0, most / max(_LEAST_BARS, 1 - widest / width))
    ax.set_ylim(len(rows) * _ROW_IN, 0)
    ax.set_axis_off()
    return rows


def draw_row(ax: Axes, row: PairRow, *, top: float) -> None:
    """The name, and below it what was predicted in its parts, and what was measured; red is what lies between."""
    pair, predicted = row.pair, _predicted(row.pair)
    first, second = top + _HEAD_IN, top + _HEAD_IN + _BAR_IN
    ax.annotate(
        cut(row.name, points(ax, 1.0, along="x"), size=TEXT_PT), (0, first - 0.03), va="bottom", fontsize=TEXT_PT,
        fontweight="bold", color=INK, parse_math=False, annotation_clip=False,
    )  # fmt: skip
    framing = pair.predicted_bytes - pair.payload_bytes
    parts = ((pair.payload_bytes, _PAYLOAD, "payload"), (framing, _FRAMING, "framing"))
    left = 0
    for size, color, what in (*parts, (pair.observer_bytes, STRIP, "observer")):
        if size > 0:
            _bar(ax, first, left, size, color, f"{what} {row.name}", line="derived")
            left += size
    _write(ax, predicted, first, row.predicted)
    if pair.measured_bytes is None:
        _write(ax, 0, second, row.measured)
        return
    both = min(pair.measured_bytes, predicted)
    _bar(ax, second, 0, both, _MEASURED, f"measured {row.name}")
    residue = abs(pair.measured_bytes - predicted)
    if residue:
        _bar(ax, second, both, residue, "white", f"residue {row.name}", edge=MISSING, hatch=_RESIDUE_HATCH)
    _write(ax, max(pair.measured_bytes, predicted), second, row.measured, ink=MISSING if residue else INK)


def _bar(
    ax: Axes, top: float, left: int, size: int, color: str, gid: str, *, line: str = "observed", edge: str = INK,
    hatch: str = "",
) -> None:  # fmt: skip
    ax.barh(
        top + _BAR_IN / 2, size, left=left, height=0.86 * _BAR_IN, color=color, edgecolor=edge, linewidth=0.8,
        linestyle=LINES[line], hatch=hatch, gid=gid,
    )  # fmt: skip


def _write(ax: Axes, size: int, top: float, text: str, *, ink: str = INK) -> None:
    room = points(ax, 1 - size / ax.get_xlim()[1], along="x") - 5
    ax.annotate(
        cut(text, room, size=TEXT_PT), (size, top + _BAR_IN / 2), (5, 0), textcoords="offset points",
        va="center_baseline", fontsize=TEXT_PT, color=ink, parse_math=False, annotation_clip=False,
    )  # fmt: skip


def legend(found: Reconciliation) -> list[Artist]:
    def patch(color: str, label: str, line: str = "derived", edge: str = INK, hatch: str = "") -> Patch:
        return Patch(
            facecolor=color, edgecolor=edge, linewidth=0.8, linestyle=LINES[line], hatch=hatch, label=label
        )  # fmt: skip

    handles: list[Artist] = [patch(_PAYLOAD, "payload"), patch(_FRAMING, "framing, predicted")]
    if found.whole.observer_bytes:
        handles.append(patch(STRIP, "the recorder's own ids"))
    if any(pair.measured_bytes is not None for pair in found.whole.pairs):
        handles.append(patch(_MEASURED, "counted by the kernel", "observed"))
    if any(pair.residue_bytes for pair in found.whole.pairs):
        handles.append(patch("white", "residue", "observed", MISSING, _RESIDUE_HATCH))
    return handles


def notes(found: Reconciliation, shown: int) -> list[str]:
    """The sum, which also says why something was not measured; then what the parts of the recording say."""
    left_out = len(found.whole.pairs) - shown
    told = [f"{count_text(left_out, 'more pair')} of ranks not drawn: see analysis.reconcile."] if left_out else []
    said_already = bool(found.not_measured or found.whole.note)
    return [found.sentence, *told, *found.sentences()[said_already:]]
