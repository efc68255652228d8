"""Both ends of an RPC: the six functions of torch in which every way to call ends, and the pickler of both."""

import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import api, rref_proxy
from torch.distributed.rpc.internal import PythonUDF, RemoteException, _InternalRPCPickler

from dlearn.events.event import RpcArrival, RpcCall, RpcReply, RpcRun, RpcWindow, RRefFork
from dlearn.hooks import gate
from dlearn.hooks.c10d.works import outcome_of
from dlearn.hooks.callers import caller
from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.rpc.rpc_state import (
    AnsweredCall,
    CallId,
    RpcCalls,
    describe_all,
    flatten,
    observing_now,
    result_of_cpp,
    tensors_in,
    this_thread,
    watch_crossings,
    watch_return,
)

MAGIC = b"DLRN"
TRAILER = struct.Struct("<cIQq4s")
"""Kind of message, worker id and number of the call, autograd context (-1: none), magic: 25 B."""
CALL, REMOTE, REPLY, FETCHED = b"Q", b"M", b"R", b"F"


def watch_callers(calls: RpcCalls, patches: Patches) -> None:
    for op in ("rpc", "remote"):
        remote = op == "remote"
        patches.wrap(api, f"_invoke_{op}_python_udf", partial(_call_python, calls, remote))
        patches.wrap(api, f"_invoke_{op}_builtin", partial(_call_cpp, calls, remote, "builtin"))
        patches.wrap(api, f"_invoke_{op}_torchscript", partial(_call_cpp, calls, remote, "script"))


def _call_python(
    calls: RpcCalls, remote: bool, original: Any, to: Any, pickled: bytes, tensors: list[torch.Tensor], *more: Any
) -> Any:
    thread = this_thread()
    function, arguments = calls.function.pop(thread, (None, ()))
    name = function_name(function, arguments)
    rrefs = tuple(calls.forks.pop(thread, ()))
    context, call = calls.context.get(thread), calls.next_id()
    # What torch calls to set RPC up or shut it down is not paused.
    own = getattr(function, "__module__", "") == api.__name__
    if gate.current is not None and not observing_now() and not own:
        gate.current.wait(f"{'remote' if remote else 'rpc'} {name}", to.name, len(pickled))
    start_ns = time.monotonic_ns()
    sent_context = -1 if context is None else context
    trailer = TRAILER.pack(REMOTE if remote else CALL, *call, sent_context, MAGIC)
    result = original(to, pickled + trailer, tensors, *more)
    times = {"start_ns": start_ns, "handed_ns": time.monotonic_ns()}

    def note() -> None:
        parameters = [value for value in flatten(arguments) if isinstance(value, torch.nn.Parameter)]
        detached = tuple(f"Parameter{list(parameter.shape)}" for parameter in parameters)
        sizes = {"pickled_bytes": len(pickled), "observer_bytes": len(trailer)}
        known = {"flavour": "python", "context": context, "rrefs": rrefs, "detached": detached}
        number = _note_call(calls, name, to.id, call, tensors, remote, **known, **sizes, **times)
        if remote:
            calls.futures.watch(number, result._get_future())
        else:
            calls.waiting[call] = number, result, to.id

    guarded(calls.host, "an RPC", note)
    return result


def _call_cpp(
    calls: RpcCalls, remote: bool, flavour: str, original: Any, to: Any, function: str, *args: Any, **kwargs: Any
) -> Any:
    worker = to if hasattr(to, "id") else api.get_worker_info(to)
    name = function.removeprefix("aten::").rpartition(".")[2]
    if gate.current is not None and not observing_now():
        gate.current.wait(f"rpc {name}", worker.name, 0)
    call = calls.next_id()
    start_ns = time.monotonic_ns()
    result = original(to, function, *args, **kwargs)
    times = {"start_ns": start_ns, "handed_ns": time.monotonic_ns()}
    # The user's arguments follow the timeout and, for TorchScript, a flag; or they have two parameters of their own.
    given: Any = args[:2]
    if flavour == "builtin" or remote:
        given = args[1 if flavour == "builtin" else 2 :], kwargs

    def note() -> None:
        forks = [value for value in flatten(given) if isinstance(value, PyRRef)]
        rrefs = tuple(RRefFork(rref.owner().id, "") for rref in forks)
        tensors, context = tensors_in(given), calls.context.get(this_thread())
        if context is not None and any(tensor.requires_grad for tensor in tensors):
            watch_return(calls, context, worker.id)
        known = {"flavour": flavour, "context": context, "rrefs": rrefs}
        number = _note_call(calls, name, worker.id, call, tensors, remote, **known, **times)
        if remote:
            calls.futures.watch(number, result._get_future())
            return

        def answer(value: Any) -> dict[str, Any]:
            return {"result": result_of_cpp(calls, value, context, worker.id)}

        calls.futures.watch(number, result, answer)

    guarded(calls.host, "an RPC", note)
    return result


