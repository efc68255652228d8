"""The timeline: a lane per rank, a bar per call, waiting apart from transfer, an arrow per message."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.analysis.ddp.step_times import step_times
from dlearn.analysis.ddp.training_steps import COMPUTED
from dlearn.analysis.findings import hang_finding, time_text, traffic_finding
from dlearn.analysis.telling.words import network_sentences, problem_sentences
from dlearn.analysis.volume.flows import Flow
from dlearn.analysis.volume.traffic import traffic
from dlearn.draw import canvas
from dlearn.draw.arrows import MOST_ARROWS, draw_arrow, in_legend
from dlearn.draw.bars import ENDS_RED, THIN, Bar, draw_bars, draw_busy, is_collective, label_bars, wait_text
from dlearn.draw.canvas import Box, points_per_ms
from dlearn.draw.layout.lanes import ALIKE, SPAN_IN, STRIP_IN, height_in
from dlearn.draw.palette import FAINT, GRID, INK, LANE, MISSING, STRIP, WAITING_HATCH, WORKS
from dlearn.draw.scene import MOST_SPAN_ROWS, Scene, set_scene, stem_of
from dlearn.draw.step_strip import steps
from dlearn.draw.text import TEXT_PT, plain, text_width
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import count_text
from dlearn.trace import Trace

MOST_STEPS = 12
"""Bars of more training steps cannot be told apart."""
_TALLEST_IN = 14.0
_NARROWEST_PT = 1.0
_MOST_WIDENED = 400
_MOST_LINES = 24
"""Operations whose last rank is marked."""
_LAST_RANK: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 2))}


def timeline(trace: Trace, *, arrows: bool = False, ax: Axes | None = None) -> Axes:
    """Draw a lane for each rank and a bar for each call, thin while it waits; time in ms from the first event shown.

    An arrow stands for each message that was observed; with `arrows=True` also for those that are derived, whose times
    are shares of their operation's. More than twelve steps are drawn as `steps` draws them.
    """
    if len(step_times(trace).titles) > MOST_STEPS:
        return steps(trace, ax=ax)
    scene = set_scene(trace, derived=arrows)
    ax = ax or _new_axes(trace, scene)
    if not (scene.bars or scene.busy or scene.spans or scene.gradients):
        return canvas.say_empty(ax, "This trace holds no operation, span or gradient.")
    canvas.describe(
        ax,
        "A lane for each rank, from the top; in it a bar for each call, and between lanes an arrow for each message.",
    )
    label_axes(ax, trace, scene)
    draw_spans(ax, scene)
    draw_gradients(ax, scene)
    draw_calls(ax, scene)
    draw_last_ranks(ax, scene)
    draw_path(ax, scene)
    draw_messages(ax, scene)
    hang, longest, sent = hang_finding(trace), scene.longest_wait, traffic_finding(traffic(trace))
    title, more, marked = hang or sent, [], canvas.in_red(trace)
    if longest is not None and not hang:
        title, more = wait_text(longest, trace), [f"{sent}."]
        marked = {plain(trace.label(rank)): INK for rank in (longest.rank, longest.waited_for)}
        write_wait(ax, scene, longest)
    told = [*more, *notes(ax, trace, scene)]
    return canvas.frame(ax, title=title, legend=legend(scene), notes=told, marked=marked)


def _new_axes(trace: Trace, scene: Scene) -> Axes:
    labels = [line for rank in scene.ranks for line in scene.name(rank, trace.label(rank)).splitlines()]
    return canvas.new_axes(height_in=min(height_in(scene.lanes), _TALLEST_IN), left_in=canvas.left_margin_in(labels))


def label_axes(ax: Axes, trace: Trace, scene: Scene) -> None:
    width = scene.ms(scene.end_ns)
    lanes = scene.lanes.values()
    ax.set(xlim=(-0.005 * width, 1.01 * width), ylim=(height_in(scene.lanes), 0))
    canvas.draw_lanes(ax, [(lane.top, lane.bottom) for lane in lanes])
    names = [scene.name(lane.rank, trace.label(lane.rank)) for lane in lanes]
    canvas.name_rows(ax, [lane.middle for lane in lanes], names)
    canvas.quiet(ax, "ms from the first event shown")


def draw_spans(ax: Axes, scene: Scene) -> None:
    """A bracket above the bars of its rank, a box where nothing is called in it; with its name where there is room."""
    brackets: list[list[tuple[float, float]]] = []
    boxes: list[Box] = []
    colors: list[str] = []
    scale = points_per_ms(ax)
    for span, row in zip(scene.spans, scene.span_rows, strict=True):
        lane = scene.lanes[span.rank]
        if row >= lane.spans:
            continue
        left, right = scene.ms(span.start_ns), scene.ms(span.end_ns or scene.end_ns)
        # Inner spans stand below outer ones.
        top = lane.top + row * SPAN_IN
        line, foot, bottom = top + SPAN_IN * 0.5, top + SPAN_IN * 0.85, top + SPAN_IN * 0.95
        shade = scene.works.get((span.rank, span.number))
        if shade is None:
            behind, margin, pad = LANE, 8, 1.0
            brackets.append([(left, foot), (left, line), (right, line), (right, foot)])
        else:
            behind, margin, pad = WORKS[shade % len(WORKS)], 2, 0.0
            boxes.append((left, right, top, bottom))
            colors.append(behind)
        name = plain(span.name, most=30)
        if text_width(name, size=TEXT_PT) + margin < (right - left) * scale:
            middle = (left + right) / 2
            canvas.write(ax, middle, line, name, on=behind, pad=pad, ha="center", zorder=6, clip_on=True)
    canvas.draw_boxes(ax, boxes, facecolors=colors, edgecolor=FAINT, linewidth=0.4, zorder=1, gid="works")
    canvas.draw_lines(ax, brackets, colors=FAINT, linewidths=0.8, zorder=1, gid="spans")


def draw_gradients(ax: Axes, scene: Scene) -> None:
    """A tick when a gradient is ready, on a strip from the first to the last of each backward pass."""
    passes: dict[tuple[int, int | None, int], list[float]] = defaultdict(list)
    for gradient in scene.gradients:
        passes[gradient.rank, gradient.backward, gradient.model].append(scene.ms(gradient.start_ns))
    ticks: list[list[tuple[float, float]]] = []
    strips: list[Box] = []
    for (rank, _, _), times in passes.items():
        top = scene.lanes[rank].strip_top + 0.02
        bottom = top + STRIP_IN - 0.03
        strips.append((min(times), max(times), top, bottom))
        ticks += [[(time, top), (time, bottom)] for time in times]
    canvas.draw_boxes(ax, strips, facecolor=STRIP, zorder=1, gid="backward")
    canvas.draw_lines(ax, ticks, colors=INK, linewidths=0.8, zorder=1.5, gid="gradients")


def draw_calls(ax: Axes, scene: Scene) -> None:
    """The bars, with what each call was and how many bytes."""
    # Among many, a widened bar would hide its neighbours; their true widths blend into the right shade.
    narrowest = _NARROWEST_PT / points_per_ms(ax) if len(scene.bars) <= _MOST_WIDENED else 0.0
    placed: list[tuple[Bar, Box]] = []
    for bar, row in zip(scene.bars, scene.rows, strict=True):
        left = scene.ms(bar.start_ns)
        right = max(scene.ms(bar.end_ns), left + narrowest)
        placed.append((bar, (left, right, *scene.lanes[bar.rank].bar(row))))
    transfer_at = [scene.ms(bar.transfer_ns) for bar in scene.bars]
    draw_bars(ax, placed, transfer_at=transfer_at)
    label_bars(ax, placed, transfer_at=transfer_at)
    if scene.busy is not None:
        for rank, lane in scene.lanes.items():
            draw_busy(ax, scene.busy, rank=rank, right=scene.ms(scene.end_ns), box=lane.bar(0))


def write_wait(ax: Axes, scene: Scene, bar: Bar) -> None:
    """How long it is, on the bar that the title tells of, if there is room."""
    left, right, time = scene.ms(bar.start_ns), scene.ms(bar.transfer_ns), time_text(bar.waited_ns)
    if text_width(time, size=TEXT_PT) + 12 < (right - left) * points_per_ms(ax):
        middle = sum(scene.lanes[bar.rank].bar(scene.rows[scene.bars.index(bar)])) / 2
        canvas.write(ax, (left + right) / 2, middle, time, on=LANE, ha="center", zorder=6, gid="longest wait")


def draw_last_ranks(ax: Axes, scene: Scene) -> None:
    """A line where the last rank has come to an operation, from which on all can send, and a mark on that rank."""
    waited = waited_for(scene)
    for operation, bars in waited.items() if len(waited) <= _MOST_LINES else ():
        at = scene.ms(operation.transfer_ns)
        lanes = [scene.lanes[bar.rank] for bar, _ in bars]
        last = next((lane.bar(row) for (bar, row), lane in zip(bars, lanes, strict=True) if is_last(bar)), None)
        top, bottom = min(lane.bars_top for lane in lanes), max(lane.bottom for lane in lanes)
        color = bars[0][0].look.line
        ax.plot([at, at], [top, bottom], color=color, zorder=1.8, gid="last rank", **_LAST_RANK)
        if last is not None:
            ax.plot([at], [sum(last) / 2], marker=">", markersize=6, color=color, markeredgecolor="white", zorder=5)


def draw_path(ax: Axes, scene: Scene) -> None:
    """An outline around the bars and, where a rank computes, the strips that the end of the step waited for."""
    boxes: list[Box] = []
    rows = {(bar.rank, bar.transfer_ns): row for bar, row in zip(scene.bars, scene.rows, strict=True)}
    for (rank, computes), legs in groupby(scene.path, key=lambda leg: (leg.rank, leg.what in COMPUTED)):
        mine, lane = list(legs), scene.lanes[rank]
        left, right = max(mine[0].start_ns, scene.start_ns), min(mine[-1].end_ns, scene.end_ns)
        row = rows.get((rank, mine[0].start_ns))
        if left < right and computes:
            boxes.append((scene.ms(left), scene.ms(right), lane.strip_top, lane.bars_top))
        elif left < right and row is not None:  # A selection may leave it out.
            boxes.append((scene.ms(left), scene.ms(right), *lane.bar(row)))
    canvas.draw_boxes(ax, boxes, facecolor="none", edgecolor=INK, linewidth=2, zorder=3, gid="critical path")


def waited_for(scene: Scene) -> dict[Operation, list[tuple[Bar, int]]]:
    """Of each operation in which a rank waited, and that all came to, its bars and their rows."""
    found: dict[Operation, list[tuple[Bar, int]]] = {}
    for bar, row in zip(scene.bars, scene.rows, strict=True):
        if is_collective(bar.operation) and not bar.operation.missing:
            found.setdefault(bar.operation, []).append((bar, row))
    return {
        operation: bars
        for operation, bars in found.items()
        if any(bar.state == "ended" and bar.transfer_ns > bar.start_ns for bar, _ in bars)
    }


def is_last(bar: Bar) -> bool:
    return bar.rank == bar.operation.last_rank


def draw_messages(ax: Axes, scene: Scene) -> None:
    """Arrows between the bars of sender and receiver."""
    places = {(id(bar.operation), bar.rank): i for i, bar in enumerate(scene.bars)}
    for flow in scene.arrows.flows:
        src, dst = places.get((id(flow.operation), flow.src)), places.get((id(flow.operation), flow.dst))
        top, bottom = _tips(scene, flow, src, dst)
        sent, received = _times(scene, flow, dst)
        name, place, more = f"message {flow.src} to {flow.dst}", dst if src is None else src, dict[str, Any]()
        if flow.count > 1:  # As long as they are together: behind bars and their texts, in the colour of their own.
            more["zorder"] = 1.7
        if flow.count > 1 and flow.how != "missing" and place is not None:
            more["color"] = scene.bars[place].look.line
        draw_arrow(ax, (sent, top), (received, bottom), how=flow.how, gid=name, **more)


def _tips(scene: Scene, flow: Flow, src: int | None, dst: int | None) -> tuple[float, float]:
    """From the sender's bar to the receiver's: the edges that face each other, so that the text stays free."""
    sender, receiver = _edges(scene, flow.src, src), _edges(scene, flow.dst, dst)
    return (sender[1], receiver[0]) if sender[0] < receiver[0] else (sender[0], receiver[1])


def _edges(scene: Scene, rank: int, place: int | None) -> tuple[float, float]:
    if place is None:
        return (scene.lanes[rank].middle,) * 2
    bar, (top, bottom) = scene.bars[place], scene.lanes[rank].bar(scene.rows[place])
    thinner = THIN * (bottom - top) if bar.waited_ns and bar.transfer_ns >= bar.end_ns else 0.0
    return top + thinner, bottom - thinner


def _times(scene: Scene, flow: Flow, dst: int | None) -> tuple[float, float]:
    """In ms. A derived time is a share of the whole operation's; a rank that is done has received everything."""
    sent, received = flow.sent_ns, flow.received_ns
    assert sent is not None, "only messages with both times become arrows"
    assert received is not None
    if flow.how == "derived" and dst is not None:
        received = min(received, scene.bars[dst].end_ns)
    return scene.ms(min(sent, received)), scene.ms(received)


