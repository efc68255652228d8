"""Where the time of a training step goes: a bar per rank, cut into its parts; of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn.analysis.ddp.breakdown import Breakdown, StepTimes
from dlearn.analysis.ddp.breakdown import breakdown as parts_of
from dlearn.analysis.findings import time_text
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, plain, points_per_ms, text_width
from dlearn.draw.palette import BACKWARD, FAINT, FORWARD, INK, OPTIMIZER, WAITING_HATCH, ink_on, look
from dlearn.trace.trace import Trace

_BAR_IN, _HIDDEN_IN, _GAP_IN = 0.3, 0.22, 0.14
_SENT = look("all_reduce")


class Style(NamedTuple):
    """How a part looks. What computes is grey, so that colour is what is sent."""

    label: str
    color: str | tuple[float, float, float]
    edge: str
    hatch: str = ""


_MOST_BARS = 16

_STYLES = {
    "forward": Style("forward", FORWARD, FAINT),
    "backward": Style("backward", BACKWARD, FAINT),
    "waiting": Style("waits for the last rank, not hidden", _SENT.pale, _SENT.color, WAITING_HATCH),
    "transfer": Style("transfer, not hidden", _SENT.color, _SENT.color),
    "optimizer": Style("optimizer", OPTIMIZER, FAINT, "..."),
    "between": Style("between these", "white", FAINT),
    "hidden": Style("communication hidden behind the backward", _SENT.pale, _SENT.color),
}


def breakdown(traces: Trace | Mapping[str, Trace], *, ax: Axes | None = None) -> Axes:
    """Draw the training step of median length: forward, backward, communication that is not hidden, optimizer.

    A bar per rank, in ms; lengths, not moments. Below it, as long as it took, what was hidden behind the backward.
    Several traces, by name, stand below each other on one scale.
    """
    runs = {"": traces} if isinstance(traces, Trace) else traces
    found = {name: parts_of(trace) for name, trace in runs.items()}
    bars = [(label_of(each, name, run), each) for name, run in found.items() for each in run.middle]
    shown = bars[:_MOST_BARS]
    fit = ax is None
    row = _BAR_IN + _HIDDEN_IN + _GAP_IN
    height = _GAP_IN + row * max(1, len(shown))
    ax = ax or canvas.new_axes(height_in=height, left_in=canvas.left_margin_in(label for label, _ in shown))
    if not shown:
        return canvas.say_empty(ax, "This trace holds no training step of a DDP model.", fit=fit)
    canvas.describe(ax, "A bar for each rank, cut into the parts of its training step, with their times.")
    ax.set_xlim(0, 1.01 * max(each.total_ns for _, each in shown) / 1e6)
    ax.set_ylim(height, 0)
    tops = [_GAP_IN + place * row for place in range(len(shown))]
    labels = [label for label, _ in shown]
    ax.set_yticks([top + _BAR_IN / 2 for top in tops], labels, parse_math=False, fontsize=TEXT_PT, color=INK)
    for (_, each), top in zip(shown, tops, strict=True):
        draw_parts(ax, each, top)
    ax.set_xlabel("ms", fontsize=TEXT_PT, color=INK, labelpad=2)
    canvas.quiet(ax)
    parts = [each for _, each in shown]
    canvas.frame(
        ax, title=title_of(found), legend=legend(parts), notes=notes(found, parts, len(bars) - len(shown)), fit=fit
    )
    return ax


def label_of(each: StepTimes, name: str, run: Breakdown) -> str:
    """ "rank 0", or "ConvNet: rank 0"."""
    label = run.labels[each.rank]
    return plain(f"{name}: {label}" if name else label)


def title_of(found: Mapping[str, Breakdown]) -> str:
    """Of one run its finding; of several, what of each one's step is communication that is not hidden."""
    if len(found) == 1:
        return next(iter(found.values())).finding
    return "Communication that is not hidden: " + ", ".join(
        f"{name} " + ("not observed" if run.exposed is None else f"{run.exposed:.0%}") for name, run in found.items()
    )


def lengths_of(each: StepTimes) -> list[tuple[str, int]]:
    """The parts from left to right, in ns; together the whole step."""
    waiting = each.times.exposed_waiting_ns if each.times is not None else 0
    transfer = each.times.exposed_transfer_ns if each.times is not None else 0
    names = [("forward", each.forward_ns), ("backward", each.backward_ns), ("waiting", waiting), ("transfer", transfer)]
    return [*names, ("optimizer", each.optimizer_ns), ("between", each.between_ns)]


def draw_parts(ax: Axes, each: StepTimes, top: float) -> None:
    left = 0.0
    for name, length_ns in lengths_of(each):
        width = length_ns / 1e6
        if width:
            _box(ax, name, left, width, top, _BAR_IN, time_text(length_ns))
        left += width
    if each.times is not None and each.times.hidden_ns:
        # What is hidden lies within the backward; when in it, a length does not tell.
        end = (each.forward_ns + each.backward_ns) / 1e6
        width = each.times.hidden_ns / 1e6
        _box(ax, "hidden", end - width, width, top + _BAR_IN, _HIDDEN_IN, time_text(each.times.hidden_ns))


def _box(ax: Axes, name: str, left: float, width: float, top: float, height: float, length: str) -> None:
    style = _STYLES[name]
    ax.barh(
        top + height / 2, width, left=left, height=height, color=style.color, edgecolor=style.edge, hatch=style.hatch,
        linewidth=0.5, gid=name,
    )  # fmt: skip
    room = width * points_per_ms(ax) - 6
    text = next((text for text in (f"{name} {length}", length) if text_width(text, size=TEXT_PT) <= room), "")
    if text:
        box = {"facecolor": style.color, "edgecolor": "none", "pad": 1.0} if style.hatch else None
        middle = left + width / 2, top + height / 2
        canvas.write(ax, *middle, text, ha="center", color=ink_on(style.color), bbox=box, clip_on=True)


def legend(shown: Sequence[StepTimes]) -> list[Artist]:
    there = {name for each in shown for name, length_ns in lengths_of(each) if length_ns}
    there |= {"hidden" for each in shown if each.times is not None and each.times.hidden_ns}
    return [
        Patch(facecolor=style.color, edgecolor=style.edge, hatch=style.hatch, linewidth=0.5, label=style.label)
        for name, style in _STYLES.items()
        if name in there
    ]


def notes(found: Mapping[str, Breakdown], shown: Sequence[StepTimes], left_out: int) -> list[str]:
    told = ["Lengths, not moments: what is sent in parts is drawn in one."]
    if len(found) > 1:
        told.append("Of each run its step of median length.")
    told += dict.fromkeys(run.note for run in found.values() if run.note)
    if any(each.times is None for each in shown):
        told.append("When the communication ended was not observed: forward and backward hold it, where they waited.")
    if left_out:
        told.append(f"{left_out:,} more bars are not drawn.")
    return told
