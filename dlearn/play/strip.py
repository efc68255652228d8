"""The strip: all calls of all ranks over time, to zoom, point and select, without a kernel.

`strip.js` draws what is in view. Here the calls become columns of numbers, which pack well;
what equal operations share, as their words and who sends to whom, stands there once.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from markupsafe import Markup

from dlearn import draw
from dlearn.analysis.costs.pipeline_bubble import pipeline
from dlearn.analysis.ddp.overlap import overlap
from dlearn.analysis.ddp.step_times import RunSteps, step_times
from dlearn.analysis.findings import hang_title
from dlearn.analysis.replay.local_activity import PASS, spans_without_calls
from dlearn.draw import palette
from dlearn.draw.canvas import never_came
from dlearn.draw.step_strip import FEWEST
from dlearn.draw.timeline_model import bars_of, stem_of, wait_text
from dlearn.errors import DlearnError
from dlearn.events.event import PhaseSpan, Span
from dlearn.events.event_table import Column
from dlearn.events.printable import printable
from dlearn.join.joining import all_ranks, operations
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.play.page import Page, frame, name_for, pack, still
from dlearn.shown import count_text, first_few, time_text
from dlearn.trace import Trace

_LEAST_UNIT_NS = 100
_HIGHEST = 2**31 - 2  # Of a number in four bytes.
_ROOM_FOR_STUCK = 1.15  # The page is longer than what was seen, where a call has not come out.
_NAMES_SHOWN = 3  # Of one colour, in the legend.
_FEWEST_STEPS = 5  # Of fewer the calls are shown, and no lengths.
_LONGEST, _LONGER = 3, 1.1  # So many steps are named, if they are longer than the median.
_PARTS = {"forward": 0, "backward": 0, "optimizer": 0, "transfer": 1, "waiting": 2}
_KEYS = {
    "Home": "Whole", "+": "Zoom in", "-": "Zoom out", "p": "Previous call", "n": "Next call",
    "Escape": "Choose none",
}  # fmt: skip


class Strip(Page):
    """All of a trace over time. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    def __init__(self, trace: Trace) -> None:
        self.steps = step_times(trace)
        self._trace = trace
        facts, columns = strip_facts(trace, self.steps)
        title, named, odd = self._finding(columns)
        self.title = printable(title)
        facts["marked"] = [facts["ranks"].index(rank) for rank in named]
        facts["isTimed"] = title == self.steps.finding  # Or the title has another time.
        data, title = pack(facts, columns), self.title
        if odd is not None:
            to_step = '<button type="button" data-step="{}">{}</button>'
            title = Markup(to_step).format(odd, title)
        name = name_for(self.title, data)
        self.snippet = frame("strip", name, title, data, keys=_KEYS, facts=facts)

    def _finding(self, columns: dict[str, Column]) -> tuple[str, Sequence[int], int | None]:
        """Return the title, the ranks to mark, and the index of the step that it is about."""
        trace, steps, odd = self._trace, self.steps.steps, self.steps.reported
        found, hung = pipeline(trace), hang_title(trace)
        if len(found.busy_ns) > 1 and not hung:
            firsts = [min(step.cells.values(), key=lambda cell: cell.start_ns) for step in steps]
            begun = bisect(firsts, found.passes[0].start_ns, key=lambda cell: cell.start_ns) - 1
            slowest = [] if found.slowest is None else [found.slowest]
            return found.finding, slowest, begun if begun >= 0 else None
        if steps:
            late = None if odd is None else steps[odd].late
            is_named = late and late.waited_ns >= (steps[odd or 0].length_ns or 0) // 4
            return self.steps.finding, late.ranks if late and is_named else [], odd
        if hung:
            return hung, never_came(trace), None
        shown, longest = operations(trace), columns["operation"][columns["waited"].argmax()]
        bar = max(bars_of([shown[int(longest)]], trace, until_ns=0), key=lambda bar: bar.waited_ns)
        if bar.waited_ns > 0:
            return wait_text(bar, trace), [bar.rank, bar.waited_for], None
        calls, ranks = len(shown.calls), len(trace.ranks)
        return f"{count_text(calls, 'call')} of {count_text(ranks, 'rank')}", [], None

    def _repr_html_(self) -> str:
        """Return the page with a picture, for a notebook that runs no scripts, as one that is not trusted yet."""
        picture = draw.steps if len(self.steps.steps) >= FEWEST else draw.timeline
        return self.snippet.replace("</p>", f"</p>{still(picture, self._trace)}", 1)

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
    grounds, ground_columns = _grounds(trace, lanes, last_ns)
    facts = {
        "lanes": [printable(trace.label(rank)) for rank in ranks], "ranks": ranks,
        "begin_us": begin_ns // 1000, "unit_ns": unit_ns, "length": max(1, shown_ns // unit_ns + 1),
        "first": first.tolist(), "operations": len(shown), "kinds": kinds, **_colors(kinds),
        "spans": list(spans), **_step_facts(trace, steps, lanes, spans, unit_ns), **grounds,
    }  # fmt: skip
    columns = _call_columns(shown, order, first, begin_ns, last_ns, unit_ns)
    for name in ("ground_start", "ground_end"):
        ground_columns[name] = (ground_columns[name] - begin_ns) // unit_ns
    return facts, {**columns, "kind": kind, "within": within, **ground_columns}


