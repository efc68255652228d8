"""RPC as operations and messages: each request and each reply, with its bytes and with how it is known.

The sizes: what Python packed is known to the byte, and torch's C++ adds a constant to it that depends on the kind of
message; its own messages have a fixed size. (Measured against a C++ agent that logs itself: tests/test_rpc_oracle.py.)
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
from msgspec.structs import replace

from dlearn.events.event import Event, RpcCall, RpcReply, TensorInfo
from dlearn.events.event_table import NONE, OTHER, Column, EventTable, Rows, stacked
from dlearn.join.ends import Group, OperationClass, RpcEnd, bytes_of
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.exchange_table import ExchangeTable, at_rows, numbers_of
from dlearn.join.rpc.rpc_exchange import REPLY_OF, RpcExchange, answer_of, kind_of_reply
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation, OperationTable
from dlearn.join.wording import NONE_PICKLED, Reason, ReasonKind, reply_tensors, request_tensors

UNKNOWN = "unknown"  # The op of a message whose kind is not known.
CALL, REMOTE_CALL = 1, 27  # Bytes that C++ adds to what Python packed of a call.
FIRST_TENSOR, NEXT_TENSOR = 49, 9
"""And to a remote call, and to a fetched value, for each tensor: C++ packs the references to them once more."""
AUTOGRAD = 84  # And in a context: with the numbers of context and message, and without them.
FIXED = {rpc.ACCEPT: 11, rpc.FORK: 18, rpc.DELETE: 18, rpc.FETCH: 11, rpc.CLEANUP: 3}
FIXED |= {rpc.BACKWARD: 55, rpc.RREF_BACKWARD: 10, "REMOTE_RET": 18}
"""Payload of the messages that C++ makes by itself, without those two numbers."""
FETCHED_VALUE = 11  # What C++ adds to a fetched value, beside its tensors.
OPTIMIZER_STEPS = {f"_{kind}local_optimizer_step" for kind in ("", "script_", "functional_")}
"""The functions that torch's DistributedOptimizer calls (torch/distributed/optim/optimizer.py, of all versions)."""
FRAMING_ERROR = 4
"""Bytes a message by which the prediction of RPC's framing may be wrong (measured on ten programs)."""
_OF_A_CONTEXT = (rpc.CLEANUP, rpc.RREF_BACKWARD)
_EMPTY = {"RREF_BACKWARD_RESP", "RREF_ACK", "CLEANUP_AUTOGRAD_CONTEXT_RESP", "BACKWARD_AUTOGRAD_RESP"}


class EndTable(EventTable):
    """A job's `recorded` events, and behind them ends that none recorded, of each `exchange`."""

    def __init__(self, exchanges: ExchangeTable, exchange: Rows) -> None:
        vars(self).update(vars(stacked([exchanges.events, _ends(exchanges, exchange)])))
        self.recorded, self.exchanges, self.exchange = exchanges.events, exchanges, exchange

    def made(self, rows: Rows) -> list[Event]:
        """Return the events of these rows; those of the job are made by their own table."""
        index = rows - len(self.recorded)
        is_end, found = index >= 0, np.empty(len(rows), object)
        found[~is_end] = np.fromiter(self.recorded.made(rows[~is_end]), object)
        found[is_end] = np.fromiter(super().made(rows[is_end]), object)
        # The exchanges of all at once: one by one they take ten times as long.
        self.exchanges.made(self.exchange[index[is_end]])
        both: list[Event] = found.tolist()
        return both

    def times(self, rows: Rows, step: int, others: Sequence[Column]) -> Iterator[Column]:
        """Return when requests (step 0) or replies (1) went and came; in other rows, `others`."""
        exchange = at_rows(self.exchange, np.maximum(rows - len(self.recorded), -1), -1)
        both = self.exchanges
        request, reply = (both.sent_ns, both.received_ns), (both.reply_sent_ns, both.reply_received_ns)
        for times, other in zip(reply if step else request, others, strict=True):
            yield at_rows(times, exchange, other)


def with_rpc(met: OperationTable, exchanges: ExchangeTable) -> OperationTable:
    """Return the operations with one more for each exchange that is not the cluster's own."""
    if not len(exchanges):
        return met
    rows = np.flatnonzero(~exchanges.observer)
    counts = 1 + (exchanges.received_ns[rows] != NONE)
    events = EndTable(exchanges, np.repeat(rows, counts))
    group, firsts = exchanges.groups
    classes = []
    for exchange in exchanges.made(firsts):
        members = tuple(dict.fromkeys((exchange.src, exchange.dst)))
        of_rpc = Group("rpc", "rpc", members, default=False)
        classes.append(OperationClass(op=op_of(exchange), group=of_rpc))
    ends = np.arange(len(met.events), len(events))
    return met.with_more(events, classes, group[rows], counts, ends)


