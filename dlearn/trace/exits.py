"""How a process ended: added to its file by whoever started it, because a process that dies cannot write that."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dlearn.trace.event import Header
from dlearn.trace.job_facts import Exit, Stopped


def note_end(path: Path, end: Exit | Stopped) -> None:
    """Add how it ended, on a line of its own even if the last was cut off."""
    with path.open("a+b") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
        cut_off = stream.read(1) not in (b"", b"\n")
        stream.write((b"\n" if cut_off else b"") + msgspec.json.encode(end) + b"\n")


def file_of_rank(folder: Path, rank: int) -> Path | None:
    """The file of a cluster's rank, by its first line; None if it died before it could write that."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as stream:
            try:
                header = msgspec.json.decode(stream.readline(), type=Header)
            except msgspec.MsgspecError:
                continue
        if header.rank == rank:
            return path
    return None
