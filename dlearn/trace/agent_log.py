"""The RPC agent's own log: every request and every reply of this process, at the moment of sending and of arrival.

torch's C++ agent tells at log level -1 what it does, on stderr. A filter takes these lines out again, into a file
beside the trace, and hands on everything else, byte for byte: in a cluster the notebook's process does that, for a
script this very file runs as a small process (so it imports nothing but the standard library). No line is lost,
whatever ends the job. The log names no kind of message; rpc_kinds.py infers it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".agent.log"
"""`<host>-<pid>.agent.log` stands beside `<host>-<pid>.jsonl`."""

PIPE_BYTES = 1 << 20
PAUSE_SECONDS = 0.02
"""Between two looks into the pipe, which holds some thousand calls' lines: to wake up for each would slow the job."""

LONGEST_LINE = 4096
"""A pipe keeps what is written in one go together up to this size; the agent's lines are about 130 bytes long."""

_SEVERITY = {b"V": -1, b"I": 0, b"W": 1, b"E": 2, b"F": 3}
# With a process group, torch puts the rank before the line.
_HEAD = rb"(?:\[rank\d+\]:)?\[([VIWEF])\d{4} \d\d:\d\d:\d\d\.\d{9} ([\w.+/-]+):\d+\] "
_WHOLE = re.compile(_HEAD + rb"[^\n]*\n")
_BEGUN = re.compile(rb"\[(?:r[^\n]*|[VIWEF][^\n]*)?\Z")


class Filter:
    """Takes the agent's lines out of a stream of bytes and gives them to `keep`.

    Log lines that torch would not have written at its own level, `shown` (1: warnings), are taken out as well.
    """

    def __init__(self, keep: Callable[[bytes], object], *, shown: int = 1) -> None:
        self._keep = keep
        self._shown = shown
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What of `data` is the program's own. The beginning of what may become a log line waits for its end."""
        data = self._held + data
        self._held = b""
        if b"[" not in data:
            return data
        data = _WHOLE.sub(self._sort, data)
        begun = _BEGUN.search(data, max(0, data.rfind(b"\n")))
        if begun is not None and len(data) - begun.start() < LONGEST_LINE:
            self._held = data[begun.start() :]
            data = data[: begun.start()]
        return data

    def rest(self) -> bytes:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _sort(self, line: re.Match[bytes]) -> bytes:
        if _SEVERITY[line[1]] >= self._shown:
            return line[0]
        if line[2] == b"tensorpipe_agent.cpp":
            self._keep(line[0])
        return b""


class Moment(NamedTuple):
    """One line: what happened to request `id` of worker `src`, sent to `dst`. `clock` holds the digits as printed."""

    what: str
    src: str
    id: int
    dst: str
    clock: tuple[int, int]
    """Seconds since the epoch, and nanoseconds below the second."""


_SENT, _CAME = ("is sending request", "sent request", "received response"), ("received request", "is running request")
_DONE = ("done running request", "is sending response to request", "done sending response to request")
_LINE = re.compile(
    rb"(?:\[rank\d+\]:)?\[V(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{9}) tensorpipe_agent\.cpp:\d+\] RPC agent for (\S+) "
    rb"(" + "|".join((*_SENT, *_CAME, *_DONE)).encode() + rb") #(\d+) (?:to|from) (\S+)"
)


def moments(lines: Iterator[bytes], *, year: int) -> Iterator[Moment]:
    """What each line says; lines about other things (and damaged ones) are passed over."""
    for line in lines:
        found = _LINE.match(line[:LONGEST_LINE])
        if found is None:
            continue
        month, day, hour, minute, second, fraction = (int(found[place]) for place in range(1, 7))
        try:
            seconds = int(time.mktime((year, month, day, hour, minute, second, 0, 0, -1)))
        except (OverflowError, ValueError):
            continue
        me, what, number, peer = found[7].decode(), found[8].decode(), int(found[9]), found[10].decode(errors="replace")
        src, dst = (me, peer) if what in _SENT else (peer, me)
        yield Moment(what, src, number, dst, (seconds, fraction))


_SECOND = 10**9
_LAG_NS = 12 * 10**6
"""By how much the printed second may be late: it is the kernel's coarse clock's, which ticks every 1 to 10 ms."""
_READING_NS = 10**6
"""By how much `wall_ns` may be wrong."""


def monotonic_ns(clocks: Sequence[tuple[int, int]], wall_ns: int) -> list[int]:
    """When the lines of a log were written, on the process's monotonic clock; its wall clock is `wall_ns` ahead.

    torch 2.13 prints the wall clock's whole seconds and the *monotonic* clock's fraction. There is one moment of that
    fraction within the printed second; at its very beginning it may be the next second's, and at its end the last
    one's. Then the neighbouring lines decide.
    """
    found: list[int] = []
    doubtful: dict[int, int] = {}
    for place, (seconds, fraction) in enumerate(clocks):
        earliest = seconds * _SECOND - wall_ns
        inside = (fraction - earliest) % _SECOND
        found.append(earliest + inside)
        if inside < _LAG_NS:
            doubtful[place] = _SECOND
        elif inside > _SECOND - _READING_NS:
            doubtful[place] = -_SECOND
    sure = [place for place in range(len(found)) if place not in doubtful]
    for place, shift in doubtful.items():
        after = bisect_left(sure, place)
        near = [found[other] for other in sure[max(0, after - 1) : after + 1]]
        found[place] = min((found[place], found[place] + shift), key=partial(_distance, near))
    return found


def _distance(moments: Sequence[int], at_ns: int) -> int:
    """To the nearest of them."""
    return min((abs(at_ns - each) for each in moments), default=0)


def widen(pipe: int) -> None:
    """Make room in a pipe for what comes between two looks; where the system allows no more, it stays as it is."""
    with suppress(OSError, AttributeError, ImportError):  # Only Linux has it.
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def log_path(trace_file: Path) -> Path:
    """Where the agent's log of this process stands."""
    return trace_file.with_name(trace_file.stem + SUFFIX)


def copy(source: int, out: int, log: int, *, shown: int) -> None:
    """Read `source` to its end; log lines into `log`, the rest into `out` (all are file descriptors)."""
    kept: list[bytes] = []
    sieve = Filter(kept.append, shown=shown)
    while data := os.read(source, PIPE_BYTES):
        _write(out, sieve.feed(data))
        _write(log, b"".join(kept))
        kept.clear()
        time.sleep(PAUSE_SECONDS)
    _write(out, sieve.rest())


def _write(out: int, data: bytes) -> None:
    while data:
        data = data[os.write(out, data) :]


if __name__ == "__main__":
    copy(0, 2, int(sys.argv[1]), shown=int(sys.argv[2]))