def _note_call(
    calls: RpcCalls, name: str, to: int, call: CallId, tensors: Sequence[torch.Tensor], remote: bool, **facts: Any
) -> int:
    """Report a call, packed by Python or C++; return the event's number."""
    made_by = caller(sys._getframe())  # A frame that holds itself would keep the arguments alive.
    return calls.host.event(
        RpcCall,
        op="remote" if remote else _sync_or_async(sys._getframe()),
        function=name,
        to=to,
        call=call.number,
        tensors=describe_all(tensors),
        needs_grad=any(tensor.requires_grad for tensor in tensors),
        observer=observing_now(),
        site=made_by.site,
        phase=made_by.phase,
        **facts,
    )


def _sync_or_async(frame: FrameType) -> str:
    """Return which of the two called `_invoke_rpc`: only the stack knows."""
    # The hook has six frames of its own, an RRef's method some more.
    for calling, _ in islice(walk_stack(frame), 12):
        if calling.f_code.co_name in ("rpc_sync", "rpc_async"):
            return calling.f_code.co_name
    return "rpc_async"


def function_name(function: Any, arguments: tuple[Any, ...]) -> str:
    """Return an RRef method's name, "forward", or a function's qualified one, "Net.forward"."""
    if function in (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution) and len(arguments) > 1:
        return str(arguments[1])
    return str(getattr(function, "__qualname__", type(function).__name__))


# Requests and replies as they are packed and unpacked -----------------------------------------------------------------


def watch_pickler(calls: RpcCalls, patches: Patches) -> None:
    emit = calls.host

    def serialize(original: Any, pickler: Any, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        thread = this_thread()
        calls.forks.pop(thread, None)
        try:
            data, tensors = original(pickler, value)
        except BaseException:
            answer = calls.answering.pop(thread, None)
            if answer is not None and answer.run is not None:
                emit.end(answer.run, by="return")
            raise
        trailer = guarded(emit, "an RPC's data", _note_packed, calls, thread, value, data, tensors)
        return data + (trailer or b""), tensors

    def deserialize(original: Any, pickler: Any, data: bytes, tensors: list[torch.Tensor]) -> Any:
        if len(data) < TRAILER.size or data[-4:] != MAGIC:
            return original(pickler, data, tensors)
        kind, worker, number, context, _ = TRAILER.unpack(data[-TRAILER.size :])
        at_ns = time.monotonic_ns()
        if context < 0 and kind == FETCHED:
            # The owner of the value does not know the context; the thread that fetches it does.
            context = calls.context.get(this_thread(), -1)
        value = original(pickler, data, tensors)
        arrived = CallId(worker, number), kind, context, at_ns
        runs = guarded(emit, "an RPC's data", _note_unpacked, calls, arrived, value, tensors)
        return value if runs is None else runs

    # RemoteModule packs its RRef by these two as well, and not by the pickler's own methods.
    def packed_rref(packed: Any, _: Any) -> None:
        owner, _, _, creator, local = packed[:5]
        calls.forks.setdefault(this_thread(), []).append(RRefFork(owner, f"{creator}:{local}"))

    def unpacked_rref(start_ns: int, packed: Any) -> None:
        owner, _, _, creator, local, parent = packed[:6]
        facts = {"to": owner, "parent_worker": parent, "fork": f"{creator}:{local}"}
        times = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "ended_by": "return"}
        emit.event(RpcWindow, op="rref", **facts, **times)

    def unpack_rref(original: Any) -> Any:
        def wrapper(packed: Any) -> Any:
            start_ns = time.monotonic_ns()
            rref = original.__func__(packed)
            guarded(emit, "an RRef", unpacked_rref, start_ns, packed)
            return rref

        return staticmethod(wrapper)

    patches.wrap(_InternalRPCPickler, "serialize", serialize)
    patches.wrap(_InternalRPCPickler, "deserialize", deserialize)
    patches.around(emit, PyRRef, "_serialize", after=packed_rref)
    patches.replace(PyRRef, "_deserialize", unpack_rref)


