"""Every RPC, at both ends: what is called, with which tensors, when it arrives, runs, and is answered.

All of torch's ways to call (rpc_sync, rpc_async, remote, RRef.rpc_sync() and the like, RemoteModule, the distributed
optimizer) end in six functions of `torch.distributed.rpc.api`, and all that is Python passes `_InternalRPCPickler`:
both are patched. Pickle stops reading at its STOP opcode, so an id behind it travels unnoticed, also to a process that
is not recorded: it joins the two ends.

Python does not see what C++ sends by itself, but knows the spans of time in which it happens. They are reported as
windows, and `events` finds in the agent's own log what was sent in each.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed.rpc import api, backend_registry

from dlearn.events.event import Worker
from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.rpc.autograd import Graph
from dlearn.hooks.rpc.rpc_calls import watch_callers, watch_pickler
from dlearn.hooks.rpc.rpc_state import RpcCalls, error_of
from dlearn.hooks.rpc.rpc_windows import watch_windows


def install(host: Host) -> Undo:
    """Report all RPC to `host` until the returned function is called; with the option `graph` its autograd, too."""
    if not rpc.is_available():
        return lambda: None
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
            _meet(calls, _get_current_rpc_agent(), host.log.open())
        return patches.pop_all().close


def _end_unanswered(calls: RpcCalls) -> None:
    """Report the error of each future that has failed; one that is still open belongs to a call that hangs."""
    for number, future, _ in list(calls.waiting.values()):
        if future.done():
            calls.emit.end(number, by="future", error=error_of(future))


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

    def grouped(*_: Any) -> None:
        host.sockets.watch(None)

    def meet(*_: Any) -> None:
        _meet(calls, _get_current_rpc_agent(), log)

    def finishing(*_: Any) -> None:
        host.disconnecting()

    patches.around(host, backend_registry, "init_backend", before=making, after=made)
    patches.around(host, backend_registry, "_init_process_group", after=grouped)
    patches.around(host, api, "_init_rpc_states", after=meet)
    # Before the shutdown is final all calls are done, and the connections are still there.
    patches.around(host, api, "_finalize_shutdown", before=finishing)


def _meet(calls: RpcCalls, agent: Any, log: str) -> None:
    """Report that this process is a worker now. torch says so twice."""
    if agent is calls.agent:
        return
    info = agent.get_worker_info()
    calls.agent, calls.me = agent, info.id
    calls.emit.fact(Worker(name=info.name, id=info.id, wall_ns=_wall_ahead_ns(), log=log))


def _wall_ahead_ns() -> int:
    """Return how far the wall clock is ahead of the monotonic one, by the fastest of some looks."""
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(20)]
    before, wall, after = min(looks, key=lambda look: look[2] - look[0])
    return wall - (before + after) // 2
