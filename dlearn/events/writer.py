"""Append to a process's file: a line of JSON for each event, and one for its end.

A line is written with a single `os.write` on a file opened for appending, so it is whole in the file the moment the
call returns, whatever kills the process next. Nothing is buffered, nothing locked.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dlearn.errors import TraceError
from dlearn.events.event import End, Event, Footer, Header, Line
from dlearn.events.job_facts import Exit, Stopped, Switched
from dlearn.events.short_lines import Remembered, end_line

MAX_LINE_BYTES = 1 << 20
"""A longer line is damage: the longest real one (a bucket of thousands of parameters) stays far below."""
_FOOTER_BYTES = 512  # More than a footer takes.

_encode = msgspec.json.Encoder().encode


class Writer:
    """Appends lines to a new file, which with a `header` is made when there is more to write."""

    def __init__(self, path: Path, *, max_bytes: int, header: Header | None = None) -> None:
        self.path = path
        self.lines = 0
        self.not_written = 0
        self.refusal = ""  # The name of the error with which the system refused a line, if it did.
        self._room = max_bytes
        self._mend = b""
        self._waiting = header
        self._fd: int | None = None
        self._remembered = Remembered()
        if header is None:
            self._open()

    @property
    def begun(self) -> bool:
        return self._fd is not None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, flags, 0o644)
        except FileExistsError:
            raise TraceError(
                f"{self.path} exists already: this process is being recorded there, or was. Give another folder."
            ) from None

    def event(self, kind: type[Event], facts: dict[str, Any]) -> None:
        """Append an event; one that is like another before it as a short line. Raises OSError as `write` does."""
        short, pattern = self._remembered.begin(kind, facts)
        if self.write(short or kind(**facts)) and pattern is not None:
            self._remembered.remember(pattern, facts["number"])

    def end(self, number: int, *, at_ns: int, by: str, error: str, **facts: Any) -> None:
        """Append the end of an event; in a short line if there is no more to it. Raises OSError as `write` does."""
        more = error or (facts and any(each is not None and each != () for each in facts.values()))
        short = None if more else end_line(number, at_ns, by)
        self.write(short or End(event=number, at_ns=at_ns, by=by, error=error, **facts))

    def write(self, line: Line | bytes) -> bool:
        """Append a line; return whether it stands in the file. OSError where the disk is full."""
        if self._fd is None:
            header, self._waiting = self._waiting, None
            if header is None or isinstance(line, Footer):
                return False  # A footer alone is no reason to make the file that has waited for a line.
            self._open()
            self.write(header)
        data = line if isinstance(line, bytes) else _encode(line) + b"\n"
        # Without the header the file is no trace, and the footer says how much is not in it: these two always fit.
        if len(data) > self._room and not isinstance(line, Header | Footer):
            self._room = 0  # Nothing after it either: a short end of a long event that was left out is of no use.
            self.not_written += 1
            return False
        self._room -= len(data)
        try:
            self._append(data)
        except OSError:
            self.not_written += 1
            raise
        self.lines += 1
        return True

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            if os.write(self._fd, self._mend + data) < len(self._mend + data):
                # There was room for a part of it; the next line, if any fits, begins on its own.
                self._mend = b"\n"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.refusal = errno.errorcode.get(error.errno or 0, "")
            raise
        self._mend = b""

    def finish(self, **facts: Any) -> None:
        """Write the footer, and let the file go. On a full disk it takes the place of the last
        lines: else nothing would say that some are lost. Raises OSError where that cannot be."""
        tries = 3  # Others, too, take the place that is given up: so often, and no more of the file.
        try:
            while self._fd is not None:
                tries -= 1
                footer = Footer(lines=self.lines, not_written=self.not_written, refusal=self.refusal, **facts)
                try:
                    return self._append(_encode(footer) + b"\n")
                except OSError:
                    if not tries or not self._give_up_last_lines():
                        raise
        finally:
            self.close()

    def _give_up_last_lines(self) -> bool:
        """Make room for a footer at the end of the file; False if there is only the header."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LINE_BYTES - _FOOTER_BYTES))
            tail = file.read()
        cut = tail.rfind(b"\n", 0, max(0, len(tail) - _FOOTER_BYTES)) + 1
        if not cut:
            return False
        os.truncate(self.path, size - len(tail) + cut)
        given_up = tail.count(b"\n", cut)
        self.lines -= given_up
        self.not_written += given_up
        self._mend = b""
        return True

    def close(self) -> None:
        """Let the file go, in this process only (a forked child closes its copy, the parent goes on)."""
        self._waiting = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# How a process ended, added by its parent: one that dies cannot write that --------------------------


def note_end(path: Path, end: Exit | Stopped | Switched) -> None:
    """Add how it ended, or what its network carried, on a line of its own even if the last was cut off."""
    with path.open("a+b") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
        cut_off = stream.read(1) not in (b"", b"\n")
        stream.write((b"\n" if cut_off else b"") + msgspec.json.encode(end) + b"\n")


def file_of_rank(folder: Path, rank: int) -> Path | None:
    """Return the file of a cluster's rank; None if it died before it could write a header."""
    return next((path for path, header in headers(folder) if header.rank == rank), None)


def headers(folder: Path) -> Iterator[tuple[Path, Header]]:
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as stream:
            first = stream.readline(MAX_LINE_BYTES)
        with suppress(msgspec.MsgspecError):  # No trace file; `Trace.load` will say so.
            yield path, msgspec.json.decode(first, type=Header)
