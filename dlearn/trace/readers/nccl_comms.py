"""NCCL's log, when all of it has been read: which communicator is whose, and which of its rings are whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from dlearn.errors import TraceError
from dlearn.shown import count_text
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, GroupFact, Header, Line, PointToPoint, TensorInfo
from dlearn.trace.job_facts import Imported
from dlearn.trace.readers.nccl_log import Comm, Device, Log, LoggedCall, ThreadPart
from dlearn.trace.readers.torch_names import IN_PLACE
from dlearn.trace.wiring import Choice, Ring, TreePlace, Wired

SOURCE = "NCCL's log: it has no times, calls stand in the order of its lines"
OPS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather_single", "ReduceScatter": "reduce_scatter_single",
    "Broadcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "AlltoAll": "all_to_all_single", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
DTYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8), ("float16", 2),
    ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1),
)  # fmt: skip
"""By NCCL's numbers."""
MOST_NUMBERS = 1 << 24
"""Of members in all files together: for each rank all of a group are listed."""

Members = dict[int, Comm]
"""Of one group, by rank in it."""


class Shared(NamedTuple):
    """What holds for all members of a group."""

    rings: tuple[Ring, ...] = ()
    choices: tuple[Choice, ...] = ()


class Communicators:
    """Communicators of all processes, joined, with what was said of each."""

    def __init__(self, log: Log) -> None:
        self.log = log
        found: dict[tuple[Any, ...], list[Comm]] = defaultdict(list)
        for comm in log.comms:
            found[comm.key].append(comm)
        # Two of one key and rank: which of them belongs to whom nobody can tell.
        self.groups: list[Members] = []
        self.ambiguous = 0
        for comms in found.values():
            members = {comm.rank: comm for comm in comms}
            if len(members) == len(comms):
                self.groups.append(members)
            else:
                self.ambiguous += len(comms)
        self.unassigned = _settle(self.groups, log.open)

    @cached_property
    def _shared(self) -> dict[int, Shared]:
        return {id(group): Shared(rings_of(group), _choices(group)) for group in self.groups}

    @cached_property
    def world(self) -> Members:
        """The largest group: its ranks are those of the job."""
        return max(self.groups, key=lambda each: (_size(each), len(each)), default={})

    @cached_property
    def rank_of(self) -> dict[Device, int]:
        """The job's rank on each GPU."""
        return {comm.device: rank for rank, comm in self.world.items()}

    def members(self, group: Members) -> tuple[int, ...]:
        """The ranks of the job in a group, in its order; () where one of them left no line."""
        if group is self.world:
            return tuple(range(_size(group)))
        if len(group) < _size(group):
            return ()
        ranks = [self.rank_of.get(group[rank].device, -1) for rank in range(_size(group))]
        return () if min(ranks) < 0 or len(set(ranks)) < len(ranks) else tuple(ranks)

    def wired(self, group: Members, rank: int, name: str) -> Wired:
        """What is known of this rank of a group."""
        comm = group[rank]
        first = self._shared[id(group)] if rank == min(group) else Shared()
        links = [link for piece in comm.pieces for link in piece.links if link.to < comm.size]
        places = [place for piece in comm.pieces for place in piece.places if _inside(place, comm.size)]
        return Wired(
            group=name,
            host=comm.device.host,
            device=comm.device.number,
            channels=max((piece.channels for piece in comm.pieces), default=0),
            links=tuple(dict.fromkeys(links)),
            places=tuple(dict.fromkeys(places)),
            rings=first.rings,
            choices=first.choices,
            switch=comm.device in self.log.switched,
        )

    def notes(self) -> str:
        """What could not be used, as part of what the source is called."""
        log = self.log
        links = sum(len(piece.links) for piece in self.unassigned)
        told = [
            (links, "connections of no known communicator"),
            (self.ambiguous, "communicators that cannot be told apart"),
            (log.unknown_choices, "choices of no known communicator"),
        ]
        more = "".join(f"; not assigned: {count:,} {what}" for count, what in told if count)
        return f"{log.understood:,} of {log.lines:,} lines understood{more}"


