"""What the program asked for, joined over the ranks (Operation), and who sent what to whom for it (Message)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import msgspec

from dlearn.errors import optional
from dlearn.shown import Answer, Paragraph, Shown, Table, count_text, first_few
from dlearn.trace.event import Bucket, Collective, Event, PointToPoint, TensorInfo
from dlearn.trace.exchange import RpcExchange
from dlearn.trace.source import ServiceCall

if TYPE_CHECKING:
    import pandas

_REASONS_SHOWN = 8
_ROWS_SHOWN = 10
_OPS_SHOWN = 6
_RANKS_SHOWN = 4
_LONGEST_WHAT = 80
"""Characters of what travels, in a table of operations."""
_error = attrgetter("error")

How = Literal["observed", "derived", "inferred", "missing"]


def family_of_op(op: str) -> str:
    """ "all_gather" of "all_gather_single_coalesced"; of what ranks called differently, the first."""
    return op.split("/")[0].removesuffix("_coalesced").removesuffix("_single").removeprefix("monitored_")


class Group(msgspec.Struct, frozen=True):
    """A process group as the whole job sees it: `members[i]` is the rank (of the trace) of group rank `i`."""

    name: str
    backend: str
    members: tuple[int, ...]
    default: bool


class RpcEnd(Event, tag="rpc end", frozen=True, kw_only=True):
    """One side of an RPC: the caller's until the reply has come, or the callee's from arrival to reply.

    `seq` is the agent's own number of the request. Not in the file: made of what Python saw and the agents logged.
    """

    op: str
    seq: int
    group: str = "rpc"
    tensors: tuple[TensorInfo, ...] = ()
    what: str = ""


End = Collective | PointToPoint | RpcEnd | ServiceCall


class Operation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A collective with all its members, a send with its recv, an RPC request with its reply (`exchange`), or a call
    of another service, whose only end is the caller's.

    `ends` holds each member's own event, in the order of ranks; `missing` the ranks that never called it.
    A send stands before its recv. `problem` says in words why the ends do not fit together, or is empty.
    """

    op: str
    group: Group
    seq: int
    ends: tuple[End, ...]
    missing: tuple[int, ...] = ()
    problem: str = ""
    bucket: Bucket | None = None
    what: str = ""
    """What travels, in words: "gradient of bucket 0: fc2.weight, fc2.bias"."""
    sender: int | None = None
    receiver: int | None = None
    payload_bytes: int = 0
    """Of a point-to-point operation: from whom, to whom, how much."""
    steps: tuple[Operation, ...] = ()
    """Of a glass-box collective: the sends that it consists of."""
    exchange: RpcExchange | None = None

    @property
    def start_ns(self) -> int:
        """When the first rank called it."""
        return min(end.start_ns for end in self.ends)

    @property
    def transfer_ns(self) -> int:
        """When the last rank called it: before this, the others wait; only now all data can travel."""
        return max(end.start_ns for end in self.ends)

    @property
    def end_ns(self) -> int | None:
        """When the last rank was done; None while somebody is not, or where an end was not observed."""
        ends = [end.end_ns for end in self.ends]
        if self.missing or any(end is None for end in ends):
            return None
        return max(end for end in ends if end is not None)

    @property
    def last_rank(self) -> int:
        """The rank that called it last: the one that the others waited for."""
        return max(self.ends, key=lambda end: end.start_ns).rank

    @property
    def pending(self) -> bool:
        """Some rank is still inside it."""
        return any(end.pending for end in self.ends)

    @property
    def failed(self) -> bool:
        return any(map(_error, self.ends))

    @property
    def refused(self) -> bool:
        """Every call of it raised at once: nothing was sent."""
        return self.ends[0].refused

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who called it."""
        return tuple(end.rank for end in self.ends)

    @property
    def given_bytes(self) -> int:
        """What a rank hands to it: of a send or an RPC its payload, of a collective the most that any rank gives."""
        if self.sender is not None or self.receiver is not None:
            return self.payload_bytes
        calls = [end for end in self.ends if isinstance(end, Collective)]
        return max((sum(tensor.payload_bytes for tensor in call.inputs) for call in calls), default=0)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Who may have called it: their file, or lines of it, are not in this trace."""
        members = self.group.members if self.sender is None and self.receiver is None else (self.sender, self.receiver)
        seen = {*self.ranks, *self.missing}
        return tuple(rank for rank in members if rank is not None and rank not in seen)


