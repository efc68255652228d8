"""Traces of torch's profiler (Kineto's JSON), one file for each rank: what NCCL's kernels did, and
when.

An operation is a kernel here. What it moved, and in which group, stands beside it since 2024
(`record_param_comms`); kernels that do not say so are counted, with their time. The name of a
kernel says neither the algorithm nor the protocol that ran (github.com/NVIDIA/nccl/issues/1595).

PyTorch's execution traces of the same steps tell what old kernels do not say, and no times. A
record there is joined to a kernel by its number: the k-th call, waits left out, has launched the
k-th kernel, if both have as many.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from dlearn.events.clocks import ALL_WAIT
from dlearn.events.event import Collective
from dlearn.events.job_facts import ClockReading, group_name
from dlearn.events.readers import rank_lines
from dlearn.events.readers.rank_lines import OPS, ForeignRank, Lines, numbers

SOURCE = "profiler traces (Kineto): times are those of GPU kernels"
BESIDE = "; what they moved stands in execution traces, joined by order"
BY_ORDER = "; calls of a group are matched by their order"
NCCL = re.compile(r"nccl|rccl|multimem_", re.IGNORECASE)


class ChromeEvent(msgspec.Struct):
    """An event of Chrome's format: in microseconds, since `baseTimeNanoseconds`."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def is_kernel(self) -> bool:
        return self.cat.lower() == "kernel" and NCCL.search(self.name) is not None

    @property
    def is_call(self) -> bool:
        return self.name.startswith("c10d::")


class OfGroup(msgspec.Struct):
    """A process group; of many ranks this is the only list that is whole."""

    pg_name: str = ""
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
    """What a kernel, or a record here, says of its call; sizes are counts of elements."""

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
        self._records: dict[int, list[Said]] = {}

    def take(self, path: Path, data: bytes) -> bool:
        records = _records(path, data)
        if records is not None:
            if twice := records.keys() & self._records.keys():
                raise rank_lines.of_two_jobs(path, "another execution trace", min(twice))
            self._records |= records
            return True
        if data.lstrip()[:1] != b"{" or b'"traceEvents"' not in data or b'"distributedInfo"' not in data:
            return False
        with rank_lines.readable(path, "profiler trace"):
            file = _file.decode(data)
        rank = file.distributedInfo.rank
        if rank in self._files:
            raise rank_lines.of_two_jobs(path, self._files[rank][0].name, rank)
        file.traceEvents = [each for each in file.traceEvents if each.is_kernel or each.is_call]
        for each in file.traceEvents:
            each.args = each.args.copy()  # Else it would keep all of the file in memory.
        self._files[rank] = path, file
        return True

    def ranks(self) -> list[Lines]:
        found = sorted(self._files.items())
        ranks = [_lines(path, file, self._records.get(rank, [])) for rank, (path, file) in found]
        compare_clocks(ranks)
        return ranks


def _lines(path: Path, file: File, records: list[Said]) -> Lines:
    job, base_ns = file.distributedInfo, file.baseTimeNanoseconds
    kernels = [each for each in file.traceEvents if each.is_kernel]
    kernels.sort(key=lambda each: each.ts)
    with rank_lines.readable(path, "kernel's record"):
        said_by_all = [_said.decode(kernel.args) for kernel in kernels]
    joined = len(records) == len(kernels) and not any(said.op for said in said_by_all)
    if joined:
        said_by_all = _of_records(records, job.world_size)
    members = {group.pg_name: tuple(group.ranks) for group in job.pg_config}
    rank = ForeignRank(SOURCE, job.rank, job.world_size)
    # gloo has no kernels, and its calls do not say in which group they are.
    left_out_us = [each.dur for each in file.traceEvents if job.backend == "gloo" and each.is_call]
    by_order = False
    for kernel, said in zip(kernels, said_by_all, strict=True):
        ranks = members.get(said.group) or numbers(said.ranks)
        if not said.op or job.rank not in ranks:
            left_out_us.append(kernel.dur)
            continue
        name = group_name(said.group, said.about)
        rank.add_group(name, job.backend, ranks, said.about)
        by_order |= said.seq < 0
        start_ns = base_ns + round(kernel.ts * 1000)
        _add(rank, name, said, start_ns, start_ns + max(round(kernel.dur * 1000), 0))
    rank.unexplained = len(left_out_us)
    return rank.lines(
        details=BESIDE * (joined and bool(rank.events)) + BY_ORDER * by_order,
        took_ns=max(round(sum(left_out_us) * 1000), 0),
        host=file.host_name,
        start_ns=min((event.start_ns for event in rank.events), default=base_ns),
    )


def _of_records(records: list[Said], size: int) -> list[Said]:
    """Return what an execution trace says in place of kernels. Its groups are addresses in memory:
    a single one is taken to be that of all ranks, if the splits do not speak against it."""
    if len({said.group for said in records}) != 1:
        return [Said()] * len(records)
    ranks = str(list(range(size)))
    for said in records:
        said.group, said.about, said.ranks = "0", "default_pg", ranks
    return [said if len(numbers(said.splits)) in (0, size) else Said() for said in records]


