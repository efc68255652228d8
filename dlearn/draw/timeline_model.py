"""What a timeline shows of a trace, and where. Nothing here draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dlearn.analysis.findings import absent_texts, hang_finding, stuck_reasons
from dlearn.analysis.replay.local_activity import PASSES, spans_without_calls
from dlearn.analysis.volume.flows import count_messages
from dlearn.draw import canvas
from dlearn.draw.canvas import width_in
from dlearn.draw.palette import SERIES, WORKS, Look, look, look_of, plain
from dlearn.draw.timeline_layout import MOST_LANES, TOLERANCES, Lane, arrows_of, depths, lane_groups, rows_for, stack
from dlearn.events.event import NOT_OBSERVED, Collective, Gradient, PhaseSpan, Span
from dlearn.events.event_table import NONE
from dlearn.join.ends import End, payload_bytes
from dlearn.join.joining import all_ranks, operations
from dlearn.join.operation_messages import messages_of
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Calls, Operations
from dlearn.join.wait_times import waited_until_ns
from dlearn.shown import listed, size_text, time_text
from dlearn.trace import Trace

MOST_BARS = 4000  # Bars, spans or ticks: more are too narrow.
_LEAST_SHARE = 200  # Of many spans those are drawn that last longer than the time shown through this.
MOST_SPAN_ROWS = 3
_ROOM_FOR_STUCK = 0.6  # Share of the observed time by which calls without an end outlast it.
_LANES_WIDTH = 0.86  # Share of the figure's width that lanes usually have.
_MOST_RANKS = 64
_MOST_NAMED = 4  # Ranks that have their spans' names each.
State = Literal["ended", "failed", "stuck", "not observed", "absent"]


class TimelineModel:
    """Everything that a timeline shows: times in ns, lanes in inches."""

    def __init__(self, trace: Trace, *, derived: bool) -> None:
        """Choose what is shown of this trace, with arrows of `derived` messages if asked for."""
        shown = operations(trace)
        self.trace, self.calls = trace, shown.calls
        begun = set() if trace is not trace.whole else _start_up(shown)
        drawn = [each for each in shown if id(each) not in begun] if begun else shown
        first_ns = min((each.start_ns for each in drawn), default=0) if begun else None
        self.start_ns, self.end_ns = _window(trace, self.calls, first_ns)
        length_ns, everyone = self.end_ns - self.start_ns, ranks_shown(trace)
        called = [each for each in drawn if not is_control(each)]
        bars = bars_of(called, trace, until_ns=self.end_ns)
        longest = _longest_wait(bars)
        own = canvas.never_came(trace)
        own = own or ([] if longest is None else [longest.rank, longest.waited_for])
        for self.tolerance in TOLERANCES:
            within_ns = self.tolerance * length_ns
            self.groups = lane_groups(self.calls, everyone, own, within_ns=within_ns)
            """Rank with a lane -> the ranks that it stands for, itself included."""
            if len(self.groups) <= MOST_LANES:
                break
        bars = [bar for bar in bars if bar.rank in self.groups]
        self.bars = _in_rows(bars, length_ns // 250)
        gradients = trace.rows.where(trace.table.is_a(Gradient))
        have_room = len(gradients) <= MOST_BARS
        self.gradients_left_out = 0 if have_room else len(gradients)
        found = gradients.of(Gradient) if have_room else ()
        self.gradients = [gradient for gradient in found if gradient.rank in self.groups]
        self._choose_spans()
        self.sums = count_messages(shown, set(everyone))
        scale = _LANES_WIDTH * 72 * width_in() / length_ns
        self.arrows, self.no_room = arrows_of(drawn, [*self.groups], self.sums, points_per_ns=scale, derived=derived)
        self.hidden = 0 if derived else self.sums.count["derived"]
        self.start_up = len(begun)  # Calls that RPC made before the program's first.
        self.control = len(drawn) - len(called)  # Calls that RPC makes for itself.

    def _choose_spans(self) -> None:
        """Keep the phases and spans that have room, each span with its row in its lane and the shade of its box."""
        trace, table, first = self.trace, self.trace.table, next(iter(self.groups), None)
        phases = trace.rows.where(table.is_a(PhaseSpan))
        computing = phases.of(PhaseSpan) if len(phases) <= MOST_BARS else ()
        self.phases = [span for span in computing if span.rank in self.groups]
        found = trace.rows.where(table.is_a(Span))
        lasted_ns = np.where(table.end_ns == NONE, self.end_ns, table.end_ns) - table.start_ns
        wide = lasted_ns > (self.end_ns - self.start_ns) // _LEAST_SHARE
        wide |= len(found) <= MOST_BARS
        self.spans_left_out = int((~wide).sum())
        spans = [span for span in found.where(wide).of(Span) if span.rank in self.groups]
        self.shared_spans = _are_shared(spans, [*self.groups])  # The first rank's stand for all.
        if self.shared_spans:
            spans = [span for span in spans if span.rank == first]
        times = [(span.rank, span.start_ns, span.end_ns or self.end_ns) for span in spans]
        # One shade for "F0", "F1" and "F2", and the next for "B0" and "B1".
        works = spans_without_calls(trace)
        stems = list(dict.fromkeys(map(stem_of, works.values())))
        shades = {key: stems.index(stem_of(work)) % len(WORKS) for key, work in works.items()}
        own = [shades.get((span.rank, span.number)) for span in spans]
        self.spans = list(zip(spans, rows_for(times, range(len(spans))), own, strict=True))

    @cached_property
    def lanes(self) -> dict[int, Lane]:
        """Return the lane of each rank; spans need no room for bars where nothing is called."""
        rows = depths((bar.rank, bar.row) for bar in self.bars)
        if not len(self.calls):
            rows = {span.rank: 0 for span, _, _ in self.spans}
        above = depths((span.rank, row) for span, row, _ in self.spans if row < MOST_SPAN_ROWS)
        strips = {gradient.rank for gradient in self.gradients}
        return stack([*self.groups], rows=rows, spans=above, strips=strips)

    @cached_property
    def longest_wait(self) -> Bar | None:
        """Return the bar that waits longest, where none hangs."""
        return None if hang_finding(self.trace) else _longest_wait(self.bars)

    def ms(self, at_ns: int) -> float:
        """Return the time in ms from the first event shown."""
        return (at_ns - self.start_ns) / 1e6

    def ends(self, bar: Bar) -> tuple[float, float]:
        return self.lanes[bar.rank].bar(bar.row)

    def over(self, color: str) -> str:
        """Return " over shard" where calls of this colour are that, and other calls are not."""
        dimensions = (bar.operation.group.dimension for bar in self.bars if bar.look.color == color)
        names = [name or "other groups" for name in dict.fromkeys(dimensions)]
        shown = plain(listed(names, 3), most=26)  # Some frameworks give a group a long name.
        return f" over {shown}" * operations(self.trace).several_dimensions

    @property
    def names(self) -> list[str]:
        """Return what stands beside each lane, in one line or two."""
        labels = {rank: plain(self.trace.label(rank)) for rank in self.groups}
        more = {rank: len(ranks) - 1 for rank, ranks in self.groups.items()}
        return [label + f"\nand {more[rank]:,} alike" * bool(more[rank]) for rank, label in labels.items()]


def _longest_wait(bars: Sequence[Bar]) -> Bar | None:
    return max((bar for bar in bars if bar.waited_ns > 0), key=lambda bar: bar.waited_ns, default=None)


def _in_rows(bars: Sequence[Bar], least_ns: int) -> list[Bar]:
    """Give a collective one row on all ranks, and a bucket one in all steps, as the calls of two ranks by RPC."""
    same = [id(bar.operation) if is_collective(bar.operation) else (index,) for index, bar in enumerate(bars)]
    kinds = [_kind(bar) for bar in bars]
    # A bar whose end was not observed takes some room, so that such bars do not hide each other.
    until = [bar.start_ns + least_ns if bar.state == "not observed" else bar.end_ns for bar in bars]
    times = [(bar.start_ns, end) for bar, end in zip(bars, until, strict=True)]
    # Those of a kind that overlap each other are of as many kinds.
    apart = rows_for([((bar.rank, kind), *when) for bar, kind, when in zip(bars, kinds, times, strict=True)], same)
    ranks = [(bar.rank, *when) for bar, when in zip(bars, times, strict=True)]
    rows = rows_for(ranks, list(zip(kinds, apart, strict=True)))
    return [replace(bar, row=row) for bar, row in zip(bars, rows, strict=True)]


def _kind(bar: Bar) -> Hashable:
    operation = bar.operation
    if is_collective(operation):
        return operation.bucket.index if operation.bucket else operation.op
    return bar.rank, bar.op if operation.exchange is None else operation.ranks


def _are_shared(spans: Sequence[Span], ranks: Sequence[int]) -> bool:
    """Return whether these are many ranks, and all have spans of the same names."""
    names: dict[int, list[str]] = {rank: [] for rank in ranks}
    for span in spans:
        names[span.rank].append(span.name)
    return len(ranks) > _MOST_NAMED and all(each == names[ranks[0]] for each in names.values())


def is_control(operation: Operation) -> bool:
    """Return whether RPC makes the call for itself, without the program's data or an error."""
    if operation.exchange is None or operation.failed or operation.pending:
        return False
    found = messages_of(operation)
    return bool(found) and all(message.control for message in found)


