"""The strip: all calls of all ranks of a run over time, to zoom into, point at and select, in a page without a kernel.

`strip.js` draws what is in view. Here the calls become columns of numbers, which pack well. The words of equal
operations, and who sends how much to whom in them, stand there once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dlearn import draw
from dlearn.analysis.ddp.step_times import RunSteps, StepOnRank, step_times
from dlearn.draw.palette import SERIES, ink_on, look
from dlearn.draw.save import closed_after, svg_of
from dlearn.draw.step_strip import FEWEST
from dlearn.errors import DlearnError
from dlearn.events.event import Span
from dlearn.events.event_table import Column
from dlearn.events.printable import printable
from dlearn.join.joining import all_ranks, operations
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.play.page import Page, frame, name_for, pack
from dlearn.play.static_frames import image
from dlearn.shown import count_text, first_few
from dlearn.trace import Trace

Units = Callable[[int], int]  # From a time in ns to units from the first call on.
_LEAST_UNIT_NS = 100
_HIGHEST = 2**31 - 2  # Of a number in four bytes.
_ROOM_FOR_STUCK = 1.15  # The page is longer than what was seen, where a call has not come out.
_NAMES_SHOWN = 3  # Of one colour, in the legend.
_KEYS = {
    "Home": "Whole", "+": "Zoom in", "-": "Zoom out", "p": "Previous call", "n": "Next call",
    "Escape": "Choose none",
}  # fmt: skip


class Strip(Page):
    """All of a trace over time. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    def __init__(self, trace: Trace) -> None:
        self.steps = step_times(trace)
        calls = len(operations(trace).calls)
        counted = f"{count_text(calls, 'call')} of {count_text(len(trace.ranks), 'rank')}"
        finding = f": {self.steps.finding}" if self.steps.steps else ""
        self.title = printable(f"{counted}{finding}")
        data = pack(*strip_facts(trace, self.steps))
        self.snippet = frame("strip", name_for(self.title, data), self.title, data, keys=_KEYS)
        self._trace = trace

    def _repr_html_(self) -> str:
        """Return the page with a picture, for a notebook that runs no scripts, as one that is not trusted yet."""
        with closed_after():
            picture = draw.steps if len(self.steps.steps) >= FEWEST else draw.timeline
            axes = picture(self._trace)
            still = image(str(axes.get_label()), svg_of(axes))
        return self.snippet.replace("</p>", f"</p>{still}", 1)

    def __repr__(self) -> str:
        return self.title


def strip(trace: Trace) -> Strip:
    """Travel through all calls of a trace: the whole run with a frame to move, below it a lane for each rank.

    Drag, wheel and keys move and zoom. A chosen call is described in words, with its line of code, its bytes and how
    they are known, and in Python that selects the same. DlearnError for a trace without calls.
    """
    if not len(operations(trace).calls):
        raise DlearnError("there is nothing to travel through: this trace holds no call of an operation.")
    return Strip(trace)


def strip_facts(trace: Trace, steps: RunSteps) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return the facts and columns that `strip.js` reads, with times in `unit_ns`.

    Columns of calls, by rank and start: the start after the one before, how long it took (-1: it has not come out,
    -2: its end was not seen) and waited, and its operation; of operations: the kind, and the span it lies in.
    """
    shown = operations(trace)
    ranks = sorted(all_ranks(trace) | {*trace.labels})
    lanes = {rank: lane for lane, rank in enumerate(ranks)}
    calls, begin_ns = shown.calls, trace.whole.first_ns
    last_ns = max(int(calls.start_ns.max()), int(calls.end_ns.max()))  # NONE is lower than any time.
    shown_ns = last_ns - begin_ns
    if calls.pending.any():
        shown_ns = int(shown_ns * _ROOM_FOR_STUCK)
    unit_ns = max(_LEAST_UNIT_NS, -(-shown_ns // _HIGHEST))
    order = np.lexsort((calls.start_ns, calls.rank))
    first = np.searchsorted(calls.rank[order], [*ranks, ranks[-1] + 1])
    kinds, kind = _kinds(trace, shown, lanes)
    spans, within = _in_steps(trace, shown, steps)
    titled: list[list[Any]] = []
    shades = steps.shades
    heat: list[tuple[int, int, int, int]] = []

    def units(at_ns: int) -> int:
        return (at_ns - begin_ns) // unit_ns

    for step, shade in zip(steps.steps, shades, strict=True):
        title, cells = step.title, _cells(step.cells, shade, lanes, units, last_ns)
        begins, ends = [cell[1] for cell in cells], [cell[2] for cell in cells]
        titled.append([printable(title), min(begins), max(ends) + 1, spans.get(title, -1)])
        heat += cells
    facts = {
        "lanes": [printable(trace.label(rank)) for rank in ranks],
        "begin_us": begin_ns // 1000,
        "unit_ns": unit_ns,
        "length": max(1, shown_ns // unit_ns + 1),
        "first": first.tolist(),
        "operations": len(shown),
        "kinds": kinds,
        **_colors(kinds),
        "spans": list(spans),
        "steps": titled,
        "heat": heat,
    }
    columns = _call_columns(shown, order, first, begin_ns, last_ns, unit_ns)
    return facts, {**columns, "kind": kind, "within": within}


def _call_columns(
    shown: Operations, order: Column, first: Column, begin_ns: int, last_ns: int, unit_ns: int
) -> dict[str, Column]:
    """Return the columns of calls in this order, in which those of a lane begin at its `first`."""
    calls = shown.calls
    start = np.maximum(0, calls.start_ns[order] - begin_ns) // unit_ns
    end_ns = np.where(calls.ended, calls.end_ns, last_ns)[order]
    unended = np.where(calls.pending[order], -1, -2)
    took = np.where(calls.ended[order], (end_ns - begin_ns) // unit_ns - start, unended)
    waits_ns = np.minimum(calls.last_arrival_ns[order], end_ns) - calls.start_ns[order]
    alone = shown.table.waits_for_none[shown.rows][calls.operation[order]]
    waited = np.where(alone, 0, np.maximum(0, waits_ns // unit_ns))
    differences = np.diff(start, prepend=0)
    begins = first[:-1][np.diff(first) > 0]  # Of the ranks that call anything.
    differences[begins] = start[begins]
    operation = calls.operation[order]
    return {"start": differences, "took": took, "waited": waited, "operation": operation}


def _colors(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the colours with their legend, and number them in `kinds`."""
    families: dict[str, list[str]] = {}
    for kind in kinds:
        names = families.setdefault(kind["color"], [])
        names.append(kind["family"] or kind["mark"])
        kind["look"] = [*families].index(kind["color"])
    legend = [first_few([*dict.fromkeys(names)], _NAMES_SHOWN) for names in families.values()]
    return {"colors": list(families), "legend": legend, "inks": {each: ink_on(each) for each in families}}


