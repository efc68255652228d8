"""Chrome's trace format, as https://ui.perfetto.dev and chrome://tracing read it: slices, and arrows between ranks.

The format: "Trace Event Format" (Google, 2016). Times are us. Each rank is a process, and its slices stand on tracks on
which none cuts another in two. Perfetto lets an arrow begin and end at the slice that covers the moment on its track:
so at any moment at most one call is on a track for calls. Spans and phases may stand inside each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dlearn.analysis.telling.explanations import payload_text
from dlearn.diagnosis.hang_report import missing_text
from dlearn.events.event import Bucket, Event, Gradient, PhaseSpan, Span
from dlearn.events.printable import printable
from dlearn.join.ends import End, RpcEnd, payload_bytes
from dlearn.join.joining import operations
from dlearn.join.operation_messages import messages_of, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wait_times import waited_until_ns
from dlearn.play.writing import Place, write
from dlearn.shown import size_text
from dlearn.trace import Trace

Record = dict[str, Any]
_KNOWN = {
    "observed": "observed: hooks saw it at both ends",
    "derived": "derived from the backend's algorithm; when the arrow begins and ends is no measurement",
    "inferred": "inferred from the protocol's rules",
}
KINDS = ("spans and phases", "calls", "gradients")
PROGRAM, CALLS, GRADIENTS = range(3)
Track = tuple[int, int, int]  # A rank, one of the `KINDS`, and the number of its track, from 0.


class PerfettoJson:
    """The JSON text of a trace in pieces, which are made while they are read: "".join(it) is all of it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __iter__(self) -> Iterator[str]:
        yield '{"displayTimeUnit":"ns","traceEvents":[\n'
        between = ""
        for record in _records(self.trace, Tracks(self.trace)):
            yield between + msgspec.json.encode(record).decode()
            between = ",\n"
        yield "\n]}\n"


def perfetto(trace: Trace, path: Place = None) -> PerfettoJson:
    """Return JSON: a process per rank, a slice per call, an arrow per message; write it to `path`, too.

    In a call that waited stand its waiting and its transfer; a counter of each rank has its bytes in flight. Times
    are us since the first event. An arrow's category says how its message is known; a message that never came
    has none, but stands in the `args` of the calls that expected it. Raises SetupError where the file cannot be
    written.
    """
    made = PerfettoJson(trace)
    if path is not None:
        write({Path(path): made})
    return made


def _records(trace: Trace, tracks: Tracks) -> Iterator[Record]:
    yield from _names(trace, tracks)
    for span in sorted(trace.of(Span, PhaseSpan), key=tracks.outer_first):
        name, category = (span.name, "span") if isinstance(span, Span) else (span.phase, "phase")
        yield _slice(span, name, category, tracks, {})
    instants: list[Gradient | Bucket] = trace.of(Gradient, Bucket)
    yield from (_instant(event, tracks) for event in instants)
    arrow = 0
    changes: Counter[tuple[int, float]] = Counter()
    for part in parts_of(trace):
        sent = [] if part.steps else messages_of(part)
        arrows = list(filter(None, (_arrow(message, part, tracks) for message in sent)))
        yield from _calls(part, _message_args(part, sent, len(arrows), trace), tracks)
        for begin, end in arrows:
            arrow += 1
            yield {"ph": "s", "id": arrow, **begin}
            yield {"ph": "f", "bp": "e", "id": arrow, **end}
            size = begin["args"]["payload_bytes"] or 0
            changes[begin["pid"], begin["ts"]] += size
            changes[begin["pid"], end["ts"]] -= size
    yield from _in_flight(changes)


def _names(trace: Trace, tracks: Tracks) -> Iterator[Record]:
    """Return processes and tracks in the order of ranks. (Perfetto takes process 0 for the idle one of a kernel.)"""
    for rank in dict.fromkeys(rank for rank, _, _ in tracks.ids):
        name = {"name": printable(trace.label(rank))}
        yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank + 1, "args": {"sort_index": rank}}
    for (rank, kind, lane), tid in tracks.ids.items():
        name = {"name": f"{KINDS[kind]}, {lane + 1}" if lane else KINDS[kind]}
        yield {"ph": "M", "name": "thread_name", "pid": rank + 1, "tid": tid, "args": name}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank + 1, "tid": tid, "args": {"sort_index": tid}}


# Slices ---------------------------------------------------------------------------------------------------------------