def _note_packed(calls: RpcCalls, thread: int, value: Any, data: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """Report a reply or a fetched value; return its trailer. A call is reported where it is made."""
    context = calls.context.get(thread, -1)
    if isinstance(value, PythonUDF):
        calls.function[thread] = value.func, (*value.args, *value.kwargs.values())
        calls.watch_graph(context, tensors)
        return b""
    answer = calls.answering.pop(thread, None)
    kind = FETCHED if answer is None else REPLY
    call, context, run, returned_ns = answer or AnsweredCall(calls.next_id(), context)
    trailer = TRAILER.pack(kind, *call, context, MAGIC)
    calls.host.event(
        RpcReply,
        caller=call.caller,
        call=call.number,
        fetched=kind == FETCHED,
        run=run,
        returned_ns=returned_ns,
        tensors=describe_all(tensors),
        pickled_bytes=len(data),
        observer_bytes=len(trailer),
        rrefs=tuple(calls.forks.pop(thread, ())),
        needs_grad=any(tensor.requires_grad for tensor in tensors),
        parent=None,
        error=value.exception_type.__name__ if isinstance(value, RemoteException) else "",
    )
    calls.watch_graph(context, tensors)
    return trailer


Arrived = tuple[CallId, bytes, int, int]
"""Call, kind of message and context, as a trailer says, and when it arrived, in ns."""


def _note_unpacked(calls: RpcCalls, arrived: Arrived, value: Any, tensors: Sequence[torch.Tensor]) -> PythonUDF | None:
    """Return the function that is to run instead of the one in a request, to see its run."""
    call, kind, context, at_ns = arrived
    # From a call's caller, a fetched value's owner, or a reply's callee.
    sender: int | None = call.caller
    if kind == REPLY:
        number, _, sender = calls.waiting.pop(call, (None, None, None))
        if number is not None:
            calls.host.end(number, by="reply")
    elif kind == FETCHED:
        calls.fetched.add(this_thread())
        calls.host.event(RpcArrival, caller=call.caller, call=call.number, start_ns=at_ns)
    watch_crossings(calls, tensors, context, sender)
    calls.watch_graph(context, tensors)
    if kind in (REPLY, FETCHED):
        return None
    if not isinstance(value, PythonUDF):  # Torch answers with the error: no such function.
        calls.answering[this_thread()] = AnsweredCall(call, context)
        return None
    name, remote = function_name(value.func, value.args), kind == REMOTE
    run = _Run(calls, call, value.func, name, at_ns, context, remote)
    return PythonUDF(run, value.args, value.kwargs)


@dataclass
class _Run:
    """The user's function on the callee, without its arguments, which would live longer here."""

    calls: RpcCalls
    call: CallId
    function: Any
    name: str
    arrived_ns: int
    context: int
    remote: bool
    number: int = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, thread = self.calls, this_thread()
        guarded(calls.host, "a call that came", self._begin, thread, args, kwargs)
        try:
            result = self.function(*args, **kwargs)
        except BaseException as error:
            self._end(thread, error=type(error).__name__)
            raise
        if isinstance(result, torch._C.Future) and hasattr(self.function, "_wrapped_async_rpc_function"):
            calls.host.leave(self.number)
            calls.context.pop(thread, None)

            def then(future: Any) -> Any:
                # The reply is packed right after this, in this thread.
                self._end(this_thread(), error=outcome_of(future)[1])
                return future.value()

            return result.then(then)
        if self.remote and calls.graph is not None and self.context >= 0:
            # When it is fetched, the context in which it was made may be unknown.
            watch = partial(calls.watch_graph, self.context)
            guarded(calls.host, "a remote value", lambda: watch(tensors_in(result)))
        self._end(thread)
        return result

    def _begin(self, thread: int, args: Any, kwargs: Any) -> None:
        calls, context = self.calls, self.context if self.context >= 0 else None
        self.number = calls.host.event(
            RpcRun,
            function=self.name,
            caller=self.call.caller,
            call=self.call.number,
            arrived_ns=self.arrived_ns,
            context=context,
            parent=None,
        )
        calls.host.enter(self.number)
        if context is not None:
            # Not where the call was unpacked: it may have waited for an RRef, and run in another thread.
            calls.context[thread] = context
            # C++ makes the node that sends gradients of what came back only after the call was unpacked.
            watch_crossings(calls, tensors_in((args, kwargs)), context, self.call.caller)

    def _end(self, thread: int, error: str = "") -> None:
        calls, number = self.calls, self.number
        calls.context.pop(thread, None)
        if number >= 0:
            calls.host.leave(number)
            if self.remote or error:
                calls.host.end(number, by="return", error=error)
        if not self.remote:
            run = number if number >= 0 and not error else None
            calls.answering[thread] = AnsweredCall(self.call, self.context, run, time.monotonic_ns())
