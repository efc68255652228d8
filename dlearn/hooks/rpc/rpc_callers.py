"""The caller's end of an RPC: the six functions of torch in which every way to call ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import api, rref_proxy

from dlearn.hooks import gate
from dlearn.hooks.callers import caller
from dlearn.hooks.patches import Patches
from dlearn.hooks.rpc.rpc_script_size import packed_call
from dlearn.hooks.rpc.rpc_state import (
    CALL,
    MAGIC,
    REMOTE,
    TRAILER,
    RpcCalls,
    describe_all,
    flatten,
    observing_now,
    result_of_cpp,
    tensors_in,
    this_thread,
)
from dlearn.hooks.rpc.rpc_windows import watch_crossings, watch_return
from dlearn.trace.event import RpcCall, RRefFork


def watch_callers(calls: RpcCalls, patches: Patches) -> None:
    for op in ("rpc", "remote"):
        remote = op == "remote"
        patches.replace(api, f"_invoke_{op}_python_udf", partial(_python_caller, calls, remote))
        patches.replace(api, f"_invoke_{op}_builtin", partial(_cpp_caller, calls, remote, "builtin"))
        patches.replace(api, f"_invoke_{op}_torchscript", partial(_cpp_caller, calls, remote, "script"))


def _python_caller(calls: RpcCalls, remote: bool, original: Any) -> Any:
    kind = REMOTE if remote else CALL

    def invoke(to: Any, pickled: bytes, tensors: list[torch.Tensor], timeout: float, is_async: bool) -> Any:
        thread = this_thread()
        function, arguments = calls.function.pop(thread, (None, ()))
        rrefs = calls.forks.pop(thread, ())
        context = calls.context.get(thread)
        call = calls.next_id()
        if gate.current is not None and not observing_now():
            gate.current.wait(
                f"{'remote' if remote else 'rpc'} {function_name(function, arguments)}", to.name, len(pickled)
            )
        start_ns = time.monotonic_ns()
        trailer = TRAILER.pack(kind, call.caller, call.number, -1 if context is None else context, MAGIC)
        result = original(to, pickled + trailer, tensors, timeout, is_async)
        try:
            handed_ns = time.monotonic_ns()
            parameters = [each for each in flatten(arguments) if isinstance(each, torch.nn.Parameter)]
            number = calls.emit.event(
                RpcCall,
                function=function_name(function, arguments),
                flavour="python",
                to=to.id,
                call=call.number,
                start_ns=start_ns,
                handed_ns=handed_ns,
                pickled_bytes=len(pickled),
                observer_bytes=len(trailer),
                context=context,
                rrefs=tuple(rrefs),
                detached=tuple(f"Parameter{list(each.shape)}" for each in parameters),
                **_facts(tensors, remote),
            )
            if remote:
                calls.futures.watch(number, result._get_future())
            else:
                calls.waiting[call] = number, result, to.id
        except Exception as error:
            calls.emit.failed("an RPC", error)
        return result

    return invoke


def _cpp_caller(calls: RpcCalls, remote: bool, flavour: str, original: Any) -> Any:
    # The user's arguments come after the timeout and, for TorchScript, a flag; or they have a place of their own.
    before, own_place = 1 if flavour == "builtin" else 2, flavour == "script" and not remote

    def invoke(to: Any, function: str, *args: Any, **kwargs: Any) -> Any:
        if gate.current is not None and not observing_now():
            name = to.name if hasattr(to, "name") else api.get_worker_info(to).name
            gate.current.wait(f"rpc {function.rpartition('.')[2].removeprefix('aten::')}", name, 0)
        call = calls.next_id()
        start_ns = time.monotonic_ns()
        result = original(to, function, *args, **kwargs)
        try:
            handed_ns = time.monotonic_ns()
            given, named = args[:2] if own_place else (args[before:], kwargs)
            rrefs = [each for each in flatten((given, named)) if isinstance(each, PyRRef)]
            facts, context = _facts(tensors_in((given, named)), remote), calls.known_context()
            worker = to.id if hasattr(to, "id") else api.get_worker_info(to).id
            if facts["needs_grad"] and context is not None:
                watch_return(calls, context, worker)
            number = calls.emit.event(
                RpcCall,
                function=function.removeprefix("aten::").rpartition(".")[2],
                flavour=flavour,
                to=worker,
                call=call.number,
                start_ns=start_ns,
                handed_ns=handed_ns,
                pickled_bytes=packed_call(function, given, named, remote=remote),
                context=context,
                rrefs=tuple(RRefFork(each.owner().id, "") for each in rrefs),
                **facts,
            )
            if remote:
                calls.futures.watch(number, result._get_future())
            else:
                calls.futures.watch(number, result, partial(_answer, calls, worker, context))
        except Exception as error:
            calls.emit.failed("an RPC", error)
        return result

    return invoke


def _answer(calls: RpcCalls, worker: int, context: int | None, value: Any) -> dict[str, Any]:
    """A reply that has never passed Python is known by what the caller gets."""
    if context is not None:
        watch_crossings(calls, tensors_in(value), context, worker)
    return {"result": result_of_cpp(value)}


def _facts(tensors: Sequence[torch.Tensor], remote: bool) -> dict[str, Any]:
    """Of any call, whoever packs it."""
    frame = sys._getframe(1)
    made_by = caller(frame)
    return {
        "op": "remote" if remote else _sync_or_async(frame),
        "tensors": describe_all(tensors),
        "needs_grad": any(each.requires_grad for each in tensors),
        "observer": observing_now(),
        "site": made_by.site,
        "phase": made_by.phase,
    }


_LOOKED_BACK = 7
"""Frames between the function that is patched and the user's call: an RRef's method has some of its own."""


def _sync_or_async(hook: FrameType) -> str:
    """Which of the two called `_invoke_rpc`: only the stack knows."""
    frame = hook.f_back
    for _ in range(_LOOKED_BACK):
        if frame is None:
            break
        if frame.f_code.co_name in ("rpc_sync", "rpc_async"):
            return frame.f_code.co_name
        frame = frame.f_back
    return "rpc_async"


def function_name(function: Any, arguments: tuple[Any, ...]) -> str:
    """ "Net.forward" of a method of an RRef's value is "forward"; else the function's own qualified name."""
    if function in (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution) and len(arguments) > 1:
        return str(arguments[1])
    return str(getattr(function, "__qualname__", type(function).__name__))
