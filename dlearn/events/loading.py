"""The files of a job, read: every process's events in one table, on one clock, and all problems."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from dlearn.errors import TraceError
from dlearn.events import readers
from dlearn.events.clocks import SAME, line_through
from dlearn.events.event import Collective, Event, Line, PointToPoint
from dlearn.events.event_table import EventTable, joined
from dlearn.events.job_facts import ClockReading
from dlearn.events.printable import printable
from dlearn.events.process import Process
from dlearn.events.store import ProcessFile, left_out, read
from dlearn.shown import first_few

NAMES_SHOWN = 8
Files = list[ProcessFile]


def load_job(
    paths: Sequence[Path], attempt: int | None
) -> tuple[tuple[Process, ...], EventTable, list[str]]:  # fmt: skip
    """Read a job's files, of a restarted one this attempt or the last; and say what is damaged."""
    path = paths[0]
    files, problems = _read_any(paths)
    problems += readers.notes([file.imported for file in files if file.imported is not None])
    _refuse_two_jobs(path, files)
    alone = [file for file in files if len(files) > 1 and not _jobs(file)]
    text = "whether this process is of the job is not known: it met no other"
    problems += [f"{file.path.name}: {text}" for file in alone]
    files = _choose(_attempts(files), attempt, problems)
    for file in files:
        problems += file.problems
    world = _world_size(files)
    _assign_ranks(files, world, problems)
    _align(files)
    by_rank = sorted(files, key=lambda file: file.rank)
    # Of events that start at the same moment, the lower rank's and number's stay first.
    table = joined([table for file in by_rank for table in file.tables()])
    processes = [file.process() for file in by_rank]
    _agree_on_names(processes, table.firsts)
    problems += _missing_processes(path, files, world)
    problems += left_out(files)
    return tuple(processes), table, problems


def _read_any(paths: Sequence[Path]) -> tuple[Files, list[str]]:
    """Read our own files, with NCCL's log beside them, or what another tool's files hold."""
    if readers.is_own(paths):
        logs = [path for path in paths if path.suffix != ".jsonl" and os.path.isfile(path)]
        files, problems = _read_all([path for path in paths if path not in logs])
        return files, problems + (readers.beside(logs, files) if logs else [])
    with readers.room() as folder:
        not_read = readers.translate(paths, Path(folder))
        files, problems = _read_all([Path(folder)])
    return files, problems + not_read


def _read_all(folders: Sequence[Path]) -> tuple[Files, list[str]]:
    """Read every file with a line in it. Return the files, and a sentence for each empty one."""
    files: Files = []
    problems: list[str] = []
    for path in dict.fromkeys(folders):
        try:
            if not path.is_dir():
                text = "is no folder. A trace is one, with a .jsonl file per process."
                if path.is_file():
                    text = f"is the file of one process. Give its folder: {path.parent}"
                raise TraceError(printable(f"{path} {text}"))
            # Not `glob`, which finds nothing in a folder that may not be read.
            for name in sorted(each for each in path.iterdir() if each.match("*.jsonl")):
                if name.is_file() and name.stat().st_size == 0:
                    problems.append(f"{name.name} is empty: its process died before it could write")
                else:
                    files.append(read(name))
        except OSError as error:
            raise TraceError(printable(f"{path}: cannot be read: {error.strerror}")) from None
    if not files:
        where = ", ".join(map(str, folders))
        text = "holds no trace: there is no .jsonl file with a line in it."
        raise TraceError(printable(f"{where} {text}"))
    # Folders of several hosts may hold copies of the same file: the longest counts.
    by_length = sorted(files, key=lambda file: file.event_count)
    kept = {(file.header.job, file.path.name): id(file) for file in by_length}
    return _without_replaced([file for file in files if id(file) in kept.values()]), problems


