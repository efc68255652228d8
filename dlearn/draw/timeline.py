"""The timeline: a lane per rank, a bar per call, waiting apart from transfer, an arrow per message."""

from collections import defaultdict
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from dlearn.analysis.ddp.step_times import step_times
from dlearn.analysis.findings import hang_finding, hang_title, traffic_finding
from dlearn.analysis.telling.explanations import network_sentences, problem_sentences
from dlearn.analysis.volume.traffic import traffic
from dlearn.draw import canvas
from dlearn.draw.call_marks import CallBars, CriticalPath, Outcomes, TimelineMark, Waits
from dlearn.draw.canvas import Box, Style, draw_arrow, in_legend, points_per_ms
from dlearn.draw.palette import FAINT, GROUNDS, INK, LANE, WORKS, plain, text_width
from dlearn.draw.pipeline_lanes import bubble_note
from dlearn.draw.timeline_layout import MOST_ARROWS, SPAN_IN, STRIP_IN, height_in
from dlearn.draw.timeline_model import MOST_BARS, MOST_SPAN_ROWS, Bar, TimelineModel, stem_of, wait_text
from dlearn.join.joining import operations
from dlearn.shown import count_text, time_text
from dlearn.trace import Trace

MOST_STEPS = 12  # Bars of more training steps cannot be told apart.
_TALLEST_IN = 14.0
_AROUND = 60  # Calls before and after the one that waits longest.


@canvas.for_cells
def timeline(trace: Trace, *, arrows: bool = False, ax: Axes | None = None) -> Axes:
    """Draw a lane for each rank and a bar for each call, hatched while it waits.

    Time is in ms from the first event shown. An arrow stands for each message that was observed;
    with `arrows=True` also for those that are derived, whose times are shares of their
    operation's. Of more than twelve steps one is drawn: one that never ended,
    else the one in which ranks waited longest for a rank, else the last; `steps` draws all. Of more
    than 4,000 calls those around the one that waits longest are drawn; `play.strip` has all.
    """
    trace, of_steps = _one_step(trace)
    trace, of_many = _around_the_longest_wait(trace)
    model = TimelineModel(trace, derived=arrows)
    left_in = canvas.left_margin_in(line for name in model.names for line in name.splitlines())
    ax = ax or canvas.new_axes(height_in=min(height_in(model.lanes), _TALLEST_IN), left_in=left_in)
    if not (model.bars or model.spans or model.gradients):
        return canvas.draw_message_instead(ax, "This trace holds no operation, span or gradient.")
    _label_axes(ax, model)
    kinds = CallBars, Waits, Spans, Computing, Gradients, MessageArrows, CriticalPath, Outcomes
    marks: list[TimelineMark] = [kind(model) for kind in kinds]
    hang, longest, sent = hang_finding(trace), model.longest_wait, traffic_finding(traffic(trace))
    title, marked = hang_title(trace) or sent, canvas.in_red(trace)
    notes = [f"{hang}."] if hang and hang != title else []
    if longest is not None:
        title, notes = wait_text(longest, trace), [f"{sent}."]
        marked = {plain(trace.label(rank)): INK for rank in (longest.rank, longest.waited_for)}
    for mark in marks:
        mark.draw(ax)
    notes = [*of_steps, *of_many, *notes, *problem_sentences(trace, canvas.MOST_PROBLEMS)]
    notes += network_sentences(trace) + bubble_note(trace)
    notes += [note for mark in marks for note in mark.notes(ax)]
    legend = [key for mark in marks for key in mark.legend()]
    return canvas.frame(ax, title=title, legend=legend, notes=notes, marked=marked)


def _one_step(trace: Trace) -> tuple[Trace, list[str]]:
    """Return the part of a long run that is drawn, and a note on which step it is, and why."""
    found = step_times(trace)
    if len(found.steps) <= MOST_STEPS:
        return trace, []
    step, why = found.to_draw, "the last"
    if step.length_ns is None:
        why = "which was never finished"
    elif step.late is not None:
        waited, whom = time_text(step.longest_wait_ns), found.labels.together(step.late.ranks)
        why = f"in which ranks waited longest ({waited} for {whom})"
    drawn = f"One of {len(found.steps):,} steps is drawn: {step.title}, {why}."
    note = f"{drawn} Another: dlearn draw timeline --step N, or trace.step(N)."
    return trace.step(step.number), [note]


