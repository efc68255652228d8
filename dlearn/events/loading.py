"""The files of a job, read: every process's events in one table, on one clock, with what is missing or damaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from dlearn.errors import TraceError
from dlearn.events import readers
from dlearn.events.attempts import attempts, refuse_two_jobs, unidentified_files, without_replaced
from dlearn.events.clocks import Clock, align, clock_name
from dlearn.events.device_times import device_spans
from dlearn.events.event_table import EventTable, joined
from dlearn.events.group_names import agree_on_names
from dlearn.events.printable import printable
from dlearn.events.process import Process
from dlearn.events.store import ProcessFile, Recorded, left_out, read

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class JobFiles:
    """One attempt of a job as its files tell it. `problems` says in words what is damaged or missing."""

    path: Path
    processes: tuple[Process, ...]
    events: EventTable
    clocks: int
    problems: list[str]


def load_job(paths: Sequence[Path], attempt: int | None) -> JobFiles:
    """Read the files in these folders; of a job that was restarted the last attempt, or the one with this number."""
    path = paths[0]
    files, problems = _read_any(paths)
    problems += readers.notes([file.imported for file in files if file.imported is not None])
    refuse_two_jobs(path, files)
    for file in unidentified_files(files):
        problems.append(f"{file.path.name}: whether this process is of the job is not known: it met no other")
    files = _choose(attempts(files), attempt, problems)
    problems += [problem for file in files for problem in file.problems]
    world = _world_size(files)
    clocks = align(files)
    processes, events = _assign_ranks(files, world, problems, clocks)
    problems += _missing_processes(path, files, processes, world)
    problems += left_out(files)
    return JobFiles(path, processes, events, len(clocks), problems)


def first_names(names: Sequence[str]) -> str:
    """Return the first of these names, and dots if there are more."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def _read_any(paths: Sequence[Path]) -> tuple[list[ProcessFile], list[str]]:
    """Our own files there, with NCCL's log beside them, or what another tool's files hold."""
    if readers.is_own(paths):
        logs = [path for path in paths if path.suffix != ".jsonl" and os.path.isfile(path)]
        files, problems = _read_all([path for path in paths if path not in logs])
        return files, problems + (readers.beside(logs, files) if logs else [])
    with readers.room() as folder:
        not_told = readers.translate(paths, Path(folder))
        files, problems = _read_all([folder])
    return files, problems + not_told


def _read_all(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[ProcessFile], list[str]]:
    """Every file in them that holds a line, and which hold none."""
    files: list[ProcessFile] = []
    problems: list[str] = []
    for path in dict.fromkeys(map(Path, folders)):
        try:
            if not path.is_dir():
                raise TraceError(printable(f"{path} is no folder. A trace is one, with a .jsonl file per process."))
            # Not `glob`, which finds nothing in a folder that may not be read.
            for name in sorted(each for each in path.iterdir() if each.match("*.jsonl")):
                if name.is_file() and name.stat().st_size == 0:
                    problems.append(f"{name.name} is empty: its process died before it could write")
                else:
                    files.append(read(name))
        except OSError as error:
            raise TraceError(printable(f"{path}: cannot be read: {error.strerror}")) from None
    if not files:
        where = ", ".join(str(folder) for folder in folders)
        raise TraceError(printable(f"{where} holds no trace: there is no .jsonl file with a line in it."))
    # Folders of several hosts may hold copies of the same file: the longest counts.
    by_length = sorted(files, key=lambda file: file.event_count)
    kept = {(file.header.job, file.path.name): id(file) for file in by_length}
    return without_replaced([file for file in files if id(file) in kept.values()]), problems


def _choose(found: list[list[ProcessFile]], attempt: int | None, problems: list[str]) -> list[ProcessFile]:
    """The files of this attempt, by default of the last."""
    if attempt is not None and not 0 <= attempt < len(found):
        raise TraceError(f"there is no attempt {attempt} in this trace; it has {len(found)}, from 0.")
    number = len(found) - 1 if attempt is None else attempt
    if len(found) > 1:
        problems.append(
            f"the job began {len(found)} times (it was restarted, or its script runs one job after the other):"
            f" this is attempt {number}; Trace.load(..., attempt=...) gives the others, from 0"
        )
    return found[number]


def _world_size(files: list[ProcessFile]) -> int:
    """How many processes the headers or the default groups promise; 0 where they promise nothing."""
    sizes = [file.header.world_size or 0 for file in files]
    sizes += [group.size for file in files for group in file.groups.values() if group.default]
    return max(sizes)


def _assign_ranks(
    files: list[ProcessFile], world: int, problems: list[str], clocks: dict[str, Clock]
) -> tuple[tuple[Process, ...], EventTable]:
    """Give each process its rank: the cluster's or launcher's (recorder/), else the default group's, else the
    next number that nobody can have."""
    taken: dict[int, ProcessFile] = {}
    strays: list[ProcessFile] = []
    for file in files:
        rank = _own_rank(file)
        if rank is None or rank in taken:
            if rank is not None:
                other = taken[rank].path.name
                problems.append(f"{file.path.name}: says that it is rank {rank}, as {other} does")
            strays.append(file)
        else:
            taken[rank] = file
    workers = {rank: file.worker.name for rank, file in taken.items() if file.worker is not None}
    labels = {rank: file.header.name or workers.get(rank) or f"rank {rank}" for rank, file in taken.items()}
    for file in strays:
        rank = max(world - 1, *taken) + 1 if taken else world
        taken[rank] = file
        labels[rank] = f"{file.header.host}-{file.header.pid}"
    # Of events that start at the same moment, the lower rank's and number's stay first.
    table = joined([table for rank, file in sorted(taken.items()) for table in file.tables(rank)])
    processes = tuple(
        Process(
            rank=rank,
            label=labels[rank],
            clock=clocks[clock_name(file)],
            device_spans=device_spans(file.device_times, file.device_clocks, clocks[clock_name(file)].to_reference),
            **{fact.name: getattr(file, fact.name) for fact in fields(Recorded)},
        )
        for rank, file in sorted(taken.items())
    )
    agree_on_names(processes, table.firsts)
    return processes, table


def _own_rank(file: ProcessFile) -> int | None:
    if file.header.rank is not None:
        return file.header.rank
    default = next((group.rank for group in file.groups.values() if group.default), None)
    return default if default is not None or file.worker is None else file.worker.id


def _missing_processes(path: Path, files: list[ProcessFile], processes: tuple[Process, ...], world: int) -> list[str]:
    """The ranks of which no file is here, in a sentence, and where their files are as far as the others know."""
    here = {process.rank for process in processes if process.rank < world}
    # As many as the sentence could ever name: a damaged header may promise any number of processes.
    absent = [rank for rank in range(min(world, len(here) + _NAMES_SHOWN + 1)) if rank not in here]
    if not absent:
        return []
    named = first_names([str(rank) for rank in absent])
    who = f"those of ranks {named} are" if len(absent) > 1 else f"that of rank {named} is"
    found = f"{len(here)} of {world:,} processes left a file in {path}: {who} missing"
    peers = {rank: peer for file in files for rank, peer in file.peers.items() if rank in absent}
    places = [f"rank {rank}'s is {peer.path} on host {peer.host}" for rank, peer in sorted(peers.items())]
    hint = f"{'; '.join(places)}: copy it here" if places else "if it ran on another host, copy its file here"
    return [f"{found} ({hint})"]