def _without_replaced(files: Files) -> Files:
    """Leave out programs that recorded nothing before they became another one (`exec`)."""
    last = {(file.header.host, file.header.pid): file for file in sorted(files, key=_start)}
    kept = []
    for file in files:
        has_content = file.event_count or file.footer or file.imported
        if has_content or last[file.header.host, file.header.pid] is file:
            kept.append(file)
    return kept


# The files of one job, and of one attempt -----------------------------------------------------------


def _refuse_two_jobs(path: Path, files: Files) -> None:
    jobs = _connected(files, _jobs)
    if len(jobs) > 1:
        a, b = jobs[0][0], jobs[1][0]
        text = printable(
            f"{path} holds the files of {len(jobs)} jobs: {a.path.name} is of"
            f" {a.header.job[:40]!r}, {b.path.name} of {b.header.job[:40]!r}."
        )
        raise TraceError(f"{text} Move each job's files into a folder of its own.")


def _jobs(file: ProcessFile) -> set[str]:
    """Return all names that the process knows of its job."""
    met = {f"met {name}" for name in file.joined}
    return met | {f"job {file.header.job}"} if file.header.job else met


def _attempts(files: Files) -> list[Files]:
    """Return the files of each attempt, in order: torchrun restarts all when one process fails.

    Without restarts, processes that met are of one attempt, others of the last that began before.
    """
    restarts = sorted({file.header.restart for file in files})
    if len(restarts) > 1:
        return [[file for file in files if file.header.restart == number] for number in restarts]
    attempts = _connected(sorted(files, key=_start), lambda file: file.joined) or [[]]
    began = [_start(met[0]) for met in attempts if met]
    for file in files:
        if not file.joined:
            before = sum(start <= _start(file) for start in began)
            attempts[max(0, before - 1)].append(file)
    return attempts


def _start(file: ProcessFile) -> int:
    return file.header.start_ns


def _connected(files: Files, names: Callable[[ProcessFile], set[str]]) -> list[Files]:
    """Group files that have a name in common, if through others; leave out files without one."""
    groups: list[tuple[set[str], Files]] = []
    for file in files:
        known_names = names(file)
        same = [group for group in groups if not known_names.isdisjoint(group[0])]
        if not same and known_names:
            groups.append((set(known_names), [file]))
        for known, members in same[:1]:
            known |= known_names
            members.append(file)
            for other in same[1:]:
                known |= other[0]
                members += other[1]
                groups.remove(other)
    return [members for _, members in groups]


def _choose(attempts: list[Files], attempt: int | None, problems: list[str]) -> Files:
    if attempt is not None and not 0 <= attempt < len(attempts):
        text = f"there is no attempt {attempt} in this trace"
        raise TraceError(f"{text}; it has {len(attempts)}, from 0.")
    number = len(attempts) - 1 if attempt is None else attempt
    if len(attempts) > 1:
        problems.append(
            f"the job began {len(attempts)} times (it was restarted, or its script runs one job after"
            f" the other): this is attempt {number}; Trace.load(..., attempt=...) gives the others,"
            " from 0"
        )
    return attempts[number]


# Ranks ----------------------------------------------------------------------------------------------


def _world_size(files: Files) -> int:
    """Return how many processes headers, default groups or calls promise; 0 if not known."""
    sizes = [file.header.world_size or 0 for file in files]
    for file in files:
        sizes += [group.size for group in file.groups.values() if group.default]
        sizes += [call.size for call in file.rendezvous if not call.name]
    return max(sizes)