def _add(rank: ForeignRank, group: str, said: Said, start_ns: int, end_ns: int) -> None:
    op = OPS.get(said.op, said.op)
    given = rank_lines.tensor([said.given], said.dtype, "cuda")
    got = rank_lines.tensor([said.got], said.dtype, "cuda")
    # Of an all-to-all the bytes for each rank, where its splits are told, and whole.
    rows, size = numbers(said.splits), given.logical_bytes
    whole = sum(rows) and not size % sum(rows)
    splits = tuple(size // sum(rows) * row for row in rows) if whole else ()
    seq = -1 if op in ("send", "recv") else said.seq
    rank.add(
        op, group, (given,), (got,), seq=seq, peer=said.peer, splits=splits,
        start_ns=start_ns, end_ns=end_ns, ended_by="kernel",
    )  # fmt: skip


def compare_clocks(ranks: Sequence[Lines]) -> None:
    """Compare the clocks of hosts by what ends on all ranks at once, such as an all-reduce.

    The median difference of the ends of its kernels is by how much two clocks differ, the largest
    deviation the error. Each host is compared with the first, through others if need be.
    """
    ends: dict[str, dict[tuple[str, int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    lines_of = {header.host: lines for header, lines in reversed(ranks)}
    for header, lines in ranks:
        for line in lines:
            if isinstance(line, Collective) and line.op.startswith(ALL_WAIT) and line.end_ns is not None:
                ends[header.host][line.group, line.seq, line.op].append(line.end_ns)
    first = ranks[0][0].host if ranks else ""
    known, waiting = {first: (0, 0)}, [first]
    while waiting:
        near = waiting.pop(0)
        for host in sorted(ends.keys() - known.keys()):
            common = ends[near].keys() & ends[host].keys()
            if not common:
                continue
            apart = [round(median(ends[near][call]) - median(ends[host][call])) for call in common]
            offset = round(median(apart))
            error = max(abs(each - offset) for each in apart)
            known[host] = (known[near][0] + offset, known[near][1] + error)
            waiting.append(host)
            reading = ClockReading(
                at_ns=round(median(ends[host][call][0] for call in common)),
                offset_ns=known[host][0], error_ns=known[host][1], reference=f"host {first}",
                rounds=len(common),
            )  # fmt: skip
            lines_of[host].append(reading)


# Execution traces -----------------------------------------------------------------------------------------------------


class RecordNode(msgspec.Struct):
    """A call of anything; inputs of a communication end with group, rank, op, splits in, out."""

    name: str = ""
    inputs: list[Any] = []
    input_types: list[str] = []
    outputs: list[Any] = []


class ExecutionTrace(msgspec.Struct):
    """What is read of a rank's file; the nodes of another schema are not."""

    schema: str
    nodes: msgspec.Raw = msgspec.Raw()


READ = "1.0.1"
"""The schema with a list of inputs; later ones keep their values, shapes and types apart."""
_trace = msgspec.json.Decoder(ExecutionTrace)
_nodes = msgspec.json.Decoder(list[RecordNode], strict=False)


def schema_of_nodes(data: bytes) -> str | None:
    """Return "1.0.1"; None where this is something else, or no whole JSON."""
    if b'"nodes"' not in data or b'"schema"' not in data or b'"traceEvents"' in data:
        return None
    try:
        return _trace.decode(data).schema
    except (ValueError, RecursionError):
        return None


def _records(path: Path, data: bytes) -> dict[int, list[Said]] | None:
    """Return the calls of each rank in a file, in their order; None where it is something else."""
    if schema_of_nodes(data) != READ:
        return None
    calls: dict[int, list[Said]] = defaultdict(list)
    with rank_lines.readable(path, "execution trace"):
        for node in _nodes.decode(_trace.decode(data).nodes):
            index = next((i for i, value in enumerate(node.inputs) if isinstance(value, str)), 0)
            is_call = node.name == "record_param_comms" and index >= 3
            if is_call and node.inputs[index] != "wait":
                calls[int(node.inputs[index - 1])].append(_of_node(node, index))
    return calls


def _of_node(node: RecordNode, index: int) -> Said:
    """Return what a node says; the name of its op stands at this index of its inputs."""
    kind, op = node.input_types[0], node.inputs[index]
    if op == "all_to_all" and not kind.startswith("GenericList"):
        op = "all_to_all_single"  # Of one tensor, in equal parts.
    return Said(
        op=op, given=_elements(node.inputs[0]),
        got=_elements(node.outputs[0] if node.outputs else []),
        dtype=kind.removeprefix("GenericList[").removeprefix("Tensor(").rstrip("])"),
        group=str(node.inputs[index - 2]), splits=str(node.inputs[index + 1]),
    )  # fmt: skip


def _elements(value: list[Any]) -> int:
    """Count those of a tensor (its id, storage, an offset, their number, ...), or of a list."""
    if value and isinstance(value[0], list):
        return sum(map(_elements, value))
    return int(value[3]) if value else 0
