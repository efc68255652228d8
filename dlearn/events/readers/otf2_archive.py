"""OTF2 archives (Score-P, EZTrace, Vampir): one for all ranks of an MPI job. Needs `otf2`.

Times are those of one clock. Ranks in records are those in the communicator. A call begins where
its region is entered; of one that does not block, begin and end stand in two records with one
number.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dlearn.errors import TraceError, optional
from dlearn.events.event import NOT_OBSERVED, Collective, GroupFact, Header, PointToPoint
from dlearn.events.job_facts import DEFAULT, Imported
from dlearn.events.readers import rank_lines
from dlearn.events.readers.rank_lines import ForeignRank, Lines, Tensors

SOURCE = "an OTF2 archive: calls of MPI, matched by their order"
ANCHOR, LOCAL = b"\x03\x42OTF2", (b"\x03\x42\x01", b"\x03\x42\x02")
"""How an archive's own file begins, and those beside it."""
OPS = {
    "BARRIER": "barrier", "BCAST": "broadcast", "GATHER": "gather", "GATHERV": "gather", "SCATTER": "scatter",
    "SCATTERV": "scatter", "ALLGATHER": "all_gather", "ALLGATHERV": "all_gather", "ALLTOALL": "all_to_all_single",
    "ALLTOALLV": "all_to_all_single", "ALLTOALLW": "all_to_all_single", "ALLREDUCE": "all_reduce", "REDUCE": "reduce",
    "REDUCE_SCATTER": "reduce_scatter_single", "REDUCE_SCATTER_BLOCK": "reduce_scatter_single",
}  # fmt: skip
NO_ROOT = 2**32 - 2
"""From here on there is none (OTF2_UNDEFINED_UINT32, OTF2_COLLECTIVE_ROOT_NONE)."""
_NONBLOCKING = re.compile(r"MPI_I(barrier|bcast|all\w+|gather\w*|scatter\w*|reduce\w*|scan|exscan)", re.IGNORECASE)
_READ = list[tuple[Header, list[Imported | GroupFact | Collective | PointToPoint]]]
MOST_SECONDS, MOST_MEMORY = 300, 16 << 30  # For one archive.


class Otf2:
    def __init__(self) -> None:
        self._anchors: list[Path] = []

    def take(self, path: Path, data: bytes) -> bool:
        """Return whether it is a file of an archive. What is in it is read from the disk."""
        if data.startswith(ANCHOR):
            if not path.is_file():
                why = "an OTF2 archive is read from a folder: unpack it first"
                raise rank_lines.refused(f"{path}: {why}.")
            self._anchors.append(path)
        return data.startswith((ANCHOR, *LOCAL))

    def ranks(self) -> list[Lines]:
        if len(self._anchors) > 1:
            names = " and ".join(path.name for path in self._anchors[:2])
            raise rank_lines.refused(f"{names} are two OTF2 archives: give one job.")
        return _read(self._anchors[0]) if self._anchors else []


def _read(path: Path) -> list[Lines]:
    """Read it in a process of its own: the library is C, and damaged archives may keep it busy."""
    optional("otf2", needed_by="an OTF2 archive")
    command = [sys.executable, "-c", f"import {__name__} as it; it.tell()", str(path.resolve())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST_SECONDS, env=env, check=True)
        made: list[Lines] = msgspec.json.decode(done.stdout, type=_READ)
        return made
    except subprocess.TimeoutExpired:
        why: object = f"its library read for {MOST_SECONDS} s and came to no end"
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").split("\n")[-2:]
        why = last[0] or error
    except msgspec.DecodeError as error:  # A damaged number is larger than any there can be.
        why = error
    raise rank_lines.unreadable(path, "OTF2 archive", why)


