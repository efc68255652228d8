"""One rank's trace file, read while it grows: what is open in it, and how its last seconds were spent.

Of what is new only the end is read line by line: so a fast job is not slowed down by being watched.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dlearn.events import event as seen
from dlearn.events.event import Collective, PointToPoint, RpcCall, Span
from dlearn.events.job_facts import AnyLine
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.short_lines import COMMON, layout

WINDOW_BYTES = 16_000  # Of what is new, so much at the end is read line by line.
LANE_SECONDS = 10
BARS = "·▁▂▃▄▅▆▇█"  # The share of a second that a rank was inside of calls: from none to all of it.
WAITED = "░"  # A second in which a rank was seen waiting for a late one.
_NS = 1_000_000_000
_LONG_LINE = re.compile(rb"^\{.*$", re.MULTILINE)
_SHORT_END = re.compile(rb"^\[(\d+),\d+,\d+\]$", re.MULTILINE)
Call = Collective | PointToPoint | RpcCall | Rendezvous
decode = msgspec.json.Decoder(AnyLine).decode


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
    first: dict[int, seen.Event] = field(default_factory=dict)
    open: dict[int, Call] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    seconds: dict[int, Second] = field(default_factory=dict)
    buckets: int = 0
    last_ns: int = 0
    begun_ns: int = 0
    ended: bool = False
    skipped: bool = False  # Lines not read may be calls in a group that is not in `reached`.
    _of_backward: Counter[int] = field(default_factory=Counter)
    _inside_since_ns: int = 0
    _unread_from_ns: int = 0

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

    def catch_up(self) -> None:
        with self.path.open("rb") as stream:
            stream.seek(self.read_to)
            new = stream.read()
        new = new[: new.rfind(b"\n") + 1]  # A line may be half written.
        self.read_to += len(new)
        cut = new.rfind(b"\n", 0, max(len(new) - WINDOW_BYTES, 0)) + 1
        if cut:
            self._skip(new[:cut])
        for line in new[cut:].splitlines():
            # Damage is reported when the trace is read as a whole; an event may be of another's Source.
            with suppress(ValueError, KeyError):
                self._take(line)
        now = time.monotonic_ns() // _NS
        for old in [second for second in self.seconds if second < now - LANE_SECONDS]:
            del self.seconds[old]

    def _skip(self, lines: bytes) -> None:
        """Read only the facts of these lines; how long the calls took follows from the first line behind them."""
        self.skipped = True
        self._leave(self.last_ns)
        self.open.clear()
        self.spans.clear()
        self._of_backward.clear()
        self._unread_from_ns = self.last_ns
        for line in _LONG_LINE.findall(lines):
            with suppress(ValueError):
                fact = decode(line)
                self._learn(fact)
                self.spans.pop(fact.event if isinstance(fact, seen.End) else -1, None)
        for number in _SHORT_END.findall(lines):
            self.spans.pop(int(number), None)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"{"):
            fact = decode(line)
            self._learn(fact)
            if isinstance(fact, seen.End):
                self._end(fact.event, fact.at_ns or 0)
            elif isinstance(fact, Call) and fact.end_ns is None:
                self._begin(fact)
            return
        numbers = [int(number) for number in line[1:-1].split(b",")]
        if len(numbers) == 3:
            self._end(numbers[0], numbers[1])
            return
        if isinstance(call := self.first[numbers[0]], Call):
            names = (*COMMON, *layout(call))
            own = zip(names, numbers[1:], strict=True)
            fields = {name: value for name, value in own if "." not in name}
            self._begin(msgspec.structs.replace(call, **fields))

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
                self.ended = True
            case seen.Event():
                self.first[fact.number] = fact

    def _begin(self, call: Call) -> None:
        if self._unread_from_ns:
            self._add(self._unread_from_ns, call.start_ns, "unread_ns")
            self._unread_from_ns = 0
        if isinstance(call, Collective) and call.launcher == "reducer" and call.op == "all_reduce":
            # DDP launches its buckets in their order; what follows them is none.
            bucket = self._of_backward[call.backward or 0]
            self._of_backward[call.backward or 0] += 1
            call = msgspec.structs.replace(call, bucket_index=bucket if bucket < self.buckets else None)
        if not self.open:
            self._inside_since_ns = call.start_ns
        self.open[call.number] = call
        if call.op != "recv" and not isinstance(call, Rendezvous):
            given = call.inputs if isinstance(call, Collective) else call.tensors
            self._second(call.start_ns).given_bytes += sum(tensor.payload_bytes for tensor in given)
        self.begun_ns = self.begun_ns or call.start_ns
        self.last_ns = max(self.last_ns, call.start_ns)
        if isinstance(call, Collective):
            self.reached[call.group] = max(self.reached.get(call.group, 0), call.seq)

    def _end(self, number: int, at_ns: int) -> None:
        call = self.open.pop(number, None)
        self.spans.pop(number, None)
        self.last_ns = max(self.last_ns, at_ns)
        if call is not None and not self.open:
            self._leave(at_ns)

    def _leave(self, at_ns: int) -> None:
        if self._inside_since_ns:
            self._add(self._inside_since_ns, at_ns, "inside_ns")
        self._inside_since_ns = 0

    def _second(self, at_ns: int) -> Second:
        return self.seconds.setdefault(at_ns // _NS, Second())

    def _add(self, from_ns: int, to_ns: int, what: str) -> None:
        """Share a time span out over the seconds of the lane."""
        from_ns = max(from_ns, to_ns - (LANE_SECONDS + 1) * _NS)
        while from_ns < to_ns:
            until_ns = min(to_ns, (from_ns // _NS + 1) * _NS)
            second = self._second(from_ns)
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
        """Return a letter for each of the last whole seconds, and a space for unread ones and before its first call."""
        if self._inside_since_ns:  # Share out what has passed of the call that it is in.
            self._add(self._inside_since_ns, now_ns, "inside_ns")
            self._inside_since_ns = now_ns
        now = now_ns // _NS
        return "".join(self._letter(second) for second in range(now - LANE_SECONDS, now))

    def _letter(self, number: int) -> str:
        second = self.seconds.get(number, Second())
        known_ns = _NS - second.unread_ns
        if not self.begun_ns or number < self.begun_ns // _NS or known_ns <= 0:
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
            self._second(second * _NS).waited = True
