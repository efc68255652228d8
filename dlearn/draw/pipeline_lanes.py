"""A step of a pipeline: the passes of micro-batches in the lane of each rank, and the bubble."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from dlearn.analysis.costs.pipeline_bubble import NO_PIPELINE, Pipeline
from dlearn.analysis.costs.pipeline_bubble import pipeline as step_of
from dlearn.analysis.findings import hang_finding
from dlearn.analysis.replay.local_activity import PASSES
from dlearn.draw import canvas, palette
from dlearn.draw.canvas import Style, draw_boxes, legend_of, points_per_ms, write
from dlearn.draw.palette import INK, LANE, SMALLEST_PT, plain, text_width
from dlearn.shown import count_text, listed, size_text, time_text
from dlearn.trace import Trace

_HEAD_IN, _GAP_IN, _LANE_IN, _STAGE_IN = 0.3, 0.09, 0.29, 0.19
_MOST_LANES = 32
_EQUAL = 0.03  # Steps that differ by less of the longer are called equally long.
_STYLES = {
    "F": Style(f"{PASSES['F']} of a micro-batch", palette.FORWARD),
    "B": Style(PASSES["B"], palette.BACKWARD),
    "W": Style(PASSES["W"], palette.WORK),
    "idle": Style("idle: the bubble", LANE, palette.COUNTED, palette.WAITING_HATCH),
}


class PipelineLane(NamedTuple):
    """The lane of a rank, in inches from the top, with the same height for each of its stages."""

    run: Pipeline
    rank: int
    name: str
    stages: list[int | None]
    top: float
    bottom: float


@canvas.for_cells
def pipeline(traces: Trace | Mapping[str, Trace], *, ax: Axes | None = None) -> Axes:
    """Draw the last whole step: a lane for each rank, its bubble hatched, from the first pass on.

    Several traces, by name, stand below each other on one scale, in ms.
    """
    traces = {"": traces} if isinstance(traces, Trace) else traces
    found = {name: step_of(trace) for name, trace in traces.items()}
    runs = {name: run for name, run in found.items() if run.passes}
    lanes = _place(runs.values())
    height = lanes[-1].bottom + _GAP_IN if lanes else 1.0
    left_in = canvas.left_margin_in(lane.name for lane in lanes)
    ax = ax or canvas.new_axes(height_in=height, left_in=left_in)
    if not lanes:
        return canvas.draw_message_instead(ax, f"{NO_PIPELINE}.")
    canvas.describe(ax, "A lane for each rank: a box for each pass; hatched where it is idle.")
    last = max(run.length_ns for run in runs.values()) / 1e6
    room = (text_width("idle 100%") + 8) / canvas.points(ax, 1.0, along="x")
    ax.set(xlim=(0, last / (1 - room)), ylim=(height, 0))
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= last])
    canvas.quiet(ax, "ms from the first pass")
    middles = [(lane.top + lane.bottom) / 2 for lane in lanes]
    canvas.name_rows(ax, middles, [lane.name for lane in lanes])
    for lane in lanes:
        _draw_lane(ax, lane)
    for name, run in runs.items() if len(runs) > 1 else ():
        top = next(lane.top for lane in lanes if lane.run is run) - _HEAD_IN / 2
        head = f"{name}: {time_text(run.length_ns)}, {run.idle():.0%} of it bubble"
        write(ax, 0, top, plain(head, most=200), fontweight="bold")
    slowest = [lane.name for lane in lanes if len(runs) == 1 and lane.rank == lane.run.slowest]
    notes = [note for run in runs.values() for note in run.notes]
    notes += [f"{name}: {run.finding}." for name, run in found.items() if name not in runs]
    notes += [f"After the step: {hang}." for hang in map(hang_finding, traces.values()) if hang]
    left_out = sum(len(run.busy_ns) for run in runs.values()) - len(lanes)
    notes += [f"{left_out:,} more ranks are not drawn."] * (left_out > 0)
    legend, notes = legend_of(ax, _STYLES), [*dict.fromkeys(notes)]
    marked = dict.fromkeys(slowest, INK)
    return canvas.frame(ax, title=_title(runs), legend=legend, notes=notes, marked=marked)


def bubble_note(trace: Trace) -> list[str]:
    """Say of a pipeline that this picture shows its bubble."""
    found = step_of(trace)
    return [f"{found.finding}: draw.pipeline shows it."] if found.passes else []


def _place(runs: Collection[Pipeline]) -> list[PipelineLane]:
    """Stack the lanes of all runs below their headings; of many ranks the first of each run."""
    lanes, at = list[PipelineLane](), 0.0
    for run in runs:
        at += _HEAD_IN * (len(runs) > 1)
        for rank in [*run.busy_ns][: _MOST_LANES // len(runs)]:
            known = {each.stage or 0: each.stage for each in run.passes if each.rank == rank}
            stages = [known[stage] for stage in sorted(known)]
            name, high = run.labels[rank], max(_LANE_IN, _STAGE_IN * len(stages))
            if len(stages) > 1:
                name = f"{name}, stages {listed([*map(str, stages)])}"
            lanes.append(PipelineLane(run, rank, plain(name), stages, at, at + high))
            at += high + _GAP_IN
    return lanes


def _draw_lane(ax: Axes, lane: PipelineLane) -> None:
    """Draw the lane as idle, on it the passes, with their numbers where these fit."""
    run, ends, scale = lane.run, (lane.top, lane.bottom), points_per_ms(ax)
    over, begin_ns = run.length_ns / 1e6, run.passes[0].start_ns
    high = (lane.bottom - lane.top) / len(lane.stages)
    idle = _STYLES["idle"].of_bar | {"linewidth": 0, "zorder": 1, "gid": "idle"}
    draw_boxes(ax, [(0, over, *ends)], **idle)
    for each in run.passes:
        if each.rank != lane.rank:
            continue
        left, right = (each.start_ns - begin_ns) / 1e6, (each.end_ns - begin_ns) / 1e6
        top, color = lane.top + high * lane.stages.index(each.stage), _STYLES[each.kind].color
        width, number = (right - left) * scale, str(each.micro_batch)
        draw_boxes(ax, [(left, right, *ends)], facecolor=LANE, edgecolor=LANE, zorder=2)
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": min(0.8, width / 8)}
        box = (left, right, top, top + high)
        draw_boxes(ax, [box], facecolor=color, zorder=3, gid=each.kind, **style)
        if text_width(number, size=SMALLEST_PT) + 2 < width:
            style = {"color": palette.ink_on(color), "fontsize": SMALLEST_PT, "ha": "center"}
            write(ax, (left + right) / 2, top + high / 2, number, zorder=4, **style)
    write(ax, over + 5 / scale, sum(ends) / 2, f"idle {run.idle(lane.rank):.0%}")


def _title(runs: Mapping[str, Pipeline]) -> str:
    """Write "1F1B ends its step 60 ms (8%) sooner than GPipe; the same 36 messages, 74 kB"."""
    if len(runs) == 1:
        ((name, run),) = runs.items()
        return f"{name}: {run.finding[0].lower()}{run.finding[1:]}" if name else run.finding
    first, *_, last = sorted(runs, key=lambda name: runs[name].length_ns)
    sooner_ns = runs[last].length_ns - runs[first].length_ns
    share = sooner_ns / runs[last].length_ns
    text = f"{first} ends its step {time_text(sooner_ns)} ({share:.0%}) sooner than {last}"
    if share < _EQUAL:
        text = f"{listed([*runs])} take equally long, within {_EQUAL:.0%}"
    sent = []
    for run in runs.values():
        sent.append(Counter((each.src, each.dst, each.payload_bytes) for each in run.sent))
    sizes = [each.payload_bytes for each in runs[first].sent]
    if sizes and None not in sizes and sent.count(sent[0]) == len(sent):
        total = size_text(sum(filter(None, sizes)))
        text += f"; the same {count_text(len(sizes), 'message')}, {total} in all"
    return text