def legend(scene: Scene) -> list[Artist]:
    looks = [bar.look for bar in scene.bars] + [each for _, each in (scene.busy.transfer if scene.busy else ())]
    families = {each.family: each for each in reversed(looks)}
    hues = len({each.color for each in looks}) > len(families)
    aside = ", a colour for each" * hues
    handles: list[Artist] = [_key(each.family + aside, each.color, each.ink, each.hatch) for each in families.values()]
    waits = " or ".join(dict.fromkeys(_awaited(bar) for bar in scene.bars if bar.waited_ns > 0))
    if waits:
        handles.append(Line2D([], [], color=FAINT, linewidth=3, label=f"thin: waits for {waits}"))
        if 0 < len(waited_for(scene)) <= _MOST_LINES:
            label = "the last rank has come"
            handles.append(Line2D([], [], color=FAINT, marker=">", markersize=6, label=label, **_LAST_RANK))
    if any(bar.transfer_ns > bar.start_ns and bar.state in ENDS_RED for bar in scene.bars):
        handles.append(_key("hatched: waits", GRID, FAINT, WAITING_HATCH))
    for shade, names in sorted(works_of(scene).items()):
        label = plain(f"span without calls: {', '.join(names)}".removesuffix(": "))
        handles.append(_key(label, WORKS[shade], FAINT))
    if scene.gradients:
        marker = Line2D([], [], color=INK, marker="|", linestyle="", markersize=7, label="a gradient is ready")
        handles += [marker, Patch(facecolor=STRIP, label="from the first gradient to the last")]
    for how in dict.fromkeys(flow.how for flow in scene.arrows.flows):
        handles.append(in_legend(how))
    if scene.path:
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=2, label="critical path of the step"))
    red = [told for state, told in ENDS_RED.items() if any(bar.state == state for bar in scene.bars)]
    if red:
        handles.append(Line2D([], [], color=MISSING, linewidth=4, label="; ".join(red)))
    return handles