def _slice(event: Event, name: str, category: str, tracks: Tracks, args: Record) -> Record:
    start_ns, end_ns = tracks.interval(event)
    if event.end_ns is None:
        args["end"] = "it did not end" if event.pending else "not observed"
    if event.error:
        args["error"] = printable(event.error)
    what = {"ph": "X", "name": printable(name), "cat": category}
    return {**what, **tracks.at(event, start_ns), "dur": (end_ns - start_ns) / 1000, "args": args}


def _calls(part: Operation, more: Record, tracks: Tracks) -> Iterator[Record]:
    for end in part.ends:
        args: Record = {"what": printable(part.what), "payload_bytes": payload_bytes(end), "phase": end.phase}
        args |= {"site": printable(end.site)} if end.site else {}
        args |= {"op": end.op, "group": printable(part.group.name), "number": part.seq, **more}
        yield _slice(end, _call_name(part, end), part.group.backend or "unknown", tracks, args)
        yield from _inside_of(part, end, tracks)


def _call_name(part: Operation, end: End) -> str:
    """Return "bucket 0 · 101 kB": Perfetto gives each name a colour."""
    name = end.op
    if isinstance(end, RpcEnd):
        name = end.what if end.exchange.call is None else end.exchange.call.function
    if part.bucket is not None:
        name = f"bucket {part.bucket.index}"
    size = payload_bytes(end)
    return f"{name} · {size_text(size)}" if size else name


def _inside_of(part: Operation, end: End, tracks: Tracks) -> Iterator[Record]:
    """Return the two parts of a call that waited: for the last rank, and then for the transfer."""
    start_ns, end_ns = tracks.interval(end)
    until_ns = waited_until_ns(part, end)
    until_ns = end_ns if until_ns is None else min(until_ns, end_ns)
    place = {"ph": "X", "cat": "waiting"}
    for name, begin, over in (("waiting", start_ns, until_ns), ("transfer", until_ns, end_ns)):
        if until_ns > start_ns and over > begin:
            yield {**place, "name": name, **tracks.at(end, begin), "dur": (over - begin) / 1000, "args": {}}


def _message_args(part: Operation, sent: Sequence[Message], arrows: int, trace: Trace) -> Record:
    """Return what the arrows of an operation do not say: how its messages are known, and which have no arrow."""
    args: Record = {"problem": printable(part.problem)} if part.problem else {}
    if part.steps:
        return args | {"messages": "its messages are those of its steps"}
    reason = None if sent else why_unknown(part)
    if reason is not None:
        return args | {"messages": printable(str(reason))}
    known = Counter(message.how for message in sent)
    never = known.pop("missing", 0)
    if never:
        why = missing_text(part, trace) if part.missing else "the call failed"
        args["missing"] = printable(f"{never:,} expected and never came, so there is no arrow: {why}")
    if known.total() > arrows:
        why = "an end is not in the trace, or by the clocks it came before it was sent"
        args["no arrow"] = f"{known.total() - arrows:,}: {why}"
    if known:
        args["messages"] = "; ".join(f"{count:,} {_KNOWN[how]}" for how, count in known.items())
    return args


def _instant(event: Gradient | Bucket, tracks: Tracks) -> Record:
    args: Record = {"bytes": event.bytes}
    if isinstance(event, Gradient):
        what, name, args["backward"] = "gradient", f"gradient of {event.parameter}", event.backward
    else:
        what, name = "bucket", f"bucket {event.index} of {event.count}"
        args["parameters"] = printable(", ".join(event.parameters))
    mark = {"ph": "i", "s": "t", "name": printable(name), "cat": what}
    return {**mark, **tracks.at(event, event.start_ns), "args": args}


# Arrows ---------------------------------------------------------------------------------------------------------------


def _arrow(message: Message, part: Operation, tracks: Tracks) -> tuple[Record, Record] | None:
    """Return the arrow's begin and end; None if it never came, or came before it was sent."""
    ends = _ends(message, part.ends)
    if message.how == "missing" or ends is None:
        return None
    (first, sent_until), (begin, until) = map(tracks.interval, ends)
    received_ns = _inside(message.received_ns, begin, until)
    sent_ns = min(_inside(message.sent_ns, first, sent_until), received_ns)
    if sent_ns < first:
        return None
    args: Record = {"payload_bytes": message.payload_bytes, "known": _KNOWN[message.how], "phase": ends[0].phase}
    if message.sent_ns is None or message.received_ns is None:
        args["times"] = "not observed: the arrow begins or ends somewhere in its call"
    what = {"name": f"{payload_text(message)}, {message.how}", "cat": message.how}
    return {**what, **tracks.at(ends[0], sent_ns), "args": args}, {**what, **tracks.at(ends[1], received_ns)}


