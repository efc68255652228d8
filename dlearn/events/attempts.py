"""Which files belong together: those of one job, and of its attempts, if it was restarted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dlearn.errors import TraceError
from dlearn.events.printable import printable
from dlearn.events.store import ProcessFile


def refuse_two_jobs(path: Path, files: Sequence[ProcessFile]) -> None:
    """Raise TraceError unless all are of one job, as those are that have met."""
    jobs = _connected(files, _jobs)
    if len(jobs) > 1:
        a, b = jobs[0][0], jobs[1][0]
        raise TraceError(
            printable(
                f"{path} holds the files of {len(jobs)} jobs: {a.path.name} is of {a.header.job[:40]!r},"
                f" {b.path.name} of {b.header.job[:40]!r}."
            )
            + " Move each job's files into a folder of its own."
        )


def unidentified_files(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Those of which it is not known whether they are of the job of the others."""
    return [file for file in files if not _jobs(file)] if len(files) > 1 else []


def _jobs(file: ProcessFile) -> set[str]:
    """All names that the process knows of its job."""
    met = {f"met {name}" for name in file.joined}
    return met | {f"job {file.header.job}"} if file.header.job else met


def attempts(files: Sequence[ProcessFile]) -> list[list[ProcessFile]]:
    """The files of each attempt to do the job, in order: torchrun restarts all processes when one of them fails.

    Without restarts, processes that met, in a default group or by RPC, are of one attempt. Those that met none are of
    the last that had begun before them.
    """
    restarts = sorted({file.header.restart for file in files})
    if len(restarts) > 1:
        return [[file for file in files if file.header.restart == number] for number in restarts]
    found = _connected(sorted(files, key=_start), lambda file: file.joined) or [[]]
    began = [_start(met[0]) for met in found if met]
    for file in files:
        if not file.joined:
            before = sum(start <= _start(file) for start in began)
            found[max(0, before - 1)].append(file)
    return found


def _connected(files: Sequence[ProcessFile], names: Callable[[ProcessFile], set[str]]) -> list[list[ProcessFile]]:
    """Files that have a name in common, or each one with a third; those without a name are in none."""
    groups: list[tuple[set[str], list[ProcessFile]]] = []
    for file in files:
        mine = names(file)
        same = [group for group in groups if not mine.isdisjoint(group[0])]
        if not same and mine:
            groups.append((set(mine), [file]))
        for known, members in same[:1]:
            known |= mine
            members.append(file)
            for other in same[1:]:
                known |= other[0]
                members += other[1]
                groups.remove(other)
    return [members for _, members in groups]


def without_replaced(files: Sequence[ProcessFile]) -> list[ProcessFile]:
    """Less those of programs that recorded nothing and then put another in their own place (`exec`)."""
    last = {(file.header.host, file.header.pid): file for file in sorted(files, key=_start)}
    nothing = [file for file in files if not (file.event_count or file.footer or file.imported)]
    replaced = [file for file in nothing if last[file.header.host, file.header.pid] is not file]
    return [file for file in files if file not in replaced]


def _start(file: ProcessFile) -> int:
    return file.header.start_ns
