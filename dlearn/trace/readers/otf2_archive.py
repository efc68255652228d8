"""OTF2 archives (Score-P, EZTrace, Vampir): one for all ranks of an MPI job. Read by the package `otf2`, an extra.

Times are those of one clock, to which the writer has moved them. Ranks in records are those in the communicator. A call
begins where its region is entered; of one that does not block, begin and end stand in two records with one number.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from dlearn.errors import DlearnError, TraceError, optional
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, GroupFact, Header, Line, PointToPoint, TensorInfo
from dlearn.trace.job_facts import Imported
from dlearn.trace.printable import printable

SOURCE = "an OTF2 archive: calls of MPI, matched by their order"
ANCHOR, LOCAL = b"\x03\x42OTF2", (b"\x03\x42\x01", b"\x03\x42\x02")
"""How an archive's own file begins, and those beside it."""
BACKEND = "MPI"
OPS = {
    "BARRIER": "barrier", "BCAST": "broadcast", "GATHER": "gather", "GATHERV": "gather", "SCATTER": "scatter",
    "SCATTERV": "scatter", "ALLGATHER": "all_gather", "ALLGATHERV": "all_gather", "ALLTOALL": "all_to_all_single",
    "ALLTOALLV": "all_to_all_single", "ALLTOALLW": "all_to_all_single", "ALLREDUCE": "all_reduce", "REDUCE": "reduce",
    "REDUCE_SCATTER": "reduce_scatter_single", "REDUCE_SCATTER_BLOCK": "reduce_scatter_single",
}  # fmt: skip
NO_ROOT = 2**32 - 2
"""From here on there is none (OTF2_UNDEFINED_UINT32, OTF2_COLLECTIVE_ROOT_NONE)."""
_NONBLOCKING = re.compile(r"MPI_I(barrier|bcast|all\w+|gather\w*|scatter\w*|reduce\w*|scan|exscan)", re.IGNORECASE)
_MOST_EVENTS = 20_000_000
_READ = list[tuple[Header, list[Imported | GroupFact | Collective | PointToPoint]]]
MOST_SECONDS, MOST_MEMORY = 300, 16 << 30
"""For one archive."""
_OF_TYPES = (ValueError, AttributeError, TypeError, MemoryError, OSError)
"""What a damaged archive makes the package raise, beside errors of its own."""


class Otf2:
    """The archive of a job."""

    def __init__(self) -> None:
        self._anchors: list[Path] = []

    def take(self, path: Path, data: bytes) -> bool:
        """Whether it is a file of an archive; then which. What is in it is read from the disk."""
        if data.startswith(ANCHOR):
            if not path.is_file():
                raise TraceError(printable(f"{path}: an OTF2 archive is read from a folder: unpack it first."))
            self._anchors.append(path)
        return data.startswith((ANCHOR, *LOCAL))

    def ranks(self) -> list[tuple[Header, list[Line]]]:
        """The lines of each rank."""
        if not self._anchors:
            return []
        if len(self._anchors) > 1:
            names = " and ".join(path.name for path in self._anchors[:2])
            raise TraceError(printable(f"{names} are two OTF2 archives: give one job."))
        return _read(self._anchors[0])


def _read(path: Path) -> list[tuple[Header, list[Line]]]:
    """In a process of its own: the library is C, and there are damaged archives that keep it busy for ever."""
    optional("otf2", needed_by="an OTF2 archive")
    house = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", f"import {__name__} as it; it.tell()", str(path.resolve())]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MOST_SECONDS, env={**os.environ, "PYTHONPATH": house}, check=False
        )
    except subprocess.TimeoutExpired:
        raise TraceError(printable(f"{path}: its library read for {MOST_SECONDS} s and came to no end.")) from None
    told, _, rest = done.stdout.partition(b"\n")
    if done.returncode or told != b"read":
        why = told.decode(errors="replace") or f"its library ended with status {done.returncode}"
        raise TraceError(printable(f"{path}: no OTF2 archive that can be read: {why[:300]}."))
    try:
        made: list[tuple[Header, list[Line]]] = msgspec.json.decode(rest, type=_READ)
    except msgspec.ValidationError as error:  # A damaged number is larger than any there can be.
        raise TraceError(printable(f"{path}: no OTF2 archive that can be read: {error}.")) from None
    return made