def _start_up(shown: Operations) -> set[int]:
    """Return the ids of the calls by which RPC's workers met before the program's first call."""
    own = [each for each in shown if function_of(each).startswith("_") and not (each.failed or each.pending)]
    mine = {id(each) for each in own}
    first_ns = min((each.start_ns for each in shown if function_of(each) and id(each) not in mine), default=0)
    return {id(each) for each in own if each.end_ns is not None and each.end_ns <= first_ns}


def ranks_shown(trace: Trace) -> tuple[int, ...]:
    """Return all ranks, but only those with a file where there are too many for a picture."""
    found = all_ranks(trace)
    return tuple(sorted(found if len(found) <= _MOST_RANKS else trace.ranks))


def _window(trace: Trace, calls: Calls, from_ns: int | None) -> tuple[int, int]:
    """Return start and end of what is drawn, the end later where a call never ended."""
    seen = trace.rows.where(trace.table.is_a(Span, Gradient)).rows
    starts_ns = calls.start_ns if from_ns is None else np.maximum(calls.start_ns, from_ns)
    began_ns = np.append(starts_ns, trace.table.start_ns[seen])
    if not len(began_ns):
        return 0, 1000
    start = int(began_ns.min())
    end_ns = np.append(calls.end_ns, trace.table.end_ns[seen])
    last = max(int(began_ns.max()), int(end_ns.max()))  # NONE is lower than any time.
    length = max(last - start, 1000)
    return start, start + int(length * (1 + _ROOM_FOR_STUCK if calls.pending.any() else 1))


