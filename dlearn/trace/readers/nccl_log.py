"""NCCL's own log (NCCL_DEBUG=INFO): one file for all ranks, or one for each; lines of several may be mixed.

The format is undocumented and changes (github.com/NVIDIA/nccl/issues/1644), so each kind of line has a pattern here,
what fits none is passed over, and how many fitted is said. A line says which thread of which process wrote it, and
seldom of which communicator: what a thread says while it makes one is of that one, and what it says later is assigned
in `nccl_comms.py`, or not at all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlearn.errors import TraceError
from dlearn.trace.printable import printable
from dlearn.trace.wiring import ChannelLink, Choice, TreePlace

MARK = " NCCL INFO "
MOST_CHARACTERS = 8192
"""Of one line that are looked at; NCCL writes 1,023."""
_CUT = 1000
"""A longer line may have lost its end."""
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
_TREE = re.compile(r"Tree (\d{1,4}) : (-?\d{1,6}) -> (\d{1,6}) -> ([-\d/]{1,40})$")
_TREES = re.compile(r"\[(\d{1,4})\] ([-\d/]{1,40})->(\d{1,6})->(-?\d{1,6})(?= |$)")
_CHANNELS = re.compile(r"(\d{1,4}) coll channels")
_CHOICE = re.compile(
    r"(\w+): (\d{1,15}) Bytes -> Algo (\w+) proto (\w+)( time)?"
    r"(?:.{0,40}channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
)
_CALL = re.compile(
    r"(\w+): opCount \w+ sendbuff \S+ recvbuff \S+ count (\d{1,15}) datatype (\d{1,4}) op \d+ root (\d{1,6}) comm (\S+)"
)
_SWITCH = re.compile(r"NVLS (?:Creat|comm |rank )|Connected NVLS")
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""By NCCL's numbers, which older logs write."""


class Device(NamedTuple):
    """A GPU of a process: a rank of the job. (One process may drive several.)"""

    host: str
    pid: int
    number: int


class LoggedCall(NamedTuple):
    """A collective, a send or a receive, as its line says."""

    op: str
    elements: int
    datatype: int
    root: int


class Head(NamedTuple):
    """Who wrote a line: process and thread; and where that begins in it."""

    thread: tuple[Device, int]
    start: int


@dataclass
class ThreadPart:
    """What a thread said of one communicator, until it said that all rings, or all trees, are connected."""

    device: Device
    links: list[ChannelLink] = field(default_factory=list)
    me: set[int] = field(default_factory=set)
    """The ranks that it sends as: one, if the piece is of one communicator."""
    after: dict[int, set[int]] = field(default_factory=dict)
    """Who comes next in the ring of each channel."""
    places: list[TreePlace] = field(default_factory=list)
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rings that stand in one line."""
    channels: int = 0

    def connected(self, use: str) -> None:
        """All that was connected without a word what for is for this."""
        for at, link in enumerate(self.links):
            if not link.use:
                self.links[at] = ChannelLink(link.channel, link.to, link.via, use)
                if use == "ring":
                    self.after.setdefault(link.channel, set()).add(link.to)

    def __bool__(self) -> bool:
        return bool(self.links or self.after or self.places or self.orders)


@dataclass
class Comm:
    """A communicator, as one rank of it has it."""

    device: Device
    rank: int
    size: int
    key: tuple[str | int, ...]
    pieces: list[ThreadPart] = field(default_factory=list)
    choices: dict[Choice, None] = field(default_factory=dict)
    calls: list[tuple[int, LoggedCall]] = field(default_factory=list)
    """With their number among all calls of the device."""


class Log:
    """What the lines of a job's log say, file by file."""

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self._open: list[ThreadPart] = []
        self.switched: set[Device] = set()
        self.lines = self.understood = self.unknown_calls = self.unknown_choices = 0
        self._by_pointer: dict[tuple[str, int, str], Comm] = {}
        self._of_device: dict[Device, list[Comm]] = defaultdict(list)
        self._threads: dict[tuple[Device, int], list[ThreadPart]] = {}
        self._making: dict[tuple[Device, int], Comm] = {}
        self._last_call: dict[tuple[Device, int], Comm] = {}
        self._turns: Counter[tuple[Device, int]] = Counter()
        self._calls: Counter[Device] = Counter()

    def take(self, path: Path, data: bytes) -> bool:
        """Whether this is one; then what tells of rings, links and calls is kept."""
        if MARK.encode() not in data or data[:2] == b"PK":
            return False
        hosts: set[str] = set()
        for line in data.split(b"\n"):
            if MARK.encode() in line:
                self._line(line[:MOST_CHARACTERS].decode(errors="replace"), hosts)
        if len(self.comms) > 1 << 20:
            raise TraceError(printable(f"{path}: more communicators than any job has."))
        return True

    @property
    def open(self) -> list[ThreadPart]:
        """What was said outside of the making of a communicator."""
        last = [piece for pieces in self._threads.values() for piece in pieces if piece]
        return self._open + last

    def _line(self, line: str, hosts: set[str]) -> None:
        """Lines of several ranks may have run together: then where the next begins, a host's name tells."""
        parts = line.split(MARK)
        heads = [_head(part, hosts if at else None) for at, part in enumerate(parts[:-1])]
        for at, (head, text) in enumerate(zip(heads, parts[1:], strict=True)):
            then = heads[at + 1] if at + 1 < len(heads) else None
            self.lines += 1
            if head is not None:
                hosts.add(head.thread[0].host)
                text = text if then is None else text[: then.start]
                whole = len(line) < _CUT
                self.understood += self._said(head.thread, text.rstrip(), whole=whole)

    def _said(self, thread: tuple[Device, int], text: str, *, whole: bool) -> bool:
        """Take in what a thread says; whether it is understood."""
        if "- Init " in text:
            return self._comm(thread, text)
        if ": opCount " in text:
            return self._call(thread, text)
        if " Bytes -> Algo " in text:
            return self._choice(thread, text)
        if _SWITCH.match(text):
            self.switched.add(thread[0])
            return True
        pieces = self._threads.setdefault(thread, [ThreadPart(thread[0])])
        piece = pieces[-1]
        if text.startswith("Connected all "):
            piece.connected("ring" if text.startswith("Connected all rings") else "tree")
            if thread not in self._making:
                pieces.append(ThreadPart(thread[0]))
            return True
        return _of_wiring(piece, text, whole=whole)

    def _comm(self, thread: tuple[Device, int], text: str) -> bool:
        found = _COMM.match(text)
        if found is None or not int(found[2]) < int(found[3]):
            return False
        device = thread[0]._replace(number=int(found[4]))
        pointer, more, when = found[1], found[5], found[6]
        comm = self._making.pop(thread, None) if when == "COMPLETE" else None
        if when == "START":
            self._open += [piece for piece in self._threads.pop(thread, []) if piece]
        if comm is None:
            comm = Comm(device, int(found[2]), int(found[3]), self._key(device, int(found[3]), more))
            self.comms.append(comm)
            self._of_device[device].append(comm)
            self._by_pointer[device.host, device.pid, pointer] = comm
        if when == "START":
            self._making[thread] = comm
        else:
            comm.pieces += [piece for piece in self._threads.pop(thread, []) if piece]
        return True

    def _key(self, device: Device, size: int, more: str) -> tuple[str | int, ...]:
        """What all its ranks call it; in old logs, that it is a process's first, second, ... of this size."""
        if found := _COMM_ID.search(more):
            return "commId", found[1], size
        if found := _SPLIT.search(more):
            parent = self._by_pointer.get((device.host, device.pid, found[1]))
            if parent is not None:
                return "split", *parent.key, found[2], found[3]
        self._turns[device, size] += 1
        return "of size", size, self._turns[device, size]

    def _call(self, thread: tuple[Device, int], text: str) -> bool:
        found = _CALL.match(text)
        if found is None:
            return False
        # One thread may drive several GPUs, so only the communicator says which of them it is.
        comm = self._by_pointer.get((thread[0].host, thread[0].pid, found[5]))
        if comm is None:
            self.unknown_calls += 1
            return True
        self._calls[comm.device] += 1
        call = LoggedCall(found[1], int(found[2]), int(found[3]), int(found[4]))
        comm.calls.append((self._calls[comm.device], call))
        self._last_call[thread] = comm
        return True

    def _choice(self, thread: tuple[Device, int], text: str) -> bool:
        found = _CHOICE.match(text)
        if found is None:
            return False
        own = self._of_device[thread[0]]
        comm = own[0] if len(own) == 1 else self._last_call.get(thread)
        if comm is None:
            self.unknown_choices += 1
            return True
        algorithm, protocol = _named(found[3], ALGORITHMS), _named(found[4], PROTOCOLS)
        channels = (int(found[6]), int(found[7])) if found[6] is not None else ()
        # Older logs, which tell a time too, count what all ranks give or get together.
        together = found[5] is not None and found[1] in ("AllGather", "ReduceScatter")
        size = int(found[2]) // comm.size if together else int(found[2])
        comm.choices[Choice(found[1], size, algorithm, protocol, channels)] = None
        return True


