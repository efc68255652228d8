"""Calls in which ranks wait for each other, as a group or RPC begins or ends: who is wanted there.

Only the outermost call of a thread is reported, by the name that the program knows; groups are seen
where all of torch's ways to make them meet, with the name that their members have to agree on.
"""

import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.distributed import device_mesh, distributed_c10d, rpc
from torch.distributed.rpc import api

from dlearn.events.rendezvous import Rendezvous
from dlearn.hooks import Undo
from dlearn.hooks.callers import caller
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, ended, guarded

Facts = dict[str, Any]


def install(host: Host) -> Undo:
    """Report each rendezvous to `host` until the returned function is called."""
    undo, inside = Patches(), threading.local()

    def begin(facts: Callable[..., Facts | None], args: Any, kwargs: Any) -> int | None:
        found, site = facts(*args, **kwargs), caller(sys._getframe()).site
        # A cluster's own calls come from no line of a file; one process alone waits for no other.
        of_a_program = site and not site.startswith("<")
        alone = found is None or 1 in (found.get("size"), len(found.get("ranks", ())))
        if found is None or alone or not of_a_program:
            return None
        return host.event(Rendezvous, site=site, **found)

    def watch(owner: Any, name: str, facts: Callable[..., Facts | None]) -> None:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "a_call", False):
                return original(*args, **kwargs)
            number = guarded(host, name, begin, facts, args, kwargs)
            inside.a_call = number is not None
            try:
                with ended(host, number):
                    return original(*args, **kwargs)
            finally:
                inside.a_call = False

        if name in vars(owner):
            undo.wrap(owner, name, call)

    for owner in (distributed_c10d, dist, device_mesh):
        watch(owner, "init_process_group", _of_init)
        watch(owner, "split_group", _of_split)
    watch(distributed_c10d, "_new_process_group_helper", _of_group)
    watch(rpc, "init_rpc", _of_init_rpc)
    for owner in (api, rpc):
        watch(owner, "shutdown", _of_shutdown)
    return undo.close


def _of_init(
    backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
    rank: int = -1, *_: Any, **__: Any,
) -> Facts:  # fmt: skip
    by_env = init_method is None or init_method.startswith("env:")
    return {"op": _spelling("init_process_group")} | _ends(rank, world_size, by_env=by_env)


def _of_init_rpc(
    name: str, backend: Any = None, rank: int = -1, world_size: int | None = None,
    *_: Any, **__: Any,
) -> Facts:  # fmt: skip
    return {"op": "rpc.init_rpc", "name": name} | _ends(rank, world_size or -1, by_env=False)


def _ends(rank: int, size: int, *, by_env: bool) -> Facts:
    """Return as which rank of how many a process comes, where arguments or environment say so."""
    if by_env:
        rank = int(os.environ.get("RANK", -1)) if rank < 0 else rank
        size = int(os.environ.get("WORLD_SIZE", -1)) if size < 0 else size
    return {"as_rank": rank if rank >= 0 else None, "size": max(size, 0)}


def _of_shutdown(graceful: bool = True, *_: Any, **__: Any) -> Facts | None:
    agent = _get_current_rpc_agent()
    if not graceful or not getattr(agent, "is_static_group", True):
        return None  # It waits for no other.
    me, names = agent.get_worker_info(), tuple(sorted(api._ALL_WORKER_NAMES))
    return {"op": "rpc.shutdown", "names": names, "name": me.name, "as_rank": me.id}


def _of_group(*args: Any, group_desc: Any = None, **_: Any) -> Facts | None:
    _, _, ranks, _, _, name = args[:6]
    if group_desc == "default_pg" or (me := dist.get_rank()) not in ranks:
        return None  # Only members wait.
    op = _spelling("new_group")
    return {"op": op, "ranks": tuple(ranks), "group": str(name), "as_rank": me}


def _of_split(parent_pg: Any = None, *_: Any, **__: Any) -> Facts:
    parent = parent_pg or distributed_c10d._get_default_group()
    members = distributed_c10d._world.pg_group_ranks[parent]
    return {"op": "split_group", "ranks": tuple(members), "as_rank": dist.get_rank()}


def _spelling(op: str) -> str:
    """Return the outermost of torch's calls that make groups, as the program wrote it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        op = _MAKERS.get(frame.f_code, op)
        frame = frame.f_back
    return op


_MAKERS = {
    inspect.unwrap(maker).__code__: maker.__name__
    for maker in (
        device_mesh.init_device_mesh,
        distributed_c10d.new_subgroups,
        distributed_c10d.new_subgroups_by_enumeration,
    )
}
