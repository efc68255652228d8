"""What the ranks print: shown live, a line at a time, tagged by rank, and kept."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from dlearn.events.agent_log import PIPE_BYTES, Filter

MOST_BYTES = 32 << 20
"""As much of what a rank prints is kept: a print in an endless loop must not take the notebook's memory."""
LONGEST_LINE = 1 << 20


class Printed:
    """The text that one rank has printed: beyond `MOST_BYTES` its first half and its last."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) >= 2 * MOST_BYTES:
            self._leave_out()

    def _leave_out(self) -> None:
        over, half = max(0, len(self._kept) - MOST_BYTES), MOST_BYTES // 2
        del self._kept[half : half + over]
        self._left_out += over

    @property
    def text(self) -> str:
        self._leave_out()
        if not self._left_out:
            return _text(self._kept)
        half = MOST_BYTES // 2
        left_out = f"\n... {self._left_out:,} bytes of output left out ...\n"
        return _text(self._kept[:half]) + left_out + _text(self._kept[half:])


class OutputStreams:
    """The ranks' pipes: `read` shows and keeps what comes, but for the logs of their RPC agents."""

    def __init__(self, tags: Sequence[str], logs: Sequence[Path | None] = ()) -> None:
        width = max(map(len, tags), default=0)
        self._tags = [f"[{tag}]".ljust(width + 3) for tag in tags]
        self._kept = [Printed() for _ in tags]
        self._unfinished = [bytearray() for _ in tags]
        self._to_show: list[str] = []
        self._paths = list(logs) or [None] * len(tags)
        self._logs: dict[int, BinaryIO] = {}
        self._lost: Counter[str] = Counter()
        """Lines of the logs that could not be written, by the system's reason."""
        self._sieves = [Filter() if path is not None else None for path in self._paths]

    def read(self, index: int, pipe: Connection) -> bool:
        """Take what is there now. Return False at the end of the stream."""
        sieve = self._sieves[index]
        try:
            data = sieve.read(pipe.fileno()) if sieve is not None else os.read(pipe.fileno(), PIPE_BYTES)
        except OSError:
            data = b""
        if not data:
            return False
        self._take(index, sieve.feed(data) if sieve is not None else data)
        if sieve is not None and (lines := sieve.take_lines()):
            self._keep(index, lines)
        return True

    def found_empty(self, index: int, at_ns: int) -> None:
        sieve = self._sieves[index]
        if sieve is not None:
            sieve.found_empty(at_ns)

    def _keep(self, index: int, lines: bytes) -> None:
        path = self._paths[index]
        try:
            if index not in self._logs and path is not None:
                self._logs[index] = path.open("ab", buffering=0)
            self._logs[index].write(lines)
        except OSError as error:  # A full disk is no business of the ranks.
            self._lost[error.strerror or str(error)] += lines.count(b"\n") - 1  # The first is the stamp.

    def _take(self, index: int, data: bytes) -> None:
        self._kept[index].add(data)
        first, *others = data.split(b"\n")
        unfinished = self._unfinished[index]
        unfinished += first
        for other in others:
            self._finish_line(index)
            unfinished += other
        if len(unfinished) > LONGEST_LINE:
            self._finish_line(index)

    def _finish_line(self, index: int) -> None:
        self._to_show.append(self._tags[index] + _text(self._unfinished[index]))
        self._unfinished[index].clear()

    def show(self) -> None:
        """Print the whole lines that came since the last time, in one go."""
        if self._to_show:
            text = "\n".join(self._to_show)
            self._to_show.clear()
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), flush=True)

    @property
    def logging(self) -> bool:
        return bool(self._logs)

    @property
    def waiting(self) -> bool:
        return bool(self._to_show)

    def finish(self) -> None:
        """Show what is left without a line's end, and close the logs."""
        for index, sieve in enumerate(self._sieves):
            if sieve is not None:
                self._take(index, sieve.rest())
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        for reason, lines in self._lost.items():
            print(f"dlearn: {lines:,} lines of the RPC agents' logs could not be written: {reason}", file=sys.stderr)
        for index, rest in enumerate(self._unfinished):
            if rest:
                self._finish_line(index)
        self.show()

    def text(self, index: int) -> str:
        return self._kept[index].text

    def last_line(self, index: int) -> str:
        lines = [line.strip() for line in self.text(index).splitlines()]
        return next((line for line in reversed(lines) if line), "")


def _text(data: bytes | bytearray) -> str:
    return data.decode(errors="replace")
