"""The spans of time in which C++ sends messages of its own, on behalf of Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_autograd import _retrieve_context
from torch._C._distributed_rpc import PyRRef

from dlearn.events.event import RpcResult, RpcWindow
from dlearn.hooks.callers import caller
from dlearn.hooks.patches import Patches, ended, guarded
from dlearn.hooks.rpc.rpc_state import (
    RpcCalls,
    describe_all,
    result_of_cpp,
    tensors_in,
    this_thread,
    watch_runs,
)


def watch_windows(calls: RpcCalls, patches: Patches) -> None:
    """Report each call of Python below which C++ sends messages of its own."""
    emit, count = calls.emit, calls.host.count_phase

    @contextmanager
    def window(op: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Report what is done inside as a window; the facts put into the dict are known at its end."""
        with ended(emit, emit.event(RpcWindow, op=op, **facts)) as found:
            yield found

    def at_owner(op: str, original: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
        if rref.is_owner():
            return original(rref, *args, **kwargs)
        made_by, owner, context = caller(sys._getframe()), rref.owner().id, calls.known_context()
        with window(op, to=owner, context=context, site=made_by.site, phase=made_by.phase) as found:
            calls.fetched.discard(this_thread())
            value = original(rref, *args, **kwargs)
            if op == "to_here" and this_thread() not in calls.fetched:
                found["result"] = guarded(emit, "a value that was fetched", _fetched, calls, value, owner)
        return value

    def new_context(context: Any) -> None:
        number = context._context_id()
        calls.context[this_thread()] = number
        calls.contexts_open[number] = emit.event(RpcWindow, op="context", context=number)

    def release_context(original: Any, number: int) -> Any:
        calls.context.pop(this_thread(), None)
        guarded(emit, "a context", count)
        with window("release", context=number, phase="cleanup"):
            result = original(number)
        guarded(emit, "a context", count)
        if number in calls.contexts_open:
            emit.end(calls.contexts_open.pop(number), by="return")
        return result

    @contextmanager
    def backward_pass(context: int, roots: Any, site: str) -> Iterator[None]:
        guarded(emit, "backward", count)
        with window("backward", context=context, phase="backward", site=site):
            guarded(emit, "backward", watch_nodes, context, roots)
            yield
        guarded(emit, "backward", count)

    def watch_nodes(context: int, roots: Any) -> None:
        for message, node in _retrieve_context(context)._recv_functions().items():
            _watch_crossing(calls, node, message, context, None)
        if calls.graph is not None:
            calls.graph.backward(context, roots)

    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        # As C++ names them.
        given = dict(zip(("contextId", "roots"), args, strict=False)) | kwargs
        context: Any = given.get("contextId")
        roots: Any = given.get("roots")
        fits = type(context) is int and isinstance(roots, list | tuple)
        if not fits or not all(isinstance(each, torch.Tensor) for each in roots):
            return original(*args, **kwargs)  # Torch says what is wrong with them.
        with backward_pass(context, roots, caller(sys._getframe()).site):
            return original(*args, **kwargs)

    def backward_of_rref(original: Any, rref: Any, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> Any:
        if not rref.is_owner() or dist_autograd_ctx_id < 0:
            return at_owner("rref backward", original, rref, dist_autograd_ctx_id, retain_graph)
        site = caller(sys._getframe()).site
        with backward_pass(dist_autograd_ctx_id, [rref.local_value()], site):
            return original(rref, dist_autograd_ctx_id, retain_graph)

    patches.wrap(PyRRef, "to_here", partial(at_owner, "to_here"))
    patches.wrap(PyRRef, "backward", backward_of_rref)
    patches.around(emit, dist_autograd, "_new_context", before=count, after=new_context)
    patches.wrap(dist_autograd, "_release_context", release_context)
    patches.wrap(dist_autograd, "backward", backward)


def _fetched(calls: RpcCalls, value: Any, owner: int) -> RpcResult:
    """Describe an RRef's value that has not passed Python's pickler: the result of a builtin."""
    context = calls.known_context()
    if context is not None:
        watch_crossings(calls, tensors_in(value), context, owner)
    return result_of_cpp(value)


def watch_return(calls: RpcCalls, context: int, to: int) -> None:
    """Report the gradients that `to` sends back for a call that was made in C++.

    They arrive at the node that C++ has made for the call, which forwards them after its run.
    """
    sent = _retrieve_context(context)._send_functions()
    message = max(sent)

    def arrived(gradients: Sequence[torch.Tensor | None], _: object) -> None:
        now = time.monotonic_ns()
        times = {"start_ns": now, "end_ns": now, "ended_by": "return"}
        gradient = partial(_gradients, calls, "gradient", gradients, to=to, context=context, message=message, **times)
        guarded(calls.emit, "a gradient that comes", gradient)

    sent[message].register_hook(arrived)


def watch_crossings(calls: RpcCalls, tensors: Sequence[torch.Tensor], context: int, to: int | None) -> None:
    """Report the gradients that go back later, for tensors that arrived through autograd."""
    for each in tensors:
        node = each.grad_fn
        if node is not None and node.name().endswith("RecvRpcBackward"):
            _watch_crossing(calls, node, None, context, to)


_WATCHED = "dlearn"


def _watch_crossing(calls: RpcCalls, node: Any, message: int | None, context: int, to: int | None) -> None:
    if _WATCHED not in node.metadata:
        node.metadata[_WATCHED] = True
        begins = partial(_gradients, calls, "crossing", to=to, context=max(context, 0), message=message)
        watch_runs(calls.emit, node, begins, partial(calls.emit.end, by="return"))


def _gradients(calls: RpcCalls, op: str, gradients: Sequence[torch.Tensor | None], **facts: Any) -> int:
    return calls.emit.event(RpcWindow, op=op, tensors=describe_all(gradients), phase="backward", **facts)