def _assign_ranks(files: Files, world: int, problems: list[str]) -> None:
    """Give each process its own rank, else the next number that no other process can have."""
    taken: dict[int, ProcessFile] = {}
    strays: Files = []
    for file, rank in zip(files, _own_ranks(files), strict=True):
        if rank is None:
            strays.append(file)
        elif rank in taken:
            other = taken[rank].path.name
            problems.append(f"{file.path.name}: says that it is rank {rank}, as {other} does")
            strays.append(file)
        else:
            taken[rank] = file
            names = [file.header.name, file.worker.name if file.worker is not None else ""]
            # In init_rpc a process is no worker yet, and has the name that it gave there.
            names += [call.name for call in file.rendezvous if file.worker is None]
            file.rank, file.label = rank, next(filter(None, names), f"rank {rank}")
    for file in strays:
        file.rank = max(world - 1, *taken) + 1 if taken else world
        file.label = f"{file.header.host}-{file.header.pid}"
        taken[file.rank] = file


def _own_ranks(files: Files) -> list[int | None]:
    """Return the rank that each process says; RPC's ids where ranks of groups meet those."""
    ranks = [file.own_rank for file in files]
    ids = [file.worker.id for file in files if file.worker is not None]
    given = any(file.header.rank is not None for file in files)
    clash = len(set(ranks)) < len(ranks) == len(set(ids))
    return list(ids) if clash and not given else ranks


def _align(files: Files) -> None:
    readings: dict[str, list[ClockReading]] = defaultdict(list)
    for file in files:
        readings[file.clock_name] += file.clocks
    references = [reading.reference for of_clock in readings.values() for reading in of_clock]
    # Without readings the clock of the lowest rank.
    references.append(min(files, key=lambda file: file.rank).clock_name)
    reference = references[0]
    for name, of_clock in readings.items():
        usable = [reading for reading in of_clock if reading.reference == reference]
        clock = SAME if name == reference else line_through(name, usable)
        for file in files:
            if file.clock_name == name:
                file.move(clock)


def _missing_processes(path: Path, files: Files, world: int) -> list[str]:
    here = {file.rank for file in files if file.rank < world}
    # As many as the sentence could ever name: a damaged header may promise any number.
    most = min(world, len(here) + NAMES_SHOWN + 1)
    absent = [rank for rank in range(most) if rank not in here]
    if not absent:
        return []
    named = first_few([str(rank) for rank in absent], NAMES_SHOWN)
    who = f"those of ranks {named} are" if len(absent) > 1 else f"that of rank {named} is"
    sentence = f"{len(here)} of {world:,} processes left a file in {path}: {who} missing"
    peers = {rank: peer for file in files for rank, peer in file.peers.items() if rank in absent}
    hint = "if it ran on another host, copy its file here"
    if peers:
        ranks = sorted(peers.items())
        known = [f"rank {rank}'s is {each.path} on host {each.host}" for rank, each in ranks]
        hint = f"{'; '.join(known)}: copy it here"
    return [f"{sentence} ({hint})"]


def _agree_on_names(processes: Sequence[Process], events: Iterable[Event]) -> None:
    """Give each process group one name, in place: each process counts the groups of one name that
    it has seen, so a group that was made again may be "1~2" for one member and "1" for another."""
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    taken: set[str] = set()
    for process in processes:
        for fact in process.groups.values():
            if fact.made:
                members[fact.made].append((process.rank, fact.name))
            else:
                taken.add(fact.name)
    names: dict[tuple[int, str], str] = {}
    for ends in members.values():
        name = max((name for _, name in ends), key=lambda name: (len(name), name))
        while name in taken:
            name += "~2"
        taken.add(name)
        names |= {end: name for end in ends if end[1] != name}
    if not names:
        return
    for event in events:
        if isinstance(event, Collective | PointToPoint):
            _rename(event, event.rank, names, "group")
    for process in processes:
        for fact in process.groups.values():
            _rename(fact, process.rank, names, "name", "within")
        for socket in process.sockets.values():
            _rename(socket, process.rank, names, "group")
        process.groups = {fact.name: fact for fact in process.groups.values()}


def _rename(line: Line, rank: int, names: dict[tuple[int, str], str], *columns: str) -> None:
    for column in columns:
        old = getattr(line, column)
        msgspec.structs.force_setattr(line, column, names.get((rank, old), old))
