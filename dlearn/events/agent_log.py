"""The RPC agent's own log: every request and every reply of this process, at the moment of sending and of arrival.

torch's C++ agent tells at log level -1 what it does, on stderr. A filter takes these lines out again, into a file
beside the trace, and hands on everything else, byte for byte: in a cluster the notebook's process does that, for a
script this very file as a small process (so it imports nothing but the standard library).

torch 2.13 prints the wall clock's whole seconds and the *monotonic* clock's fraction. The fraction is exact and the
second is not: it may be the one before, and the clock may be set. So the filter stamps what it reads with its
own monotonic clock, and `line_time` finds the one moment of that fraction that lies between two stamps.
"""

import os
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".agent.log"  # `<host>-<pid>.agent.log` stands beside `<host>-<pid>.jsonl`.
PIPE_BYTES = 1 << 20
PAUSE_SECONDS = 0.02
"""Between two looks into the pipe, which holds some thousand calls' lines: to wake up for each would slow the job."""
LOOK_SECONDS = 0.25
"""How often a silent pipe is looked into, so that the stamps of two reads stand close together."""
LONGEST_LINE = 4096
"""A pipe keeps what is written in one go together up to this size; the agent's lines are about 130 bytes long."""

_SEVERITY = {b"V": -1, b"I": 0, b"W": 1, b"E": 2, b"F": 3}
# With a process group, torch puts the rank before the line.
_HEAD = rb"(?:\[rank\d+\]:)?\[([VIWEF])\d{4} \d\d:\d\d:\d\d\.\d{9} ([\w.+/-]+):\d+\] "
_WHOLE = re.compile(_HEAD + rb"[^\n]*\n")
_BEGUN = re.compile(rb"\[(?:r[^\n]*|[VIWEF][^\n]*)?\Z")


class Filter:
    """Takes the agent's lines out of bytes, and log lines below torch's own level, `shown`."""

    def __init__(self, *, shown: int = 1, empty_ns: int = 0) -> None:
        self._shown = shown
        self._held = b""
        self._lines: list[bytes] = []
        self._empty_ns = empty_ns
        self._written_ns = (0, 0)
        self.lost: Counter[str] = Counter()  # The agent's lines, by why they were not written.

    def feed(self, data: bytes) -> bytes:
        """Return what of `data` is the program's own. What may become a log line is held back until it ends."""
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
        """Return what was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def read(self, pipe: int) -> bytes:
        """Read what is in the pipe now; b"" is the end of the stream."""
        asked_ns = time.monotonic_ns()
        data = os.read(pipe, PIPE_BYTES)
        self._written_ns = self._empty_ns, time.monotonic_ns()
        if len(data) < PIPE_BYTES:
            self.found_empty(asked_ns)
        return data

    def found_empty(self, at_ns: int) -> None:
        """Note that nothing was in the pipe at this moment: what comes out of it next was written later."""
        self._empty_ns = at_ns

    def keep_lines(self, write: Callable[[bytes], object]) -> None:
        """Write the agent's lines of what was read last, below a stamp of when that was written."""
        if self._lines:
            try:
                write(b"".join((b"written %d to %d\n" % self._written_ns, *self._lines)))
            except OSError as error:  # A full disk must not cost the program its stderr.
                self.lost[error.strerror or str(error)] += len(self._lines)
            self._lines.clear()

    def _sort(self, line: re.Match[bytes]) -> bytes:
        if _SEVERITY[line[1]] >= self._shown:
            return line[0]
        if line[2] == b"tensorpipe_agent.cpp":
            self._lines.append(line[0])
        return b""


class Moment(NamedTuple):
    """One line: what happened to request `id` of worker `src`, sent to `dst`, at `at_ns` (monotonic clock)."""

    what: str
    src: str
    id: int
    dst: str
    at_ns: int