def _ends(exchanges: ExchangeTable, exchange: Rows) -> EventTable:
    """Return an end of each of these exchanges: of two in a row the second is the callee's."""
    events = exchanges.events
    is_callee = np.append(False, exchange[1:] == exchange[:-1])[: len(exchange)]
    call, run, cause = (rows[exchange] for rows in (exchanges.call, exchanges.run, exchanges.cause))
    src, dst = exchanges.src[exchange], exchanges.dst[exchange]
    sent_ns, reply_sent_ns = exchanges.sent_ns[exchange], exchanges.reply_sent_ns[exchange]
    reply_received_ns = exchanges.reply_received_ns[exchange]
    request_id = exchanges.request_id[exchange]

    start_ns = at_rows(events.start_ns, call, np.maximum(sent_ns, 0))
    end_ns = _or(at_rows(events.end_ns, call, NONE), reply_received_ns)
    callee_end_ns = _or(reply_sent_ns, at_rows(events.end_ns, run, NONE))
    ended_by = at_rows(events.ended_by, call, OTHER)
    callee_ended_by = np.where(reply_sent_ns != NONE, OTHER, at_rows(events.ended_by, run, OTHER))
    # What C++ sends for a cause on another rank has no span around it here.
    is_own = ~is_callee & (at_rows(events.rank, cause, -1) == src)
    calls = np.where(call >= 0, numbers_of(events, call, "call"), 0)
    group, firsts = exchanges.groups
    examples = map(_ends_like, repeat(exchanges), exchanges.made(firsts))
    return EventTable(
        list(chain.from_iterable(examples)),
        like=2 * group[exchange] + is_callee,
        rank=np.where(is_callee, dst, src),
        ended_by=np.where(is_callee, callee_ended_by, ended_by).astype(np.int8),
        number=-1 - 2 * exchange - is_callee,
        start_ns=np.where(is_callee, exchanges.received_ns[exchange], start_ns),
        end_ns=np.where(is_callee, callee_end_ns, end_ns),
        parent=np.where(is_own, at_rows(events.parent, cause, NONE), NONE),
        own={"seq": np.where(request_id == NONE, calls, request_id)},
    )


def _ends_like(exchanges: ExchangeTable, exchange: RpcExchange) -> tuple[RpcEnd, RpcEnd]:
    """Return the two ends of an exchange but for their numbers and times, which columns hold."""
    call, run = exchange.call, exchange.run
    callee = RpcEnd(
        number=0, start_ns=0, rank=exchange.dst, op=op_of(exchange), exchanges=exchanges,
        ended_by="log", error=run.error if run is not None else "", phase=phase_of(exchange),
    )  # fmt: skip
    if call is None:
        return replace(callee, rank=exchange.src, error=""), callee
    return replace(callee, rank=exchange.src, error=call.error, site=call.site), callee


def _or(times: Column, others: Column) -> Column:
    return np.where((times == NONE) | (times == 0), others, times)


def op_of(exchange: RpcExchange) -> str:
    return (exchange.call.op if exchange.call is not None else exchange.kind) or UNKNOWN


def phase_of(exchange: RpcExchange) -> str:
    """Return the phase of an iteration; in a context, the optimizer's is all after its backward."""
    call = exchange.call
    if exchange.kind == rpc.BACKWARD:
        return "backward"
    if exchange.kind == rpc.CLEANUP:
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


def messages_of_exchange(operation: Operation, exchange: RpcExchange) -> Iterator[Message]:
    """Yield the request and, if there is one, the reply."""
    if why_nothing_sent(exchange) is not None:
        return
    call, reply, known_by = exchange.call, exchange.reply, exchange.known_by
    tensors, packed = request_tensors(exchange), _packed_request(exchange)
    request = Message(
        operation=operation, op=exchange.kind or UNKNOWN, src=exchange.src, dst=exchange.dst,
        payload_bytes=_payload(packed, tensors),
        how="observed" if known_by == "python" else "inferred", sent_ns=exchange.sent_ns,
        received_ns=exchange.received_ns, tensors=tensors, packed_bytes=packed,
        observer_bytes=call.observer_bytes if call is not None else 0,
        control=call is None and exchange.kind not in (rpc.BACKWARD, rpc.FETCH), known_by=known_by,
    )  # fmt: skip
    yield request
    if exchange.reply_sent_ns is None and exchange.reply_received_ns is None:
        return
    tensors, packed = reply_tensors(exchange), _packed_reply(exchange)
    # A C++ call's result never passes Python.
    unseen = call is not None and call.flavour != "python" and call.op != "remote"
    unseen &= call is None or call.function not in OPTIMIZER_STEPS
    says_nothing = not tensors and (reply is None or reply.pickled_bytes <= NONE_PICKLED)
    yield replace(
        request, op=kind_of_reply(exchange) or UNKNOWN, src=exchange.dst, dst=exchange.src,
        payload_bytes=_payload(packed, tensors), sent_ns=exchange.reply_sent_ns,
        received_ns=exchange.reply_received_ns, step=1, tensors=tensors, packed_bytes=packed,
        observer_bytes=reply.observer_bytes if reply is not None else 0,
        control=says_nothing and not unseen,
    )  # fmt: skip


