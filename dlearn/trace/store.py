"""One file per process, one JSON line per event: append, read back, check.

A line is written with a single `os.write` on a file opened for appending, so it is whole in the file the moment the
call returns, whatever kills the process next. Nothing is buffered, nothing locked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dlearn.errors import TraceError
from dlearn.trace.event import FORMAT, AnyLine, End, Event, Footer, GroupFact, Header, Line

MAX_LINE_BYTES = 1 << 20
"""A longer line is damage: the longest real one (a bucket of thousands of parameters) stays far below."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode
_decode_header = msgspec.json.Decoder(Header).decode


class Writer:
    """Appends lines to a new file; refuses one that exists. Counts what `max_bytes` kept out."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd: int | None = os.open(path, flags, 0o644)
        except FileExistsError:
            raise TraceError(
                f"{path} exists already: this process is being recorded there, or was. Give another folder."
            ) from None
        self.path = path
        self.lines = 0
        self.not_written = 0
        self._room = max_bytes

    def write(self, line: Line) -> None:
        if self._fd is None:
            return
        data = _encode(line) + b"\n"
        # The footer always fits: it is the line that says how much did not.
        if len(data) > self._room and not isinstance(line, Footer):
            self.not_written += 1
            return
        self._room -= len(data)
        try:
            os.write(self._fd, data)
        except OSError:
            self.not_written += 1
            raise
        self.lines += 1

    def close(self) -> None:
        """Let the file go, in this process only (a forked child closes its copy, the parent goes on)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass
class ProcessFile:
    """What one file holds. `problems` names every line that could not be used."""

    path: Path
    header: Header
    events: dict[int, Event] = field(default_factory=dict)
    groups: dict[str, GroupFact] = field(default_factory=dict)
    footer: Footer | None = None
    problems: list[str] = field(default_factory=list)


def read(path: Path) -> ProcessFile:
    """Read one process's file. A damaged line is left out and named; an unreadable header is a TraceError."""
    lines = _lines(path)
    file = ProcessFile(path, _read_header(path, next(lines, (1, b""))[1]))
    damaged: list[str] = []
    for number, line in lines:
        if line is None:
            damaged.append(f"line {number} is longer than {MAX_LINE_BYTES:,} bytes")
        elif not line.endswith(b"\n"):
            damaged.append(f"line {number}, the last, is cut off")
        else:
            try:
                _take(file, _decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
                damaged.append(f"line {number}: {str(error)[:120]}")
    if damaged:
        count = f"{len(damaged)} damaged lines were" if len(damaged) > 1 else "one damaged line was"
        file.problems.append(f"{path.name}: {count} left out ({'; '.join(damaged[:3])})")
    if file.footer and file.footer.not_written:
        file.problems.append(
            f"{path.name}: {file.footer.not_written:,} lines were not written (size limit or full disk)"
        )
    if file.footer and file.footer.hook_errors:
        file.problems.append(
            f"{path.name}: {file.footer.hook_errors:,} calls could not be recorded (see stderr of the run)"
        )
    return file


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number and bytes of each line; None stands for a line that is too long to be one of ours."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES)
                    yield number, None
                else:
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(path: Path, line: bytes | None) -> Header:
    if not line:
        raise TraceError(f"{path}, line 1: the file is empty or no trace; expected a header line")
    try:
        header = _decode_header(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}, line 1: no trace header: {str(error)[:120]}") from None
    if header.format != FORMAT:
        raise TraceError(
            f"{path}, line 1: trace format {header.format}; this dlearn reads format {FORMAT}."
            f" The file was written by dlearn {header.dlearn[:20]}: use that version."
        )
    return header


def _take(file: ProcessFile, line: AnyLine) -> None:
    """Put one line where it belongs. Raises ValueError if it contradicts the lines before it."""
    match line:
        case Header():
            raise ValueError("a second header")
        case Footer():
            file.footer = line
        case GroupFact():
            if line.rank >= line.size or len(line.ranks) not in (0, line.size):
                raise ValueError(f"group {line.name[:40]!r} contradicts itself")
            file.groups[line.name] = line
        case End():
            _end(file, line)
        case _:
            if line.number in file.events:
                raise ValueError(f"event {line.number} a second time")
            file.events[line.number] = line


def _end(file: ProcessFile, end: End) -> None:
    event = file.events.get(end.event)
    if event is None:
        raise ValueError(f"the end of event {end.event}, which is not in the file")
    if end.at_ns is not None and end.at_ns < event.start_ns:
        raise ValueError(f"event {end.event} ends before it starts")
    # Events are frozen for everybody else; only here, while they are being read, they are still being made.
    msgspec.structs.force_setattr(event, "end_ns", end.at_ns)
    msgspec.structs.force_setattr(event, "ended_by", end.by)
    msgspec.structs.force_setattr(event, "error", end.error)
    if end.peer is not None and hasattr(event, "peer"):
        msgspec.structs.force_setattr(event, "peer", end.peer)