def _around_the_longest_wait(trace: Trace) -> tuple[Trace, list[str]]:
    """Return the part that is drawn of very many calls, and a note on it."""
    shown = operations(trace)
    calls = shown.calls
    if len(calls) <= MOST_BARS:
        return trace, []
    alone = shown.table.waits_for_none[shown.rows][calls.operation]
    waited_ns = np.minimum(calls.last_arrival_ns, calls.end_ns) - calls.start_ns
    waited_ns = np.where(calls.pending, np.iinfo(np.int64).max, np.where(alone, 0, waited_ns))
    starts_ns = np.sort(calls.start_ns)
    place = int(np.searchsorted(starts_ns, calls.start_ns[waited_ns.argmax()]))
    near_ns = starts_ns[max(0, place - _AROUND) : place + _AROUND + 1] - trace.whole.first_ns
    part = trace.between(int(near_ns[0]) / 1e6, (int(near_ns[-1]) + 1) / 1e6)
    many = f"{len(calls):,} calls are too many for bars: around the longest wait"
    return part, [f"{many} {len(operations(part).calls):,} are drawn. play.strip has all."]


def _label_axes(ax: Axes, model: TimelineModel) -> None:
    bars = "a bar for each call, and between lanes an arrow for each message"
    canvas.describe(ax, f"A lane for each rank, from the top; in it {bars}.")
    width = model.ms(model.end_ns)
    ax.set(xlim=(-0.005 * width, 1.01 * width), ylim=(height_in(model.lanes), 0))
    canvas.draw_lanes(ax, [(lane.top, lane.bottom) for lane in model.lanes.values()])
    canvas.name_rows(ax, [lane.middle for lane in model.lanes.values()], model.names)
    canvas.quiet(ax, "ms from the first event shown")


class Spans(TimelineMark):
    """A bracket above the bars of its rank, a box where nothing is called in it, with its name if it fits."""

    def draw(self, ax: Axes) -> None:
        brackets: list[list[tuple[float, float]]] = []
        boxes: list[Box] = []
        colors: list[str] = []
        scale = points_per_ms(ax)
        for span, row, shade in self.model.spans:
            if row >= MOST_SPAN_ROWS:
                continue
            left, right = self.model.ms(span.start_ns), self.model.ms(span.end_ns or self.model.end_ns)
            # Inner spans stand below outer ones.
            top = self.model.lanes[span.rank].top + row * SPAN_IN
            line, foot, bottom = top + SPAN_IN * 0.5, top + SPAN_IN * 0.85, top + SPAN_IN * 0.95
            if shade is None:
                behind, margin, pad = LANE, 8, 1.0
                brackets.append([(left, foot), (left, line), (right, line), (right, foot)])
            else:
                behind, margin, pad = WORKS[shade], 2, 0.0
                boxes.append((left, right, top, bottom))
                colors.append(behind)
            name = plain(span.name, most=30)
            if text_width(name) + margin < (right - left) * scale:
                middle = (left + right) / 2
                canvas.write(ax, middle, line, name, on=behind, pad=pad, ha="center", zorder=6, clip_on=True)
        canvas.draw_boxes(ax, boxes, facecolors=colors, edgecolor=FAINT, linewidth=0.4, zorder=1, gid="works")
        canvas.draw_lines(ax, brackets, colors=FAINT, linewidths=0.8, zorder=1, gid="spans")

    def legend(self) -> list[Artist]:
        names: dict[int, dict[str, None]] = defaultdict(dict)
        for span, _, shade in self.model.spans:
            if shade is not None:
                names[shade][stem_of(span)] = None
        styles = []
        for shade, stems in sorted(names.items()):
            label = f"span without calls: {', '.join(stems)}".removesuffix(": ")
            styles.append(Style(plain(label), WORKS[shade], FAINT))
        return [style.key() for style in styles]

    def notes(self, ax: Axes) -> list[str]:
        notes = []
        if self.model.shared_spans and self.model.spans:
            first = self.model.trace.label(next(iter(self.model.groups)))
            notes.append(f"Spans are those of {first}; the others have spans of the same names.")
        deep = sum(row >= MOST_SPAN_ROWS for _, row, _ in self.model.spans)
        if deep:
            notes.append(f"{count_text(deep, 'span')} not drawn: no more than {MOST_SPAN_ROWS} inside each other are.")
        return notes + _too_many(self.model.spans_left_out, "span")


