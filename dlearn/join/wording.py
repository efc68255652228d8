"""The words of one operation or message, made of what is known of it. No code takes them apart again."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

import msgspec

from dlearn.events.event import Bucket, Collective, RpcWindow, TensorInfo
from dlearn.events.mpi_facts import PICKLED
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.rpc_exchange import BACKWARD, FETCH, FORWARD, RpcExchange, answer_of, kind_of_reply
from dlearn.shown import first_few

NONE_PICKLED = 4  # Bytes of `None`, pickled.
TENSORS_NAMED = 3  # Tensors, or modules, in the words of what travels.
EVERY_PARAMETER = 1_000_000


class ReasonKind(Enum):
    """Why ends do not fit together, or messages are not known; each with its sentence, `{}` for each of its facts."""

    RANK_TWICE = "a rank appears twice: two groups of the same name, or a damaged trace"
    DIFFERENT_OPS = "the ranks called different operations: {}"
    DIFFERENT_SIZES = "the ranks called it with different sizes: {} B"
    DIFFERENT_DTYPES = "the ranks called it with different dtypes: {}"
    DIFFERENT_ROOTS = "the ranks called it with different roots"
    DIFFERENT_PARTS = "a rank sends another not as much as that one takes"
    SMALL_BUFFER = "sends {} B into a buffer of {} B"
    LARGE_BUFFER = "sends {} B into a larger buffer of {} B"
    OTHER_DTYPE = "sent as {}, received as {}"
    OTHER_ORDER = "sent and received with another order of dimensions"

    GROUP_LOST = "the line that describes its process group is lost"
    TAKEN_BACK = "a {} that the program took back"
    PEER_NOT_SEEN = "a {} whose peer is known at its end only, and that end was not seen"
    PEER_OUTSIDE = "its peer is no member of the process group: a damaged trace"
    ROOT_OUTSIDE = "its root is no member of the process group"
    NOT_OVER = "not every rank has come out of it: which of its messages have travelled is not known"
    FAILED = "it failed: which of its messages have travelled is not known"
    CALL_FAILED = "the call failed before anything was sent: {}"
    HOST_UNKNOWN = "which process offers the service is not known"
    SOURCE_SAYS = "{}"
    MPI_CHOOSES = "MPI's library chooses how, and does not say"
    NO_SCHEDULE = "no schedule of {}'s {} is known here yet"
    RING_UNKNOWN = "NCCL's log does not hold a whole ring of this group"
    RAN_OTHERWISE = "NCCL chose {} for it, and no ring"
    SWITCH_OR_RING = "NCCL may have let a switch add up (NVLS), and the log does not say what it chose"
    LONG_SCHEDULE = "its schedule has more than {} messages"
    SPARSE_SUMS = "gloo first adds up what a sparse tensor has twice; how much is left is not recorded"
    SPARSE_UNSEEN = "how many values the ranks whose calls are not recorded had is not known"
    PARTS_UNSEEN = "what the ranks whose calls are not recorded had for each other is not known"
    WRONG_PARTS = "a rank has data for {} ranks in a group of {}"
    TOO_MANY = "the trace has more than {} messages; ask for a part of it"

    FRAMING = "how {} frames its messages is not known here"
    NEVER_CAME = "a rank never came, or failed: how much had travelled is not known"
    KIND_UNKNOWN = "of which kind it is, is not known"
    PACKED_BY_CPP = "{}: how C++ packs such arguments or tensors is not known here"


Fact = int | str | tuple[int, ...] | tuple[str, ...]


class Reason(msgspec.Struct, frozen=True):
    """Why something does not fit or is not known: the kind, and the facts of this case. `str` gives the sentence."""

    kind: ReasonKind
    facts: tuple[Fact, ...] = ()

    @classmethod
    def of(cls, kind: ReasonKind, *facts: Fact) -> Reason:
        return cls(kind, facts)

    def __str__(self) -> str:
        return self.kind.value.format(*map(_fact_text, self.facts))


def _fact_text(fact: Fact) -> str:
    if isinstance(fact, tuple):
        return ", ".join(map(_fact_text, fact))
    return fact if isinstance(fact, str) else f"{fact:,}"


# What travels ---------------------------------------------------------------------------------------------------------


def tensor_text(tensor: TensorInfo, dimensions: Sequence[int | str] = ()) -> str:
    """Write "float32[8, 3]"; with `dimensions` instead of its own "float32[B, 3]"."""
    if tensor.dtype == PICKLED:
        return "Python object"
    sparse = "sparse " if tensor.sparse else ""
    sizes = ", ".join(map(str, dimensions or tensor.shape))
    return f"{sparse}{tensor.dtype}[{sizes}]"


@lru_cache  # Of a million calls only a few differ.
def tensors_text(tensors: tuple[TensorInfo, ...]) -> str:
    """Write "float32[8, 3], int64[8]": the first few."""
    return first_few([tensor_text(each) for each in tensors], TENSORS_NAMED)


def dtypes_text(tensors: Sequence[TensorInfo]) -> str:
    """Write "float32", of tensors of several dtypes "float32+int64"."""
    return "+".join(dict.fromkeys(tensor.dtype for tensor in tensors))


@lru_cache
def bucket_text(bucket: Bucket, most: int = EVERY_PARAMETER) -> str:
    """Name what travels, with the first `most` of its parameters."""
    return f"gradient of bucket {bucket.index}: {first_few(bucket.parameters, most)}"


def modules_text(calls: Sequence[Collective]) -> str:
    """Name what FSDP2 gathers or reduces: "parameters of blocks.0, blocks.1"; "" of other calls."""
    named = ["the root module" if call.module == "." else call.module for call in calls]
    what = "gradients" if named and calls[0].launcher else "parameters"
    return f"{what} of {first_few([*dict.fromkeys(named)], TENSORS_NAMED)}" if any(named) else ""


# RPC ------------------------------------------------------------------------------------------------------------------

_ROLES = {
    rpc.ACCEPT: "the owner of an RRef takes note of a new copy of it",
    rpc.FORK: "a user asks the owner of an RRef for a copy of its own",
    rpc.DELETE: "a copy of an RRef is gone",
    rpc.CLEANUP: "the autograd context ends",
    BACKWARD: "gradient",
    FETCH: "fetch the value of an RRef",
    "RREF_ACK": "understood",
    "BACKWARD_AUTOGRAD_RESP": "the backward pass there is done",
    "CLEANUP_AUTOGRAD_CONTEXT_RESP": "understood",
    "REMOTE_RET": "the value is there",
    "": "its kind is not known",
}


def request_tensors(exchange: RpcExchange) -> tuple[TensorInfo, ...]:
    if exchange.call is not None:
        return exchange.call.tensors
    if exchange.kind == BACKWARD and isinstance(exchange.cause, RpcWindow):
        return exchange.cause.tensors
    return ()


def reply_tensors(exchange: RpcExchange) -> tuple[TensorInfo, ...]:
    answer = answer_of(exchange)
    return answer.tensors if answer is not None else ()


def request_text(exchange: RpcExchange, tensors: str) -> str:
    """Write "forward(float32[8, 3])", "gradient float32[8, 4, 16, 16]", "the autograd context ends"."""
    call = exchange.call
    if call is not None:
        notes = [f"{each} arrives as a plain tensor, without its gradient" for each in call.detached]
        return f"{call.function}({tensors})" + (f" ({'; '.join(notes)})" if notes else "")
    if exchange.kind == FORWARD:
        return _ROLES[FETCH]
    if exchange.kind == BACKWARD:
        return f"gradient {tensors}".rstrip()
    return _ROLES.get(exchange.kind, exchange.kind)


def reply_text(exchange: RpcExchange, tensors: str) -> str:
    """Write "result of forward: float32[8, 10]", "ValueError, raised by forward", "understood"."""
    call, reply, kind = exchange.call, exchange.reply, kind_of_reply(exchange)
    error = reply.error if reply is not None else call.error if call is not None and kind == "EXCEPTION" else ""
    if error:
        return f"{error}, raised by {call.function if call is not None else 'the function'}"
    found = tensors
    if reply is not None:
        found = found or ("nothing" if reply.pickled_bytes <= NONE_PICKLED else "a value")
    if found:
        return f"result of {call.function}: {found}" if call is not None else f"the value: {found}"
    if call is not None and kind not in _ROLES:
        return f"result of {call.function}"
    return _ROLES.get(kind, kind)
