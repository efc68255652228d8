"""One rank's trace file, read while it grows: only its end, so as not to slow down a fast job."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dlearn.events import event as seen
from dlearn.events.event import Collective, PointToPoint, RpcCall, Span
from dlearn.events.job_facts import EXITED, AnyLine, Heartbeat
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.short_lines import COMMON, layout

WINDOW_BYTES = 16_000  # Of what all ranks have written, so much is read line by line.
LANE_SECONDS = 10
BARS = "·▁▂▃▄▅▆▇█"  # The share of a second that a rank was inside of calls: from none to all of it.
WAITED = "░"  # A second in which a rank was seen waiting for a late one.
_NS = 1_000_000_000
Call = Collective | PointToPoint | RpcCall | Rendezvous
Pattern = tuple[Call, tuple[str, ...], int]  # Names of repeated lines' numbers; what it gave.
decode = msgspec.json.Decoder(AnyLine).decode
_SPAN = b'\n{"kind":"span","number":'
_numbers = msgspec.json.Decoder(list[int]).decode


@dataclass
class Second:
    """What a rank did in one second: how long it was inside of calls, what it gave them, how much was not read."""

    inside_ns: int = 0
    unread_ns: int = 0
    given_bytes: int = 0
    waited: bool = False


@dataclass
class Follower:
    """One file, read as it grows: the calls that are open, by number, and how far the rank came in each group."""

    path: Path
    rank: int
    pid: int = 0
    read_to: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    seconds: defaultdict[int, Second] = field(default_factory=lambda: defaultdict(Second))
    buckets: int = 0
    last_ns: int = 0
    begun_ns: int = 0
    ended: str = ""  # How: a word of `Heartbeat.ended`.
    skipped: bool = False  # Lines not read may be calls in a group that is not in `reached`.
    _first: dict[int, Pattern] = field(default_factory=dict)
    _open: dict[int, tuple[Call, tuple[str, ...], list[Any]]] = field(default_factory=dict)
    _of_backward: Counter[int] = field(default_factory=Counter)
    _inside_since_ns: int = 0
    _unread_from_ns: int = 0
    _looked_ns: int = 0

    @classmethod
    def of(cls, path: Path, otherwise: int) -> Follower | None:
        """Follow this file; None while its first line is not whole. Without a rank in it, it is `otherwise`."""
        with path.open("rb") as stream:
            line = stream.readline()
        with suppress(ValueError):
            head = decode(line)
            if line.endswith(b"\n") and isinstance(head, seen.Header):
                here = head.host == socket.gethostname()
                return cls(path, otherwise if head.rank is None else head.rank, pid=head.pid if here else 0)
        return None

    @property
    def open(self) -> list[Call]:
        calls = []
        for call, names, own in self._open.values():
            numbers = zip(names, own, strict=True)
            fields = {name: number for name, number in numbers if "." not in name}
            calls.append(msgspec.structs.replace(call, **fields))
        return calls

    def catch_up(self, window_bytes: int) -> None:
        """Read what is new; line by line only so much at its end."""
        with self.path.open("rb") as stream:
            stream.seek(self.read_to)
            new = stream.read()
        new = new[: new.rfind(b"\n") + 1]  # A line may be half written.
        self.read_to += len(new)
        cut = new.rfind(b"\n", 0, max(len(new) - window_bytes, 0)) + 1
        if cut:
            self._skip(new[:cut])
        for line in new[cut:].splitlines():
            try:  # A `suppress` for each line takes as long as the line.
                self._take(line)
            except (ValueError, LookupError):  # Damage is reported when the trace is loaded.
                continue
        self._looked_ns = time.monotonic_ns()
        while self.seconds and (first := min(self.seconds)) < self._looked_ns // _NS - LANE_SECONDS:
            del self.seconds[first]

    def _skip(self, lines: bytes) -> None:
        """Read only the facts of these lines; how long the calls took follows from the first line behind them."""
        self.skipped = True
        self._leave(self.last_ns)
        self._open.clear()
        self._of_backward.clear()
        self._unread_from_ns = max(self.last_ns, self._looked_ns)  # Until then no line was missed.
        lines, at = b"\n" + lines, -1
        for number in [number for number in self.spans if b"\n[%d," % number in lines]:
            del self.spans[number]
        while (at := lines.find(b"\n{", at + 1)) >= 0:
            begin = at + len(_SPAN)
            end = b"\n[" + lines[begin : lines.find(b",", begin) + 1]
            if lines.startswith(_SPAN, at) and lines.find(end, at) >= 0:
                continue
            with suppress(ValueError):
                fact = decode(lines[at + 1 : lines.find(b"\n", at + 1)])
                self._learn(fact)
                self.spans.pop(fact.event if isinstance(fact, seen.End) else -1, None)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"{"):
            fact = decode(line)
            self._learn(fact)
            if isinstance(fact, seen.End):
                self._end(fact.event, fact.at_ns or 0)
            elif isinstance(fact, Call):
                like = self._first[fact.number]
                self._begin(like, [getattr(fact, name, 0) for name in like[1]])
            return
        first, *own = _numbers(line)
        if len(own) == 2:
            self._end(first, own[0])
        elif first in self._first:
            self._begin(self._first[first], own)

    def _learn(self, fact: object) -> None:
        """Note what holds from here on, whether or not the lines behind it are read."""
        match fact:
            case seen.GroupFact():
                self.groups[fact.name] = fact.ranks
            case Span():
                self.spans[fact.number] = fact
            case seen.Bucket():
                self.buckets = fact.count
            case seen.Footer():
                self.ended = self.ended or EXITED
            case Heartbeat() if fact.ended:
                self.ended, self.last_ns = fact.ended, max(self.last_ns, fact.at_ns)
            case Collective() | PointToPoint() | RpcCall() | Rendezvous():
                given = getattr(fact, "inputs", ()) or getattr(fact, "tensors", ())
                given = () if fact.op == "recv" else given
                given_bytes = sum(tensor.payload_bytes for tensor in given)
                self._first[fact.number] = fact, (*COMMON, *layout(fact)), given_bytes

    def _begin(self, like: Pattern, own: list[Any]) -> None:
        """Note a call like this one but for its own numbers."""
        (call, names, given_bytes), (number, start_ns, *_) = like, own
        if "end_ns" in names:  # It was refused.
            return
        if not self._unread_from_ns:  # Else it belongs to what was not read.
            self.seconds[start_ns // _NS].given_bytes += given_bytes
        self._come_to(start_ns)
        if isinstance(call, Collective):
            self.reached[call.group] = max(self.reached.get(call.group, 0), own[3])
            if call.launcher == "reducer" and call.op == "all_reduce":
                # DDP launches its buckets in their order; what follows them is none.
                backward = own[4] if len(own) > 4 else 0
                bucket = self._of_backward[backward]
                self._of_backward[backward] += 1
                index = bucket if bucket < self.buckets else None
                call = msgspec.structs.replace(call, bucket_index=index)
        if not self._open:
            self._inside_since_ns = start_ns
        self._open[number] = call, names, own
        self.begun_ns = self.begun_ns or start_ns

    def _end(self, number: int, at_ns: int) -> None:
        self._come_to(at_ns)
        call = self._open.pop(number, None)
        self.spans.pop(number, None)
        if call is not None and not self._open:
            self._leave(at_ns)

    def _come_to(self, at_ns: int) -> None:
        """Note when a line was written; the first one behind others says how long those took."""
        if self._unread_from_ns:
            self._add(self._unread_from_ns, at_ns, "unread_ns")
            self._unread_from_ns = 0
        self.last_ns = max(self.last_ns, at_ns)

    def _leave(self, at_ns: int) -> None:
        if self._inside_since_ns:
            self._add(self._inside_since_ns, at_ns, "inside_ns")
        self._inside_since_ns = 0

    def _add(self, from_ns: int, to_ns: int, what: str) -> None:
        """Share a time span out over the seconds of the lane."""
        from_ns = max(from_ns, to_ns - (LANE_SECONDS + 1) * _NS)
        while from_ns < to_ns:
            until_ns = min(to_ns, (from_ns // _NS + 1) * _NS)
            second = self.seconds[from_ns // _NS]
            setattr(second, what, getattr(second, what) + until_ns - from_ns)
            from_ns = until_ns

    @property
    def is_gone(self) -> bool:
        """Return whether its process is known to have ended without closing its file."""
        try:
            os.kill(self.pid or os.getpid(), 0)
        except OSError as error:  # Or it is another user's.
            return isinstance(error, ProcessLookupError) and not self.ended
        return False

    def lane(self, now_ns: int) -> str:
        """Return a letter for each of the last seconds; a space if it did not run, or unread."""
        if self._inside_since_ns:  # Share out what has passed of the call that it is in.
            self._add(self._inside_since_ns, now_ns, "inside_ns")
            self._inside_since_ns = now_ns
        now = now_ns // _NS
        return "".join(self._letter(second) for second in range(now - LANE_SECONDS, now))

    def _letter(self, number: int) -> str:
        second = self.seconds.get(number, Second())
        known_ns = _NS - second.unread_ns
        is_over = bool(self.ended) and number > self.last_ns // _NS
        if is_over or not self.begun_ns or number < self.begun_ns // _NS or known_ns <= 0:
            return " "
        share = min(1.0, second.inside_ns / known_ns)
        return WAITED if second.waited else BARS[round(share * (len(BARS) - 1))]

    def bytes_per_second(self, now_ns: int) -> float | None:
        """Return the payload given to calls in these seconds, as far as they were read; None before the first call."""
        if not self.begun_ns:
            return None
        since_ns = max(self.begun_ns, now_ns - LANE_SECONDS * _NS)
        seconds = [second for at, second in self.seconds.items() if (at + 1) * _NS > since_ns]
        known_ns = now_ns - since_ns - sum(second.unread_ns for second in seconds)
        given_bytes = sum(second.given_bytes for second in seconds)
        return given_bytes / known_ns * 1e9 if known_ns > 0 else None

    def waits_since(self, start_ns: int, now_ns: int) -> None:
        """Count all seconds since then as waiting: the ranks that it waits for have not come yet."""
        for second in range(max(start_ns // _NS + 1, now_ns // _NS - LANE_SECONDS), now_ns // _NS + 1):
            self.seconds[second].waited = True