class Computing(TimelineMark):
    """What a rank computes, as the ground of its lane: so nothing but what is idle is white."""

    def draw(self, ax: Axes) -> None:
        grounds: dict[str, list[Box]] = defaultdict(list)
        for span in self.model.phases:
            lane, end_ns = self.model.lanes[span.rank], span.end_ns or self.model.end_ns
            times = self.model.ms(span.start_ns), self.model.ms(end_ns)
            grounds[span.phase].append((*times, lane.strip_top, lane.bottom))
        for phase, boxes in grounds.items():
            canvas.draw_boxes(ax, boxes, facecolor=GROUNDS[phase], zorder=0.5, gid=phase)

    def legend(self) -> list[Artist]:
        phases = dict.fromkeys(span.phase for span in self.model.phases)
        return [Style(phase, GROUNDS[phase], FAINT).key() for phase in GROUNDS if phase in phases]


class Gradients(TimelineMark):
    """A tick when a gradient is ready."""

    def draw(self, ax: Axes) -> None:
        ticks: list[list[tuple[float, float]]] = []
        for gradient in self.model.gradients:
            top = self.model.lanes[gradient.rank].strip_top + 0.02
            time = self.model.ms(gradient.start_ns)
            ticks.append([(time, top), (time, top + STRIP_IN - 0.03)])
        canvas.draw_lines(ax, ticks, colors=INK, linewidths=0.8, zorder=1.5, gid="gradients")

    def legend(self) -> list[Artist]:
        return [Style("a gradient is ready", INK, marker="|").key()] if self.model.gradients else []

    def notes(self, ax: Axes) -> list[str]:
        return _too_many(self.model.gradients_left_out, "gradient")


def _too_many(count: int, what: str) -> list[str]:
    return [f"{count_text(count, what)} too many to be told apart: choose a shorter part."] if count else []


class MessageArrows(TimelineMark):
    """Arrows between the bars of sender and receiver."""

    def draw(self, ax: Axes) -> None:
        bars = {(id(bar.operation), bar.rank): bar for bar in self.model.bars}
        for flow in self.model.arrows:
            src, dst = bars.get((id(flow.operation), flow.src)), bars.get((id(flow.operation), flow.dst))
            sender, receiver = _edges(self.model, flow.src, src), _edges(self.model, flow.dst, dst)
            # From edge to edge, as far as they face each other: clear of the text on the bars.
            top, bottom = (sender[1], receiver[0]) if sender[0] < receiver[0] else (sender[0], receiver[1])
            received_ns = flow.received_ns or 0  # Only messages with both times become arrows.
            if flow.how == "derived" and dst is not None:  # A rank that is done has received everything.
                received_ns = min(received_ns, dst.end_ns)
            sent, received = self.model.ms(min(flow.sent_ns or 0, received_ns)), self.model.ms(received_ns)
            bar, style = src or dst, dict[str, Any](gid=f"message {flow.src} to {flow.dst}")
            if flow.count > 1:  # As long as they are together: behind bars and their texts, in the colour of their own.
                style["zorder"] = 1.7
            if flow.count > 1 and flow.how != "missing" and bar is not None:
                style["color"] = bar.look.line
            draw_arrow(ax, (sent, top), (received, bottom), how=flow.how, **style)

    def legend(self) -> list[Artist]:
        return [in_legend(how) for how in dict.fromkeys(flow.how for flow in self.model.arrows)]

    def notes(self, ax: Axes) -> list[str]:
        model, notes = self.model, []
        if any(flow.count > 1 for flow in model.arrows):
            notes.append("An arrow stands for all messages of one operation between two ranks.")
        if model.no_room:
            count = count_text(model.no_room, "message")
            notes.append(f"{count} without room for an arrow: choose a shorter part.")
        if model.start_up:
            calls = count_text(model.start_up, "call")
            notes.append(f"Before the program's first call: {calls} of RPC's start-up, not drawn.")
        if model.control:
            notes.append(f"{count_text(model.control, 'control call')} that RPC makes for itself, not drawn.")
        if model.hidden:
            asked = ": arrows=True, or --arrows, draws them" * (model.sums.arrows["derived"] <= MOST_ARROWS)
            notes.append(f"{count_text(model.hidden, 'derived message')} without arrows{asked}.")
        if any(flow.how == "derived" for flow in model.arrows):
            whose = f"{traffic(model.trace).derived_from}'s"
            notes.append(f"Derived: from {whose} algorithm; the time of the transfer is shared out, not measured.")
        return notes


def _edges(model: TimelineModel, rank: int, bar: Bar | None) -> tuple[float, float]:
    """Return top and bottom of the bar that an arrow touches, or the middle of the lane."""
    if bar is None:
        return (model.lanes[rank].middle,) * 2
    return model.ends(bar)
