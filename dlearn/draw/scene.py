"""The scene of a timeline: what is to be drawn, and where. Nothing here draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlearn.analysis.flows import sent_over_time
from dlearn.analysis.joining import operations
from dlearn.analysis.unrolling import answers
from dlearn.draw.arrows import Arrows, readable
from dlearn.draw.bars import Bar, bars_of
from dlearn.draw.lanes import Lane, rows_for, stack
from dlearn.trace.event import Gradient, Span
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace

BINS = 200
MOST_SPAN_ROWS = 3
_ROOM_FOR_STUCK = 0.6
"""What never ended lasts this much longer than all that was seen, so that its reason can be read."""
_USUAL_WIDTH_PT = 560.0
_MOST_RANKS = 64


@dataclass(frozen=True)
class Scene:
    """Times in ns, lanes in inches. `rows[i]` is the row of `bars[i]` in its lane, as `span_rows[i]` of `spans[i]`."""

    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int
    bars: list[Bar]
    rows: list[int]
    spans: list[Span]
    span_rows: list[int]
    gradients: list[Gradient]
    lanes: dict[int, Lane]
    arrows: Arrows
    density: dict[int, list[float]]
    """Bytes that each rank sends in each of `BINS` stretches, where there are too many messages for arrows."""
    never_came: int
    unexplained: dict[str, int]
    """Why operations have no messages, and how many."""

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.start_ns) / 1e6


def set_scene(trace: Trace) -> Scene:
    """Everything that a timeline of this trace shows."""
    shown = operations(trace)
    spans = [event for event in trace.events if isinstance(event, Span)]
    gradients = [event for event in trace.events if isinstance(event, Gradient)]
    start_ns, end_ns = _window(shown, spans, gradients)
    bars = bars_of(shown, trace, until_ns=end_ns)
    ranks = ranks_shown(trace, shown)
    rows = _bar_rows(bars, (end_ns - start_ns) // 250)
    span_rows = _span_rows(spans, end_ns)
    found, unexplained = _messages(shown, ranks)
    arrows = readable(found, points_per_ns=_USUAL_WIDTH_PT / (end_ns - start_ns))
    flat = [message for messages in found for message in messages]
    lanes = stack(
        ranks,
        rows=_depth([bar.rank for bar in bars], rows),
        spans={rank: min(depth, MOST_SPAN_ROWS) for rank, depth in _depth([s.rank for s in spans], span_rows).items()},
        strips={gradient.rank for gradient in gradients},
        density=arrows.not_drawn > 0,
    )
    return Scene(
        ranks=ranks,
        start_ns=start_ns,
        end_ns=end_ns,
        bars=bars,
        rows=rows,
        spans=spans,
        span_rows=span_rows,
        gradients=gradients,
        lanes=lanes,
        arrows=arrows,
        density=sent_over_time(flat, start_ns=start_ns, end_ns=end_ns, bins=BINS) if arrows.not_drawn else {},
        never_came=sum(message.how == "missing" for message in flat),
        unexplained=unexplained,
    )


def ranks_shown(trace: Trace, shown: Sequence[Operation]) -> tuple[int, ...]:
    """Every rank that left a file, and those that others name, unless they are too many for a picture."""
    named = {rank for operation in shown for rank in (*operation.ranks, operation.sender, operation.receiver)}
    named |= {rank for group in {id(o.group): o.group for o in shown}.values() for rank in group.members}
    everybody = {*trace.ranks, *(rank for rank in named if rank is not None)}
    return tuple(sorted(everybody if len(everybody) <= _MOST_RANKS else trace.ranks))


def _window(shown: Sequence[Operation], spans: Sequence[Span], gradients: Sequence[Gradient]) -> tuple[int, int]:
    """From the first moment seen to the last one; longer where something never ended."""
    events = [*(end for operation in shown for end in operation.ends), *spans, *gradients]
    start = min((event.start_ns for event in events), default=0)
    last = max((event.end_ns or event.start_ns for event in events), default=0)
    length = max(last - start, 1000)
    stuck = any(operation.pending for operation in shown)
    return start, start + int(length * (1 + _ROOM_FOR_STUCK if stuck else 1))


def _bar_rows(bars: Sequence[Bar], narrowest_ns: int) -> list[int]:
    """`narrowest_ns` is what a bar takes whose end nobody saw, so that such bars do not hide each other."""
    rows = [0] * len(bars)
    for places in _by_rank([bar.rank for bar in bars]).values():
        stretches = [(bars[i].start_ns, _shown_until(bars[i], narrowest_ns)) for i in places]
        for i, row in zip(places, rows_for(stretches), strict=True):
            rows[i] = row
    return rows


def _shown_until(bar: Bar, narrowest_ns: int) -> int:
    return bar.start_ns + narrowest_ns if bar.state == "not observed" else bar.end_ns


def _span_rows(spans: Sequence[Span], end_ns: int) -> list[int]:
    rows = [0] * len(spans)
    for places in _by_rank([span.rank for span in spans]).values():
        stretches = [(spans[i].start_ns, spans[i].end_ns or end_ns) for i in places]
        for i, row in zip(places, rows_for(stretches), strict=True):
            rows[i] = row
    return rows


def _by_rank(ranks: Sequence[int]) -> dict[int, list[int]]:
    """Rank -> the places at which it stands."""
    places: dict[int, list[int]] = defaultdict(list)
    for i, rank in enumerate(ranks):
        places[rank].append(i)
    return places


def _depth(ranks: Sequence[int], rows: Sequence[int]) -> dict[int, int]:
    depth: dict[int, int] = defaultdict(int)
    for rank, row in zip(ranks, rows, strict=True):
        depth[rank] = max(depth[rank], row + 1)
    return depth


def _messages(shown: Sequence[Operation], ranks: Sequence[int]) -> tuple[list[list[Message]], dict[str, int]]:
    """The messages of each operation that has any, between these ranks, and why other operations have none."""
    found: list[list[Message]] = []
    unexplained: dict[str, int] = defaultdict(int)
    lanes = set(ranks)
    for _, answer in answers(shown):
        if isinstance(answer, str):
            unexplained[answer] += 1
        else:
            found.append([message for message in answer if message.src in lanes and message.dst in lanes])
    return found, unexplained
