"""Process groups, and what comes and goes with them: the connections that are counted, and the desk of the clocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store

from dlearn.hooks import Undo
from dlearn.hooks.c10d.groups import Made, watch_groups
from dlearn.hooks.host import Host


def install(host: Host) -> Undo:
    """Describe each group when it is made, or now; watch its sockets, whose counters are read, and open the desk."""
    groups, desk, count = host.groups, host.desk, host.count
    sockets = host.sockets if host.options.measure is not None else None
    undo = ExitStack()
    present: list[str] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            present.append(groups.of(group).name)
        except Exception as error:
            host.failed("a process group", error)
    making: list[Callable[[Store | None], object]] = []
    made: list[Callable[[Made], object]] = [groups.made]
    destroying: list[Callable[[ProcessGroup | None], object]] = [groups.destroying]
    if sockets is not None:
        sockets.begin(present)
        count()

        def watch_its_own(new: Made) -> None:
            if new.group is not None and sockets.watch(groups.of(new.group).name):
                count()

        def read_for_the_last_time(group: object) -> None:
            sockets.note_strangers()
            count()

        making.append(sockets.making)
        made.append(watch_its_own)
        destroying.insert(0, read_for_the_last_time)
    if desk is not None:
        made.append(desk.made)
        destroying.insert(0, desk.destroying)
        undo.callback(desk.install())
    undo.callback(groups.release)
    undo.callback(watch_groups(host, making=making, made=made, destroying=destroying))
    return undo.close
