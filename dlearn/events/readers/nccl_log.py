"""NCCL's own log (NCCL_DEBUG=INFO): one file for all ranks, or one for each; lines of several may be mixed.

The format is undocumented and changes (github.com/NVIDIA/nccl/issues/1644), so each kind of line has a pattern here,
what fits none is passed over, and how many fitted is said. A line says which thread of which process wrote it, and
seldom of which communicator: what a thread says while it makes one is of that one, and what it says later is assigned
in `nccl_comms.py`, or not at all.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlearn.events.printable import printable
from dlearn.events.wiring import ChannelLink, Choice

MARK = " NCCL INFO "
MOST_CHARACTERS = 8192  # Of one line that are looked at; NCCL writes 1,023.
_PREFIX = re.compile(r"([\w.-]{1,255}):(\d{1,10}):(\d{1,10}) \[(\d{1,4})\](?: \S{1,100}:\d{1,6})?$")
_COMM = re.compile(
    r"(?:\[Rank \d+\] )?(?:ncclComm\w+ )?comm (\w+) rank (\d{1,6}) nranks (\d{1,6}) cudaDev (\d{1,4}) "
    r"(.{0,300}?) ?- Init (START|COMPLETE)"
)
_COMM_ID = re.compile(r"commId (\w+)")
_SPLIT = re.compile(r"parent (\w+) splitCount (-?\d+) color (-?\d+)")
_ORDER = re.compile(r"Channel (\d{1,4})/(\d{1,4}) :([ \d]+)$")
_LINK = re.compile(
    r"Channel (\d{1,4})(?:/(\d))? : (\d{1,6})\[\w+\] -> (\d{1,6})\[\w+\](?: \[(send|receive)\])?"
    r" via (.{1,80}?)(?: comm .*)?$"
)
_RING = re.compile(r"Ring (\d{1,4}) : (\d{1,6}) -> (\d{1,6}) -> (\d{1,6})$")
_TREE = re.compile(r"Trees \[|Tree \d{1,4} : ")
"""Lines that are counted only: no question asks for the ranks of a tree."""
_CHANNELS = re.compile(r"(\d{1,4}) coll channels")
_CHOICE = re.compile(
    r"(\w+): (\d{1,15}) Bytes -> Algo (\w+) proto (\w+)( time)?"
    r"(?:.{0,40}channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
)
_CALL = re.compile(
    r"(\w+): opCount \w+ sendbuff \S+ recvbuff \S+ count (\d{1,15}) datatype (\d{1,4}) op \d+ root (\d{1,6}) comm (\S+)"
)
_SWITCH = re.compile(r"NVLS (?:Creat|comm |rank )|Connected NVLS")
OPS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather_single", "ReduceScatter": "reduce_scatter_single",
    "Broadcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "AlltoAll": "all_to_all_single", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")  # By NCCL's numbers, which older logs write.


class Device(NamedTuple):
    """A GPU of a process: a rank of the job. (One process may drive several.)"""

    host: str
    pid: int
    number: int


Thread = tuple[Device, int]


class LoggedCall(NamedTuple):
    """A collective, a send or a receive: its number on the device, and what its line says."""

    number: int
    op: str
    elements: int
    datatype: int
    root: int


@dataclass
class ThreadPart:
    """What a thread said of one communicator, until it said that all rings, or all trees, are connected."""

    device: Device
    links: list[ChannelLink] = field(default_factory=list)
    me: set[int] = field(default_factory=set)
    """The ranks that it sends as: one, if the piece is of one communicator."""
    after: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Who comes next in the ring of each channel."""
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rings that stand in one line."""
    channels: int = 0

    def connected(self, use: str) -> None:
        """Note that all that was connected without a word what for is for this."""
        for at, link in enumerate(self.links):
            if not link.use:
                self.links[at] = ChannelLink(link.channel, link.to, link.via, use)
                if use == "ring":
                    self.after[link.channel].add(link.to)


@dataclass
class Comm:
    """A communicator, as one rank of it has it."""

    device: Device
    rank: int
    size: int
    key: tuple[str | int, ...]
    pieces: list[ThreadPart] = field(default_factory=list)
    choices: dict[Choice, None] = field(default_factory=dict)
    calls: list[LoggedCall] = field(default_factory=list)


class Log:
    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self.open: list[ThreadPart] = []
        """What was said before a communicator was made; what is said after is in `spoken`."""
        self.spoken: dict[Thread, list[ThreadPart]] = {}
        self.switched: set[Device] = set()
        self.lines = self.understood = self.unknown_calls = 0
        self.unassigned: Counter[str] = Counter()  # What is understood, but not of whom.
        self._by_pointer: dict[tuple[str, int, str], Comm] = {}
        self._of_device: dict[Device, list[Comm]] = defaultdict(list)
        self._making: dict[Thread, Comm] = {}
        self._last_call: dict[Thread, Comm] = {}
        self._turns: Counter[tuple[Device, int]] = Counter()
        self._calls: Counter[Device] = Counter()

    def take(self, path: Path, data: bytes) -> bool:
        if MARK.encode() not in data or data[:2] == b"PK":
            return False
        for line in data.split(b"\n"):
            if MARK.encode() in line:
                self.lines += 1
                self._line(printable(line[:MOST_CHARACTERS].decode(errors="replace").rstrip()))
        return True

    def _line(self, line: str) -> None:
        """Take in one line; two that have run together are not understood."""
        before, _, text = line.partition(MARK)
        found = _PREFIX.search(before, max(0, len(before) - 500))
        if found is not None and MARK not in text:
            device = Device(found[1], int(found[2]), int(found[4]))
            self.understood += self._said((device, int(found[3])), text)

    def _said(self, thread: Thread, text: str) -> bool:
        """Take in what a thread says. Return whether it is understood."""
        if "- Init " in text:
            return self._comm(thread, text)
        if ": opCount " in text:
            return self._call(thread, text)
        if " Bytes -> Algo " in text:
            return self._choice(thread, text)
        if _SWITCH.match(text):
            self.switched.add(thread[0])
            return True
        pieces = self.spoken.setdefault(thread, [ThreadPart(thread[0])])
        if not text.startswith("Connected all "):
            return _of_wiring(pieces[-1], text)
        pieces[-1].connected("ring" if text.startswith("Connected all rings") else "tree")
        if thread not in self._making:
            pieces.append(ThreadPart(thread[0]))
        return True

    def _comm(self, thread: Thread, text: str) -> bool:
        parts = _COMM.match(text)
        if parts is None or not int(parts[2]) < int(parts[3]):
            return False
        device = thread[0]._replace(number=int(parts[4]))
        pieces = self.spoken.pop(thread, [])
        comm = self._making.pop(thread, None)
        starts = parts[6] == "START"
        if comm is None or starts:
            key = self._key(device, int(parts[3]), parts[5])
            comm = Comm(device, int(parts[2]), int(parts[3]), key)
            self.comms.append(comm)
            self._of_device[device].append(comm)
            self._by_pointer[device.host, device.pid, parts[1]] = comm
        if starts:
            self._making[thread] = comm
            self.open += pieces
        else:
            comm.pieces += pieces
        return True

    def _key(self, device: Device, size: int, more: str) -> tuple[str | int, ...]:
        """Return what all its ranks call it; in old logs, its number among those of its size."""
        if found := _COMM_ID.search(more):
            return "commId", found[1], size
        if found := _SPLIT.search(more):
            parent = self._by_pointer.get((device.host, device.pid, found[1]))
            if parent is not None:
                return "split", *parent.key, found[2], found[3]
        self._turns[device, size] += 1
        return "of size", size, self._turns[device, size]

    def _call(self, thread: Thread, text: str) -> bool:
        parts = _CALL.match(text)
        if parts is None:
            return False
        # One thread may drive several GPUs, so only the communicator says which of them it is.
        comm = self._by_pointer.get((thread[0].host, thread[0].pid, parts[5]))
        if comm is None:
            self.unknown_calls += 1
            return True
        self._calls[comm.device] += 1
        op, *counts = parts.groups()[:-1]
        named = OPS.get(op, op.lower())
        comm.calls.append(LoggedCall(self._calls[comm.device], named, *map(int, counts)))
        self._last_call[thread] = comm
        return True

    def _choice(self, thread: Thread, text: str) -> bool:
        parts = _CHOICE.match(text)
        own = self._of_device[thread[0]]
        comm = own[0] if len(own) == 1 else self._last_call.get(thread)
        if parts is None:
            return False
        if comm is None:
            self.unassigned["choices of no known communicator"] += 1
            return True
        op, size, algorithm, protocol, time, first, last = parts.groups()
        # Older logs, which tell a time too, count what all ranks give or get together.
        together = time is not None and op in ("AllGather", "ReduceScatter")
        choice = Choice(
            OPS.get(op, op), int(size) // (comm.size if together else 1),
            _named(algorithm, ALGORITHMS), _named(protocol, PROTOCOLS),
            () if first is None else (int(first), int(last)),
        )  # fmt: skip
        comm.choices[choice] = None
        return True


def _named(text: str, names: Sequence[str]) -> str:
    """Return NCCL's word, which is a number in older logs."""
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text.upper()


def _of_wiring(piece: ThreadPart, text: str) -> bool:
    """Take in a line about rings, trees and links. Return whether it is one."""
    if parts := _LINK.match(text):
        channel, use, src, dst, way, via = parts.groups()
        if way != "receive":
            piece.me.add(int(src))
            use = "send, recv" if use == "1" else ""
            piece.links.append(ChannelLink(int(channel), int(dst), via, use))
    elif parts := _ORDER.match(text):
        piece.orders[int(parts[1])] = tuple(int(each) for each in parts[3].split() if len(each) < 7)
        piece.channels = max(piece.channels, int(parts[2]))
    elif parts := _RING.match(text):
        piece.me.add(int(parts[3]))
        piece.after[int(parts[1])].add(int(parts[4]))
    elif parts := _CHANNELS.match(text):
        piece.channels = max(piece.channels, int(parts[1]))
    else:
        return _TREE.match(text) is not None
    return True
