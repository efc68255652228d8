"""RPC as operations and messages: each request and each reply, with its bytes and with how it is known.

The sizes: what Python packed is known to the byte, and torch's C++ adds a constant to it that depends on the kind of
message; its own messages have a fixed size. (Measured against a C++ agent that logs itself: tests/test_rpc_oracle.py.)
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from dlearn.events.event import RpcCall, RpcReply, TensorInfo
from dlearn.join.ends import End, Group, OperationClass, RpcEnd, bytes_of
from dlearn.join.rpc.rpc_exchange import (
    ACCEPT,
    BACKWARD,
    CLEANUP,
    DELETE,
    FETCH,
    FORK,
    FORWARD,
    REPLY_OF,
    RREF_BACKWARD,
    RpcExchange,
    answer_of,
    kind_of_reply,
)
from dlearn.join.selection import Selection
from dlearn.join.tables.message_table import HOWS, CallMessage, Content, Message
from dlearn.join.wording import NONE_PICKLED, Reason, ReasonKind, reply_tensors, request_tensors

UNKNOWN = "unknown"
"""The op of a message whose kind is not known."""
CALL, REMOTE_CALL = 1, 27
"""Bytes that C++ adds to what Python packed of a call."""
FIRST_TENSOR, NEXT_TENSOR = 49, 9
"""And to a remote call, and to a fetched value, for each tensor: C++ packs the references to them once more."""
AUTOGRAD = 84
"""And in a context: with the numbers of context and message, and without them."""
FIXED = {ACCEPT: 11, FORK: 18, DELETE: 18, FETCH: 11, CLEANUP: 3, BACKWARD: 55, RREF_BACKWARD: 10, "REMOTE_RET": 18}
"""Payload of the messages that C++ makes by itself, without those two numbers."""
FETCHED_VALUE = 11
"""What C++ adds to a fetched value, beside its tensors."""
OPTIMIZER_STEPS = {f"_{kind}local_optimizer_step" for kind in ("", "script_", "functional_")}
"""The functions that torch's DistributedOptimizer calls (torch/distributed/optim/optimizer.py, of all versions)."""
FRAMING_ERROR = 4
"""Bytes a message by which the prediction of RPC's framing may be wrong (measured on ten programs)."""
_EMPTY = {"RREF_BACKWARD_RESP", "RREF_ACK", "CLEANUP_AUTOGRAD_CONTEXT_RESP", "BACKWARD_AUTOGRAD_RESP"}


def rpc_operations(trace: Selection) -> Iterator[tuple[OperationClass, tuple[End, ...]]]:
    """Each request with its reply as one operation; none of them is left out."""
    for exchange in trace.rpc.exchanges:
        if exchange.call is None or not exchange.call.observer:
            yield _operation(exchange)


def _operation(exchange: RpcExchange) -> tuple[OperationClass, tuple[End, ...]]:
    call, run, cause = exchange.call, exchange.run, exchange.cause
    op = (call.op if call is not None else exchange.kind) or UNKNOWN
    seq = exchange.request.id if exchange.request is not None else call.call if call is not None else 0
    caller = RpcEnd(
        number=-1 - 2 * exchange.number,
        rank=exchange.src,
        op=op,
        seq=seq,
        start_ns=call.start_ns if call is not None else exchange.sent_ns or 0,
        end_ns=(call.end_ns if call is not None else None) or exchange.reply_received_ns,
        ended_by=call.ended_by if call is not None else "log",
        error=call.error if call is not None else "",
        # What C++ sends for a cause on another rank has no span around it here.
        parent=cause.parent if cause is not None and cause.rank == exchange.src else None,
        phase=phase_of(exchange),
        site=call.site if call is not None else "",
        exchange=exchange,
    )
    ends: tuple[RpcEnd, ...] = (caller,)
    if exchange.received_ns is not None:
        callee = replace(
            caller,
            number=caller.number - 1,
            rank=exchange.dst,
            start_ns=exchange.received_ns,
            end_ns=exchange.reply_sent_ns or (run.end_ns if run is not None else None),
            ended_by="log" if exchange.reply_sent_ns is not None or run is None else run.ended_by,
            error=run.error if run is not None else "",
            parent=None,
            site="",
        )
        ends = (caller, callee)
    members = tuple(dict.fromkeys((exchange.src, exchange.dst)))
    group = Group("rpc", "rpc", members, default=False)
    return OperationClass(op=op, group=group, exchange=exchange), ends


