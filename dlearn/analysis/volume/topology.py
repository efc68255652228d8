"""The wiring of NCCL: hosts, rings and links of a process group, read from its log."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from dlearn.events.event import Collective, TensorInfo
from dlearn.events.wiring import Choice, Ring, Wiring
from dlearn.join import nccl_rings
from dlearn.join.ends import Group
from dlearn.join.matching import join_groups
from dlearn.shown import Findings, Paragraph, RankNames, Result, Table, count_text, first_few
from dlearn.trace import Trace

_ROWS_SHOWN = 24
_RANKS_SHOWN = 40
_CHOICES_TOLD = 3


class LinkSum(NamedTuple):
    """The links from one rank of the trace to another of one kind and for one use."""

    src: int
    dst: int
    kind: str
    use: str
    channels: int
    vias: tuple[str, ...]
    cards: tuple[str, ...]


class Topology(Result, frozen=True):
    """The wiring of one process group by NCCL. `hosts` have the ranks that left lines; ranks are the trace's.

    `rings` are whole, with the number of their channels; None of them ran where NCCL chose something else (`choices`),
    as it may where a switch adds up (`switch`).
    """

    group: Group
    labels: RankNames
    hosts: dict[str, tuple[int, ...]]
    edges: tuple[LinkSum, ...]
    rings: tuple[Ring, ...]
    choices: tuple[Choice, ...]
    switch: bool

    @property
    def host_of(self) -> dict[int, str]:
        return {rank: host for host, ranks in self.hosts.items() for rank in ranks}

    def crossings(self, ring: Ring) -> list[tuple[int, int]]:
        """Return the pairs of ranks by which a ring goes from one host to another."""
        host_of = self.host_of
        pairs = pairwise((*ring.order, ring.order[0]))
        return [(src, dst) for src, dst in pairs if host_of.get(src) != host_of.get(dst)]

    def sent(self, op: str, payload_bytes: int) -> dict[tuple[int, int], int]:
        """Predict the bytes from each rank to each in a collective of these rings, to which one rank gives so many.

        Empty where it runs on none; its root is the group's rank 0.
        """
        given = TensorInfo((payload_bytes,), "uint8", "cuda", payload_bytes, payload_bytes)
        call = Collective(number=0, start_ns=0, op=op, group=self.group.name, seq=1, inputs=(given,), root=0)
        members = self.group.members
        assert self.group.wiring is not None
        schedule = nccl_rings.schedule_of(call, len(members), self.group.wiring)
        sent = schedule.sizes_by_pair.items()
        return {(members[src], members[dst]): sum(sizes) for (src, dst), sizes in sent}

    @property
    def sentences(self) -> list[str]:
        """Say what the log holds, without its tables."""
        ranks = count_text(len(self.group.members), "rank")
        where = f"{ranks} of group {self.group.name} on {count_text(len(self.hosts), 'host')}"
        if count := sum(len(ring.channels) for ring in self.rings):
            orders = f", in {count_text(len(self.rings), 'different order')}" if len(self.rings) > 1 else ""
            crossing = {len(self.crossings(ring)) for ring in self.rings}
            up_to = "up to " if len(crossing) > 1 else ""
            most = f"; each goes from host to host {up_to}{max(crossing)} times" if len(self.hosts) > 1 else ""
            texts = [f"NCCL has made {count_text(count, 'ring')} of the {where}{orders}{most}"]
        else:
            texts = [f"NCCL has wired the {where}; its log holds no whole ring of them"]
        kinds = Counter[str]()
        for edge in self.edges:
            kinds["/".join(edge.vias[0].split("/")[:2])] += edge.channels
        cards = sorted({card for edge in self.edges for card in edge.cards})
        over = f" (cards {', '.join(cards)})" if cards else ""
        links = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()) or "none"
        texts.append(f"Links, one way and channel by channel: {links}{over}")
        chosen = [f"{each.algorithm}/{each.protocol} for {each.op} of {each.bytes:,} B" for each in self.choices]
        if chosen:
            texts.append(f"NCCL chose {first_few(chosen, _CHOICES_TOLD)}")
        else:
            unknown = "Which algorithm NCCL chose the log does not say (NCCL_DEBUG_SUBSYS=INIT,TUNING would)"
            texts.append(f"{unknown}: messages of its collectives are inferred, those of its rings, if it chose these")
        if self.switch:
            texts.append("NCCL has prepared to let a switch add up (NVLS): what it did so went round no ring")
        return [f"{sentence}." for sentence in texts]

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for the links from each rank to each other, of one kind and use."""
        for edge in self.edges:
            ends = {"src": self.labels[edge.src], "dst": self.labels[edge.dst]}
            yield edge._asdict() | ends | {"group": self.group.name}

    def paragraphs(self) -> Iterator[Paragraph]:
        yield from self.sentences
        if self.rings:
            rows = [["channels", "ring", "from host to host"]]
            for ring in self.rings[:_ROWS_SHOWN]:
                order = first_few([self.labels.short(rank) for rank in ring.order], _RANKS_SHOWN, " -> ")
                crossing = [f"{src} -> {dst}" for src, dst in self.crossings(ring)]
                rows.append([", ".join(map(str, ring.channels)), order, first_few(crossing, 8)])
            yield Table(rows, names=3, title="Rings, as the data go")
        if self.choices:
            rows = [["op", "algorithm", "protocol", "channels", "bytes"]]
            for each in sorted(self.choices, key=lambda one: (one.op, one.bytes))[:_ROWS_SHOWN]:
                channels = f"{each.channels[0]} to {each.channels[-1]}" if each.channels else ""
                rows.append([each.op, each.algorithm, each.protocol, channels, f"{each.bytes:,}"])
            yield Table(rows, names=4, title="What NCCL chose")


def topology(trace: Trace, *, group: str | None = None) -> Topology | None:
    """Return how NCCL wired this group, by default the largest in its log; None where the log has none."""
    found = topologies(trace)
    return next((each for each in found if group in (None, each.group.name)), None)


def topologies(trace: Trace) -> Findings[Topology]:
    """Return how NCCL wired each group in its log, the largest first."""
    groups = {id(each.wiring): each for each in join_groups(trace.processes).values() if each.wiring is not None}
    found = [_topology(trace, group, group.wiring) for group in groups.values() if group.wiring]
    return Findings.of(sorted(found, key=lambda each: -len(each.group.members)), trace.labels)


def _topology(trace: Trace, group: Group, wiring: Wiring) -> Topology:
    members = group.members
    hosts: dict[str, list[int]] = defaultdict(list)
    links: dict[tuple[int, int, str, str], list[tuple[str, str]]] = defaultdict(list)
    for rank, wired in sorted(wiring.members.items()):
        hosts[wired.host].append(members[rank])
        for link in wired.links:
            if link.to < len(members):
                links[members[rank], members[link.to], link.kind, link.use].append((link.via, link.card))
    edges = []
    for ends, found in links.items():
        vias, cards = map(dict.fromkeys, zip(*found, strict=True))
        edges.append(LinkSum(*ends, len(found), tuple(vias), tuple(sorted(filter(None, cards)))))
    rings = [Ring(tuple(map(members.__getitem__, ring.order)), ring.channels) for ring in wiring.rings]
    ranks_of = {host: tuple(ranks) for host, ranks in hosts.items()}
    facts = tuple(edges), tuple(rings), wiring.choices, wiring.switch
    return Topology(group, trace.labels, ranks_of, *facts)
