"""Two runs side by side: for each kind of traffic, and for each pair of ranks, what was sent before and after."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlearn.analysis import Comparison
from dlearn.analysis import compare as compared
from dlearn.analysis.findings import size_text
from dlearn.analysis.volume.comparing import Difference
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, plain
from dlearn.draw.palette import FAINT, GRID, INK, SERIES
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_ROW_IN = 0.26
_MOST_KINDS, _MOST_PAIRS = 12, 12
_RIGHT_IN = 1.5
"""For what is said of each row."""


def compare(a: Trace, b: Trace, *, names: tuple[str, str] = ("a", "b"), ax: Axes | None = None) -> Axes:
    """Draw the payload bytes that two runs send, a row for each kind of operation and for each pair of ranks: an open
    dot for `a`, a full one for `b`, and what is only in one of them named."""
    found = compared(a, b, names=names)
    kinds = _largest({f"{op}, {phase}": each for (phase, op), each in found.by_kind.items()}, _MOST_KINDS)
    pairs = _largest({f"{src} → {dst}": each for (src, dst), each in found.by_pair.items()}, _MOST_PAIRS)
    rows = [*kinds.items(), *pairs.items()]
    labels = [plain(name, most=40) for name, _ in rows]
    ax = ax or canvas.new_axes(
        height_in=_ROW_IN * (len(rows) + 1), left_in=canvas.left_margin_in(labels), right_in=_RIGHT_IN
    )
    if not rows:
        return canvas.say_empty(ax, "Neither run sends anything that is known.")
    dots = "an open dot for the first run, a full one for the second"
    canvas.describe(ax, f"{found.sentence}.", f"A row for each kind of operation and each pair of ranks: {dots}.")
    # A line of its own parts pairs of ranks from kinds of operations.
    heights = [place + (place >= len(kinds)) for place in range(len(rows))]
    for height, (_, each) in zip(heights, rows, strict=True):
        _draw_row(ax, height, each)
    label_axes(ax, labels, heights)
    return canvas.frame(ax, title=title(found), legend=legend(found), notes=notes(found, len(kinds), len(pairs)))


def _largest(rows: dict[str, Difference], most: int) -> dict[str, Difference]:
    """Those whose bytes have changed most, in their own order."""
    kept = sorted(rows, key=lambda name: (-abs(rows[name].added_bytes), -rows[name].b.payload_bytes))[:most]
    return {name: each for name, each in rows.items() if name in kept}


def title(found: Comparison) -> str:
    """Say how much more or less the second run sends: in bytes, and in messages where these differ."""
    a, b = found.names
    size, count = found.total.added_bytes, found.total.added_messages
    before, after = (size_text(each.payload_bytes) for each in (found.total.a, found.total.b))
    told = f"{b} sends {size_text(abs(size))} {'more' if size > 0 else 'less'} than {a}: {after} and not {before}"
    if not size:
        told = f"{b} sends as many bytes as {a}: {after}"
    if not count:
        return f"{told}, in as many messages"
    return f"{told}, in {count_text(abs(count), 'message')} {'more' if count > 0 else 'fewer'}"


def _draw_row(ax: Axes, height: int, each: Difference) -> None:
    before, after = each.a.payload_bytes, each.b.payload_bytes
    ax.plot([before, after], [height, height], color=FAINT, linewidth=1.4, zorder=1, gid="change")
    dot: dict[str, Any] = {"marker": "o", "clip_on": False}
    if each.a.message_count:
        ax.plot([before], [height], markersize=7, markerfacecolor="white", markeredgecolor=INK, zorder=2, **dot)
    if each.b.message_count:
        ax.plot([after], [height], markersize=6, color=SERIES[0], markeredgecolor="none", zorder=3, **dot)
    canvas.write(ax, 1.02, height, change_text(each), transform=ax.get_yaxis_transform(), va="center", fontsize=TEXT_PT)


def change_text(each: Difference) -> str:
    """ "-12.6 MB", "came: 405 kB", "went: 405 kB", "the same"."""
    if not each.a.message_count:
        return f"came: {size_text(each.b.payload_bytes)}"
    if not each.b.message_count:
        return f"went: {size_text(each.a.payload_bytes)}"
    size, count = each.added_bytes, each.added_messages
    if not size and not count:
        return "the same"
    messages = f"{count:+,} message{'s' * (abs(count) != 1)}" if count else ""
    sizes = f"{'+' if size > 0 else '-'}{size_text(abs(size))}" if size else ""
    return ", ".join(filter(None, (sizes, messages)))


def label_axes(ax: Axes, labels: list[str], heights: list[int]) -> None:
    """Bytes from 0; a row's name at its height."""
    ax.set_ylim(heights[-1] + 0.7, -0.7)
    ax.set_xlim(left=0, right=(ax.dataLim.x1 or 1) * 1.04)
    ax.set_yticks(heights, labels, parse_math=False, fontsize=TEXT_PT, color=INK)
    ax.xaxis.set_major_formatter(lambda size, _: size_text(round(size)))
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlabel("payload", fontsize=TEXT_PT, color=INK, labelpad=2, loc="left")
    canvas.quiet(ax)


def legend(found: Comparison) -> list[Artist]:
    a, b = (plain(name, most=40) for name in found.names)
    return [
        Line2D([], [], marker="o", linestyle="", markersize=7, markerfacecolor="white", markeredgecolor=INK, label=a),
        Line2D([], [], marker="o", linestyle="", markersize=6, color=SERIES[0], label=b),
    ]


def notes(found: Comparison, kinds: int, pairs: int) -> list[str]:
    """What is left out of the picture, and what is in no count."""
    told = []
    for name, shown, everything in (("kinds", kinds, found.by_kind), ("pairs of ranks", pairs, found.by_pair)):
        if len(everything) > shown:
            told.append(f"Of {len(everything):,} {name} the {shown} whose bytes differ most.")
    told += [
        f"Not counted: {count_text(count, 'operation')} of {name} whose messages are not known."
        for count, name in zip(found.unexplained, found.names, strict=True)
        if count
    ]
    return told