_SENT, _CAME = ("is sending request", "sent request", "received response"), ("received request", "is running request")
_DONE = ("done running request", "is sending response to request", "done sending response to request")
_LINE = re.compile(
    rb"(?:\[rank\d+\]:)?\[V\d{4} \d\d:(\d\d):(\d\d)\.(\d{9}) tensorpipe_agent\.cpp:\d+\] RPC agent for (\S+) "
    rb"(" + "|".join((*_SENT, *_CAME, *_DONE)).encode() + rb") #(\d+) (?:to|from) (\S+)"
)
_STAMP = re.compile(rb"written (\d{1,19}) to (\d{1,19})\n")


def moments(lines: Iterator[bytes], *, wall_ns: int) -> Iterator[Moment]:
    """Yield what the lines say; `wall_ns`: how far the wall clock was ahead of the monotonic."""
    written = (0, 0)
    for line in lines:
        stamp = _STAMP.fullmatch(line[:LONGEST_LINE])
        if stamp is not None:
            written = int(stamp[1]), int(stamp[2])
        found = _LINE.match(line[:LONGEST_LINE])
        if found is None:
            continue
        minute, second, fraction = int(found[1]), int(found[2]), int(found[3])
        # A name may be damaged: then it is no worker's.
        me, peer = found[4].decode(errors="replace"), found[7].decode(errors="replace")
        what, number = found[5].decode(), int(found[6])
        src, dst = (me, peer) if what in _SENT else (peer, me)
        yield Moment(what, src, number, dst, line_time((60 * minute + second) * _SECOND - wall_ns, fraction, *written))


_SECOND = 10**9
_QUARTER = 900 * _SECOND
"""Time zones differ by quarters of an hour: the minute within one is the same in all, whose wall clock is printed."""
_HELD_UP_NS = 250 * 10**6
"""How long a line may be on its way from torch's look at the clock into the pipe."""


def line_time(printed_ns: int, fraction: int, since: int, until: int) -> int:
    """Return when a line was written, in ns: at this fraction of a second, between two stamps.

    `printed_ns` is when the printed second began, by the wall clock, in whichever quarter of an hour.
    """
    last = until - (until - fraction) % _SECOND
    if until - since + _HELD_UP_NS < _SECOND:
        return last
    # Who reads the pipe was held up for a second. The wall clock helps, unless it was set.
    by_wall = printed_ns + (fraction - printed_ns) % _SECOND
    by_wall = until - (until - by_wall) % _QUARTER
    return by_wall if since - _HELD_UP_NS <= by_wall else last


def widen(pipe: int) -> None:
    """Make room in a pipe for what comes between two looks; where the system allows no more, it stays as it is."""
    with suppress(OSError, AttributeError, ImportError):  # Only Linux has it.
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def log_path(trace_file: Path) -> Path:
    return trace_file.with_name(trace_file.stem + SUFFIX)


def copy(source: int, out: int, log: int, *, shown: int, empty_ns: int) -> None:
    """Read `source` to its end; log lines go into `log`, the rest, and what is lost, into `out`."""
    sieve = Filter(shown=shown, empty_ns=empty_ns)
    while True:
        asked_ns = time.monotonic_ns()
        if not select.select([source], [], [], LOOK_SECONDS)[0]:
            sieve.found_empty(asked_ns)
            continue
        data = sieve.read(source)
        if not data:
            break
        _write(out, sieve.feed(data))
        sieve.keep_lines(partial(_write, log))
        time.sleep(PAUSE_SECONDS)
    _write(out, sieve.rest())
    for reason, lost in sieve.lost.items():
        _write(out, f"dlearn: {lost:,} lines of the RPC agent's log were not written: {reason}.\n".encode())


def _write(out: int, data: bytes) -> None:
    while data:
        data = data[os.write(out, data) :]


if __name__ == "__main__":
    copy(0, 2, int(sys.argv[1]), shown=int(sys.argv[2]), empty_ns=int(sys.argv[3]))
