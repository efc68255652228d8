"""Which trace a command reads, and which part of it."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dlearn.errors import TraceError, WrongArguments
from dlearn.events.loading import NAMES_SHOWN
from dlearn.notices import notice
from dlearn.scripts.sentence_parser import SentenceParser
from dlearn.shown import Table, first_few, size_text
from dlearn.trace import Trace

RUNS = Path("traces")
"""Where `dlearn run` writes, in a folder for each run."""
_TAIL_BYTES = 1024  # A footer, and the lines that others add behind it.


def selection_options() -> SentenceParser:
    """Return the options of each command that reads a trace, as a parent of its parser."""
    options = SentenceParser(add_help=False)
    text = "Several choose what belongs to all. An operation is kept whole, with its other ranks."
    part = options.add_argument_group("a part of the trace", text)
    last = "of a job that was restarted; from 0 (default: the last)"
    part.add_argument("--attempt", metavar="N", type=int, help=last)
    part.add_argument("--step", metavar="N", type=int, help="one training step, by its number")
    part.add_argument("--within", metavar="SPAN", help='a span of the program, as "step 3"')
    several = "a rank's number or name; several times for several"
    part.add_argument("--rank", metavar="R", action="append", type=_rank, help=several)
    part.add_argument("--op", help="as all_reduce")
    part.add_argument("--phase", help="forward, backward, optimizer, ...")
    part.add_argument("--dimension", metavar="D", help="of a mesh, as shard")
    window = "what began from A to B, in ms from the first event; also A: or :B"
    part.add_argument("--between", metavar="A:B", type=_window, help=window)
    return options


def _rank(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _window(text: str) -> tuple[float, float | None]:
    start, colon, end = text.partition(":")
    with suppress(ValueError):
        if colon and (start or end):
            return float(start or 0), float(end) if end else None
    raise argparse.ArgumentTypeError(f"two times in ms, as 100:200, 100: or :200, not {text!r}")


def load(options: argparse.Namespace, path: Path | None = None, *, quietly: bool = False) -> Trace:
    """Load the trace that was asked for, or at `path`; choose the part, and tell what is damaged."""
    folders = [path] if path else options.trace or [_newest()]
    try:
        trace = Trace.load(*folders, attempt=options.attempt)
    except TraceError:
        if len(folders) == 1 and (runs := runs_in(Path(folders[0]))):
            raise HoldsTraces(Path(folders[0]), runs) from None
        raise
    for problem in () if quietly else trace.problems:
        notice(problem, alone=True)
    try:
        for name, (choose, present) in _PARTS.items():
            if (value := getattr(options, name)) is not None:
                part = choose(trace, value)
                if not part.events:
                    there_is = first_few(present(trace), NAMES_SHOWN) or "nothing"
                    raise TraceError(f"--{name} leaves nothing; there is: {there_is}")
                trace = part
    except TraceError as error:
        where = f"{path}: " if path else ""
        hint = ". --step N chooses a step; dlearn run --steps A:B makes a span of each"
        hint *= bool(options.within) and not any(name.startswith("step ") for name in trace.spans)
        raise WrongArguments(f"{where}{error}{hint}") from None
    return trace


def _ranks(trace: Trace) -> list[str]:
    return [trace.label(rank) for rank in np.unique(trace.table.rank[trace.rows.rows]).tolist()]


def _ops(trace: Trace) -> list[str]:
    return sorted({getattr(first, "op", "") for first in trace.rows.firsts()} - {""})


def _times(trace: Trace) -> list[str]:
    begins_ms = (trace.begins_ns[trace.rows.rows] - trace.first_ns) / 1e6
    return [f"what began from {max(0, begins_ms.min()):.1f} to {begins_ms.max():.1f} ms"]


_PARTS: dict[str, tuple[Callable[[Trace, Any], Trace], Callable[[Trace], Sequence[str]]]] = {
    "step": (Trace.step, _ops),
    "within": (Trace.within, lambda trace: trace.spans),
    "rank": (lambda trace, ranks: trace.where(rank=ranks), _ranks),
    "op": (lambda trace, op: trace.where(op=op), _ops),
    "phase": (lambda trace, phase: trace.where(phase=phase), lambda trace: trace.phases),
    "dimension": (lambda trace, name: trace.where(dimension=name), _ops),
    "between": (lambda trace, window: trace.between(*window), _times),
}
"""Of each option how it selects, and what there is to select: spans before their parts."""


class HoldsTraces(WrongArguments):
    """A folder is no trace, and holds traces: its `table` has a line for each."""

    def __init__(self, folder: Path, runs: list[Path]) -> None:
        self.table = _table(runs)
        super().__init__(f"{folder} is no trace, and holds some. Give one of them:\n{self.table}")


# Folders ------------------------------------------------------------------------------------------


def _newest() -> Path:
    """Return the trace of the last run below this folder, and name it on stderr."""
    runs = runs_in(RUNS)
    if not runs:
        what = f"no trace was given, and {RUNS}/, where dlearn run writes, holds none here"
        raise WrongArguments(f"{what}. Give a trace's folder, or record one: dlearn run script.py.")
    which = f"{runs[0]}, the newest in {RUNS}/"
    if len(runs) > 1 and not all(map(_ended_well, _files(runs[0]))):
        which += f", which did not end well; the one before: {runs[1]}"
    notice(which, alone=True)
    return runs[0]


def runs_in(folder: Path) -> list[Path]:
    """Return the traces in a folder that is none itself, the newest first."""
    if not os.access(folder, os.R_OK | os.X_OK) or not folder.is_dir() or _files(folder):
        return []
    return sorted(filter(_files, folder.iterdir()), key=_written, reverse=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.jsonl") if path.is_file()]


def _written(folder: Path) -> float:
    return max(path.stat().st_mtime for path in _files(folder))


def _table(runs: list[Path]) -> str:
    rows = [["trace", "written", "processes", "ended well", "size"]]
    for run in runs:
        files = _files(run)
        well = sum(map(_ended_well, files))
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_written(run)))
        size = size_text(sum(path.stat().st_size for path in files))
        ended = "all" if well == len(files) else f"{well:,}"
        rows.append([str(run), when, f"{len(files):,}", ended, size])
    return "\n".join(Table(rows, names=2).lines())


def _ended_well(path: Path) -> bool:
    """Return whether the last lines of a process's file are a footer, and no exit status but 0."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = stream.read()
    exits = tail.count(b'"kind":"exit"')
    return b'"kind":"footer"' in tail and exits == tail.count(b'"kind":"exit","status":0}')
