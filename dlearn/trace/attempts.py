"""Which files belong together: those of one job, and of its attempts, if it was restarted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlearn.errors import TraceError
from dlearn.trace.store import ProcessFile, printable


def refuse_two_jobs(path: Path, files: Sequence[ProcessFile]) -> None:
    """TraceError if these are not all of one job. Processes that have met are of one job, whatever they began as."""
    leads_to: dict[str, str] = {}

    def last(name: str) -> str:
        while (after := leads_to.setdefault(name, name)) != name:
            leads_to[name] = leads_to[after]  # The way is half as long next time.
            name = after
        return name

    for file in files:
        if file.joined:
            leads_to[last(_MET + file.joined)] = last(_HEADER + file.header.job)
    jobs: dict[str, ProcessFile] = {}
    for file in files:
        jobs.setdefault(last(_HEADER + file.header.job), file)
    if len(jobs) > 1:
        a, b = list(jobs.values())[:2]
        raise TraceError(
            printable(
                f"{path} holds the files of {len(jobs)} jobs: {a.path.name} is of {a.header.job[:40]!r},"
                f" {b.path.name} of {b.header.job[:40]!r}."
            )
            + " Move each job's files into a folder of its own."
        )


_HEADER, _MET = "header ", "met "


def attempts(files: Sequence[ProcessFile]) -> list[list[ProcessFile]]:
    """The files of each attempt to do the job, in order: torchrun restarts all processes when one of them fails.

    Processes that met in one default group are of one attempt. Those that met nobody are of the attempt with their
    number of restarts, else of the last that had begun before them.
    """
    met = dict.fromkeys(_meeting(file) for file in sorted(files, key=_start) if file.joined)
    if len(met) < 2:
        restarts = sorted({file.header.restart for file in files})
        return [[file for file in files if file.header.restart == number] for number in restarts]
    found: dict[tuple[str, int], list[ProcessFile]] = {meeting: [] for meeting in met}
    for file in files:
        if file.joined:
            found[_meeting(file)].append(file)
    began = {meeting: min(map(_start, group)) for meeting, group in found.items()}
    for file in files:
        if not file.joined:
            same = [each for each in met if file.header.restart and each[1] == file.header.restart]
            before = [each for each in met if began[each] <= _start(file)]
            found[(same or before or list(met))[-1]].append(file)
    return list(found.values())


def _meeting(file: ProcessFile) -> tuple[str, int]:
    """The default group that the process was in. torchrun's own store outlives a restart, and so does its name."""
    return file.joined, file.header.restart


def _start(file: ProcessFile) -> int:
    return file.header.start_ns


def without_replaced(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Less those of programs that recorded nothing and then put another in their own place (`exec`)."""
    later = {(file.header.host, file.header.pid): file for file in sorted(files, key=_start)}
    return [file for file in files if file.events or file.footer or later[file.header.host, file.header.pid] is file]


def without_copies(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Each process once, its longest file: folders of several hosts may hold copies of the same."""
    found: dict[tuple[str, str], ProcessFile] = {}
    for file in files:
        key = (file.header.job, file.path.name)
        if key not in found or len(file.events) > len(found[key].events):
            found[key] = file
    return list(found.values())