def stem_of(span: Span) -> str:
    """Return "load" of "load 0" and "load 1", and "forward pass" of a pipeline's "F0"."""
    stem = span.name.strip("0123456789 ")
    return PASSES.get(stem, stem)


@dataclass(frozen=True)
class Bar:
    """One rank's part in one operation: waiting until `last_arrival_ns`, then transferring until `end_ns`.

    A caller by RPC waits all the time. `state` says how it ended: "stuck" reaches the right edge, "absent" is the call
    that this rank never made.
    """

    rank: int
    op: str  # What this rank itself called: in a broken exchange not what the others did.
    operation: Operation
    start_ns: int
    last_arrival_ns: int
    end_ns: int
    state: State
    labels: tuple[str, ...]  # What to write on it, the longest first.
    look: Look
    row: int = 0  # In the lane of its rank.

    @property
    def waited_ns(self) -> int:
        """Return how long it waits, of a call that ended."""
        return self.last_arrival_ns - self.start_ns if self.state == "ended" else 0

    @property
    def waited_for(self) -> int:
        """Return the rank that it waits for, if it waits."""
        operation = self.operation
        absent_first = (*operation.missing, operation.last_rank)
        return absent_first[0] if operation.exchange is None else operation.ends[1].rank


def bars_of(shown: Sequence[Operation], trace: Trace, *, until_ns: int) -> list[Bar]:
    """Return a bar for each end of each operation, also for those that never came; without an end until `until_ns`."""
    bars: list[Bar] = []
    # A hue for each function called by RPC, the program's own before torch's, as long as there are hues.
    called = Counter(filter(None, map(function_of, shown)))
    first = sorted(called, key=lambda name: (name.startswith("_"), -called[name]))
    hues = zip(first, SERIES[:5], strict=False)
    functions = {name: Look(f"call of {plain(name, most=30)}", hue) for name, hue in hues}
    dimensions = {(look_of(each).color, each.group.dimension) for each in shown}
    of_hue = Counter(color for color, _ in dimensions)
    for operation in shown:
        named = of_hue[look_of(operation).color] > 1  # Else the legend says it.
        own = look_of(operation) if operation.bucket else functions.get(function_of(operation))
        bars += [_bar(operation, end, trace, until_ns, own, named=named) for end in operation.ends]
        bars += [_absent(operation, rank, trace, until_ns) for rank in operation.missing if rank in trace.ranks]
    return sorted(bars, key=lambda bar: bar.start_ns)