def _call_columns(
    shown: Operations, order: Column, first: Column, begin_ns: int, last_ns: int, unit_ns: int
) -> dict[str, Column]:
    """Return the columns of calls in this order, in which those of a lane begin at its `first`."""
    calls = shown.calls
    start = np.maximum(0, calls.start_ns[order] - begin_ns) // unit_ns
    end_ns = np.where(calls.ended, calls.end_ns, last_ns)[order]
    unended = np.where(calls.pending[order], -1, -2)
    took = np.where(calls.ended[order], (end_ns - begin_ns) // unit_ns - start, unended)
    arrival_ns = calls.last_arrival_ns[order]  # A call that ended before did not wait for it.
    alone = shown.table.waits_for_none[shown.rows][calls.operation[order]] | (end_ns <= arrival_ns)
    waited = np.where(alone, 0, np.maximum(0, (arrival_ns - calls.start_ns[order]) // unit_ns))
    differences = np.diff(start, prepend=0)
    begins = first[:-1][np.diff(first) > 0]  # Of the ranks that call anything.
    differences[begins] = start[begins]
    operation = calls.operation[order]
    return {"start": differences, "took": took, "waited": waited, "operation": operation}


def _colors(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the colours with their legend, and number them in `kinds`."""
    families: dict[str, list[str]] = {}
    for kind in kinds:
        families.setdefault(kind["color"], []).append(kind["family"])
        kind["look"] = [*families].index(kind["color"])
    legend = [first_few([*dict.fromkeys(names)], _NAMES_SHOWN) for names in families.values()]
    transfer = palette.look("all_reduce").color
    named = {"computes": palette.FORWARD, "transfer": transfer, "waits": palette.FAINT}
    common = {name: _shades(color) for name, color in named.items()}
    return {"colors": [*map(_shades, families)], "legend": legend, **common}


def _shades(color: str) -> list[tuple[str, str]]:
    """Return a colour with the ink on it, for a light page and for a dark one."""
    shades = color, palette.at_night(color, least=3)
    return [(each, palette.black_or_white(each)) for each in shades]


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
    text = f"{operation.op}{operation.group.over} of {operation.what}"
    if sites:
        text += f" ({', '.join(sites)})"
    if operation.missing:
        never = first_few([trace.label(rank) for rank in operation.missing], _NAMES_SHOWN)
        text += f", which {never} never called"
    drawn, bucket = palette.look_of(operation), operation.bucket
    reason = why_unknown(operation)
    return {
        "op": operation.ends[0].op, "text": printable(text), "color": drawn.color,
        "mark": printable(operation.op if bucket is None else drawn.family),
        "family": drawn.family, "bucket": -1 if bucket is None else bucket.index,
        "how": ", ".join(sorted({sent.how for sent in sums})) or "none",
        "why": "" if reason is None else printable(f"No messages known: {reason}"),
        "pairs": tuple(pairs),
        "absent": tuple(lanes[rank] for rank in operation.missing if rank in lanes),
    }  # fmt: skip


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


def _grounds(trace: Trace, lanes: dict[int, int], last_ns: int) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return what ranks compute: phases of training, and spans of the program without calls."""
    kinds: dict[str, str] = {}
    rows = []
    for span in (*trace.of(PhaseSpan), *spans_without_calls(trace).values()):
        name = stem_of(span) if isinstance(span, Span) else span.phase
        kinds.setdefault(name, palette.GROUNDS.get(name, palette.WORKS[len(kinds) % 2]))
        of_pass = PASS.fullmatch(span.name) if isinstance(span, Span) else None
        what = [*kinds].index(name), int(of_pass[2]) if of_pass else -1
        rows.append((lanes[span.rank], span.start_ns, span.end_ns or last_ns, *what))
    lane, start_ns, end_ns, kind, numbers = np.array(sorted(rows), np.int64).reshape(-1, 5).T
    counted = np.searchsorted(lane, np.arange(len(lanes) + 1)).tolist()
    numbered = {"forward pass": "forward pass of micro-batch 0, 1, ..."}
    shades = [(numbered.get(name, printable(name)), _shades(hue)) for name, hue in kinds.items()]
    columns = {"ground_start": start_ns, "ground_end": end_ns, "ground": kind}
    return {"grounds": shades, "ground_first": counted}, columns | {"micro_batch": numbers}


def _step_facts(
    trace: Trace, steps: RunSteps, lanes: dict[int, int], spans: dict[str, int], unit_ns: int
) -> dict[str, Any]:
    """Return each step's title, start, end, span and length (-1: unfinished), and its cells.

    A cell is a step on a rank: its index, lane, start, length and, where it is known, how long it
    computed, sent what was not hidden, and waited; `awaited`: how long the others waited for it.
    """
    titled: list[tuple[str, int, int, int, int]] = []
    cells: list[list[int]] = []
    awaited = []
    found = enumerate(overlap(trace).steps)
    shares = {(at, share.rank): share for at, step in found for share in step.shares}
    for at, step in enumerate(steps.steps):
        first, waits = len(cells), Counter[int]()
        for rank, on_rank in step.cells.items():
            length = -1 if on_rank.length_ns is None else on_rank.length_ns // unit_ns
            begin = (on_rank.start_ns - trace.whole.first_ns) // unit_ns
            cells.append([at, lanes[rank], begin, length])
            share = shares.get((at, rank))
            if share is not None and share.observed and length >= 0:
                lengths_ns = [0, 0, 0, 0]
                for row in share.rows:
                    lengths_ns[_PARTS.get(row.phase, -1)] += row.length_ns
                cells[-1] += [length_ns // unit_ns for length_ns in lengths_ns[:3]]
                waits += share.waits
        begins = min(cell[2] for cell in cells[first:])
        ends = max(cell[2] + max(0, cell[3]) + 1 for cell in cells[first:])
        length = -1 if step.length_ns is None else step.length_ns // unit_ns
        titled.append((printable(step.title), begins, ends, spans.get(step.title, -1), length))
        awaited.append([waits[rank] // unit_ns for rank in lanes])
    is_run = len(titled) >= _FEWEST_STEPS
    return {
        "steps": titled, "cells": cells, "awaited": awaited if any(map(any, awaited)) else [],
        "isRun": is_run, "areShares": is_run and any(len(cell) > 4 for cell in cells),
        "median": median(steps.lengths_ns or [1]) / unit_ns, "longest": _longest_steps(steps),
    }  # fmt: skip


def _longest_steps(steps: RunSteps) -> list[tuple[int, str, str]]:
    """Return index, title and time of the steps that took longest, and longer than most."""
    finished, middle_ns = steps.finished, median(steps.lengths_ns or [0])
    longest = sorted(finished, key=lambda at: -finished[at])[:_LONGEST]
    shown = [at for at in sorted(longest) if finished[at] > _LONGER * middle_ns]
    return [(at, printable(steps.steps[at].title), time_text(finished[at])) for at in shown]
