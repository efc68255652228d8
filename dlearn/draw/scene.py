"""The scene of a timeline: what is to be drawn, and where. Nothing here draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dlearn.analysis.ddp.overlap import Leg, critical_path
from dlearn.analysis.ddp.step_clock import on_device
from dlearn.analysis.ddp.training_steps import training_steps
from dlearn.analysis.volume.flows import Sums, count_messages
from dlearn.analysis.walking.own_work import works_alone
from dlearn.draw import canvas
from dlearn.draw.arrows import MOST_ARROWS, Arrows, readable
from dlearn.draw.bars import Bar, Busy, bars_of, busy_of, function_of, is_collective
from dlearn.draw.canvas import width_in
from dlearn.draw.layout.lanes import Lane, fold, rows_for, stack
from dlearn.draw.text import plain
from dlearn.events.event import Gradient, Span
from dlearn.events.event_table import NONE
from dlearn.join.joining import everybody, operations
from dlearn.join.operation_messages import messages_of
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Calls, Operations
from dlearn.trace import Trace

BINS = 200
MOST_BARS = 4000
"""Of each of bars, spans, ticks: more of them cannot be told apart. Then strips are drawn, not bars (draw/bars.py)."""
MOST_SPAN_ROWS = 3
_ROOM_FOR_STUCK = 0.6
"""What never ended lasts this much longer than all that was seen, so that its reason can be read."""
_LANES_WIDTH = 0.86
"""Of the figure's, as a rule."""
_MOST_RANKS = 64
_MOST_NAMED = 4
"""Ranks that have their spans' names each."""


@dataclass(frozen=True)
class Scene:
    """Times in ns, lanes in inches. `rows[i]` is the row of `bars[i]` in its lane, as `span_rows[i]` of `spans[i]`."""

    ranks: tuple[int, ...]
    folded: dict[int, tuple[int, ...]]
    """Rank -> those that its lane stands for, itself included."""
    start_ns: int
    end_ns: int
    bars: list[Bar]
    rows: list[int]
    spans: list[Span]
    span_rows: list[int]
    works: dict[tuple[int, int], int]
    """Rank and number of each innermost span without a call -> a shade, shared by "F1" and "F2"."""
    gradients: list[Gradient]
    left_out: dict[str, int]
    """How many spans and gradients are too many to be told apart."""
    lanes: dict[int, Lane]
    arrows: Arrows
    sums: Sums
    common_spans: bool
    """Whether the spans of the first rank stand for those of all, which have the same names."""
    hidden: int
    """Derived messages that were not asked for."""
    control: int
    """Calls that RPC makes for itself, which are not drawn."""
    start_up: int
    """Calls that RPC made before the program's first, which are not drawn either."""
    path: tuple[Leg, ...]
    """The critical path, where one step is shown and all of its ranks have lanes."""
    busy: Busy | None
    """The share of time that each rank spends in calls, where these are too many for bars: only those that went wrong
    are in `bars` then."""
    longest_wait: Bar | None
    """Of all ranks that the picture stands for; who waits, and for whom, have lanes of their own."""

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.start_ns) / 1e6

    def name(self, rank: int, label: str) -> str:
        """What stands beside the lane of this rank, in one line or two."""
        alike = len(self.folded[rank]) - 1
        return f"{plain(label)}\nand {alike:,} alike" if alike else plain(label)


