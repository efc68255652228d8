"""What a network has forwarded, as its switch has measured it, beside what was asked of it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import msgspec

from dlearn.network.link import Link, rate_text, size_text, time_text
from dlearn.shown import Result, Table


class CarriedPort(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one link, as it is `asked` now, and what it has forwarded.

    `rate` in bit/s is that of packets right behind another (None if few), `late` by how many seconds they
    left late, as a mean, `deepest` the most bytes in its queue; `dropped` packets found it full.
    """

    name: str
    asked: Link
    rate: float | None
    late: float
    deepest: int
    packets: int
    bytes: int
    dropped: int
    lost: int


class CarriedPair(msgspec.Struct, frozen=True):
    """The packets from one rank to another: `payload` of TCP once, `again` what was sent once more."""

    source: int
    target: int
    packets: int
    payload: int
    again: int
    dropped: int


class CarriedRank(msgspec.Struct, frozen=True):
    """A rank whose computing was slowed: the factor asked, and the one reached."""

    rank: int
    asked: float
    reached: float | None
    computed: float


class Forwarded(Result, frozen=True, kw_only=True):
    """The counts of a switch since its ranks began.

    `late` and `latest` are seconds later than asked (median, most), `processor` the share of a
    core, `most` the bit/s that it forwarded while it was at its limit.
    """

    network: str
    seconds: float
    processor: float
    late: float
    latest: float
    most: float | None
    ports: tuple[CarriedPort, ...]
    pairs: tuple[CarriedPair, ...]
    stragglers: tuple[CarriedRank, ...]

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each port of the switch: the fields of `CarriedPort`."""
        for port in self.ports:
            yield msgspec.structs.asdict(port) | {"asked": str(port.asked)}

    def paragraphs(self) -> Iterator[str | Table]:
        payload = size_text(sum(pair.payload for pair in self.pairs))
        packets = sum(pair.packets for pair in self.pairs)
        late = f"they came {_short(self.late)} late (median; at most {_short(self.latest)})"
        yield f"{self.network}: {payload} of payload in {packets:,} packets; {late}"
        if self.most is not None:
            most = f"then it carried {rate_text(round(self.most, -6))} in all"
            yield f"the switch was at its limit: {most}, and links that were asked for more were slower than asked"
        rows = [self._row(port) for port in self.ports if port.packets or port.dropped or port.lost]
        head = ("port", "rate asked", "carried", "latency asked", "carried", "queue", "deepest", "packets", "dropped")
        yield Table([head, *rows], title="latency is the part of this port")
        rows = [("ranks", "packets", "payload B", "again B", "dropped")]
        for pair in self.pairs:
            if pair.packets:
                counts = (pair.packets, pair.payload, pair.again, pair.dropped)
                rows.append((f"{pair.source} to {pair.target}", *(f"{count:,}" for count in counts)))
        yield Table(rows)
        for slow in self.stragglers:
            reached = "-" if slow.reached is None else f"{slow.reached:.2f}"
            asked = f"rank {slow.rank}'s computing was to take {slow.asked:g} times as long"
            yield f"{asked}, and took {reached} times ({_short(slow.computed)} of computing)"
        yield f"the switch took {self.processor:.0%} of a core over {self.seconds:.1f} s"

    def _row(self, port: CarriedPort) -> tuple[str, ...]:
        asked = port.asked
        return (
            port.name,
            "no limit" if asked.rate is None else rate_text(asked.rate),
            "not full" if port.rate is None else rate_text(float(f"{port.rate:.3g}")),
            _short(asked.latency),
            _short(asked.latency + port.late),
            "waits" if asked.queue is None else size_text(asked.queue),
            size_text(port.deepest),
            f"{port.packets:,}",
            f"{port.dropped + port.lost:,}",
        )


def carried(network: str, links: Mapping[str, Link], pids: Sequence[int], counts: dict[str, Any]) -> Forwarded:
    """Return the switch's own counts as an answer. `pids` are the ranks' processes."""
    forwarded = zip(links.items(), counts.pop("ports"), strict=True)
    ports = [CarriedPort(name=name, asked=link, **port) for (name, link), port in forwarded]
    pairs = tuple(starmap(CarriedPair, counts.pop("pairs")))
    slowed = counts.pop("stragglers")
    stragglers = [CarriedRank(pids.index(pid), *times) for pid, *times in slowed if pid in pids]
    return Forwarded(network=network, ports=tuple(ports), pairs=pairs, stragglers=tuple(stragglers), **counts)


def _short(seconds: float) -> str:
    return time_text(float(f"{seconds:.3g}"))