class NcclLog(Log):
    """The log of a job: alone, or beside files that tell more of its calls."""

    @cached_property
    def _groups(self) -> Communicators:
        return Communicators(self)

    def ranks(self) -> list[tuple[Header, list[Line]]]:
        """The lines of each rank of the largest communicator."""
        if not self.lines:
            return []
        job = self._groups
        world = job.world
        if not world:
            raise TraceError(
                f"NCCL's log: none of its {count_text(self.lines, 'line')} tells of which communicator it is. It must"
                " be that of the job's beginning, and NCCL_DEBUG_SUBSYS, where it is set, must have INIT in it."
            )
        if len(world) * _size(world) > MOST_NUMBERS:
            raise TraceError(f"NCCL's log: a communicator of {_size(world):,} ranks is more than can be read.")
        groups = [(f"nccl {at}", group, job.members(group)) for at, group in enumerate(job.groups)]
        source = f"{SOURCE}; {job.notes()}"
        made = []
        for rank, one in sorted(world.items()):
            lines: list[Line] = []
            events: list[Event] = []
            unexplained = self.unknown_calls if rank == min(world) else 0
            for name, group, ranks in groups:
                for comm in (each for each in group.values() if each.device == one.device):
                    if not ranks:
                        unexplained += len(comm.calls)
                        continue
                    lines.append(_fact(name, comm, ranks, default=group is world))
                    lines.append(job.wired(group, comm.rank, name))
                    events += _events(comm, name, len(events))
            header = Header(
                format=5, job=SOURCE, host="", pid=one.device.pid, torch="", dlearn="", start_ns=0,
                rank=rank, world_size=one.size,
            )  # fmt: skip
            made.append((header, [Imported(source=source, complete=False, unexplained=unexplained), *lines, *events]))
        return made

    def beside(self, rank: int, host: str, groups: Iterable[GroupFact]) -> list[Wired]:
        """What it says of a rank that other files tell of, in their groups: those with the same members, in which all
        that it says is one. Nothing where the rank was on another host."""
        job, found = self._groups, []
        one = job.world.get(rank)
        if one is None or (host and host.partition(".")[0] != one.device.host.partition(".")[0]):
            return []
        for fact in groups:
            ranks = fact.ranks or tuple(range(fact.size))
            same = [each for each in job.groups if job.members(each) == ranks and fact.rank in each]
            told = [job.wired(each, fact.rank, fact.name) for each in same]
            if told and all(each == told[0] for each in told):
                found.append(told[0])
        return found

    def told_beside(self, wired: Sequence[Wired]) -> str:
        """What was taken from it for another file's groups, in a sentence."""
        groups = {each.group for each in wired}
        rings = sum(len(ring.channels) for each in wired for ring in each.rings)
        return (
            f"NCCL's log beside: {count_text(rings, 'ring')} in {count_text(len(groups), 'group')}, whose members are"
            f" the same there ({self._groups.notes()})"
        )


def rings_of(group: Members) -> tuple[Ring, ...]:
    """The rings that are whole: in each channel one next rank for each rank, and one way round through all of them."""
    size = _size(group)
    after: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, comm in group.items():
        for piece in comm.pieces:
            for channel, ranks in piece.after.items():
                after[channel][rank] |= ranks
            for channel, order in piece.orders.items():
                if sorted(order) == list(range(size)):
                    for one, other in zip(order, (*order[1:], order[0]), strict=True):
                        after[channel][one].add(other)
    orders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for channel, following in sorted(after.items()):
        order = _closed(following, size)
        if order:
            orders[order].append(channel)
    return tuple(Ring(order, tuple(channels)) for order, channels in orders.items())


def _closed(after: dict[int, set[int]], size: int) -> tuple[int, ...]:
    """The ring, from rank 0; () where it is not whole, or two lines contradict each other."""
    if len(after) != size or any(len(ranks) != 1 for ranks in after.values()):
        return ()
    order, (at,) = [0], after.get(0, {0})
    while at and len(order) < size and at in after:
        order.append(at)
        (at,) = after[at]
    return tuple(order) if len(order) == size and at == 0 else ()