def phase_of(exchange: RpcExchange) -> str:
    """What of a training iteration it belongs to: forward, backward, optimizer, cleanup; or the job's setup.

    In a context, all after its backward pass is the optimizer's phase.
    """
    call = exchange.call
    if exchange.kind == BACKWARD:
        return "backward"
    if exchange.kind == CLEANUP:
        return "cleanup"
    if call is None and isinstance(exchange.cause, RpcCall):
        call = exchange.cause
    if call is not None and call.function in OPTIMIZER_STEPS:
        return "optimizer"
    if call is not None and (call.observer or call.phase in ("setup", "cleanup", "backward")):
        return "setup" if call.observer else call.phase
    if exchange.context is None:
        return "none"
    return "optimizer" if exchange.after_backward else "forward"


# Messages -------------------------------------------------------------------------------------------------------------


def messages_of_exchange(exchange: RpcExchange) -> Iterator[CallMessage]:
    """Yield the request and, if there is one, the reply."""
    if why_nothing_sent(exchange) is not None:
        return
    call, reply, known_by = exchange.call, exchange.reply, exchange.known_by
    src, dst, how = exchange.src, exchange.dst, HOWS.index("observed" if known_by == "python" else "inferred")
    tensors, packed = request_tensors(exchange), _packed_request(exchange)
    observer = call.observer_bytes if call is not None else 0
    control = call is None and exchange.kind not in (BACKWARD, FETCH)
    content = Content(exchange.kind or UNKNOWN, tensors, packed, observer, control, known_by)
    yield CallMessage(src, dst, _payload(packed, tensors), how, exchange.sent_ns, exchange.received_ns, 0, content)
    sent_ns, received_ns = exchange.reply_sent_ns, exchange.reply_received_ns
    if sent_ns is None and received_ns is None:
        return
    tensors, packed = reply_tensors(exchange), _packed_reply(exchange)
    observer = reply.observer_bytes if reply is not None else 0
    says_nothing = not tensors and (reply is None or reply.pickled_bytes <= NONE_PICKLED)
    control = says_nothing and not _has_unseen_result(call)  # A C++ call's result never passes Python.
    content = Content(kind_of_reply(exchange) or UNKNOWN, tensors, packed, observer, control, known_by)
    yield CallMessage(dst, src, _payload(packed, tensors), how, sent_ns, received_ns, 1, content)


def why_nothing_sent(exchange: RpcExchange) -> Reason | None:
    """Why a call was never sent; None where it was."""
    if exchange.call is None or not exchange.call.error or exchange.request is not None:
        return None
    return Reason.of(ReasonKind.CALL_FAILED, exchange.call.error)


def _payload(packed: int | None, tensors: tuple[TensorInfo, ...]) -> int | None:
    """Where it is not known how much C++ packed, the tensors alone; without tensors that is not 0, but unknown."""
    return None if packed is None and not tensors else (packed or 0) + bytes_of(tensors)


def _packed_request(exchange: RpcExchange) -> int | None:
    """Payload without tensors and trailer, in bytes; None where C++ packed it."""
    call, kind = exchange.call, exchange.kind
    if call is None:
        if kind == FORWARD:
            return FIXED[FETCH] + _autograd(exchange, sender=0)
        if kind == BACKWARD and exchange.known_by != "window":
            return None
        if kind == BACKWARD:
            # The way back has the number that the way there had, given by who sent it.
            return FIXED[BACKWARD] + _number_bytes(exchange.context) + _message_bytes(exchange, sender=1)
        return FIXED[kind] + _number_bytes(exchange.context) if kind in (CLEANUP, RREF_BACKWARD) else FIXED.get(kind)
    if call.pickled_bytes is None:
        return None
    more = 0
    if call.flavour == "python":
        more = REMOTE_CALL + _tensors_again(len(call.tensors)) if call.op == "remote" else CALL
    return call.pickled_bytes + more + (_autograd(exchange, sender=0) if kind == FORWARD else 0)


