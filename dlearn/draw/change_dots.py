"""Two runs side by side: for each kind of traffic, and for each pair of ranks, what was sent before and after."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlearn.analysis import Comparison
from dlearn.analysis import compare as compared
from dlearn.analysis.findings import size_text
from dlearn.analysis.volume.comparing import Difference
from dlearn.draw import canvas
from dlearn.draw.canvas import plain
from dlearn.draw.palette import FAINT, GRID, INK, SERIES
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_ROW_IN = 0.4
_MOST_KINDS, _MOST_PAIRS = 12, 12


def compare(a: Trace, b: Trace, *, names: tuple[str, str] = ("a", "b"), ax: Axes | None = None) -> Axes:
    """Draw the payload bytes that two runs send, a row for each kind of operation and for each pair of ranks: an open
    dot for `a`, a full one for `b`, and what is only in one of them named. Each of the two parts has its own scale."""
    found = compared(a, b, names=names)
    kinds = _largest({_kind_text(*kind): each for kind, each in found.by_kind.items()}, _MOST_KINDS)
    alike = _alike(found.by_pair)
    pairs = _largest(alike, _MOST_PAIRS)
    parts = [part for part in (kinds, pairs) if part]
    rows = [row for part in parts for row in part.items()]
    labels = [(plain(name, most=40), change_text(each)) for name, each in rows]
    ax = ax or canvas.new_axes(
        height_in=_ROW_IN * (len(rows) + len(parts)),
        left_in=canvas.left_margin_in([line for both in labels for line in both]),
    )
    if not rows:
        return canvas.say_empty(ax, "Neither run sends anything that is known.")
    dots = "an open dot for the first run, a full one for the second"
    canvas.describe(ax, f"{found.sentence}.", f"A row for each kind of operation and each pair of ranks: {dots}.")
    heights: list[float] = []
    for part in parts:
        top = heights[-1] + 2.0 if heights else 0.0
        own = [top + place for place in range(len(part))]
        largest = max(max(each.a.payload_bytes, each.b.payload_bytes) for each in part.values()) or 1
        for height, each in zip(own, part.values(), strict=True):
            _draw_row(ax, height, each, largest)
        _draw_scale(ax, top - 0.5, own[-1] + 0.5, largest)
        heights += own
    label_axes(ax, labels, heights)
    told = ["Kinds and pairs have a scale each, below them."] if parts[1:] else []
    cut = [(len(kinds), len(found.by_kind), "kinds"), (len(pairs), len(alike), "rows of pairs")]
    told += [f"Of {count:,} {name} the {shown} whose bytes differ most." for shown, count, name in cut if count > shown]
    told += [
        f"Not counted: {count_text(count, 'operation')} of {name} whose messages are not known."
        for count, name in zip(found.unexplained, found.names, strict=True)
        if count
    ]
    return canvas.frame(ax, title=title(found), legend=legend(found), notes=told, below_in=0.1)


def _kind_text(phase: str, op: str) -> str:
    return op if phase == "none" else f"{op}, {phase}"


def _alike(by_pair: dict[tuple[str, str], Difference]) -> dict[str, Difference]:
    """Pairs of ranks that send the same in both runs have one row."""
    alike: dict[Difference, list[str]] = defaultdict(list)
    for (src, dst), each in by_pair.items():
        alike[each].append(f"{src} → {dst}")
    more = {each: f" and {len(pairs) - 1} more" if pairs[1:] else "" for each, pairs in alike.items()}
    return {f"{pairs[0]}{more[each]}": each for each, pairs in alike.items()}


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


def _draw_scale(ax: Axes, top: float, bottom: float, largest: int) -> None:
    """Thin lines at a quarter of the largest, a half, and so on; below them what these are."""
    ax.vlines([0.0, 0.25, 0.5, 0.75, 1.0], top, bottom, color=GRID, linewidth=0.6, zorder=0)
    for share in (0.0, 0.5, 1.0):
        size = size_text(round(share * largest))
        canvas.write(ax, share, bottom + 0.25, size, ha="center", va="center", color=FAINT)


def _draw_row(ax: Axes, height: float, each: Difference, largest: int) -> None:
    before, after = each.a.payload_bytes / largest, each.b.payload_bytes / largest
    ax.plot([before, after], [height, height], color=FAINT, linewidth=1.4, zorder=1, gid="change")
    dot: dict[str, Any] = {"marker": "o", "clip_on": False}
    if each.a.message_count:
        ax.plot([before], [height], markersize=7, markerfacecolor="white", markeredgecolor=INK, zorder=2, **dot)
    if each.b.message_count:
        ax.plot([after], [height], markersize=6, color=SERIES[0], markeredgecolor="none", zorder=3, **dot)


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


def label_axes(ax: Axes, labels: list[tuple[str, str]], heights: list[float]) -> None:
    """A row's name at its height, below it what has changed; the bytes stand below each part."""
    ax.set(xlim=(-0.1, 1.1), ylim=(heights[-1] + 1.0, -0.6))
    canvas.name_rows(ax, heights, ["\n".join(both) for both in labels])
    ax.set_xticks([])
    canvas.quiet(ax)
    ax.spines["bottom"].set_visible(False)


def legend(found: Comparison) -> list[Artist]:
    a, b = (plain(name, most=40) for name in found.names)
    return [
        Line2D([], [], marker="o", linestyle="", markersize=7, markerfacecolor="white", markeredgecolor=INK, label=a),
        Line2D([], [], marker="o", linestyle="", markersize=6, color=SERIES[0], label=b),
    ]
