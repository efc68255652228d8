"""NCCL's log, when all of it has been read: which communicator is whose, and which of its rings are whole."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import chain

from dlearn.errors import TraceError
from dlearn.events.event import NOT_OBSERVED, GroupFact, TensorInfo
from dlearn.events.job_facts import DEFAULT
from dlearn.events.readers import rank_lines
from dlearn.events.readers.nccl_log import Comm, Device, Log, LoggedCall, ThreadPart
from dlearn.events.readers.rank_lines import ForeignRank, Lines
from dlearn.events.wiring import Ring, Wired
from dlearn.shown import count_text

SOURCE = "NCCL's log: it has no times, calls stand in the order of its lines"
DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""By NCCL's numbers."""
GIVEN_TO_EACH = ("reduce_scatter_single", "scatter", "all_to_all_single")
GOT_OF_EACH = ("all_gather_single", "gather", "all_to_all_single")
"""What has a part for, or of, each rank: a log's count is that of one part."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MOST_NUMBERS = 1 << 24  # Of members in all files together: for each rank all of a group are listed.


class Communicator:
    """One communicator, as all its ranks have it."""

    def __init__(self, name: str, comms: dict[int, Comm], switched: set[Device]) -> None:
        self.name, self.comms, self._switched = name, comms, switched
        self.size = next(iter(comms.values())).size

    @cached_property
    def rings(self) -> tuple[Ring, ...]:
        """Return the whole ones: in a channel each rank has one next, and one path visits all."""
        after: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, comm in self.comms.items():
            for piece in comm.pieces:
                for channel, ranks in piece.after.items():
                    after[channel][rank] |= ranks
                for channel, order in piece.orders.items():
                    if sorted(order) == list(range(self.size)):
                        for one, other in zip(order, order[1:] + order[:1], strict=True):
                            after[channel][one].add(other)
        orders: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for channel, following in sorted(after.items()):
            if order := _closed(following, self.size):
                orders[order].append(channel)
        return tuple(Ring(order, tuple(channels)) for order, channels in orders.items())

    def wired(self, rank: int, name: str) -> Wired:
        """Return what is known of one of its ranks; with the first, what is known of all."""
        comm, is_first = self.comms[rank], rank == min(self.comms)
        links = dict.fromkeys(chain.from_iterable(piece.links for piece in comm.pieces))
        told = self.comms.values() if is_first else ()
        choices = dict.fromkeys(chain.from_iterable(each.choices for each in told))
        return Wired(
            group=name, host=comm.device.host, device=comm.device.number,
            channels=max((piece.channels for piece in comm.pieces), default=0),
            links=tuple(link for link in links if link.to < self.size),
            rings=self.rings if is_first else (), choices=tuple(choices),
            switch=comm.device in self._switched,
        )  # fmt: skip


class NcclLog(Log):
    """The log of a job: alone, or beside files that tell more of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Wired] = []

    @cached_property
    def _job(self) -> list[Communicator]:
        found: dict[tuple[str | int, ...], list[Comm]] = defaultdict(list)
        for comm in self.comms:
            found[comm.key].append(comm)
        job: list[Communicator] = []
        for comms in found.values():
            by_rank = {comm.rank: comm for comm in comms}
            if len(by_rank) == len(comms):
                job.append(Communicator(f"nccl {len(job)}", by_rank, self.switched))
            else:  # Of two of one key and rank it is not known which is whose.
                self.unassigned["communicators that cannot be told apart"] += len(comms)
        of_device: dict[Device, list[Comm]] = defaultdict(list)
        for group in job:
            for comm in group.comms.values():
                of_device[comm.device].append(comm)
        for piece in chain(self.open, *self.spoken.values()):
            fitting = [comm for comm in of_device[piece.device] if _fits(piece, comm)]
            if len(fitting) == 1:
                fitting[0].pieces.append(piece)
            else:
                self.unassigned["connections of no known communicator"] += len(piece.links)
        return job

    @cached_property
    def _world(self) -> Communicator:
        """Return the largest group: its ranks are those of the job."""
        if not self._job:
            raise TraceError(
                f"NCCL's log: none of its {count_text(self.lines, 'line')} tells of which communicator it is. It must"
                " be that of the job's beginning, and NCCL_DEBUG_SUBSYS, where it is set, must have INIT in it."
            )
        return max(self._job, key=lambda each: (each.size, len(each.comms)))

    @cached_property
    def _rank_of(self) -> dict[Device, int]:
        return {comm.device: rank for rank, comm in self._world.comms.items()}

    def _members(self, group: Communicator) -> tuple[int, ...]:
        """Return the job's ranks in a group, in its order; () where one of them left no line."""
        if group is self._world:
            return tuple(range(group.size))
        if len(group.comms) < group.size:
            return ()
        ranks = [self._rank_of.get(group.comms[rank].device, -1) for rank in range(group.size)]
        return () if min(ranks) < 0 or len(set(ranks)) < len(ranks) else tuple(ranks)

    def ranks(self) -> list[Lines]:
        if not self.lines:
            return []
        world = self._world
        if len(world.comms) * world.size > MOST_NUMBERS:
            what = f"a communicator of {world.size:,} ranks"
            raise TraceError(f"NCCL's log: {what} is more than can be read.")
        made: dict[Device, ForeignRank] = {}
        for number, own in sorted(world.comms.items()):
            made[own.device] = ForeignRank(SOURCE, number, own.size)
        for group in self._job:
            members = self._members(group)
            for comm in group.comms.values():
                rank = made.get(comm.device)
                if rank is None:
                    continue
                if not members:
                    rank.unexplained += len(comm.calls)
                    continue
                rank.add_group(group.name, "nccl", members, DEFAULT * (group is world))
                rank.facts.append(group.wired(comm.rank, group.name))
                for call in comm.calls:
                    _add(rank, group, call)
        next(iter(made.values())).unexplained += self.unknown_calls
        details = f"; {self._notes}"
        return [rank.lines(details=details, pid=device.pid) for device, rank in made.items()]

    def beside(self, rank: int | None, host: str, groups: Iterable[GroupFact]) -> list[Wired]:
        """Return what it says of a rank that other files tell of, in groups of the same members, if
        all that it says is one. Nothing where the rank was on another host."""
        one = self._world.comms.get(rank) if self._job and rank is not None else None
        if one is None or (host and host.partition(".")[0] != one.device.host.partition(".")[0]):
            return []
        found: list[Wired] = []
        for fact in groups:
            ranks = fact.ranks or tuple(range(fact.size))
            same = [each for each in self._job if self._members(each) == ranks]
            wired = [each.wired(fact.rank, fact.name) for each in same if fact.rank in each.comms]
            if wired and all(each == wired[0] for each in wired):
                found.append(wired[0])
        self._given += found
        return found

    def told_beside(self) -> str:
        groups = {each.group for each in self._given}
        rings = sum(len(ring.channels) for each in self._given for ring in each.rings)
        return (
            f"NCCL's log beside: {count_text(rings, 'ring')} in {count_text(len(groups), 'group')}, whose members are"
            f" the same there ({self._notes})"
        )

    @property
    def _notes(self) -> str:
        notes = f"{self.understood:,} of {self.lines:,} lines understood"
        for what, count in self.unassigned.items():
            notes += f"; not assigned: {count:,} {what}" * bool(count)
        return notes


