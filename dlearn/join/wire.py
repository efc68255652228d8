"""What the kernel counted, as bytes from rank to rank: the measured side of `reconcile`.

A connection has one end in each of two processes. Each end's file holds both addresses, so two files that hold the same
two, swapped, are its ends: that tells whom a socket leads to, and whose group it belongs to.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from dlearn.events.event import NO_GROUP, RPC, UNKNOWN_GROUP, Counters
from dlearn.events.process import Process
from dlearn.join.columns import grouped
from dlearn.join.selection import Selection, once

Edge = tuple[str, int]
"""The name of a process group (in the sender's file), and the rank at the other end."""
Connected = tuple[int, int, str, int]
"""A rank, the id of a socket there, the group that made it, and the rank at its other end."""


@dataclass(frozen=True)
class Meter:
    """The samples of one rank: `totals[i]` are the bytes that it had written to each peer by event `numbers[i]`."""

    numbers: tuple[int, ...]
    times_ns: tuple[int, ...]
    still: tuple[bool | None, ...]
    totals: tuple[Counter[Edge], ...]
    known_until: dict[Edge, int]
    """The connections that are counted, and the last sample that has each: it may have been closed since."""
    received: tuple[Counter[Edge], ...]
    """Bytes that had come from each peer at each sample, where that was read."""
    known_from: int
    """Of RPC's connections: the sample from which all of them are there, and counted."""

    def between(self, first: int, last: int) -> Counter[Edge]:
        before = self.totals[first]
        return Counter({edge: total - before[edge] for edge, total in self.totals[last].items()})


@once
def meters(trace: Selection) -> dict[int, Meter]:
    """Return the meter of each rank that has at least two samples in this trace."""
    connections = grouped(_connections(trace.processes), itemgetter(0))
    samples = grouped(sorted(trace.of(Counters), key=attrgetter("number")), attrgetter("rank"))
    several = [process for process in trace.processes if len(samples[process.rank]) > 1]
    return {each.rank: _meter(each, samples[each.rank], connections[each.rank]) for each in several}


def unattributed_bytes(trace: Selection) -> Counter[tuple[int, int]]:
    """Return the bytes for each (src, dst) on connections that no known group has made."""
    written: dict[tuple[int, int], int] = {}
    for event in trace.of(Counters):
        for number, sent in enumerate(event.sent_bytes):
            if sent is not None:
                written[event.rank, number] = sent
    found: Counter[tuple[int, int]] = Counter()
    for rank, number, group, dst in _connections(trace.processes):
        if group == NO_GROUP:
            found[rank, dst] += written.get((rank, number), 0)
    return +found


def peers_by_group(trace: Selection) -> dict[tuple[int, str], set[int]]:
    """Return the ranks that each rank's connections lead to, by rank and its name of the group."""
    peers = defaultdict[tuple[int, str], set[int]](set)
    for rank, _, group, other in _connections(trace.processes):
        peers[rank, group].add(other)
    return peers


def outer_group(process: Process, group: str) -> str:
    """Return the group whose connections this one uses: of an inner group, the outer."""
    if group == RPC:
        return group
    if any(socket.group == UNKNOWN_GROUP for socket in process.sockets.values()):
        return UNKNOWN_GROUP
    fact = process.groups.get(group)
    return fact.within or group if fact is not None else group


def why_not_measured(trace: Selection) -> str:
    """Return why there are no bytes on the wire in this trace, in words."""
    reasons = sorted({process.not_measured for process in trace.processes if process.not_measured})
    if reasons:
        return "; ".join(reasons)
    if not trace.whole.rows.has(Counters):
        backends = sorted({group.backend for process in trace.processes for group in process.groups.values()})
        if any(name.startswith("nccl") for name in backends):
            return "nccl moves its bytes between GPUs, past the sockets that the kernel counts"
        if "mpi4py" in backends:
            return "MPI moves its bytes by itself, on one host through shared memory, past the sockets that are counted"
        if any(process.worker for process in trace.processes):
            return "RPC's own transports on one host go past the sockets; Cluster(rpc=True) sends everything by TCP"
        return "the trace holds no socket counters"
    return "fewer than two samples of the socket counters lie in this part of the trace"


def _meter(process: Process, samples: Sequence[Counters], sockets: Iterable[Connected]) -> Meter:
    of_groups = [each for each in sockets if each[2] != NO_GROUP]
    edges = {number: (outer_group(process, group), dst) for _, number, group, dst in of_groups}
    # RPC makes its connections one after the other, and writes into them to do so.
    of_rpc = [number for number, edge in edges.items() if edge[0] == RPC]
    all_there = (len(sample.sent_bytes) > max(of_rpc, default=0) for sample in samples)
    known_from = next((index for index, there in enumerate(all_there) if there), 0)
    base: dict[int, int] = {}
    last: dict[int, int] = {}
    known_until: dict[Edge, int] = {}
    totals, received = [Counter[Edge]() for _ in samples], [Counter[Edge]() for _ in samples]
    for index, sample in enumerate(samples):
        sent_bytes, came_bytes = dict(enumerate(sample.sent_bytes)), dict(enumerate(sample.received_bytes))
        for number, edge in edges.items():
            sent, came = sent_bytes.get(number), came_bytes.get(number)
            if sent is not None and (edge[0] != RPC or index >= known_from):
                # A connection's own handshake is older than its first sample. A closed one keeps its last.
                base.setdefault(number, sent)
                last[number] = sent
                known_until[edge] = index
            totals[index][edge] += last.get(number, 0) - base.get(number, 0)
            if came is not None:
                received[index][edge] += came
    return Meter(
        numbers=tuple(sample.number for sample in samples),
        times_ns=tuple(sample.start_ns for sample in samples),
        still=tuple(sample.still for sample in samples), totals=tuple(totals),
        known_until=known_until, received=tuple(received), known_from=known_from,
    )  # fmt: skip


def _connections(processes: Sequence[Process]) -> Iterator[Connected]:
    """Yield each socket whose other end is known."""

    def key(host: str, here: str, there: str) -> tuple[str, str, str]:
        # A loopback address means another thing on each host.
        return (host if here.startswith(("127.", "::1 ")) else "", here, there)

    ends: dict[tuple[str, str, str], int] = {}
    for process in processes:
        for socket in process.sockets.values():
            ends[key(process.header.host, socket.local, socket.remote)] = process.rank
    for process in processes:
        for number, socket in process.sockets.items():
            other = ends.get(key(process.header.host, socket.remote, socket.local))
            if other is not None and other != process.rank:
                yield process.rank, number, socket.group, other
