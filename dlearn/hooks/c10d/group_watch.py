"""Process groups, and what comes and goes with them: the connections that are counted, and the desk of the clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.hooks import Emit, Undo
from dlearn.hooks.c10d.groups import Made
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, guarded


def install(host: Host) -> Undo:
    """Describe each group when it is made, or now; watch its sockets, whose counters are read, and open the desk."""
    groups, sockets, desk, count = host.groups, host.sockets, host.desk, host.count
    present: list[str] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        guarded(host, "a process group", lambda known=group: present.append(groups.of(known).name))
    sockets.begin(present)
    count()

    def watch_its_own(new: Made) -> None:
        if new.group is not None and sockets.watch(groups.of(new.group).name):
            count()

    def read_for_the_last_time(group: object) -> None:
        sockets.note_strangers()
        count()

    made: list[_Listener] = [groups.made, watch_its_own]
    destroying: list[_Listener] = [read_for_the_last_time, groups.destroying]
    undo = Patches()
    if desk is not None:
        made.append(desk.made)
        destroying.insert(0, desk.destroying)
        undo.callback(guarded, host, "the clocks", desk.close)
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            guarded(host, "the clocks", desk.join, "group", store, dist.get_rank(), dist.get_world_size())
    undo.callback(groups.release)
    _watch(host, undo, making=[sockets.making], made=made, destroying=destroying)
    return undo.close


_Listener = Callable[[Any], object]


def _watch(
    emit: Emit,
    patches: Patches,
    *,
    making: Sequence[_Listener],
    made: Sequence[_Listener],
    destroying: Sequence[_Listener],
) -> None:
    """Call these before a process group is made in a store, after it, and before one is destroyed (None: all)."""

    def tell(listeners: Sequence[_Listener], what: object) -> None:
        for listener in listeners:
            guarded(emit, "a process group", listener, what)

    def new_group(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            size, rank, ranks, _, store = args[:5]
            tell(making, store)
            result = original(*args, **kwargs)
            group = result[0] if isinstance(result[0], ProcessGroup) else None
            tell(made, Made(group, kwargs.get("group_desc") == "default_pg", store, rank, size, ranks or range(size)))
            return result

        return wrapper

    def destroy_group(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            group = args[0] if args else kwargs.get("group")
            tell(destroying, None if group is dist.GroupMember.WORLD else group)
            return original(*args, **kwargs)

        return wrapper

    c10d = dist.distributed_c10d
    patches.replace(c10d, "_new_process_group_helper", new_group)
    for owner in (c10d, dist):
        patches.replace(owner, "destroy_process_group", destroy_group)