def _kinds(trace: Trace, shown: Operations, lanes: dict[int, int]) -> tuple[list[dict[str, Any]], Column]:
    """Return what operations of the same kind share, each kind once, and the kind of each operation."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    kind = np.zeros(len(shown), np.int64)
    for operation, equal in shown.groups():
        described = _kind(operation, trace, lanes)
        key = tuple(described.values())
        kinds[key] = described
        kind[equal] = numbers.setdefault(key, len(numbers))
    return [*kinds.values()], kind


def _kind(operation: Operation, trace: Trace, lanes: dict[int, int]) -> dict[str, Any]:
    sums = sums_of(operation)
    pairs = []
    for sent in sums:
        if sent.how != "missing":
            size = sent.payload_bytes or 0
            pairs.append((lanes[sent.src], lanes[sent.dst], size, sent.message_count, sent.how))
    sites = dict.fromkeys(end.site for end in operation.ends if end.site)
    text = f"{operation.op} of {operation.what}"
    if sites:
        text += f" ({', '.join(sites)})"
    if operation.missing:
        never = first_few([trace.label(rank) for rank in operation.missing], _NAMES_SHOWN)
        text += f", which {never} never called"
    op, bucket = look(operation.op), operation.bucket
    mark, color, family = operation.op, op.color, op.family
    if bucket is not None:
        mark, color, family = f"bucket {bucket.index}", SERIES[bucket.index % len(SERIES)], ""
    reason = why_unknown(operation)
    return {
        "op": operation.ends[0].op,
        "text": printable(text),
        "mark": printable(mark),
        "color": color,
        "family": family,
        "how": ", ".join(sorted({sent.how for sent in sums})) or "none",
        "why": "" if reason is None else printable(f"No messages known: {reason}"),
        "pairs": tuple(pairs),
        "absent": tuple(lanes[rank] for rank in operation.missing if rank in lanes),
    }


def _in_steps(trace: Trace, shown: Operations, steps: RunSteps) -> tuple[dict[str, int], Column]:
    """Return the number of each step that is a span, and in which each operation lies, or -1."""
    # It lies there as for `Trace.within`: one of its calls does. With RPC the page selects by time.
    spans = [one.title for one in steps.steps if one.title in trace.spans and not trace.rpc.exchanges]
    named = {title: number for number, title in enumerate(spans)}
    table = shown.table.events
    inside = table.of_firsts(lambda event: named.get(event.name, -1) if isinstance(event, Span) else -1, np.int64)
    calls = shown.table.end_row[shown.table.ends_of(shown.rows)]
    first = np.cumsum(np.append(0, np.diff(shown.table.first)[shown.rows]))[:-1]
    inside = table.around(inside)[calls]
    within = np.maximum.reduceat(inside, first) if len(calls) else np.empty(0, np.int64)
    return named, within


def _cells(
    step: dict[int, StepOnRank], shades: dict[int, float], lanes: dict[int, int], units: Units, last_ns: int
) -> list[tuple[int, int, int, int]]:
    """Return lane, start, end, shade (0 to 255, as in draw.steps; -1: unfinished) on each rank."""
    cells = []
    for rank, on_rank in step.items():
        end_ns, shade = last_ns, -1
        if on_rank.length_ns is not None:
            end_ns = on_rank.start_ns + on_rank.length_ns
            shade = int(255 * shades[rank])
        cells.append((lanes[rank], units(on_rank.start_ns), units(end_ns), shade))
    return cells
