"""Network: the links between ranks, and the ports that a packet passes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate

from dlearn.errors import SetupError
from dlearn.network.link import Link

PACKET_SECONDS = 0.001  # A packet is what the slowest link carries in it: some 1,000 a second.
SMALLEST_PACKET, LARGEST_PACKET = 3000, 65_000
QUEUE_PACKETS, WINDOW_PACKETS = 64, 48
"""The room of a queue without a stated size, at least; and what TCP may have on its way."""


class Network:
    """Links from each rank to one switch: from rank to rank a message takes latency + bytes / rate.

        Network(rate="1 Gbit/s", latency="100 us", queue="64 kB")
        Network.star(["1 Gbit/s, 100 us", "10 Mbit/s, 5 ms"])                # a link of its own for each rank
        Network.racks([2, 2], inside="1 Gbit/s, 50 us", between="100 Mbit/s, 1 ms")

    A link carries in both directions at the same time, each at its rate. A rank's own port holds its sender back; one
    towards a rank, or to and from a rack, has a queue, and what finds it full is lost: where several ranks send to one,
    that is incast. Without a stated `queue` it has room for 64 packets, or for what one round trip holds.
    """

    def __init__(
        self, *, rate: float | str | None = None, latency: float | str = 0.0,
        jitter: float | str = 0.0, loss: float | str = 0.0, queue: float | str | None = None,
    ) -> None:  # fmt: skip
        link = Link(rate, latency, jitter, loss, queue)  # type: ignore[arg-type]
        self.rank_links: tuple[Link, ...] = (link,)  # One for each rank, or one for all.
        self.sizes: tuple[int, ...] = ()  # How many ranks each rack has.
        self.between: Link | None = None

    @classmethod
    def of(cls, given: Network | Link | str) -> Network:
        """Return a network as it is, or one with this link for each rank."""
        return given if isinstance(given, Network) else cls.star([given])

    @classmethod
    def star(cls, links: Sequence[Link | str]) -> Network:
        """Give each rank a link of its own to the switch. From one to another is half of each one's latency."""
        if isinstance(links, str) or not links:
            raise SetupError("a star has a list of links, one for each rank.")
        network = cls()
        network.rank_links = tuple(map(Link.of, links))
        return network

    @classmethod
    def racks(cls, sizes: Sequence[int], *, inside: Link | str, between: Link | str) -> Network:
        """Connect the first `sizes[0]` ranks by a switch, and so on; racks share the links `between`."""
        if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise SetupError(f"racks have a list of sizes, such as [2, 2], not {sizes!r}.")
        network = cls.star([inside])
        network.sizes, network.between = tuple(sizes), Link.of(between)
        return network

    def fitted(self, ranks: int) -> Network:
        """Return it with one link for each rank. SetupError if it is for another number of ranks."""
        fitted = copy(self)
        if len(self.rank_links) == 1:
            fitted.rank_links *= sum(self.sizes) or ranks
        if len(fitted.rank_links) != ranks:
            has = len(fitted.rank_links)
            raise SetupError(f"this network is for {has} ranks, and the cluster has {ranks}.")
        return fitted

    def changed(self, rank: int, words: str) -> Network:
        """Return a fitted network in which the link of one rank has changed."""
        network, links = copy(self), list(self.rank_links)
        links[rank] = links[rank].changed(words)
        network.rank_links = tuple(links)
        return network

    @property
    def packet_bytes(self) -> int:
        rates = [link.rate for link in self._links() if link.rate is not None]
        return round(min(LARGEST_PACKET, max(SMALLEST_PACKET, min(rates, default=1e10) / 8 * PACKET_SECONDS)))

    def ports(self, packet_bytes: int) -> dict[str, Link]:
        """Return a port for each direction of each link, with its share of the latency; a rank's own has no queue."""
        half = [_half(link) for link in self.rank_links]
        ports = {f"from rank {rank}": replace(link, queue=None) for rank, link in enumerate(half)}
        for rank, link in enumerate(half):
            ports[f"to rank {rank}"] = self._with_queue(link, packet_bytes)
        if self.between is not None:
            port = self._with_queue(_half(self.between), packet_bytes)
            for direction in ("from", "to"):
                ports |= {f"{direction} rack {rack}": port for rack in range(len(self.sizes))}
        return ports

    @property
    def window_bytes(self) -> int:
        """Return what TCP may have in flight: more than fills the longest path, and less than 200 ms of
        it, after which TCP would take a packet for lost."""
        return round(max(WINDOW_PACKETS * self.packet_bytes, *(8 * self._on_the_way(link) for link in self._links())))

    def _links(self) -> list[Link]:
        return [*self.rank_links, *([] if self.between is None else [self.between])]

    def _on_the_way(self, link: Link) -> float:
        """Return the bytes that this link's rate sends in one round trip."""
        seconds = sum(other.latency + other.jitter for other in set(self._links()))
        return (link.rate or 0) / 8 * 2 * seconds

    def _with_queue(self, link: Link, packet_bytes: int) -> Link:
        return link if link.queue else replace(link, queue=max(QUEUE_PACKETS * packet_bytes, self._on_the_way(link)))

    def path(self, source: int, target: int) -> list[str]:
        """Return the names of the ports that a packet passes."""
        ends = list(accumulate(self.sizes))
        racks = [bisect_right(ends, rank) for rank in (source, target)]
        through = [] if racks[0] == racks[1] else [f"from rack {racks[0]}", f"to rack {racks[1]}"]
        return [f"from rank {source}", *through, f"to rank {target}"]

    def __str__(self) -> str:
        if self.between is not None:
            return f"racks of {', '.join(map(str, self.sizes))}: {self.rank_links[0]}; between them {self.between}"
        return "; ".join(map(str, dict.fromkeys(self.rank_links)))


def _half(link: Link) -> Link:
    """Return one of the two ports of a path: both together are the link."""
    return replace(link, latency=link.latency / 2, jitter=link.jitter / 2, loss=1 - (1 - link.loss) ** 0.5)