def set_scene(trace: Trace, *, derived: bool) -> Scene:
    """Everything that a timeline of this trace shows; arrows of `derived` messages, too, if they are asked for."""
    shown = operations(trace)
    calls = shown.calls
    many = len(calls) > MOST_BARS
    begun = set() if many or trace is not trace.whole else _start_up(shown)
    drawn = [each for each in shown if id(each) not in begun] if begun else shown
    start_ns, end_ns = _window(trace, calls, min((each.start_ns for each in drawn), default=0) if begun else None)
    everyone = ranks_shown(trace)
    kept = _gone_wrong(shown) if many else [each for each in drawn if not is_control(each)]
    bars = bars_of(kept, trace, until_ns=end_ns)
    waits = [] if many else [bar for bar in bars if bar.waited_ns > 0]
    longest = max(waits, key=lambda bar: bar.waited_ns, default=None)
    told = [] if longest is None else [longest.rank, longest.waited_for]
    folded = fold(calls, everyone, end_ns - start_ns, own=canvas.never_came(trace) or told)
    ranks = tuple(folded)
    bars = [bar for bar in bars if bar.rank in folded]
    # A bar whose end nobody saw takes some room, so that such bars do not hide each other.
    least_ns = (end_ns - start_ns) // 250
    until = [bar.start_ns + least_ns if bar.state == "not observed" else bar.end_ns for bar in bars]
    rows = _rows(bars, until)
    if many:
        rows = [row + 1 for row in rows]  # Below the strip that says how busy the rank is.
    all_spans, all_gradients = (trace.rows.where(trace.table.is_a(kind)) for kind in (Span, Gradient))
    lasted_ns = np.where(trace.table.end_ns == NONE, end_ns, trace.table.end_ns) - trace.table.start_ns
    told_apart = (lasted_ns > (end_ns - start_ns) // BINS) | (len(all_spans) <= MOST_BARS)
    spans = [span for span in all_spans.where(told_apart).of(Span) if span.rank in folded]
    common_spans = _are_common(spans, ranks)
    spans = [span for span in spans if not common_spans or span.rank == ranks[0]]
    gradients = all_gradients.of(Gradient) if len(all_gradients) <= MOST_BARS else []
    gradients = [gradient for gradient in gradients if gradient.rank in folded]
    span_rows = rows_for([(s.rank, s.start_ns, s.end_ns or end_ns) for s in spans], range(len(spans)))
    sums = count_messages(shown, set(everyone))
    hidden = 0 if derived else sums.derived
    wanted = sums.arrows - (0 if derived else sums.derived_arrows)
    arrows = _arrows(drawn, ranks, start_ns, end_ns, derived=derived) if wanted <= MOST_ARROWS else None
    # Where nothing is called at all, the spans need no room for bars beside them.
    deep = _depth([bar.rank for bar in bars], rows) if len(calls) else {span.rank: 0 for span in spans}
    above = _depth([span.rank for span in spans], span_rows)
    above = {rank: min(depth, MOST_SPAN_ROWS) for rank, depth in above.items()}
    lanes = stack(ranks, rows=deep, spans=above, strips={gradient.rank for gradient in gradients})
    unseen = len(all_gradients) * (len(all_gradients) > MOST_BARS)
    return Scene(
        ranks=ranks, folded=folded, start_ns=start_ns, end_ns=end_ns, bars=bars, rows=rows, spans=spans,
        span_rows=span_rows, works=_shades(works_alone(trace)), gradients=gradients, lanes=lanes,
        left_out={"span": int((~told_apart).sum()), "gradient": unseen},
        arrows=arrows or Arrows((), merged=False, crowded=sums.count - hidden), sums=sums,
        common_spans=common_spans, hidden=hidden, path=_critical_path(trace, ranks), longest_wait=longest,
        control=0 if many else len(drawn) - len(kept), start_up=len(begun),
        busy=busy_of(calls, start_ns=start_ns, end_ns=end_ns, bins=BINS) if many else None,
    )  # fmt: skip


def _rows(bars: Sequence[Bar], until_ns: Sequence[int]) -> list[int]:
    """A collective has one row on all ranks, and a bucket in all steps, as the calls between two ranks by RPC."""
    same = [id(bar.operation) if is_collective(bar.operation) else (place,) for place, bar in enumerate(bars)]
    kinds = [_kind(bar) for bar in bars]
    times = [(bar.start_ns, end) for bar, end in zip(bars, until_ns, strict=True)]
    # Those of a kind that overlap each other are of as many kinds.
    apart = rows_for([((bar.rank, kind), *when) for bar, kind, when in zip(bars, kinds, times, strict=True)], same)
    ranks = [(bar.rank, *when) for bar, when in zip(bars, times, strict=True)]
    return rows_for(ranks, list(zip(kinds, apart, strict=True)))


def _kind(bar: Bar) -> Hashable:
    operation = bar.operation
    if is_collective(operation):
        return operation.bucket.index if operation.bucket else operation.op
    return bar.rank, bar.op if operation.exchange is None else operation.ranks


def _critical_path(trace: Trace, ranks: Sequence[int]) -> tuple[Leg, ...]:
    steps = training_steps(trace)
    if len({step.number for step in steps}) != 1 or on_device(trace) is not trace:
        return ()  # A GPU's times are not those of this picture.
    path = critical_path(steps)
    return path if {leg.rank for leg in path} <= {*ranks} else ()


def _are_common(spans: Sequence[Span], ranks: Sequence[int]) -> bool:
    """Whether these are many ranks, and all have spans of the same names."""
    names: dict[int, list[str]] = {rank: [] for rank in ranks}
    for span in spans:
        names[span.rank].append(span.name)
    return len(ranks) > _MOST_NAMED and all(each == names[ranks[0]] for each in names.values())


def is_control(operation: Operation) -> bool:
    """Whether RPC makes it for itself: it carries none of the program's data, and nothing went wrong in it."""
    if operation.exchange is None or operation.failed or operation.pending:
        return False
    found = messages_of(operation)
    return bool(found) and all(message.control for message in found)


def _start_up(shown: Operations) -> set[int]:
    """The calls by which RPC's workers meet, which were over before the program's first call, by `id`."""
    own = [each for each in shown if function_of(each).startswith("_") and not (each.failed or each.pending)]
    mine = {id(each) for each in own}
    first_ns = min((each.start_ns for each in shown if function_of(each) and id(each) not in mine), default=0)
    return {id(each) for each in own if each.end_ns is not None and each.end_ns <= first_ns}


def _gone_wrong(shown: Operations) -> list[Operation]:
    """The first of those that some rank did not come to or out of."""
    wrong = (each for each in shown.unusual() if each.missing or each.pending or each.failed)
    return list(islice(wrong, MOST_BARS // 100))


def ranks_shown(trace: Trace) -> tuple[int, ...]:
    """Every rank that left a file, and those that others name, unless they are too many for a picture."""
    found = everybody(trace)
    return tuple(sorted(found if len(found) <= _MOST_RANKS else trace.ranks))


def _window(trace: Trace, calls: Calls, from_ns: int | None) -> tuple[int, int]:
    """From the first moment that is drawn to the last one; longer where something never ended."""
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
    """ "F" of "F0", "F1" and "F2"."""
    return span.name.strip("0123456789 ")


def _shades(works: dict[tuple[int, int], Span]) -> dict[tuple[int, int], int]:
    """ "F0", "F1" and "F2" have one shade, "B0" and "B1" the next."""
    stems = {key: stem_of(span) for key, span in works.items()}
    shades = {stem: shade for shade, stem in enumerate(dict.fromkeys(stems.values()))}
    return {key: shades[stem] for key, stem in stems.items()}


def _depth(ranks: Sequence[int], rows: Sequence[int]) -> dict[int, int]:
    depth: dict[int, int] = defaultdict(int)
    for rank, row in zip(ranks, rows, strict=True):
        depth[rank] = max(depth[rank], row + 1)
    return depth


def _arrows(
    shown: Sequence[Operation], ranks: Sequence[int], start_ns: int, end_ns: int, *, derived: bool
) -> Arrows | None:
    """The messages of each operation that has any, between these ranks; None if they are too many."""
    lanes = set(ranks)

    def is_shown(message: Message) -> bool:
        asked_for = derived or message.how != "derived"
        return message.src in lanes and message.dst in lanes and asked_for and not message.control

    found = [list(filter(is_shown, messages_of(operation))) for operation in shown]
    return readable(found, ranks, points_per_ns=_LANES_WIDTH * 72 * width_in() / (end_ns - start_ns))
