"""What the ranks print: shown live, a line at a time, tagged by rank, and kept."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from dlearn.events.agent_log import PIPE_BYTES, Filter
from dlearn.notices import notice

MOST_BYTES = 32 << 20  # Kept of each rank: an endless print must not take all memory.
LONGEST_LINE = 1 << 20


class RankOutput:
    """What a rank printed, at most both ends. Whole lines go to `lines`, its agent's to `log`."""

    def __init__(self, tag: str, log: Path | None, lines: list[str]) -> None:
        self._tag, self._lines = tag, lines
        self._kept, self._unfinished, self._left_out = bytearray(), bytearray(), 0
        self._filter = Filter() if log is not None else None
        self._path = log
        self.log: BinaryIO | None = None
        self.lost = Counter[str]() if self._filter is None else self._filter.lost

    def read(self, pipe: Connection) -> bool:
        """Take what is in the pipe now. Return False at the end of the stream."""
        log = self._filter
        try:
            data = os.read(pipe.fileno(), PIPE_BYTES) if log is None else log.read(pipe.fileno())
        except OSError:
            data = b""
        if not data:
            return False
        self._add(data if log is None else log.feed(data))
        if log is not None:
            log.keep_lines(self._write)
        return True

    def found_empty(self, at_ns: int) -> None:
        if self._filter is not None:
            self._filter.found_empty(at_ns)

    def _write(self, lines: bytes) -> None:
        assert self._path is not None
        self.log = self.log or self._path.open("ab", buffering=0)
        self.log.write(lines)

    def _add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) >= 2 * MOST_BYTES:
            self._leave_out()
        first, *others = data.split(b"\n")
        self._unfinished += first
        for line in others:
            self._finish_line()
            self._unfinished += line
        if len(self._unfinished) > LONGEST_LINE:
            self._finish_line()

    def _finish_line(self) -> None:
        self._lines.append(self._tag + _text(self._unfinished))
        self._unfinished.clear()

    def _leave_out(self) -> None:
        over, half = max(0, len(self._kept) - MOST_BYTES), MOST_BYTES // 2
        del self._kept[half : half + over]
        self._left_out += over

    def finish(self) -> None:
        """Take what is left without a line's end, and close the log."""
        if self._filter is not None:
            self._add(self._filter.rest())
        if self._unfinished:
            self._finish_line()
        if self.log is not None:
            self.log.close()
            self.log = None

    @property
    def text(self) -> str:
        self._leave_out()
        if not self._left_out:
            return _text(self._kept)
        half = MOST_BYTES // 2
        left_out = f"\n... {self._left_out:,} bytes of output left out ...\n"
        return _text(self._kept[:half]) + left_out + _text(self._kept[half:])

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.text.splitlines()]
        return next(filter(None, reversed(lines)), "")


class OutputStreams:
    """The output of all ranks. `show` prints the whole lines that have come."""

    def __init__(self, tags: Sequence[str], logs: Sequence[Path | None]) -> None:
        width = max(map(len, tags), default=0) + 3
        self.lines: list[str] = []  # What is still to be shown.
        self.ranks: list[RankOutput] = []
        for tag, log in zip(tags, logs, strict=True):
            self.ranks.append(RankOutput(f"[{tag}]".ljust(width), log, self.lines))

    def show(self) -> None:
        if self.lines:
            text = "\n".join(self.lines)
            self.lines.clear()
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def finish(self) -> None:
        """Show what is left, close the logs, and say on stderr what of them could not be written."""
        lost: Counter[str] = Counter()
        for rank in self.ranks:
            rank.finish()
            lost += rank.lost
        for reason, lines in lost.items():
            notice(f"{lines:,} lines of the RPC agents' logs could not be written: {reason}")
        self.show()


def _text(data: bytes | bytearray) -> str:
    return data.decode(errors="replace")
