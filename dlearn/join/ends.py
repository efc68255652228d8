"""The ends of operations: one call of one rank each; and what operations with equal ends share."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from dlearn.events.event import Collective, Event, PointToPoint, TensorInfo
from dlearn.events.source import ServiceCall
from dlearn.events.wiring import Wiring
from dlearn.join.rpc.exchange_table import ExchangeTable
from dlearn.join.rpc.rpc_exchange import RpcExchange
from dlearn.join.wording import Reason, request_tensors, request_text, tensors_text
from dlearn.shown import RankNames

How = Literal["observed", "derived", "inferred", "missing"]


def family_of_op(op: str) -> str:
    """Return "all_gather" for "all_gather_single_coalesced"; where ranks called different ops, the first."""
    return op.split("/")[0].removesuffix("_coalesced").removesuffix("_single").removeprefix("monitored_")


class Group(msgspec.Struct, frozen=True):
    """A process group of the whole job: `members[i]` is the rank (of the trace) of group rank `i`."""

    name: str
    backend: str
    members: tuple[int, ...]
    default: bool
    wiring: Wiring | None = None
    dimensions: tuple[str, ...] = ()
    """What the program's meshes call it, mostly one name."""

    @property
    def dimension(self) -> str:
        """Return its names in one word: "shard"; "" where it has none."""
        return "/".join(self.dimensions)

    @property
    def over(self) -> str:
        """Return " over shard", to stand behind an op; "" where it has no name."""
        return f" over {self.dimension}" if self.dimensions else ""

    def named(self, labels: RankNames) -> str:
        """Return "shard (ranks 0 and 1)", of the default group "tp"; "" where it has no name."""
        who = f" ({labels.together(self.members)})" if self.dimensions and not self.default else ""
        return self.dimension + who


class RpcEnd(Event, tag="rpc end", frozen=True, kw_only=True):
    """One side of an RPC: the caller's until the reply has come, or the callee's from arrival to reply.

    `seq` is the agent's number of the request. No file holds it: it is made of what Python saw and
    the agents logged. Its own number is -1 - 2 * exchange, and one less for the callee's end.
    """

    own = ("seq",)
    op: str
    exchanges: ExchangeTable
    seq: int = 0
    group: str = "rpc"

    @property
    def exchange(self) -> RpcExchange:
        return self.exchanges.made(np.array([~self.number >> 1]))[0]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return request_tensors(self.exchange)

    @property
    def what(self) -> str:
        """Return what is asked, in words: "forward(float32[8, 3])"."""
        return request_text(self.exchange, tensors_text(self.tensors))


End = Collective | PointToPoint | RpcEnd | ServiceCall


def tensors_of(call: End) -> tuple[TensorInfo, ...]:
    """Return what one rank hands to the transport: what it gives, else what it gets."""
    return (call.inputs or call.outputs) if isinstance(call, Collective) else call.tensors


def bytes_of(tensors: Sequence[TensorInfo]) -> int:
    """Return the bytes that are handed to the transport of all of these."""
    return sum([tensor.payload_bytes for tensor in tensors])


def logical_bytes(call: End) -> int:
    """Return the logical bytes: of sparse tensors the same on all ranks."""
    return sum([tensor.logical_bytes for tensor in tensors_of(call)])


def payload_bytes(call: End) -> int:
    """Return the bytes that one rank hands to the transport; of an RPC its arguments."""
    return bytes_of(tensors_of(call))


class OperationClass(msgspec.Struct, frozen=True, kw_only=True):
    """What operations with equal ends share: fields that `Operation` has, too, and tells of."""

    op: str
    group: Group
    mismatch: Reason | None = None
    role: str = ""
    sender: int | None = None
    receiver: int | None = None
    payload_bytes: int = 0
