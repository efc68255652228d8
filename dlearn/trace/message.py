"""What the program asked for, joined over the ranks (Operation), and who sent what to whom for it (Message)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dlearn.trace.event import Bucket, Collective, Event, PointToPoint, TensorInfo
from dlearn.trace.rpc.rpc_exchange import RpcExchange
from dlearn.trace.source import ServiceCall
from dlearn.trace.wiring import Wiring
from dlearn.trace.wording import (
    EVERY_PARAMETER,
    Reason,
    bucket_text,
    reply_text,
    request_tensors,
    request_text,
    tensors_text,
)

How = Literal["observed", "derived", "inferred", "missing"]


def family_of_op(op: str) -> str:
    """ "all_gather" of "all_gather_single_coalesced"; of what ranks called differently, the first."""
    return op.split("/")[0].removesuffix("_coalesced").removesuffix("_single").removeprefix("monitored_")


class Group(msgspec.Struct, frozen=True):
    """A process group of the whole job: `members[i]` is the rank (of the trace) of group rank `i`."""

    name: str
    backend: str
    members: tuple[int, ...]
    default: bool
    wiring: Wiring | None = None


class RpcEnd(Event, tag="rpc end", frozen=True, kw_only=True):
    """One side of an RPC: the caller's until the reply has come, or the callee's from arrival to reply.

    `seq` is the agent's own number of the request. Not in the file: made of what Python saw and the agents logged.
    """

    op: str
    seq: int
    exchange: RpcExchange
    group: str = "rpc"

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Those of the request."""
        return request_tensors(self.exchange)

    @property
    def what(self) -> str:
        """What is asked, in words: "forward(float32[8, 3])"."""
        return request_text(self.exchange, tensors_text(self.tensors))


End = Collective | PointToPoint | RpcEnd | ServiceCall


def tensors_of(call: End) -> tuple[TensorInfo, ...]:
    """What one rank hands to the transport in this call: what it gives, or, if it gives nothing, what it gets."""
    return (call.inputs or call.outputs) if isinstance(call, Collective) else call.tensors


def bytes_of(tensors: Sequence[TensorInfo]) -> int:
    """What is handed to the transport of all of these."""
    return sum([tensor.payload_bytes for tensor in tensors])


def payload_bytes(call: End) -> int:
    """What one rank hands to the transport: what it gives, else what it gets; of an RPC its arguments."""
    return bytes_of(tensors_of(call))


class Operation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A collective with all its members, a send with its recv, an RPC request with its reply (`exchange`), or a call
    of another service, whose only end is the caller's.

    `ends` holds each member's own event, in the order of ranks; `missing` the ranks that never called it.
    A send stands before its recv. `misfit` says why the ends do not fit together; None where they do.
    """

    op: str
    group: Group
    seq: int
    ends: tuple[End, ...]
    missing: tuple[int, ...] = ()
    misfit: Reason | None = None
    bucket: Bucket | None = None
    role: str = ""
    """What torch makes it for, where no program asked: "DDP sends rank 0's model"."""
    sender: int | None = None
    receiver: int | None = None
    payload_bytes: int = 0
    """Of a point-to-point operation: from whom, to whom, how much."""
    steps: tuple[Operation, ...] = ()
    """Of a glass-box collective: the sends that it consists of."""
    exchange: RpcExchange | None = None

    @property
    def is_message(self) -> bool:
        """Whether it is a send with its recv, or one of the two alone."""
        return self.sender is not None or self.receiver is not None

    @property
    def problem(self) -> str:
        """Why the ends do not fit together, in words, or nothing."""
        return "" if self.misfit is None else str(self.misfit)

    @property
    def what(self) -> str:
        """What travels, in words: "gradient of bucket 0: fc2.weight, fc2.bias"."""
        return self.describe()

    def describe(self, *, most: int = EVERY_PARAMETER, tagged: bool = True, tensors: str = "") -> str:
        """What travels, with the first `most` parameters of a bucket and, if `tagged`, the tag of a message.

        `tensors` stands for the tensors, instead of their own text.
        """
        if self.bucket is not None:
            return bucket_text(self.bucket, most)
        if self.role:
            return self.role
        tensors = tensors or tensors_text(self.tensors)
        if self.exchange is not None:
            return request_text(self.exchange, tensors)
        if isinstance(self.ends[0], ServiceCall):
            return self.ends[0].about
        return tensors if self.tag is None or not tagged else f"{tensors}, tag {self.tag}"

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Those that are named in what travels: of the first rank that gives any, as of a scatter the root alone."""
        givers = (end for end in self.ends if isinstance(end, Collective) and end.inputs)
        return tensors_of(next(givers, self.ends[0]))

    @property
    def tag(self) -> int | None:
        """The program's own tag of a message: a glass-box step has none, and the hidden default, 0, is none either."""
        call = self.ends[0]
        return call.tag if isinstance(call, PointToPoint) and call.tag > 0 and not call.step else None

    @property
    def start_ns(self) -> int:
        """When the first rank called it."""
        return min([end.start_ns for end in self.ends])

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
    def last_ranks(self) -> tuple[int, ...]:
        """All that called it at that same nanosecond: where clocks are coarse, more than one."""
        last = self.transfer_ns
        return tuple(sorted(end.rank for end in self.ends if end.start_ns == last))

    @property
    def pending(self) -> bool:
        """Some rank is still inside it."""
        return any(end.pending for end in self.ends)

    @property
    def failed(self) -> bool:
        return any(end.failed for end in self.ends)

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
        if self.is_message:
            return self.payload_bytes
        calls = [end for end in self.ends if isinstance(end, Collective)]
        return max((bytes_of(call.inputs) for call in calls), default=0)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Who may have called it: their file, or lines of it, are not in this trace."""
        members = (self.sender, self.receiver) if self.is_message else self.group.members
        seen = {*self.ranks, *self.missing}
        return tuple(rank for rank in members if rank is not None and rank not in seen)


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

    @property
    def what(self) -> str:
        """What it carries, in words: "float32[8, 3]", "result of forward: float32[8, 10]"."""
        return self.describe()

    def describe(self, *, most: int = EVERY_PARAMETER, tensors: str = "") -> str:
        """What it carries, as `Operation.describe` says it; of a reply, what comes back."""
        exchange = self.operation.exchange
        if exchange is None or not self.step:
            return self.operation.describe(most=most, tensors=tensors)
        return reply_text(exchange, tensors or tensors_text(self.carried))

    @property
    def carried(self) -> tuple[TensorInfo, ...]:
        """The tensors that `what` names: of a message of a collective, those of the whole operation."""
        return self.operation.tensors if self.operation.exchange is None else self.tensors