class Operations(tuple[Operation, ...], Shown):
    """The operations of a trace, in the order of first call. Shows their number by kind and the first ten."""

    __repr__ = Shown.__repr__
    labels: dict[int, str]

    @classmethod
    def of(cls, found: Iterable[Operation], labels: dict[int, str]) -> Operations:
        """These, with the labels of their ranks."""
        operations = cls(found)
        operations.labels = labels
        return operations

    def paragraphs(self) -> Iterator[Paragraph]:
        kinds = Counter(each.op for each in self)
        named = first_few([f"{count:,} {op}" for op, count in kinds.most_common()], _OPS_SHOWN)
        yield f"{count_text(len(self), 'operation')}{': ' if self else ''}{named}"
        if self:
            begin = self[0].start_ns
            head = ("operation", "ranks", "at, ms", "took, ms", "gives, B", "what")
            rows = [self._row(each, begin) for each in self[:_ROWS_SHOWN]]
            yield Table([head, *rows], names=2, numbers=3)
        if len(self) > _ROWS_SHOWN:
            yield f"and {len(self) - _ROWS_SHOWN:,} more"

    def _row(self, each: Operation, begin: int) -> tuple[str, ...]:
        took = "-" if each.end_ns is None else f"{(each.end_ns - each.start_ns) / 1e6:,.2f}"
        what = each.what or each.problem
        short = what if len(what) <= _LONGEST_WHAT else f"{what[: _LONGEST_WHAT - 3]}..."
        at = f"{(each.start_ns - begin) / 1e6:,.2f}"
        return each.op, self._ranks(each), at, took, f"{each.given_bytes:,}", short

    def _ranks(self, each: Operation) -> str:
        if each.sender is not None and each.receiver is not None:
            return f"{self._label(each.sender)} -> {self._label(each.receiver)}"
        return first_few([self._label(rank) for rank in each.ranks], _RANKS_SHOWN)

    def _label(self, rank: int) -> str:
        return self.labels.get(rank, f"rank {rank}")


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Always exactly one sender and one receiver.

    `payload_bytes` is the data without framing; None where it is not known. `offset_bytes` and `whole_bytes` say which
    part of the operation's data it is. `sent_ns` and `received_ns` bracket it: those of a derived message share the
    operation's transfer among the steps of the algorithm, and are no measurement. `how` says how it is known:
    observed (hooks saw it) · derived (from the backend's algorithm) · inferred (a control message that follows from
    rules) · missing (expected, never came). `confirmed`: the kernel's socket counters agree, to the byte.
    """

    src: int
    dst: int
    op: str
    what: str
    payload_bytes: int | None
    how: How
    operation: Operation
    sent_ns: int | None = None
    received_ns: int | None = None
    offset_bytes: int = 0
    whole_bytes: int = 0
    step: int = 0
    confirmed: bool = False
    control: bool = False
    """Of an RPC: torch's own, without any of the program's data."""
    known_by: str = ""
    """Of an RPC, how its kind is known: python, window, rule or unknown."""
    tensors: tuple[TensorInfo, ...] = ()
    packed_bytes: int | None = None
    """Of an RPC: the payload without its tensors; None where C++ packed it."""
    observer_bytes: int = 0
    """What the recorder adds to it on the wire; in no other count."""


class Messages(Answer, frozen=True):
    """All messages of a trace, in the order of sending, and each operation that gave none, with the reason.

    Shows their number and the first ten.
    """

    items: tuple[Message, ...]
    unexplained: tuple[tuple[Operation, str], ...]
    labels: dict[int, str]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Message:
        return self.items[index]

    def to_frame(self) -> pandas.DataFrame:
        """One row a message (needs pandas)."""
        pandas = optional("pandas", needed_by="to_frame")

        columns = ["src", "dst", "op", "what", "payload_bytes", "how", "confirmed", "sent_ns", "received_ns", "step"]
        rows = [[getattr(message, column) for column in columns] for message in self.items]
        frame = pandas.DataFrame(rows, columns=columns)
        for column in ("src", "dst"):
            frame[column] = [self.label(rank) for rank in frame[column]]
        return frame

    def paragraphs(self) -> Iterator[Paragraph]:
        finding, *reasons = self.sentences()
        yield finding
        if self.items:
            yield Table([self.head, *self.rows(self.items[:_ROWS_SHOWN])], names=2, numbers=2)
        if len(self) > _ROWS_SHOWN:
            yield f"and {len(self) - _ROWS_SHOWN:,} more"
        yield from reasons

    def sentences(self) -> list[str]:
        """How many they are, and why some operations gave none."""
        total = len({id(message.operation) for message in self.items})
        left = len(self.unexplained)
        lines = [f"{len(self.items):,} messages of {total:,} operations; {left:,} operations not explained"]
        reasons = Counter((operation.op, reason) for operation, reason in self.unexplained)
        for (op, reason), count in reasons.most_common(_REASONS_SHOWN):
            lines.append(f"  not explained: {op}{f', {count:,} times' if count > 1 else ''}: {reason}")
        if len(reasons) > _REASONS_SHOWN:
            lines.append(f"  and {len(reasons) - _REASONS_SHOWN:,} more: see .unexplained")
        return lines

    head = ("from", "to", "payload bytes", "sent, ms", "how", "op", "what")

    def rows(self, some: Iterable[Message]) -> Iterator[tuple[str, ...]]:
        """Some of these messages as rows of a table; times from the first that was sent."""
        # They stand in the order of sending; one without a time stands where its operation was called.
        first_ns = next((message.sent_ns for message in self.items if message.sent_ns is not None), 0)
        for message in some:
            yield self._row(message, first_ns)

    def _row(self, message: Message, first_ns: int) -> tuple[str, ...]:
        size = "?" if message.payload_bytes is None else f"{message.payload_bytes:,}"
        sent = "-" if message.sent_ns is None else f"{(message.sent_ns - first_ns) / 1e6:,.3f}"
        how = f"{message.how}, confirmed" if message.confirmed else message.how
        return self.label(message.src), self.label(message.dst), size, sent, how, message.op, message.what

    def label(self, rank: int) -> str:
        """What pictures and words call this rank."""
        return self.labels.get(rank, f"rank {rank}")
