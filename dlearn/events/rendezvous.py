"""Calls that end when other processes have come, and send nothing that is recorded."""

from typing import Annotated

import msgspec

from dlearn.events.event import Count, Event


class Rendezvous(Event, tag="rendezvous", frozen=True, kw_only=True):
    """A process waits here for others: all `ranks`, all of `size` (0: not known), workers `names`.

    `op` is the call as the program wrote it: init_process_group, rpc.shutdown, Split. `group` is
    the name of the group that is made. The process comes `as_rank`; for RPC, by its `name`.
    """

    op: str
    ranks: tuple[Count, ...] = ()
    size: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    names: tuple[str, ...] = ()
    group: str = ""
    as_rank: Count | None = None
    name: str = ""
