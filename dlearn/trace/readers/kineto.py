"""Traces of torch's profiler (Kineto's JSON), one file for each rank: what NCCL's kernels did, and when.

An operation is a kernel here: it begins when the GPU begins it, so that who came last is seen on the GPU, and what a
rank waited for the others stands apart from the transfer. What the kernel moved, and in which group, stands beside it
since 2024 (`record_param_comms`); kernels that do not say so are counted, with their time. The name of a kernel says
neither the algorithm nor the protocol that ran (github.com/NVIDIA/nccl/issues/1595).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from dlearn.errors import TraceError
from dlearn.trace.event import Collective, Event, GroupFact, Header, Line, PointToPoint
from dlearn.trace.job_facts import Imported
from dlearn.trace.printable import printable, printable_all
from dlearn.trace.readers import execution_trace, host_clocks
from dlearn.trace.readers.execution_trace import Moved
from dlearn.trace.readers.torch_names import IN_PLACE, OPS, tensors, title

SOURCE = "profiler traces (Kineto): times are those of GPU kernels"
BESIDE = "; what they moved stands in execution traces, joined by order"
BY_ORDER = "; calls of a group are matched by their order"
NCCL = re.compile(r"nccl|rccl|multimem_", re.IGNORECASE)
MOST_US = 2.0**53
"""A time that is 285 years from another; in nanoseconds, no trace has room for it."""
RANKS = re.compile(r"\[\d{1,15}(, ?\d{1,15})*\]")
"""A list that is whole: of more than 30 numbers the middle is cut out."""


class ChromeEvent(msgspec.Struct):
    """An event of Chrome's format: in microseconds, since `baseTimeNanoseconds`."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class OfGroup(msgspec.Struct):
    """A process group; of many ranks this is the only list that is whole."""

    pg_name: str = ""
    pg_desc: str = ""
    ranks: list[int] = []


class OfJob(msgspec.Struct):
    """Whose file it is."""

    rank: int
    world_size: int
    backend: str = "nccl"
    pg_config: list[OfGroup] = []


class File(msgspec.Struct):
    """What is read of a rank's file."""

    traceEvents: list[ChromeEvent]
    distributedInfo: OfJob
    baseTimeNanoseconds: int = 0
    host_name: str = ""


class Said(msgspec.Struct):
    """What a kernel says of the call that launched it; sizes are counts of elements, ranks and splits are text."""

    op: str = msgspec.field(default="", name="Collective name")
    given: int = msgspec.field(default=0, name="In msg nelems")
    got: int = msgspec.field(default=0, name="Out msg nelems")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    about: str = msgspec.field(default="", name="Process Group Description")
    ranks: str = msgspec.field(default="", name="Process Group Ranks")
    splits: str = msgspec.field(default="", name="In split size")
    seq: int = msgspec.field(default=-1, name="Seq")
    peer: int = msgspec.field(default=-1, name="Rank")


_file = msgspec.json.Decoder(File, strict=False)
_said = msgspec.json.Decoder(Said, strict=False)


