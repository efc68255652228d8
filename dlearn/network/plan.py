"""Network: the links between ranks, and the ports that a packet passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from dlearn.errors import SetupError
from dlearn.network.link import Link

PACKET_SECONDS = 0.001
"""A packet is what the slowest link carries in this time: the switch has some 1,000 a second."""
SMALLEST_PACKET, LARGEST_PACKET = 3000, 65_000
QUEUE_PACKETS, WINDOW_PACKETS = 64, 48
"""The room of a queue without a stated size, at least; and what TCP may have on its way."""


Pair = tuple[int | str, int | str]
"""Two ranks, by their names; of a fitted network by their numbers."""


@dataclass(frozen=True, init=False)
class Network:
    """Links from each rank to one switch: from rank to rank a message takes latency + bytes / rate.

        Network(rate="1 Gbit/s", latency="100 us", queue="64 kB")
        Network.star(["1 Gbit/s, 100 us", "10 Mbit/s, 5 ms"])                # a link of its own for each rank
        Network.racks([2, 2], inside="1 Gbit/s, 50 us", between="100 Mbit/s, 1 ms")
        Network.links({("ps", "a"): "10 Mbit/s, 5 ms"}, others="1 Gbit/s, 100 us")  # one link apart from the switch

    A link carries in both directions at the same time, each at its rate. A rank's own port holds its sender back; one
    towards a rank, or to and from a rack, has a queue, and what finds it full is lost: where several ranks send to one,
    that is incast. Without a stated `queue` it has room for 64 packets, or for what one round trip holds.
    """

    rank_links: tuple[Link, ...]
    """One for each rank, or one for all."""
    sizes: tuple[int, ...] = ()
    """How many ranks each rack has."""
    between: Link | None = None
    single: tuple[tuple[Pair, Link], ...] = ()
    """Of pairs of ranks that have a link apart from the switch."""

    def __init__(
        self,
        *,
        rate: float | str | None = None,
        latency: float | str = 0.0,
        jitter: float | str = 0.0,
        loss: float | str = 0.0,
        queue: float | str | None = None,
    ) -> None:
        self._set(Link(rate, latency, jitter, loss, queue))  # type: ignore[arg-type]

    def _set(self, *rank_links: Link, **others: Any) -> Network:
        for name, value in ({"rank_links": rank_links} | others).items():
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def _of(cls, *rank_links: Link | str, **others: Any) -> Network:
        return cls.__new__(cls)._set(*map(Link.of, rank_links), **others)

    @classmethod
    def of(cls, given: Network | Link | str) -> Network:
        """Return a network as it is, or one with this link for each rank."""
        return given if isinstance(given, Network) else cls._of(given)

    @classmethod
    def star(cls, links: Sequence[Link | str]) -> Network:
        """Give each rank a link of its own to the switch. From one to another is half of each one's latency."""
        if isinstance(links, str) or not links:
            raise SetupError("a star has a list of links, one for each rank.")
        return cls._of(*links)

    @classmethod
    def racks(cls, sizes: Sequence[int], *, inside: Link | str, between: Link | str) -> Network:
        """Connect the first `sizes[0]` ranks by a switch, and so on; racks share the links `between`."""
        if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise SetupError(f"racks have a list of sizes, such as [2, 2], not {sizes!r}.")
        return cls._of(inside, sizes=tuple(sizes), between=Link.of(between))

    @classmethod
    def links(cls, single: Mapping[Pair, Link | str], *, others: Link | str) -> Network:
        """Give pairs of ranks, by number or name, a link of their own; all else has links `others`."""
        for ends in single:
            if not isinstance(ends, tuple) or len(set(ends)) != 2:
                raise SetupError(f"a single link is between two ranks, not {ends!r}.")
        own = tuple((ends, Link.of(link)) for ends, link in single.items())
        return cls._of(others, single=own)

    def fitted(self, names: Sequence[int | str]) -> Network:
        """Return it with one link for each rank. SetupError if it does not fit these names."""
        ranks = len(names)
        for end in (end for ends, _ in self.single for end in ends):
            if end not in names:
                raise SetupError(f"a single link leads to no rank {end!r}; its ranks are {list(names)}.")
        pairs = [sorted((names.index(a), names.index(b))) for (a, b), _ in self.single]
        numbered = tuple(((a, b), link) for (a, b), (_, link) in zip(pairs, self.single, strict=True))
        has = sum(self.sizes) or (len(self.rank_links) if len(self.rank_links) > 1 else ranks)
        if has != ranks:
            raise SetupError(f"this network is for {has} ranks, and the cluster has {ranks}.")
        links = self.rank_links if len(self.rank_links) == ranks else self.rank_links * ranks
        return Network._of(*links, sizes=self.sizes, between=self.between, single=numbered)

    def changed(self, rank: int, words: str) -> Network:
        """Return a fitted network in which the link of one rank has changed."""
        links = list(self.rank_links)
        links[rank] = links[rank].changed(words)
        return Network._of(*links, sizes=self.sizes, between=self.between, single=self.single)

    @property
    def packet_bytes(self) -> int:
        """Return the size of the largest packet."""
        rates = [link.rate for link in self._links() if link.rate is not None]
        return round(min(LARGEST_PACKET, max(SMALLEST_PACKET, min(rates, default=1e10) / 8 * PACKET_SECONDS)))

    def ports(self, packet_bytes: int) -> dict[str, Link]:
        """Return a port for each direction of each link, with its share of the latency; a rank's own has no queue."""
        half = [_half(link) for link in self.rank_links]
        found = {f"from rank {rank}": replace(link, queue=None) for rank, link in enumerate(half)}
        found |= {f"to rank {rank}": self._with_queue(link, packet_bytes) for rank, link in enumerate(half)}
        if self.between is not None:
            one = self._with_queue(_half(self.between), packet_bytes)
            racks = range(len(self.sizes))
            found |= {f"from rack {rack}": one for rack in racks} | {f"to rack {rack}": one for rack in racks}
        for (a, b), link in self.single:
            found |= dict.fromkeys((_direct(a, b), _direct(b, a)), replace(link, queue=None))
        return found

    @property
    def window_bytes(self) -> int:
        """Return what TCP may have in flight: more than fills the longest path, and less than 200 ms of
        it, after which TCP would take a packet for lost."""
        return round(max(WINDOW_PACKETS * self.packet_bytes, *(8 * self._on_the_way(link) for link in self._links())))

    def _links(self) -> list[Link]:
        return [*self.rank_links, *([] if self.between is None else [self.between]), *dict(self.single).values()]

    def _on_the_way(self, link: Link) -> float:
        """Return the bytes that this link's rate sends in one round trip."""
        return (link.rate or 0) / 8 * 2 * sum(each.latency + each.jitter for each in set(self._links()))

    def _with_queue(self, link: Link, packet_bytes: int) -> Link:
        return link if link.queue else replace(link, queue=max(QUEUE_PACKETS * packet_bytes, self._on_the_way(link)))

    def way(self, source: int, target: int) -> list[str]:
        """Return the names of the ports that a packet passes."""
        if any({source, target} == set(ends) for ends, _ in self.single):
            return [_direct(source, target)]
        ends = list(accumulate(self.sizes))
        racks = [next((rack for rack, end in enumerate(ends) if rank < end), 0) for rank in (source, target)]
        through = [] if racks[0] == racks[1] else [f"from rack {racks[0]}", f"to rack {racks[1]}"]
        return [f"from rank {source}", *through, f"to rank {target}"]

    def __str__(self) -> str:
        if self.between is not None:
            return f"racks of {', '.join(map(str, self.sizes))}: {self.rank_links[0]}; between them {self.between}"
        single = [f"between ranks {ends[0]} and {ends[1]} {link}" for ends, link in self.single]
        return "; ".join([*map(str, dict.fromkeys(self.rank_links)), *single])


def _direct(source: int | str, target: int | str) -> str:
    return f"rank {source} to rank {target}"


def _half(link: Link) -> Link:
    """Return one of the two ports of a path: both together are the link."""
    return replace(link, latency=link.latency / 2, jitter=link.jitter / 2, loss=1 - (1 - link.loss) ** 0.5)