def _head(before: str, hosts: set[str] | None) -> Head | None:
    """What stands before the mark; in the middle of a line only one of these hosts can be told from other text."""
    found = _PREFIX.search(before, max(0, len(before) - 500))
    if found is None:
        return None
    host, start = found[1], found.start()
    if hosts is not None and host not in hosts:
        host = max((each for each in hosts if host.endswith(each)), key=len, default="")
        start += len(found[1]) - len(host)
    if not host:
        return None
    return Head((Device(printable(host), int(found[2]), int(found[4])), int(found[3])), start)


def _named(text: str, names: tuple[str, ...]) -> str:
    """NCCL's word, which is a number in older logs."""
    if text.isdecimal() and len(text) < 3 and int(text) < len(names):
        return names[int(text)]
    return printable(text.upper())


def _of_wiring(piece: ThreadPart, text: str, *, whole: bool) -> bool:
    """Take in a line about rings, trees and links; whether it is one."""
    if found := _LINK.match(text):
        channel, use, src, dst, way, via = found.groups()
        if way != "receive":
            piece.me.add(int(src))
            piece.links.append(ChannelLink(int(channel), int(dst), printable(via), "send, recv" if use == "1" else ""))
    elif found := _ORDER.match(text):
        piece.orders[int(found[1])] = tuple(int(each) for each in found[3].split() if len(each) < 7)
        piece.channels = max(piece.channels, int(found[2]))
    elif text.startswith("Trees ["):
        places = [_place(int(each[1]), each[4], each[2]) for each in _TREES.finditer(text)]
        piece.places += places if whole else places[:-1]
    elif found := _RING.match(text):
        piece.me.add(int(found[3]))
        piece.after.setdefault(int(found[1]), set()).add(int(found[4]))
    elif found := _TREE.match(text):
        piece.me.add(int(found[3]))
        piece.places.append(_place(int(found[1]), found[2], found[4]))
    elif found := _CHANNELS.match(text):
        piece.channels = max(piece.channels, int(found[1]))
    else:
        return False
    return True


def _place(channel: int, up: str, down: str) -> TreePlace:
    below = tuple(int(each) for each in down.split("/") if each.isdecimal() and len(each) < 7)
    return TreePlace(channel, int(up) if up.isdecimal() else None, below)