class Kineto:
    """The profiler's files of a job, and the execution traces beside them, file by file."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[Path, File]] = {}
        self._moved: dict[int, list[Moved]] = {}

    def take(self, path: Path, data: bytes) -> bool:
        """Whether this is one of them; then what tells of communication is kept. TraceError where it is damaged, or of
        another job."""
        moved = execution_trace.read(path, data)
        if moved is not None:
            if twice := moved.keys() & self._moved.keys():
                raise TraceError(
                    printable(f"{path.name} is of rank {min(twice)}, as another execution trace is: give one job.")
                )
            self._moved |= moved
            return True
        if data.lstrip()[:1] != b"{" or b'"traceEvents"' not in data or b'"distributedInfo"' not in data:
            return False
        try:
            file = _file.decode(data)
        except (ValueError, RecursionError) as error:
            raise TraceError(printable(f"{path}: no profiler trace that can be read: {str(error)[:200]}.")) from None
        rank = file.distributedInfo.rank
        if rank in self._files:
            other = self._files[rank][0].name
            raise TraceError(printable(f"{other} and {path.name} are both of rank {rank}: give one step of one job."))
        file.traceEvents = [each for each in file.traceEvents if _is_kernel(each) or each.name.startswith("c10d::")]
        if any(max(abs(each.ts), abs(each.dur)) > MOST_US for each in file.traceEvents):
            raise TraceError(printable(f"{path}: a call lies at a time that no clock has (ts or dur): is it damaged?"))
        for each in file.traceEvents:
            each.args = each.args.copy()  # Else it would keep all of the file in memory.
        self._files[rank] = path, file
        return True

    def ranks(self) -> list[tuple[Header, list[Line]]]:
        """The lines of each rank."""
        found = sorted(self._files.items())
        ranks = [_lines(path, file, self._moved.get(rank, [])) for rank, (path, file) in found]
        host_clocks.compare(ranks)
        return ranks


def _is_kernel(event: ChromeEvent) -> bool:
    return event.cat.lower() == "kernel" and NCCL.search(event.name) is not None


def _lines(path: Path, file: File, moved: list[Moved]) -> tuple[Header, list[Line]]:
    job, base_ns = file.distributedInfo, file.baseTimeNanoseconds
    kernels = [each for each in file.traceEvents if _is_kernel(each)]
    kernels.sort(key=lambda each: each.ts)
    said_by_all = [_said_by(path, kernel) for kernel in kernels]
    joined = len(moved) == len(kernels) and not any(said.op for said in said_by_all)
    if joined:
        said_by_all = [_of_record(each, job, alone=len({each.group for each in moved}) == 1) for each in moved]
    known = {each.pg_name: each for each in job.pg_config}
    groups: dict[str, GroupFact] = {}
    events: list[Event] = []
    turns: Counter[tuple[str, str]] = Counter()
    # gloo has no kernels, and its calls do not say in which group they are.
    left_out_us = [each.dur for each in file.traceEvents if job.backend == "gloo" and each.name.startswith("c10d::")]
    by_order = False
    for kernel, said in zip(kernels, said_by_all, strict=True):
        ranks = _ranks(said, known)
        if not said.op or job.rank not in ranks:
            left_out_us.append(kernel.dur)
            continue
        name = title(said.group, said.about)
        default = said.about == "default_pg"
        rank = ranks.index(job.rank)
        groups[name] = GroupFact(
            name=name, backend=job.backend, rank=rank, size=len(ranks), ranks=ranks, default=default
        )
        turns[name, said.op if said.op in ("send", "recv") else ""] += 1
        by_order |= said.seq < 0
        start_ns = base_ns + round(kernel.ts * 1000)
        common: dict[str, Any] = {"number": len(events), "start_ns": start_ns, "group": name, "ended_by": "kernel"}
        common["end_ns"] = start_ns + max(round(kernel.dur * 1000), 0)
        events.append(_event(said, turns, common))
    start_ns = min((event.start_ns for event in events), default=base_ns)
    header = Header(
        format=5, job=SOURCE, host=printable(file.host_name), pid=0, torch="", dlearn="", start_ns=start_ns,
        rank=job.rank, world_size=job.world_size,
    )  # fmt: skip
    source = SOURCE + BESIDE * (joined and bool(events)) + BY_ORDER * by_order
    unexplained_ns = max(round(sum(left_out_us) * 1000), 0)
    limits = Imported(source=source, complete=False, unexplained=len(left_out_us), unexplained_ns=unexplained_ns)
    return header, [limits, *groups.values(), *events]


def _said_by(path: Path, kernel: ChromeEvent) -> Said:
    try:
        said: Said = msgspec.convert(printable_all(msgspec.to_builtins(_said.decode(kernel.args))), Said)
    except (ValueError, RecursionError) as error:
        raise TraceError(printable(f"{path}: a kernel's record cannot be read: {str(error)[:200]}.")) from None
    return said


def _of_record(moved: Moved, job: OfJob, *, alone: bool) -> Said:
    """What an execution trace says in place of a kernel. Its groups are addresses in memory: where there is one only,
    it is taken to be that of all ranks, if the splits do not speak against it."""
    if not alone or len(moved.splits) not in (0, job.world_size):
        return Said()
    return Said(
        op=printable(moved.op),
        given=moved.given,
        got=moved.got,
        dtype=printable(moved.dtype),
        group="0",
        about="default_pg",
        ranks=str(list(range(job.world_size))),
        splits=str(list(moved.splits)),
    )


def _ranks(said: Said, known: dict[str, OfGroup]) -> tuple[int, ...]:
    """The members' global ranks; () where they are not told."""
    if said.group in known and known[said.group].ranks:
        return tuple(known[said.group].ranks)
    return tuple(map(int, said.ranks[1:-1].split(","))) if RANKS.fullmatch(said.ranks) else ()


def _event(said: Said, turns: Counter[tuple[str, str]], common: dict[str, Any]) -> Event:
    """Without a number of its own a call is the next of its group."""
    given, got = (tensors([[count]], [said.dtype], "cuda") for count in (said.given, said.got))
    if said.op in ("send", "recv"):
        one: Literal["send", "recv"] = "send" if said.op == "send" else "recv"
        common |= {"peer": said.peer if said.peer >= 0 else None, "tag": 0, "seq": turns[common["group"], one]}
        return PointToPoint(op=one, tensors=given if one == "send" else got, **common)
    op = OPS.get(said.op, said.op)
    seq = said.seq if said.seq >= 0 else turns[common["group"], ""]
    return Collective(
        op=op, seq=seq, inputs=given, outputs=() if op in IN_PLACE else got, splits=_splits(said, given), **common
    )


def _splits(said: Said, given: tuple[Any, ...]) -> tuple[int, ...]:
    """The bytes for each rank of an all-to-all, where its splits are told, and whole."""
    rows = [int(each) for each in said.splits[1:-1].split(",")] if RANKS.fullmatch(said.splits) else []
    size = given[0].logical_bytes
    return tuple(size // sum(rows) * row for row in rows) if sum(rows) and not size % sum(rows) else ()
