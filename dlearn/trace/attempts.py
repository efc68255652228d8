"""Which files belong together: those of one job, and of its attempts, if it was restarted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlearn.errors import TraceError
from dlearn.trace.store import ProcessFile, printable


def refuse_two_jobs(path: Path, files: Sequence[ProcessFile]) -> None:
    """TraceError if these are not all of one job. Processes that have met are of one job, whatever they began as.

    Those of which that is not known (`strangers`) are let pass.
    """
    jobs = _connected([file for file in files if _jobs(file)], _jobs)
    if len(jobs) > 1:
        a, b = jobs[0][0], jobs[1][0]
        raise TraceError(
            printable(
                f"{path} holds the files of {len(jobs)} jobs: {a.path.name} is of {a.header.job[:40]!r},"
                f" {b.path.name} of {b.header.job[:40]!r}."
            )
            + " Move each job's files into a folder of its own."
        )


def strangers(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Those of which nobody knows whether they are of the job of the others."""
    return [file for file in files if not _jobs(file)] if len(files) > 1 else []


def _jobs(file: ProcessFile) -> set[Any]:
    """All names that the process knows of its job."""
    named = {("name", file.header.job)} if file.header.job else set()
    return named | {("met", name) for name in file.joined}


def attempts(files: Sequence[ProcessFile]) -> list[list[ProcessFile]]:
    """The files of each attempt to do the job, in order: torchrun restarts all processes when one of them fails.

    Processes that met, in a default group or by RPC, are of one attempt. Those that met nobody are of the attempt with
    their number of restarts, else of the last that had begun before them.
    """
    met = _connected([file for file in sorted(files, key=_start) if file.joined], _meetings)
    if len(met) < 2:
        restarts = sorted({file.header.restart for file in files})
        return [[file for file in files if file.header.restart == number] for number in restarts]
    found = [list(group) for group in met]
    for file in files:
        if not file.joined:
            same = [place for place, group in enumerate(met) if _same_restart(group[0], file)]
            before = [place for place, group in enumerate(met) if _start(group[0]) <= _start(file)]
            found[(same or before or [0])[-1]].append(file)
    return found


def _meetings(file: ProcessFile) -> set[tuple[str, int]]:
    """Where it met others. torchrun's own store outlives a restart, and so does the name that stands in it."""
    return {(name, file.header.restart) for name in file.joined}


def _connected(files: Sequence[ProcessFile], names: Callable[[ProcessFile], set[Any]]) -> list[list[ProcessFile]]:
    """Files that have a name in common, or each one with a third; the first file's group first."""
    leader: dict[Any, Any] = {}

    def leader_of(name: Any) -> Any:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    for file in files:
        first, *others = names(file)
        for other in others:
            leader[leader_of(other)] = leader_of(first)
    groups: dict[Any, list[ProcessFile]] = {}
    for file in files:
        groups.setdefault(leader_of(next(iter(names(file)))), []).append(file)
    return list(groups.values())


def _same_restart(one: ProcessFile, other: ProcessFile) -> bool:
    return bool(one.header.restart) and one.header.restart == other.header.restart


def _start(file: ProcessFile) -> int:
    return file.header.start_ns


def without_replaced(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Less those of programs that recorded nothing and then put another in their own place (`exec`)."""
    later = {(file.header.host, file.header.pid): file for file in sorted(files, key=_start)}
    return [
        file for file in files if file.event_count or file.footer or later[file.header.host, file.header.pid] is file
    ]


def without_copies(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Each process once, its longest file: folders of several hosts may hold copies of the same."""
    found: dict[tuple[str, str], ProcessFile] = {}
    for file in files:
        key = (file.header.job, file.path.name)
        if key not in found or file.event_count > found[key].event_count:
            found[key] = file
    return list(found.values())