def function_of(operation: Operation) -> str:
    """Return the function that a call by RPC calls; "" of all others."""
    exchange = operation.exchange
    event = None if exchange is None else exchange.call or exchange.run
    return event.function if event is not None else ""


def is_collective(operation: Operation) -> bool:
    """Return whether all ranks of a group call it, and wait for the last."""
    return isinstance(operation.ends[0], Collective)


def _bar(
    operation: Operation, end: End, trace: Trace, until_ns: int, own: Look | None, *, named: bool
) -> Bar:  # fmt: skip
    state: State = "ended"
    until = end.end_ns if end.end_ns is not None else until_ns
    if end.pending or end.failed:
        state = "stuck" if end.pending else "failed"
    elif end.ended_by == NOT_OBSERVED or end.end_ns is None:
        state, until = "not observed", end.start_ns
    waited = waited_until_ns(operation, end)
    asks = operation.exchange is not None and len(operation.ends) > 1 and end is operation.ends[0]
    if asks and state != "failed":
        waited = None  # The callee works meanwhile.
    transfer = until if waited is None else min(waited, until)
    reasons = stuck_reasons(operation, end, trace)
    labels, style = _labels(operation, end, reasons, named=named), own or look(end.op)
    return Bar(end.rank, end.op, operation, end.start_ns, transfer, until, state, labels, style)


def _labels(operation: Operation, end: End, reasons: Sequence[str], *, named: bool) -> tuple[str, ...]:
    size = payload_bytes(end)
    name = _name(operation, end)
    short = f"{name} {size_text(size)}" if size else name
    if reasons:
        texts = [plain(text, most=160) for reason in reasons for text in (f"{short}: {reason}", reason)]
        return (*texts, short)
    # Torch numbers the groups that a program makes; other names are the program's, and may be long.
    of = operation.group
    group = f"group {of.name}" if of.name.isdecimal() and not of.default else ""
    group = plain(of.dimension, most=30) * named or group
    module = plain(_module(operation), most=30)
    part = f"bucket {operation.bucket.index}" if operation.bucket else module
    both = ", ".join(each for each in (part, group) if each)
    brief = (f"{short}, {both}", both, group or part) if both else ()
    return (*dict.fromkeys(brief), short, *((size_text(size),) if size else ()))


def _name(operation: Operation, end: End) -> str:
    return "gradients" if end.op == "BACKWARD_AUTOGRAD_REQ" else plain(function_of(operation), most=30) or end.op


def wait_text(bar: Bar, trace: Trace) -> str:
    """Return "Longest wait: rank 0 for rank 2, 40.0 ms in all_reduce #1"."""
    operation = bar.operation
    what = brief_name(operation) if operation.exchange is None else _name(operation, operation.ends[0])
    who, whom = trace.label(bar.rank), trace.label(bar.waited_for)
    return f"Longest wait: {who} for {whom}, {time_text(bar.waited_ns)} in {what}"


def brief_name(operation: Operation) -> str:
    """Return "bucket 2", "all_reduce #3 over tp"; of FSDP2 "all_gather_single #4 (blocks.1)"."""
    module = f" ({_module(operation)})" * bool(_module(operation))
    name = f"{operation.op} #{operation.seq}{operation.group.over}{module}"
    return f"bucket {operation.bucket.index}{operation.group.over}" if operation.bucket else name


def _module(operation: Operation) -> str:
    """Return the module that FSDP2 gathers or reduces; "" of other operations."""
    first = operation.ends[0]
    module = first.module if isinstance(first, Collective) else ""
    return "root" if module == "." else module


def _absent(operation: Operation, rank: int, trace: Trace, until_ns: int) -> Bar:
    """Return the bar of a missing call, from the last call made until the others gave up, or the right edge."""
    start = operation.last_arrival_ns
    given_up = [end.end_ns for end in operation.ends if end.end_ns is not None]
    end = until_ns if operation.pending else max([start, *given_up])
    op = "recv" if rank == operation.receiver else operation.op
    labels = tuple(plain(text, most=160) for text in absent_texts(operation, rank, op, trace))
    return Bar(rank, op, operation, start, start, end, "absent", labels, look(op))