def _settle(groups: Sequence[Members], pieces: list[ThreadPart]) -> list[ThreadPart]:
    """Give each piece that was said outside of the making of a communicator to the one that it can only be of.

    That is the only one of its process in which it has this rank; or that whose rings it closes, with one piece of each
    other member, if there is no second one of the same members. Returns those that stay open.
    """
    comms: dict[Device, list[Comm]] = defaultdict(list)
    for group in groups:
        for comm in group.values():
            comms[comm.device].append(comm)
    left: list[ThreadPart] = []
    for piece in pieces:
        fitting = [comm for comm in comms[piece.device] if _fits(piece, comm)]
        if len(fitting) == 1:
            fitting[0].pieces.append(piece)
        else:
            left.append(piece)
    open_of: dict[Device, list[ThreadPart]] = defaultdict(list)
    for piece in left:
        open_of[piece.device].append(piece)
    alike = Counter(_who(group) for group in groups)
    for group in sorted(groups, key=_size):
        if rings_of(group) or len(group) < _size(group) or alike[_who(group)] > 1:
            continue
        options = {
            rank: [piece for piece in open_of[comm.device] if piece.after and _fits(piece, comm)]
            for rank, comm in group.items()
        }
        if not all(len(found) == 1 for found in options.values()):
            continue
        tried = {rank: Comm(comm.device, rank, comm.size, comm.key, options[rank]) for rank, comm in group.items()}
        channels = {channel for (piece,) in options.values() for channel in piece.after}
        if sum(len(ring.channels) for ring in rings_of(tried)) == len(channels):
            for rank, comm in group.items():
                (piece,) = options[rank]
                comm.pieces.append(piece)
                open_of[comm.device].remove(piece)
    return [piece for found in open_of.values() for piece in found]


def _who(group: Members) -> frozenset[tuple[int, Device]]:
    return frozenset((rank, comm.device) for rank, comm in group.items())


def _fits(piece: ThreadPart, comm: Comm) -> bool:
    ranks = {link.to for link in piece.links} | {rank for following in piece.after.values() for rank in following}
    return piece.me == {comm.rank} and max(ranks, default=0) < comm.size


def _size(group: Members) -> int:
    return next(iter(group.values())).size


def _inside(place: TreePlace, size: int) -> bool:
    return all(rank < size for rank in (*place.down, place.up or 0))


def _choices(group: Members) -> tuple[Choice, ...]:
    found = (
        Choice(OPS.get(each.op, each.op), each.bytes, each.algorithm, each.protocol, each.channels)
        for comm in group.values()
        for each in comm.choices
    )
    return tuple(dict.fromkeys(found))


def _fact(name: str, comm: Comm, ranks: tuple[int, ...], *, default: bool) -> GroupFact:
    return GroupFact(name=name, backend="nccl", rank=comm.rank, size=comm.size, ranks=ranks, default=default)


def _events(comm: Comm, group: str, before: int) -> list[Event]:
    """The calls of a rank in one group. Their times are their numbers: the log has none."""
    events: list[Event] = []
    turns: dict[str, int] = defaultdict(int)
    for at, (number, call) in enumerate(comm.calls):
        op = OPS.get(call.op, call.op.lower())
        turns[op if op in ("send", "recv") else ""] += 1
        common: dict[str, Any] = {"number": before + at, "start_ns": number, "ended_by": NOT_OBSERVED, "group": group}
        if op in ("send", "recv"):
            peer = call.root if call.root < comm.size else None
            tensors = _tensor(call, 1)
            common |= {"peer": peer, "tag": 0, "seq": turns[op]}
            events.append(PointToPoint(op="send" if op == "send" else "recv", tensors=tensors, **common))
            continue
        gathers, scatters = op in ("all_gather_single", "gather"), op in ("reduce_scatter_single", "scatter")
        whole = comm.size if scatters or op == "all_to_all_single" else 1
        outputs = _tensor(call, comm.size if gathers or op == "all_to_all_single" else 1)
        root = call.root if op in ("broadcast", "reduce", "gather", "scatter") else None
        events.append(
            Collective(
                op=op,
                seq=turns[""],
                inputs=_tensor(call, whole),
                outputs=() if op in IN_PLACE else outputs,
                root=root,
                **common,
            )
        )
    return events


def _tensor(call: LoggedCall, times: int) -> tuple[TensorInfo, ...]:
    dtype, item_bytes = DTYPES[call.datatype] if call.datatype < len(DTYPES) else (f"type {call.datatype}", 1)
    count = min(call.elements * times, 2**40)
    size = min(count * item_bytes, 2**53)
    return (TensorInfo((count,), dtype, "cuda", size, size),)
