"""Requests and replies as they are packed and unpacked, at both ends; and the call's run in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc.internal import PythonUDF, RemoteException, _InternalRPCPickler

from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.rpc.rpc_callers import function_name
from dlearn.hooks.rpc.rpc_state import (
    CALL,
    FETCHED,
    MAGIC,
    REMOTE,
    REPLY,
    TRAILER,
    AnsweredCall,
    CallId,
    RpcCalls,
    describe_all,
    error_of,
    tensors_in,
    this_thread,
)
from dlearn.hooks.rpc.rpc_windows import watch_crossings
from dlearn.trace.event import RpcArrival, RpcReply, RpcRun, RpcWindow, RRefFork


def watch_pickler(calls: RpcCalls, patches: Patches) -> None:
    emit, graph = calls.emit, calls.graph

    def serialize(original: Any) -> Any:
        def wrapper(self: Any, value: Any) -> tuple[bytes, list[torch.Tensor]]:
            thread = this_thread()
            calls.forks.pop(thread, None)
            try:
                data, tensors = original(self, value)
            except BaseException:
                answer = calls.answering.pop(thread, None)
                if answer is not None and answer.run is not None:
                    emit.end(answer.run, by="return")
                raise
            try:
                context = calls.context.get(thread, -1)
                if isinstance(value, PythonUDF):
                    calls.function[thread] = value.func, (*value.args, *value.kwargs.values())
                else:
                    context = calls.answering.get(thread, (None, context))[1]
                    data += _note_reply(calls, thread, value, data, tensors)
                if graph is not None:
                    graph.tensors(context, tensors)
            except Exception as error:
                emit.failed("an RPC's data", error)
            return data, tensors

        return wrapper

    def deserialize(original: Any) -> Any:
        def wrapper(self: Any, data: bytes, tensors: list[torch.Tensor]) -> Any:
            if len(data) < TRAILER.size or data[-4:] != MAGIC:
                return original(self, data, tensors)
            kind, worker, number, context, _ = TRAILER.unpack(data[-TRAILER.size :])
            call = CallId(worker, number)
            arrived_ns = time.monotonic_ns()
            thread = this_thread()
            if context < 0 and kind == FETCHED:
                context = calls.context.get(thread, -1)  # The owner does not know it; who fetches does.
            value = original(self, data, tensors)
            try:
                watch_crossings(calls, tensors, context, _came_from(calls, call, kind))
                if kind in (CALL, REMOTE):
                    value = _note_request(calls, call, value, arrived_ns, context, remote=kind == REMOTE)
                else:
                    _note_arrival(calls, call, arrived_ns, fetched=kind == FETCHED)
                if graph is not None:
                    graph.tensors(context, tensors)
            except Exception as error:
                emit.failed("an RPC's data", error)
            return value

        return wrapper

    # RemoteModule packs its RRef by these two as well, and not by the pickler's own methods.
    def pack_rref(original: Any) -> Any:
        def wrapper(self: Any) -> Any:
            packed = original(self)
            owner, _, _, creator, local = packed[:5]
            calls.forks.setdefault(this_thread(), []).append(RRefFork(owner, f"{creator}:{local}"))
            return packed

        return wrapper

    def taken_in(start_ns: int, owner: int, _: int, __: int, creator: int, local: int, parent: int) -> None:
        end, fork = {"end_ns": time.monotonic_ns(), "ended_by": "return"}, f"{creator}:{local}"
        emit.event(RpcWindow, op="rref", start_ns=start_ns, to=owner, parent_worker=parent, fork=fork, **end)

    def unpack_rref(original: Any) -> Any:
        def wrapper(packed: Any) -> Any:
            start_ns = time.monotonic_ns()
            rref = original.__func__(packed)
            guarded(emit, "an RRef", taken_in, start_ns, *packed[:6])
            return rref

        return staticmethod(wrapper)

    patches.replace(_InternalRPCPickler, "serialize", serialize)
    patches.replace(_InternalRPCPickler, "deserialize", deserialize)
    patches.replace(PyRRef, "_serialize", pack_rref)
    patches.replace(PyRRef, "_deserialize", unpack_rref)


def _came_from(calls: RpcCalls, call: CallId, kind: bytes) -> int | None:
    """The worker that sent this: a call's caller, a fetched value's owner; a reply's is who was called."""
    if kind != REPLY:
        return call.caller
    known = calls.waiting.get(call)
    return known[2] if known is not None else None