def _key(label: str, face: str, edge: str, hatch: str = "") -> Patch:
    return Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, label=label)


def works_of(scene: Scene) -> dict[int, dict[str, None]]:
    """By shade the names of the spans without calls, less their numbers."""
    found: dict[int, dict[str, None]] = defaultdict(dict)
    for span in scene.spans:
        shade = scene.works.get((span.rank, span.number))
        if shade is not None:
            found[shade % len(WORKS)][stem_of(span)] = None
    return found


def _awaited(bar: Bar) -> str:
    if bar.operation.exchange is not None:
        return "an answer"
    return "the last rank" if is_collective(bar.operation) else "the other rank"


def notes(ax: Axes, trace: Trace, scene: Scene) -> list[str]:
    """What the picture does not show, or shows in another way than a reader would think."""
    told = [*problem_sentences(trace, canvas.MOST_PROBLEMS), *network_sentences(trace)]
    if scene.busy:
        told.append(
            f"{scene.busy.calls:,} calls are too many for bars: the height of a strip is the share of the time that the"
            " rank is inside of calls, fainter while all of them wait for the last rank."
        )
    most = max(scene.folded.values(), key=len)
    if len(most) > 1:
        told.append(
            f"Alike: ranks that call the same, each call within {ALIKE:.0%} of the picture's width of their median;"
            " the nearest to it is drawn."
        )
    if scene.common_spans and scene.spans:
        told.append(f"Spans are those of {trace.label(scene.ranks[0])}; the others have spans of the same names.")
    if len(waited_for(scene)) > _MOST_LINES:
        told.append(f"More than {_MOST_LINES} operations: no lines where the last rank has come.")
    for what, count in scene.left_out.items():
        if count:
            told.append(f"{count_text(count, what)} too many to be told apart: choose a shorter part.")
    if scene.arrows.merged and any(flow.count > 1 for flow in scene.arrows.flows):
        told.append("An arrow stands for all messages of one operation between two ranks.")
    if scene.arrows.crowded:
        told.append(f"{count_text(scene.arrows.crowded, 'message')} without room for an arrow: choose a shorter part.")
    if scene.start_up:
        told.append(
            f"Before the program's first call: {count_text(scene.start_up, 'call')} of RPC's start-up, not drawn."
        )
    if scene.control:
        told.append(f"{count_text(scene.control, 'control call')} that RPC makes for itself, not drawn.")
    if scene.hidden:
        asked = ": arrows=True draws them" if scene.sums.derived_arrows <= MOST_ARROWS else ""
        told.append(f"{count_text(scene.hidden, 'derived message')} without arrows{asked}.")
    if any(flow.how == "derived" for flow in scene.arrows.flows):
        whose = f"{traffic(trace).derived_from}'s"
        told.append(f"Derived: from {whose} algorithm; the time of the transfer is shared out, not measured.")
    if any(bar.state == "stuck" for bar in scene.bars):
        told.append("Stuck calls last longer than drawn: the axis ends with the last event that was seen.")
    if scene.sums.never_came:
        told.append(f"{scene.sums.never_came:,} messages were expected and never came: no arrows.")
    reasons = list(scene.sums.unexplained.items())
    told += [f"No arrows for {count_text(count, 'operation')}: {reason}." for reason, count in reasons[:2]]
    if reasons[2:]:
        told.append(f"No arrows for {count_text(sum(count for _, count in reasons[2:]), 'operation')} of other kinds.")
    narrow = sum(bar.end_ns - bar.start_ns < 1e6 / points_per_ms(ax) and bar.state == "ended" for bar in scene.bars)
    if narrow > len(scene.bars) // 10:
        told.append(f"{narrow:,} of {len(scene.bars):,} bars are narrower than a line: choose a shorter part.")
    deep = sum(row >= scene.lanes[span.rank].spans for span, row in zip(scene.spans, scene.span_rows, strict=True))
    if deep:
        told.append(f"{count_text(deep, 'span')} not drawn: no more than {MOST_SPAN_ROWS} inside each other are.")
    unseen = sum(bar.state == "not observed" for bar in scene.bars)
    if unseen:
        were = "end was" if unseen == 1 else "ends were"
        told.append(f"{unseen:,} {were} not seen: the bar shows the start only.")
    return told