def _ends(message: Message, ends: Sequence[End]) -> tuple[End, End] | None:
    """Return the sender's and the receiver's call. A message to itself (of MPI, of RPC) has two calls of one rank."""
    if message.src == message.dst:
        pair = (ends[0], ends[-1]) if message.operation.exchange is None or not message.step else (ends[-1], ends[0])
        return pair if len(ends) > 1 else None
    src = next((end for end in ends if end.rank == message.src), None)
    dst = next((end for end in ends if end.rank == message.dst), None)
    return (src, dst) if src is not None and dst is not None else None


def _inside(at_ns: int | None, start_ns: int, end_ns: int) -> int:
    """Return the time, moved into the slice. The end of a slice is no longer in it."""
    return min(max(start_ns if at_ns is None else at_ns, start_ns), end_ns - 1)


def _in_flight(changes: Mapping[tuple[int, float], int]) -> Iterator[Record]:
    """Return the bytes under way from each process, as far as arrows show: in the end 0."""
    total = 0
    for (pid, ts), change in sorted(changes.items()):
        total += change
        yield {"ph": "C", "name": "bytes in flight", "pid": pid, "ts": ts, "args": {"bytes": total}}


# Tracks ---------------------------------------------------------------------------------------------------------------


class Tracks:
    """`ids` numbers all tracks, from 1, in the order in which they should be shown."""

    def __init__(self, trace: Trace) -> None:
        calls = [end for part in parts_of(trace) for end in part.ends]
        kinds: tuple[list[Event], ...] = ([*trace.of(Span, PhaseSpan)], [*calls], [*trace.of(Gradient, Bucket)])
        seen = [event for events in kinds for event in events]
        self.start_ns = min((event.start_ns for event in seen), default=0)
        self.end_ns = max((max(event.start_ns + 1, event.end_ns or 0) for event in seen), default=1)
        self._track: dict[tuple[int, int], Track] = {}
        for kind, events in enumerate(kinds):
            self._stack(events, kind)
        always = {(rank, kind, 0) for rank in trace.ranks for kind in (PROGRAM, CALLS)}
        self.ids = {track: number for number, track in enumerate(sorted(always.union(self._track.values())), 1)}

    def at(self, event: Event, at_ns: int) -> dict[str, Any]:
        """Return a moment on the track of an event, as Perfetto names it, in us."""
        tid = self.ids[self._track[event.rank, event.number]]
        return {"pid": event.rank + 1, "tid": tid, "ts": (at_ns - self.start_ns) / 1000}

    def interval(self, event: Event) -> tuple[int, int]:
        """Return start and end of an event's slice in ns: 1 ns at least, as an arrow needs it."""
        end_ns = self.end_ns if event.pending else event.end_ns
        return event.start_ns, max(event.start_ns + 1, end_ns or 0)

    def outer_first(self, event: Event) -> tuple[int, int]:
        """Return a key to sort by: of two events with the same start, the longer one is first."""
        start_ns, end_ns = self.interval(event)
        return start_ns, -end_ns

    def _stack(self, events: Sequence[Event], kind: int) -> None:
        """Give each the first lane of its rank where it cuts nothing; calls do not stand inside each other either."""
        lanes: dict[int, list[list[int]]] = defaultdict(list)  # On each, the ends of what is open: the innermost last.
        for event in sorted(events, key=self.outer_first):
            start, end = self.interval(event)
            mine = lanes[event.rank]
            for ends in mine:
                while ends and ends[-1] <= start:
                    ends.pop()
            free = (at for at, ends in enumerate(mine) if not ends or (kind != CALLS and end <= ends[-1]))
            lane = next(free, len(mine))
            if lane == len(mine):
                mine.append([])
            mine[lane].append(end)
            self._track[event.rank, event.number] = event.rank, kind, lane


def parts_of(trace: Trace) -> Iterator[Operation]:
    """Return every operation, and after a glass-box collective its steps."""
    for operation in operations(trace):
        yield operation
        yield from operation.steps
