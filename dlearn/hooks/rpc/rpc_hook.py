"""Every RPC, at both ends: what is called, with which tensors, when it arrives, runs, and is answered.

All of torch's ways to call (rpc_sync, rpc_async, remote, RRef.rpc_sync() and the like, RemoteModule, the distributed
optimizer) end in six functions of `torch.distributed.rpc.api`, and all that is Python passes `_InternalRPCPickler`:
both are patched. Pickle stops reading at its STOP opcode, so an id behind it travels unnoticed, also to a process that
nobody records: it joins the two ends.

What C++ sends by itself cannot be seen from Python. But Python knows the stretches of time in which it happens: they
are reported as windows, and `analysis` finds in the agent's own log what was sent in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed.rpc import api, backend_registry

from dlearn.hooks import Emit, Undo
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches
from dlearn.hooks.rpc.autograd import Graph
from dlearn.hooks.rpc.rpc_callers import watch_callers
from dlearn.hooks.rpc.rpc_pickler import watch_pickler
from dlearn.hooks.rpc.rpc_state import RpcCalls, error_of, guarded
from dlearn.hooks.rpc.rpc_windows import watch_windows
from dlearn.trace.event import Worker


def install(host: Host) -> Undo:
    """Report all RPC to `host` until the returned function is called; with the option `graph` its autograd, too."""
    if not rpc.is_available():
        return lambda: None
    with ExitStack() as undo:
        undo.callback(host.log.close)
        graph = Graph(host) if host.options.graph else None
        if graph is not None:
            undo.callback(graph.stop)
        undo.callback(_watch_calls(RpcCalls(host, graph)))
        return undo.pop_all().close


def _watch_calls(calls: RpcCalls) -> Undo:
    patches = Patches()
    watch_agents(calls, patches)
    watch_callers(calls, patches)
    watch_pickler(calls, patches)
    watch_windows(calls, patches)
    if _is_current_rpc_agent_set():
        _meet(calls, _get_current_rpc_agent(), calls.host.log.open())

    def undo() -> None:
        patches.undo()
        calls.futures.settle()
        for number, future, _ in list(calls.waiting.values()):
            end_unanswered(calls.emit, number, future)

    return undo


# Agents ---------------------------------------------------------------------------------------------------------------


def watch_agents(calls: RpcCalls, patches: Patches) -> None:
    host, log = calls.host, ""
    # The connections that are there before it are none of the agent's.
    strangers = host.sockets.pass_over

    def make_agent() -> None:
        nonlocal log
        guarded(host, "init_rpc", strangers)
        try:
            log = host.log.open()
        except Exception as error:
            log = f"{type(error).__name__}: {error}"

    def around(before: Callable[[], object] = _nothing, after: Callable[[], object] = _nothing) -> Any:
        def make(original: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                guarded(host, original.__name__, before)
                result = original(*args, **kwargs)
                guarded(host, original.__name__, after)
                return result

            return wrapper

        return make

    # Before the shutdown is final everybody is done, and the connections are still there.
    patches.replace(api, "_finalize_shutdown", around(host.disconnecting))
    patches.replace(backend_registry, "init_backend", around(make_agent, host.watch_rpc_sockets))
    patches.replace(backend_registry, "_init_process_group", around(after=strangers))
    patches.replace(api, "_init_rpc_states", around(after=lambda: _meet(calls, _get_current_rpc_agent(), log)))


def _nothing() -> None:
    pass


def _meet(calls: RpcCalls, agent: Any, log: str) -> None:
    """This process has become a worker. torch says so twice."""
    if agent is calls.agent:
        return
    info = agent.get_worker_info()
    calls.agent, calls.me = agent, info.id
    calls.emit.fact(Worker(name=info.name, id=info.id, wall_ns=_wall_ahead_ns(), log=log))


def _wall_ahead_ns() -> int:
    """How far the wall clock is ahead of the monotonic one: of some looks at both, that which took the shortest."""
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(20)]
    before, wall, after = min(looks, key=lambda look: look[2] - look[0])
    return wall - (before + after) // 2


def end_unanswered(emit: Emit, number: int, future: Any) -> None:
    """At the end of the recording: a future that has failed says so; one that is open belongs to a call that hangs."""
    if future.done():
        emit.end(number, by="future", error=error_of(future))