def _packed_reply(exchange: RpcExchange) -> int | None:
    kind, answer = kind_of_reply(exchange), answer_of(exchange)
    if answer is None or answer.pickled_bytes is None:
        return 0 if kind in _EMPTY else FIXED.get(kind)
    more = _autograd(exchange, sender=1) if kind == REPLY_OF[FORWARD] else 0
    if isinstance(answer, RpcReply) and answer.fetched:
        more += FETCHED_VALUE + _tensors_again(len(answer.tensors))
    elif exchange.call is None:
        more += 1  # C++ packs a fetched value as a tuple of one.
    return answer.pickled_bytes + more


def _tensors_again(count: int) -> int:
    """Where C++ packs the references to tensors once more."""
    return FIRST_TENSOR + NEXT_TENSOR * (count - 1) if count else 0


def _autograd(exchange: RpcExchange, *, sender: int) -> int:
    """What autograd adds to a message: the numbers of its context and of the message, and the rest."""
    return AUTOGRAD + _number_bytes(exchange.context) + _message_bytes(exchange, sender=sender)


def _message_bytes(exchange: RpcExchange, *, sender: int) -> int:
    """A message's number has its sender's id in the upper 16 bits; that below counts its messages."""
    return _number_bytes(exchange.worker_ids[sender] << 48)


def _number_bytes(number: int | None) -> int:
    """A whole number as TorchScript pickles it: the larger, the longer."""
    number = number or 0
    return 2 if number < 2**8 else 3 if number < 2**16 else 5 if number < 2**31 else 10


def _has_unseen_result(call: RpcCall | None) -> bool:
    if call is None or call.flavour == "python" or call.op == "remote":
        return False
    return call.function not in OPTIMIZER_STEPS


# The wire -------------------------------------------------------------------------------------------------------------

MESSAGE_BYTES, FIRST_TENSOR_BYTES, NEXT_TENSOR_BYTES = 127, 167, 66
"""TensorPipe's framing of a message, and what it adds for its tensors, without the numbers of their shapes."""
NEXT_DTYPE_BYTES = 20
"""For each dtype after the first."""
EMPTY_TENSOR_BYTES = 9
"""Less for one that has no values, as measured."""


def wire_bytes(message: Message) -> int | None:
    """Predicted bytes on the wire, without what the recorder adds; None where nobody here knows.

    That is where C++ packs the payload, and of sparse tensors, which have a format of their own.
    """
    if message.packed_bytes is None or any(tensor.sparse for tensor in message.tensors):
        return None
    count = len(message.tensors)
    framing = FIRST_TENSOR_BYTES + NEXT_TENSOR_BYTES * (count - 1) if count else 0
    framing += NEXT_DTYPE_BYTES * max(0, len({tensor.dtype for tensor in message.tensors}) - 1)
    framing -= EMPTY_TENSOR_BYTES * sum(tensor.payload_bytes == 0 for tensor in message.tensors)
    shapes = sum(_shape_bytes(tensor) for tensor in message.tensors)
    return MESSAGE_BYTES + framing + shapes + message.packed_bytes + bytes_of(message.tensors)


def _shape_bytes(tensor: TensorInfo) -> int:
    """A tensor is announced by its sizes, its strides, and the number of values in its storage."""
    strides, stride = [], 1
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= size
    # Of a view more, of an expanded tensor less than its own: as much as is sent.
    values = tensor.payload_bytes * stride // tensor.logical_bytes if tensor.logical_bytes else 0
    return sum(map(_number_bytes, (*tensor.shape, *strides, values)))