def _closed(after: dict[int, set[int]], size: int) -> tuple[int, ...]:
    """Return the ring from rank 0; () where it is not whole, or its lines contradict each other."""
    if len(after) != size or any(len(ranks) != 1 for ranks in after.values()):
        return ()
    order, (at,) = [0], after.get(0, {0})
    while at and len(order) < size and at in after:
        order.append(at)
        (at,) = after[at]
    return tuple(order) if len(order) == size and at == 0 else ()


def _fits(piece: ThreadPart, comm: Comm) -> bool:
    """Return whether connections made outside of any communicator's making can be of this one."""
    ranks = {link.to for link in piece.links}.union(*piece.after.values())
    return piece.me == {comm.rank} and max(ranks, default=0) < comm.size


def _add(rank: ForeignRank, group: Communicator, call: LoggedCall) -> None:
    """Add a call. Its times are its number: the log has none."""
    op = call.op
    rank.add(
        op, group.name, (_tensor(call, group.size if op in GIVEN_TO_EACH else 1),),
        (_tensor(call, group.size if op in GOT_OF_EACH else 1),),
        peer=call.root if call.root < group.size else -1, root=call.root if op in ROOTED else None,
        start_ns=call.number, ended_by=NOT_OBSERVED,
    )  # fmt: skip


def _tensor(call: LoggedCall, parts: int) -> TensorInfo:
    known = call.datatype < len(DTYPES)
    dtype = DTYPES[call.datatype] if known else f"type {call.datatype}"
    return rank_lines.tensor((call.elements * parts,), dtype, "cuda")