def tell() -> None:
    """What that process does: it prints "read" and all lines, or why there are none."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    try:
        made = _read_here(Path(sys.argv[1]))
    except DlearnError as error:
        print(error)
        return
    sys.stdout.buffer.write(b"read\n" + msgspec.json.encode(made))


def _read_here(path: Path) -> list[tuple[Header, list[Line]]]:
    otf2 = optional("otf2", needed_by="an OTF2 archive")
    low_level = optional("_otf2", needed_by="an OTF2 archive")
    try:
        with otf2.reader.open(str(path)) as archive:
            job = _MpiJob(archive)
            for count, (location, event) in enumerate(archive.events):
                if count > _MOST_EVENTS:
                    raise TraceError(f"more than {_MOST_EVENTS:,} events are more than can be read")
                job.see(location, event)
            return job.lines()
    except (otf2.error.Error, low_level.Error, ArithmeticError, LookupError, *_OF_TYPES) as error:
        raise TraceError(printable(str(error)[:200].rstrip(".") or type(error).__name__)) from None


class _MpiRank:
    """What has been read of one rank so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.entered: list[tuple[str, int, int]] = []
        """Regions that it is in: name, since when, and which event was the first inside of each."""
        self.requested: dict[int, tuple[int, int]] = {}
        """Of calls that do not block, by their number: place among the events, and when each began."""
        self.begun_ns = 0
        self.groups: dict[str, GroupFact] = {}
        self.turns: Counter[tuple[str, str]] = Counter()
        self.recorded = self.nonblocking = 0