def tell() -> None:
    """Print all lines, in that process; what it raises is the reason why there are none."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    otf2 = optional("otf2", needed_by="an OTF2 archive")
    with otf2.reader.open(sys.argv[1]) as archive:
        job = _MpiJob(archive)
        for location, event in archive.events:
            job.see(location, event)
        sys.stdout.buffer.write(msgspec.json.encode(job.lines()))


class _MpiRank(ForeignRank):
    def __init__(self, location: Any, rank: int, world_size: int) -> None:
        super().__init__(SOURCE, rank, world_size)
        self.location = location
        self.entered: list[tuple[str, int, int]] = []
        """Regions that it is in: name, since when, and which event was the first inside of each."""
        self.sent: dict[int, int] = {}
        """Of sends that do not block, by their request: the index of the event."""
        self.requested: dict[int, int] = {}  # Of other calls that do not block: when each began.
        self.begun_ns = 0

    def since(self, at_ns: int) -> int:
        """Return when the call began that a record is of."""
        return self.entered[-1][1] if self.entered else at_ns

    def leave(self, at_ns: int) -> None:
        """Leave a region: a call of MPI that blocks ends there."""
        region, _, first = self.entered.pop()
        self.unexplained += _NONBLOCKING.fullmatch(region) is not None
        if region.startswith("MPI_") and not region.startswith("MPI_I"):
            for index in range(first, len(self.events)):
                if self.events[index].end_ns is None and index not in self.sent.values():
                    self.end(index, at_ns)

    def end(self, index: int, at_ns: int) -> None:
        event = self.events[index]
        self.events[index] = replace(event, end_ns=max(at_ns, event.start_ns), ended_by="leave")


class _MpiJob:
    def __init__(self, archive: Any) -> None:
        definitions = archive.definitions
        clock = definitions.clock_properties
        self._begin, self._resolution = clock.global_offset, max(int(clock.timer_resolution), 1)
        self._comms: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        for number, comm in enumerate(definitions.comms):
            name = str(comm.name or f"comm {number}")
            taken = {each for each, _ in self._comms.values()}
            self._comms[comm] = (f"{name} {number}" if name in taken else name, tuple(comm.group.members))
        of_mpi = [members for name, members in self._comms.values() if "MPI" in name]
        world = max(of_mpi or [members for _, members in self._comms.values()], key=len, default=())
        if not world:
            raise TraceError("it has no communicators of MPI, so there is nothing to show")
        self._rank_of = {location: rank for rank, location in enumerate(world)}
        self._ranks = {}
        for location, rank in self._rank_of.items():
            self._ranks[location] = _MpiRank(location, rank, len(world))
        self._elsewhere = 0  # Calls of threads that have no rank.

    def see(self, location: Any, event: Any) -> None:
        kind = type(event).__name__
        rank = self._ranks.get(location)
        if rank is None:
            self._elsewhere += kind.startswith("Mpi")
            return
        at_ns = (event.time - self._begin) * 10**9 // self._resolution
        match kind:
            case "Enter":
                rank.entered.append((str(event.region.name), at_ns, len(rank.events)))
            case "Leave" if rank.entered:
                rank.leave(at_ns)
            case "MpiSend" | "MpiRecv":
                op = "send" if kind == "MpiSend" else "recv"
                self._message(rank, event, op, rank.since(at_ns))
            case "MpiIsend":
                rank.sent[event.request_id] = len(rank.events)
                self._message(rank, event, "send", rank.since(at_ns))
            case "MpiIsendComplete" if event.request_id in rank.sent:
                rank.end(rank.sent.pop(event.request_id), at_ns)
            case "MpiIrecvRequest" | "NonBlockingCollectiveRequest":
                rank.requested[event.request_id] = rank.since(at_ns)
            case "MpiIrecv":
                start_ns = rank.requested.pop(event.request_id, at_ns)
                self._message(rank, event, "recv", start_ns, end_ns=at_ns, ended_by="complete")
            case "MpiCollectiveBegin":
                rank.begun_ns = rank.since(at_ns)
            case "MpiCollectiveEnd":
                self._collective(rank, event, rank.begun_ns, at_ns)
            case "NonBlockingCollectiveComplete":
                rank.unexplained -= 1
                self._collective(rank, event, rank.requested.pop(event.request_id, at_ns), at_ns)

    def _message(self, rank: _MpiRank, event: Any, op: str, start_ns: int, **end: Any) -> None:
        # What a program does not wait for before its end has no end in the archive.
        end = {"ended_by": NOT_OBSERVED, **end}
        peer = int(event.receiver if op == "send" else event.sender)
        tensors = (rank_lines.tensor((int(event.msg_length),), "uint8", "cpu"),)
        rank.add(
            op, self._group(rank, event.communicator), tensors, tensors,
            peer=peer if peer < NO_ROOT else -1, tag=int(event.msg_tag), start_ns=start_ns, **end,
        )  # fmt: skip

    def _collective(self, rank: _MpiRank, event: Any, start_ns: int, end_ns: int) -> None:
        name = self._group(rank, event.communicator)
        size = rank.groups[name].size if name in rank.groups else 1
        op = str(event.collective_op).rpartition(".")[2]
        given, got = _sizes(op, int(event.size_sent), int(event.size_received), size)
        root = int(event.root)
        rank.add(
            OPS.get(op, op.lower()), name, _bytes(given), _bytes(got),
            root=root if root < NO_ROOT else None,
            start_ns=min(start_ns, end_ns), end_ns=end_ns, ended_by="leave",
        )  # fmt: skip

    def _group(self, rank: _MpiRank, comm: Any) -> str:
        name, members = self._comms[comm]
        members = members or (rank.location,)  # An archive names none of MPI_COMM_SELF.
        ranks = [self._rank_of.get(member, -1) for member in members]
        if name not in rank.groups and rank.location in members and min(ranks) >= 0:
            rank.add_group(name, "MPI", ranks, DEFAULT * (len(members) == len(self._ranks)))
        return name

    def lines(self) -> list[Lines]:
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.unexplained = max(rank.unexplained, 0)
        ranks[0].unexplained += self._elsewhere
        return [rank.lines(complete=True) for rank in ranks]


def _sizes(op: str, sent: int, received: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank gives and gets: Score-P counts data for all ranks once a rank."""
    given = sent // ranks if op in ("BCAST", "ALLREDUCE", "ALLGATHER", "ALLGATHERV") else sent
    gets_none = op in ("ALLREDUCE", "REDUCE") or (op == "BCAST" and sent > 0)
    return given, 0 if gets_none else received


def _bytes(size: int) -> Tensors:
    return (rank_lines.tensor((size,), "uint8", "cpu"),) if size else ()
