"""How NCCL has wired the ranks of a process group: rings, trees and links, as its own log tells them.

Ranks are those in the group. A ring is here only if it is whole: what a cut line says of one is no ring.
"""

from dataclasses import dataclass

import msgspec

from dlearn.events.event import Count, Line


class ChannelLink(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A connection on which a rank sends to another, in one of NCCL's channels.

    `via` is NCCL's own word, as "NET/IB/0/GDRDMA"; `use`: "ring", "tree", "send, recv" or "".
    """

    channel: Count
    to: Count
    via: str
    use: str = ""

    @property
    def kind(self) -> str:
        """Return "P2P" (memory of both GPUs), "SHM" (memory of the host) or "NET" (the network)."""
        return self.via.partition("/")[0]

    @property
    def card(self) -> str:
        """Return the network card of a link: "0" of "NET/IB/0/GDRDMA"; "" of other links."""
        parts = self.via.split("/")
        return parts[2].partition("(")[0] if self.kind == "NET" and parts[2:] else ""


class Ring(msgspec.Struct, frozen=True, gc=False):
    """All ranks of a group in the order in which data goes from one to the next, from rank 0; and in which channels."""

    order: tuple[Count, ...]
    channels: tuple[Count, ...]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What NCCL chose for a collective of so many bytes of a rank (reduce-scatter: it gets)."""

    op: str
    bytes: Count
    algorithm: str
    protocol: str
    channels: tuple[Count, ...] = ()  # The first and the last, where that is said.


class Wired(Line, tag="wired", frozen=True, kw_only=True):
    """What NCCL's log says of this process in a group: its host, its GPU and its links.

    What holds for all members stands in the file of one: the whole `rings`, and the choices. `channels`: how many NCCL
    made. `switch`: whether NCCL prepared to let a switch add up (NVLS), as it does beside its rings.
    """

    group: str
    host: str
    device: Count
    channels: Count = 0
    links: tuple[ChannelLink, ...] = ()
    rings: tuple[Ring, ...] = ()
    choices: tuple[Choice, ...] = ()
    switch: bool = False


@dataclass(frozen=True, eq=False)
class Wiring:
    """The same of all members of a group, by rank in the group."""

    members: dict[int, Wired]

    @property
    def rings(self) -> tuple[Ring, ...]:
        return next((each.rings for each in self.members.values() if each.rings), ())

    @property
    def channels(self) -> int:
        """Return how many NCCL made, or as many as the log has rings of."""
        told = max((each.channels for each in self.members.values()), default=0)
        return told or sum(len(ring.channels) for ring in self.rings)

    @property
    def choices(self) -> tuple[Choice, ...]:
        found = (choice for each in self.members.values() for choice in each.choices)
        return tuple(dict.fromkeys(found))

    @property
    def switch(self) -> bool:
        return any(each.switch for each in self.members.values())
