"""Every RPC, at both ends: what is called, with which tensors, when it arrives, runs, and is answered.

All of torch's ways to call end in six functions of `torch.distributed.rpc.api`, and all that is
Python passes `_InternalRPCPickler`: both are patched. Pickle stops reading at its STOP opcode, so
an id behind it travels unnoticed, also to a process that is not recorded: it joins the two ends.
What C++ sends by itself is found in the agent's own log; the spans of time in which it happens are
reported as windows.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_autograd import _retrieve_context
from torch._C._distributed_rpc import PyRRef, _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed.rpc import api, backend_registry

from dlearn.events.event import RpcWindow, Worker
from dlearn.hooks import Undo
from dlearn.hooks.c10d.works import outcome_of
from dlearn.hooks.callers import caller
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, ended, guarded
from dlearn.hooks.rpc.autograd import Graph
from dlearn.hooks.rpc.rpc_calls import watch_callers, watch_pickler
from dlearn.hooks.rpc.rpc_state import RpcCalls, result_of_cpp, this_thread, watch_crossing


def install(host: Host) -> Undo:
    """Report all RPC to `host` until the returned function is called; with the option `graph` its autograd, too."""
    with Patches() as patches:
        patches.callback(host.log.close)
        graph = Graph(host) if host.options.graph else None
        if graph is not None:
            patches.callback(graph.stop)
        calls = RpcCalls(host, graph)
        patches.callback(_end_unanswered, calls)
        patches.callback(calls.futures.settle)
        watch_agents(calls, patches)
        watch_callers(calls, patches)
        watch_pickler(calls, patches)
        watch_windows(calls, patches)
        if _is_current_rpc_agent_set():
            _meet(calls, host.log.open())
        return patches.pop_all().close


def _end_unanswered(calls: RpcCalls) -> None:
    """Report the error of each future that has failed; one that is still open belongs to a call that hangs."""
    for number, future, _ in list(calls.waiting.values()):
        if future.done():
            calls.host.end(number, by="future", error=outcome_of(future)[1])


# Agents ---------------------------------------------------------------------------------------------------------------


def watch_agents(calls: RpcCalls, patches: Patches) -> None:
    """Report this process as a worker, and which connections are its agent's."""
    host, log = calls.host, ""

    def making(*_: Any, store: Any, **__: Any) -> None:
        nonlocal log
        # Connections that are there before the agent's are none of its own.
        guarded(host, "init_rpc", host.sockets.making, store, None)
        try:
            log = host.log.open()
        except Exception as error:
            log = f"{type(error).__name__}: {error}"

    def made(*_: Any, store: Any, rank: int, world_size: int | None, **__: Any) -> None:
        host.watch_rpc_sockets()
        host.clocks.join("rpc", store, rank, world_size)  # RPC's workers meet in a store, too.

    patches.around(host, backend_registry, "init_backend", before=making, after=made)
    patches.around(host, backend_registry, "_init_process_group", after=lambda *_: host.sockets.watch(None))
    patches.around(host, api, "_init_rpc_states", after=lambda *_: _meet(calls, log))
    # Before the shutdown is final all calls are done, and the connections are still there.
    patches.around(host, api, "_finalize_shutdown", before=lambda *_: host.disconnecting())


def _meet(calls: RpcCalls, log: str) -> None:
    """Report that this process is a worker now. torch says so twice."""
    agent = _get_current_rpc_agent()
    if agent is calls.agent:
        return
    info = agent.get_worker_info()
    calls.agent, calls.me = agent, info.id
    # How far the wall clock is ahead of the monotonic one, by the fastest of some looks.
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(20)]
    before, wall, after = min(looks, key=lambda look: look[2] - look[0])
    wall_ns = wall - (before + after) // 2
    calls.host.fact(Worker(name=info.name, id=info.id, wall_ns=wall_ns, log=log))


# Spans of time in which C++ sends messages of its own, on behalf of Python ------------------------


def watch_windows(calls: RpcCalls, patches: Patches) -> None:
    host = calls.host
    # As a phase of an iteration over RPC begins or ends.
    count = host.count if host.options.measure == "phase" else lambda: None

    def window(op: str, **facts: Any) -> AbstractContextManager[dict[str, Any]]:
        """Report what is done inside as a window; what is put into the dict is known at its end."""
        return ended(host, guarded(host, op, host.event, RpcWindow, op=op, **facts))

    def at_owner(op: str, original: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
        if rref.is_owner():
            return original(rref, *args, **kwargs)
        made_by, owner = caller(sys._getframe()), rref.owner().id
        context = calls.context.get(this_thread())
        with window(op, to=owner, context=context, site=made_by.site, phase=made_by.phase) as facts:
            calls.fetched.discard(this_thread())
            value = original(rref, *args, **kwargs)
            if op == "to_here" and this_thread() not in calls.fetched:
                # It has not passed the pickler: the result of a builtin.
                known = calls, value, context, owner
                facts["result"] = guarded(host, "a fetched value", result_of_cpp, *known)
        return value

    def new_context(context: Any) -> None:
        number = context._context_id()
        calls.context[this_thread()] = number
        calls.contexts_open[number] = host.event(RpcWindow, op="context", context=number)

    def release_context(original: Any, number: int) -> Any:
        calls.context.pop(this_thread(), None)
        count()
        with window("release", context=number, phase="cleanup"):
            result = original(number)
        count()
        if number in calls.contexts_open:
            host.end(calls.contexts_open.pop(number), by="return")
        return result

    @contextmanager
    def backward_pass(context: int, roots: Any, site: str) -> Iterator[None]:
        count()
        with window("backward", context=context, phase="backward", site=site):
            guarded(host, "backward", watch_nodes, context, roots)
            yield
        count()

    def watch_nodes(context: int, roots: Any) -> None:
        for message, node in _retrieve_context(context)._recv_functions().items():
            watch_crossing(calls, node, message, context, None)
        if calls.graph is not None:
            calls.graph.backward(context, roots)

    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        # As C++ names them.
        given = dict(zip(("contextId", "roots"), args, strict=False)) | kwargs
        context: Any = given.get("contextId")
        roots: Any = given.get("roots")
        fits = type(context) is int and isinstance(roots, list | tuple)
        if not fits or not all(isinstance(root, torch.Tensor) for root in roots):
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
    patches.around(host, dist_autograd, "_new_context", before=count, after=new_context)
    patches.wrap(dist_autograd, "_release_context", release_context)
    patches.wrap(dist_autograd, "backward", backward)