def _note_reply(calls: RpcCalls, thread: int, value: Any, data: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """The result of the call that this thread has just run, or else a value that somebody fetches."""
    answer = calls.answering.pop(thread, None)
    fetched = answer is None
    if answer is None:
        answer = AnsweredCall(calls.next_id(), calls.context.get(thread, -1))
    call, context = answer.call, answer.context
    trailer = TRAILER.pack(FETCHED if fetched else REPLY, call.caller, call.number, context, MAGIC)
    calls.emit.event(
        RpcReply,
        caller=call.caller,
        call=call.number,
        fetched=fetched,
        run=answer.run,
        returned_ns=answer.returned_ns,
        tensors=describe_all(tensors),
        pickled_bytes=len(data),
        observer_bytes=len(trailer),
        rrefs=tuple(calls.forks.pop(thread, ())),
        needs_grad=any(each.requires_grad for each in tensors),
        error=value.exception_type.__name__ if isinstance(value, RemoteException) else "",
        parent=None,
    )
    return trailer


def _note_arrival(calls: RpcCalls, call: CallId, arrived_ns: int, *, fetched: bool) -> None:
    if fetched:
        calls.fetched.add(this_thread())
        calls.emit.event(RpcArrival, caller=call.caller, call=call.number, start_ns=arrived_ns)
    known = calls.waiting.pop(call, None)
    if known is not None:
        calls.emit.end(known[0], by="reply")


def _note_request(calls: RpcCalls, call: CallId, value: Any, arrived_ns: int, context: int, *, remote: bool) -> Any:
    if not isinstance(value, PythonUDF):  # The function is not known here: torch answers with the error.
        calls.answering[this_thread()] = AnsweredCall(call, context)
        return value
    name = function_name(value.func, value.args)
    return PythonUDF(_Run(calls, call, value.func, name, arrived_ns, context, remote), value.args, value.kwargs)


@dataclass
class _Run:
    """The user's function on the callee; `number` is that of its event, once it has begun.

    It does not hold the arguments: these would live longer, and the remote references among them be given back late.
    """

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
        guarded(calls.emit, "a call that came", self._begin, thread, args, kwargs)
        try:
            result = self.function(*args, **kwargs)
        except BaseException as error:
            self._end(thread, error=type(error).__name__)
            raise
        if isinstance(result, torch._C.Future) and hasattr(self.function, "_wrapped_async_rpc_function"):
            calls.emit.leave(self.number)
            calls.context.pop(thread, None)

            def then(future: Any) -> Any:
                # The reply is packed right after this, in this thread.
                self._end(this_thread(), error=error_of(future))
                return future.value()

            return result.then(then)
        if self.remote and calls.graph is not None and self.context >= 0:
            # It stays here for now; when it is fetched, nobody may know in which context it was made.
            guarded(calls.emit, "a remote value", lambda: calls.graph.tensors(self.context, tensors_in(result)))
        self._end(thread)
        return result

    def _begin(self, thread: int, args: Any, kwargs: Any) -> None:
        calls, context = self.calls, self.context if self.context >= 0 else None
        self.number = calls.emit.event(
            RpcRun,
            function=self.name,
            caller=self.call.caller,
            call=self.call.number,
            arrived_ns=self.arrived_ns,
            context=context,
            parent=None,
        )
        calls.emit.enter(self.number)
        if context is not None:
            # Not where the call was unpacked: it may have waited for an RRef, and run in another thread.
            calls.context[thread] = context
            # C++ makes the node that sends gradients of what came back only after the call was unpacked.
            watch_crossings(calls, tensors_in((args, kwargs)), context, self.call.caller)

    def _end(self, thread: int, error: str = "") -> None:
        calls, number = self.calls, self.number
        calls.context.pop(thread, None)
        if number >= 0:
            calls.emit.leave(number)
            if self.remote or error:
                calls.emit.end(number, by="return", error=error)
        if not self.remote:
            run = number if number >= 0 and not error else None
            calls.answering[thread] = AnsweredCall(self.call, self.context, run, time.monotonic_ns())