class _MpiJob:
    """The ranks of an archive, and what its definitions say."""

    def __init__(self, archive: Any) -> None:
        definitions = archive.definitions
        clock = definitions.clock_properties
        self._begin, self._resolution = clock.global_offset, max(int(clock.timer_resolution), 1)
        self._comms: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        for number, comm in enumerate(definitions.comms):
            name = printable(str(comm.name or f"comm {number}"))
            taken = {each for each, _ in self._comms.values()}
            self._comms[comm] = (f"{name} {number}" if name in taken else name, tuple(comm.group.members))
        world = max((members for name, members in self._comms.values() if "MPI" in name), key=len, default=())
        world = world or max((members for _, members in self._comms.values()), key=len, default=())
        if not world:
            raise TraceError("it has no communicators of MPI, so there is nothing to show")
        self._rank_of = {location: rank for rank, location in enumerate(world)}
        self._ranks = {location: _MpiRank() for location in world}
        self.elsewhere = 0
        """Calls of threads that have no rank."""

    def see(self, location: Any, event: Any) -> None:
        """Take in one record."""
        kind = type(event).__name__
        rank = self._ranks.get(location)
        if rank is None:
            self.elsewhere += kind.startswith("Mpi")
            return
        at_ns = (event.time - self._begin) * 10**9 // self._resolution
        match kind:
            case "Enter":
                rank.entered.append((str(event.region.name), at_ns, len(rank.events)))
            case "Leave" if rank.entered:
                self._leave(rank, at_ns)
            case "MpiSend" | "MpiRecv":
                self._message(rank, location, event, "send" if kind == "MpiSend" else "recv", at_ns)
            case "MpiIsend":
                rank.requested[event.request_id] = (len(rank.events), at_ns)
                self._message(rank, location, event, "send", at_ns)
            case "MpiIrecvRequest" | "NonBlockingCollectiveRequest":
                rank.requested[event.request_id] = (-1, self._since(rank, at_ns))
            case "MpiIsendComplete":
                place, _ = rank.requested.pop(event.request_id, (-1, 0))
                if place >= 0:
                    rank.events[place] = _ended(rank.events[place], at_ns)
            case "MpiIrecv":
                _, start_ns = rank.requested.pop(event.request_id, (-1, at_ns))
                self._message(rank, location, event, "recv", start_ns, end_ns=at_ns)
            case "MpiCollectiveBegin":
                rank.begun_ns = self._since(rank, at_ns)
            case "MpiCollectiveEnd":
                self._collective(rank, location, event, rank.begun_ns, at_ns)
            case "NonBlockingCollectiveComplete":
                _, start_ns = rank.requested.pop(event.request_id, (-1, at_ns))
                rank.recorded += 1
                self._collective(rank, location, event, start_ns, at_ns)

    def _since(self, rank: _MpiRank, at_ns: int) -> int:
        """When the call began that a record is of."""
        return rank.entered[-1][1] if rank.entered else at_ns

    def _leave(self, rank: _MpiRank, at_ns: int) -> None:
        """A call of MPI that blocks ends where its region is left."""
        region, _, first = rank.entered.pop()
        rank.nonblocking += _NONBLOCKING.fullmatch(region) is not None
        if not region.startswith("MPI_") or region.startswith("MPI_I"):
            return
        for place in range(first, len(rank.events)):
            event = rank.events[place]
            if isinstance(event, PointToPoint) and event.end_ns is None and event.ended_by == "leave":
                rank.events[place] = _ended(event, at_ns)

    def _message(
        self, rank: _MpiRank, location: Any, event: Any, op: Literal["send", "recv"], start_ns: int, *,
        end_ns: int | None = None,
    ) -> None:  # fmt: skip
        blocks = type(event).__name__ in ("MpiSend", "MpiRecv")
        group = self._group(rank, location, event.communicator)
        rank.turns[group, op] += 1
        peer = int(event.receiver if op == "send" else event.sender)
        rank.events.append(
            PointToPoint(
                number=len(rank.events),
                start_ns=self._since(rank, start_ns) if end_ns is None else start_ns,
                end_ns=end_ns,
                ended_by="complete" if end_ns is not None else "leave" if blocks else "",
                op=op,
                group=group,
                peer=peer if peer < NO_ROOT else None,
                tag=int(event.msg_tag),
                seq=rank.turns[group, op],
                tensors=_bytes(event.msg_length),
            )
        )

    def _collective(self, rank: _MpiRank, location: Any, event: Any, start_ns: int, end_ns: int) -> None:
        group = self._group(rank, location, event.communicator)
        size = rank.groups[group].size if group in rank.groups else 1
        named = str(event.collective_op).rpartition(".")[2]
        rank.turns[group, ""] += 1
        root = int(event.root)
        given, got = _sizes(named, int(event.size_sent), int(event.size_received), size)
        rank.events.append(
            Collective(
                number=len(rank.events),
                start_ns=min(start_ns, end_ns),
                end_ns=end_ns,
                ended_by="leave",
                op=OPS.get(named, printable(named.lower())),
                group=group,
                seq=rank.turns[group, ""],
                inputs=_bytes(given) if given else (),
                outputs=_bytes(got) if got else (),
                root=root if root < NO_ROOT else None,
            )
        )

    def _group(self, rank: _MpiRank, location: Any, comm: Any) -> str:
        name, members = self._comms[comm]
        members = members or (location,)  # Of MPI_COMM_SELF and its like an archive does not name them.
        if name not in rank.groups and location in members:
            ranks = tuple(self._rank_of.get(member, -1) for member in members)
            if min(ranks) >= 0:
                own = members.index(location)
                default = len(members) == len(self._ranks)
                rank.groups[name] = GroupFact(
                    name=name, backend=BACKEND, rank=own, size=len(members), ranks=ranks, default=default
                )
        return name

    def lines(self) -> list[tuple[Header, list[Line]]]:
        made: list[tuple[Header, list[Line]]] = []
        for location, rank in self._ranks.items():
            number = self._rank_of[location]
            header = Header(
                format=5, job=SOURCE, host="", pid=0, torch="", dlearn="", start_ns=0, rank=number,
                world_size=len(self._ranks),
            )  # fmt: skip
            unexplained = max(rank.nonblocking - rank.recorded, 0) + (self.elsewhere if number == 0 else 0)
            limits = Imported(source=SOURCE, complete=True, unexplained=unexplained)
            # What a program does not wait for before its end has no end in the archive.
            events = [_ended(event, None) if event.end_ns is None else event for event in rank.events]
            made.append((header, [limits, *rank.groups.values(), *events]))
        return made


def _ended(event: Event, at_ns: int | None) -> Event:
    if at_ns is None:
        return replace(event, ended_by=NOT_OBSERVED)
    return replace(event, end_ns=max(at_ns, event.start_ns), ended_by="leave")


def _sizes(op: str, sent: int, received: int, ranks: int) -> tuple[int, int]:
    """What a rank gives and gets, of what Score-P writes: there a rank that gives all the same counts it for each."""
    match op:
        case "BCAST":
            return (sent // ranks, 0) if sent else (0, received)
        case "ALLREDUCE":
            return sent // ranks, 0
        case "ALLGATHER" | "ALLGATHERV":
            return sent // ranks, received
        case "REDUCE":
            return sent, 0
        case _:
            return sent, received


def _bytes(size: int) -> tuple[TensorInfo, ...]:
    count = min(int(size), 2**40)
    return (TensorInfo((count,), "uint8", "cpu", count, count),)