def why_nothing_sent(exchange: RpcExchange) -> Reason | None:
    if exchange.call is None or not exchange.call.error or exchange.request is not None:
        return None
    return Reason.of(ReasonKind.CALL_FAILED, exchange.call.error)


def _payload(packed: int | None, tensors: tuple[TensorInfo, ...]) -> int | None:
    """Return the tensors alone where it is not known how much C++ packed; without tensors None, not 0."""
    return None if packed is None and not tensors else (packed or 0) + bytes_of(tensors)


def _packed_request(exchange: RpcExchange) -> int | None:
    """Return the payload without tensors and trailer, in bytes; None where C++ packed it."""
    call, kind, context_bytes = exchange.call, exchange.kind, _number_bytes(exchange.context)
    if call is None:
        if kind == rpc.FORWARD:
            return FIXED[rpc.FETCH] + _autograd(exchange, sender=0)
        if kind == rpc.BACKWARD:
            # The way back has the number that the way there had, given by who sent it.
            size = FIXED[kind] + context_bytes + _message_bytes(exchange, sender=1)
            return size if exchange.known_by == "window" else None
        return FIXED.get(kind) if kind not in _OF_A_CONTEXT else FIXED[kind] + context_bytes
    if call.pickled_bytes is None:
        return None
    more = 0
    if call.flavour == "python":
        more = REMOTE_CALL + _tensors_again(len(call.tensors)) if call.op == "remote" else CALL
    return call.pickled_bytes + more + (_autograd(exchange, sender=0) if kind == rpc.FORWARD else 0)


def _packed_reply(exchange: RpcExchange) -> int | None:
    kind, answer = kind_of_reply(exchange), answer_of(exchange)
    if answer is None or answer.pickled_bytes is None:
        return 0 if kind in _EMPTY else FIXED.get(kind)
    more = _autograd(exchange, sender=1) if kind == REPLY_OF[rpc.FORWARD] else 0
    if isinstance(answer, RpcReply) and answer.fetched:
        more += FETCHED_VALUE + _tensors_again(len(answer.tensors))
    elif exchange.call is None:
        more += 1  # C++ packs a fetched value as a tuple of one.
    return answer.pickled_bytes + more


def _tensors_again(count: int) -> int:
    """Return what C++ adds where it packs the references to tensors once more."""
    return FIRST_TENSOR + NEXT_TENSOR * (count - 1) if count else 0


def _autograd(exchange: RpcExchange, *, sender: int) -> int:
    """Return what autograd adds to a message: the numbers of its context and message, and the rest."""
    return AUTOGRAD + _number_bytes(exchange.context) + _message_bytes(exchange, sender=sender)


def _message_bytes(exchange: RpcExchange, *, sender: int) -> int:
    """Return the size of a message's number: the sender's id in the upper 16 bits, and a counter."""
    return _number_bytes(exchange.worker_ids[sender] << 48)


def _number_bytes(number: int | None) -> int:
    """Return how many bytes TorchScript pickles a whole number into: the larger, the longer."""
    number = number or 0
    return 2 if number < 2**8 else 3 if number < 2**16 else 5 if number < 2**31 else 10


# The wire -------------------------------------------------------------------------------------------------------------

MESSAGE_BYTES, FIRST_TENSOR_BYTES, NEXT_TENSOR_BYTES = 127, 167, 66
"""TensorPipe's framing of a message, and what it adds for its tensors, without the numbers of their shapes."""
NEXT_DTYPE_BYTES = 20  # For each dtype after the first.
EMPTY_TENSOR_BYTES = 9  # Less for one that has no values, as measured.


def wire_bytes(message: Message) -> int | None:
    """Predict the bytes on the wire; None where C++ packs the payload, or of sparse tensors."""
    if message.packed_bytes is None or any(tensor.sparse for tensor in message.tensors):
        return None
    count = len(message.tensors)
    framing = FIRST_TENSOR_BYTES + NEXT_TENSOR_BYTES * (count - 1) if count else 0
    framing += NEXT_DTYPE_BYTES * max(0, len({tensor.dtype for tensor in message.tensors}) - 1)
    framing -= EMPTY_TENSOR_BYTES * sum(tensor.payload_bytes == 0 for tensor in message.tensors)
    shapes = sum(_shape_bytes(tensor) for tensor in message.tensors)
    return MESSAGE_BYTES + framing + shapes + message.packed_bytes + bytes_of(message.tensors)


def _shape_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of a tensor's sizes, strides, and number of values in its storage."""
    strides, stride = [], 1
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= size
    # Of a view more, of an expanded tensor less than its own: as much as is sent.
    values = tensor.payload_bytes * stride // tensor.logical_bytes if tensor.logical_bytes else 0
    return sum(map(_number_bytes, (*tensor.shape, *strides, values)))
