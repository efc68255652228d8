"""Process groups as they are made and destroyed: their connections are counted, and clocks are compared."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.network.sockets import NO_GROUP
from dlearn.hooks.patches import Patches, guarded


def install(host: Host) -> Undo:
    """Describe each group, count the bytes in its sockets, and compare clocks with its other ranks."""
    groups, sockets, clocks, count = host.groups, host.sockets, host.clocks, host.count
    c10d, undo = dist.distributed_c10d, Patches()
    present: list[str] = []
    for group in list(c10d._world.pg_map):
        guarded(host, "a process group", lambda known=group: present.append(groups.of(known).name))
    sockets.begin(present)
    count()

    def making(*args: Any, **_: Any) -> None:
        sockets.making(args[4])  # The store in which its members meet.

    def made(result: Any, *args: Any, group_desc: Any = None, **_: Any) -> None:
        size, rank, ranks, _backend, store = args[:5]
        if isinstance(result[0], ProcessGroup):  # Else this process is no member.
            groups.made(result[0], ranks or range(size))
            if sockets.watch(groups.of(result[0]).name):
                count()
        if group_desc == "default_pg":
            clocks.join("group", store, rank, size)

    def destroying(group: Any = None) -> None:
        everything = group is None or group is dist.GroupMember.WORLD
        if everything:
            clocks.close()
        sockets.watch(NO_GROUP)
        count()
        groups.destroying(None if everything else group)

    undo.callback(guarded, host, "the clocks", clocks.close)
    if dist.is_initialized():
        store = c10d._get_default_store()
        guarded(host, "the clocks", clocks.join, "group", store, dist.get_rank(), dist.get_world_size())
    undo.callback(groups.kept.clear)
    undo.around(host, c10d, "_new_process_group_helper", before=making, after=made)
    for owner in (c10d, dist):
        undo.around(host, owner, "destroy_process_group", before=destroying)
    return undo.close
