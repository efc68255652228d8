"""Is the traffic the one that was asked for? For the tests of a course, and for pytest.

    assert_traffic(run.trace, op="send", bytes_per_rank=2 * (n - 1) / n * size, pattern="ring")

It returns nothing, or raises TrafficError: the finding in one sentence, then what was expected beside what was seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal

from dlearn.analysis.hanging.hang_words import call_text, hang_sentence, missing_text
from dlearn.analysis.hanging.stuck import hangs
from dlearn.analysis.volume.traffic import Traffic, traffic_of
from dlearn.errors import DlearnError, TrafficError
from dlearn.join.gloo_schedules import SEGMENT_BYTES
from dlearn.join.joining import operations
from dlearn.join.unrolling import why_unknown
from dlearn.shown import Table, count_text
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import Operation
from dlearn.trace.trace import Trace

Bytes = float | Fraction
Edge = tuple[int, int]
Pattern = Literal["ring", "star", "tree", "doubling", "all"]

NAMES: dict[str, str] = {
    "ring": "a ring",
    "star": "a star",
    "tree": "a binomial tree",
    "doubling": "recursive doubling",
    "all": "an all-to-all",
}
"""Each pattern, as a sentence calls it."""

_RANKS_SHOWN = 8
_WITHOUT_DATA = {"barrier", "monitored_barrier"}


def assert_traffic(
    trace: Trace,
    *,
    op: str | tuple[str, ...] | None = None,
    bytes_per_rank: Bytes | Mapping[int, Bytes] | None = None,
    pattern: Pattern | None = None,
) -> None:
    """Raise TrafficError, with both traffic matrices, unless the ranks sent as much as was asked for, and to whom.

    `op` is a collective ("all_reduce"), or "send" for an algorithm written by hand; without it, all but barriers count.
    Each collective has to fit by itself; those named in a tuple count together, whatever is not there: an all-reduce is
    as good as a reduce-scatter and an all-gather. The sends of one process group count together, too, so select the
    span of one exercise: `trace.within("my ring")`. No such operation, one that hangs, or one whose messages are not
    known is a failure, too.

    `bytes_per_rank` is the payload that each rank sends, `2 * (n - 1) / n * S` in a ring all-reduce of S bytes; where
    the ranks differ, a dict (who is not in it sends nothing). All ranks together must send as much to the byte. A
    single one may be off by 4 n items, and one more for each MiB, because chunks need not come out even: give tensors
    of at least 100 n items. Nor is it wrong to fill up the tensor until it has equal chunks: then all ranks send the
    same, and in each message less than an item more.

    `pattern` says who sends to whom: "ring" (each to one neighbour, all the same way), "star" (all from or to one
    rank), "tree" (binomial), "doubling" (to the ranks 1, 2, 4, ... away) or "all". Not one pair more or less. With two
    ranks these are all the same.
    """
    if pattern is not None and pattern not in NAMES:
        raise DlearnError(f"there is no pattern {pattern!r} here; the patterns are: {', '.join(NAMES)}")
    for unit in units(trace, op):
        plan = _plan(unit, bytes_per_rank, pattern)
        finding = _wrong_pairs(plan) or _wrong_sizes(plan)
        if finding:
            raise TrafficError(f"{finding}{unit.where}\n\n{_side_by_side(plan)}")


# What is judged as one ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A collective, or all plain sends of one process group: what has to fit by itself."""

    operations: tuple[Operation, ...]
    trace: Trace

    @property
    def members(self) -> tuple[int, ...]:
        return self.operations[0].group.members

    @property
    def where(self) -> str:
        """In which of several collectives; nothing of sends."""
        first = self.operations[0]
        return "" if _is_p2p(first) or len(self.operations) > 1 else f", in {call_text(first.ends[0])}"


def units(trace: Trace, op: str | tuple[str, ...] | None) -> list[Unit]:
    """What `op` selects. Raises TrafficError where there is nothing, or where not all of it is known and done."""
    everything = operations(trace)
    asked = [each for each in everything if _is_asked(each, op)]
    if not asked:
        others = Counter(each.op for each in everything)
        found = ", ".join(f"{count:,} × {name}" for name, count in others.most_common(_RANKS_SHOWN)) or "no operation"
        wanted = " or ".join(op) if isinstance(op, tuple) else op or "operation with data"
        raise TrafficError(f"there is no {wanted} in this trace; there is: {found}")
    stuck = hangs(trace)
    if stuck:
        raise TrafficError(hang_sentence(stuck[0], trace))
    sends: dict[int, list[Operation]] = defaultdict(list)
    for each in asked:
        why = _why_unfit(each, trace)
        if why:
            raise TrafficError(f"{call_text(each.ends[0])}: {why}")
        if _is_p2p(each):
            sends[id(each.group)].append(each)
    if isinstance(op, tuple):
        return [Unit(tuple(asked), trace)]
    collectives = [(each,) for each in asked if not _is_p2p(each)]
    return [Unit(tuple(one), trace) for one in (*sends.values(), *collectives)]


def _is_asked(operation: Operation, op: str | tuple[str, ...] | None) -> bool:
    if isinstance(op, tuple):
        return any(_is_asked(operation, each) for each in op)
    if op == "send":
        return _is_p2p(operation)  # A recv that nobody has sent for, too.
    return operation.op not in _WITHOUT_DATA if op is None else operation.op == op


def _is_p2p(operation: Operation) -> bool:
    return isinstance(operation.ends[0], PointToPoint)


def _why_unfit(operation: Operation, trace: Trace) -> str:
    """Why it cannot be judged: lost lines, a message that never came, an algorithm that is not known."""
    whole = {process.rank for process in trace.processes if process.complete}
    lost = next((rank for rank in operation.group.members if rank not in whole), None)
    if lost is not None:
        return f"the file of {trace.label(lost)} is not here or not whole: what it sent is not known"
    for each in (operation, *operation.steps):
        if each.misfit is not None:
            return str(each.misfit)
        if each.missing:
            return missing_text(each, trace)
        failed = next((end for end in each.ends if end.failed), None)
        if failed is not None:
            return f"it failed on {trace.label(failed.rank)}: {failed.error}"
    reason = why_unknown(operation)
    return "" if reason is None else f"its messages are not known: {reason}"


# What was asked for, and what was seen --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What the caller asked of one unit, and what was seen.

    `wanted` is what each rank should send, None where any number of bytes is right. `pairs` is who should send to whom:
    of the ways to form the pattern, the one that is nearest to what was seen.
    """

    unit: Unit
    seen: Traffic
    wanted: dict[int, Fraction] | None
    pattern: Pattern | None
    pairs: frozenset[Edge]

    @property
    def seen_pairs(self) -> frozenset[Edge]:
        return _pairs(self.seen)

    @property
    def slack_bytes(self) -> int:
        """How far one rank may be off, because chunks do not come out even: 4 items a rank, and one for each MiB."""
        most = max((self.wanted or {}).values(), default=0)
        return self.item_bytes * (4 * len(self.unit.members) + int(most) // SEGMENT_BYTES)

    @property
    def item_bytes(self) -> int:
        ends = [end for each in self.unit.operations for end in each.ends]
        tensors = [
            tensor
            for end in ends
            for tensor in ((*end.inputs, *end.outputs) if isinstance(end, Collective) else end.tensors)
        ]
        return max((each.logical_bytes // prod(each.shape) for each in tensors if prod(each.shape)), default=1)

    @property
    def is_filled_up(self) -> bool:
        """Whether the tensor was made longer, to have equal chunks: by less than an item in each message."""
        sent = {rank: self.seen.bytes_from(rank=rank) for rank in self.unit.members}
        messages: Counter[int] = Counter()
        for (src, _), count in self.seen.message_count.items():
            messages[src] += count
        return len({*sent.values()}) == 1 and all(
            0 <= sent[rank] - wanted < self.item_bytes * messages[rank] for rank, wanted in (self.wanted or {}).items()
        )


def _plan(unit: Unit, bytes_per_rank: Bytes | Mapping[int, Bytes] | None, pattern: Pattern | None) -> _Plan:
    members, seen = unit.members, traffic_of(unit.operations, unit.trace)
    wanted = None
    if isinstance(bytes_per_rank, Mapping):
        wanted = {rank: Fraction(bytes_per_rank.get(rank, 0)) for rank in members}
    elif bytes_per_rank is not None:
        wanted = dict.fromkeys(members, Fraction(bytes_per_rank))
    pairs = _pairs(seen)
    if pattern is not None:
        ways = [frozenset((members[a], members[b]) for a, b in way) for way in edges_of(pattern, len(members))]
        pairs = min(ways, key=lambda way: len(way ^ pairs))
    return _Plan(unit, seen, wanted, pattern, pairs)


def _pairs(seen: Traffic) -> frozenset[Edge]:
    """Who sends data to whom: a message of no bytes is none."""
    return frozenset(pair for pair, size in seen.payload_bytes.items() if size)


# What is wrong with it ------------------------------------------------------------------------------------------------


def _wrong_pairs(plan: _Plan) -> str:
    """Who sends to somebody and should not, or the other way round; nothing where the pattern is right."""
    if plan.pattern is None or plan.seen_pairs == plan.pairs:
        return ""
    name, labels = NAMES[plan.pattern], plan.seen.labels
    hub = _hub(plan)
    if hub:
        return f"everything goes through {hub}: that is a star, and not {name}"
    extra, absent = sorted(plan.seen_pairs - plan.pairs), sorted(plan.pairs - plan.seen_pairs)
    src, dst = (extra or absent)[0]
    wrong = len(extra) + len(absent)
    more = f" ({count_text(wrong, 'pair')} wrong in all)" if wrong > 1 else ""
    if extra:
        return f"{labels[src]} sends {plan.seen.payload_bytes[src, dst]:,} B to {labels[dst]}, in {name} nothing{more}"
    return f"{labels[src]} sends nothing to {labels[dst]}, in {name} it does{more}"


def _hub(plan: _Plan) -> str:
    """The one rank that all messages come from or go to, if there is one; of two ranks it would say nothing."""
    if len(plan.unit.members) < 3 or plan.pattern == "star":
        return ""
    hubs = [rank for rank in plan.unit.members if all(rank in pair for pair in plan.seen_pairs)]
    return plan.seen.labels[hubs[0]] if len(hubs) == 1 and len(plan.seen_pairs) >= len(plan.unit.members) - 1 else ""


def _wrong_sizes(plan: _Plan) -> str:
    """Which rank sends too much or too little; nothing where the bytes are right."""
    if plan.wanted is None:
        return ""
    short = {rank: wanted - plan.seen.bytes_from(rank=rank) for rank, wanted in plan.wanted.items()}
    rank = max(short, key=lambda rank: abs(short[rank]))
    right = plan.seen.total_bytes == round(sum(plan.wanted.values())) and abs(short[rank]) <= plan.slack_bytes
    if right or plan.is_filled_up:
        return ""
    spread = max(short.values()) - min(short.values())
    alike = len(short) > 1 and spread <= plan.slack_bytes and 2 * spread <= abs(short[rank])
    who = "each rank" if alike else plan.seen.labels[rank]
    about = "about " if alike and spread else ""
    sent, wanted = plan.seen.bytes_from(rank=rank), plan.wanted[rank]
    return f"{who} sends {about}{_number(sent)} B instead of {_number(wanted)} B"


def _number(value: Fraction | int) -> str:
    return f"{float(value):,.1f}".removesuffix(".0")


# Both matrices as text ------------------------------------------------------------------------------------------------


def _side_by_side(plan: _Plan) -> str:
    """What was expected, on the left, and what was seen; of many ranks the first."""
    ranks = plan.unit.members[:_RANKS_SHOWN]
    names = [plan.seen.labels[rank] for rank in ranks]
    expected = [["expected", *names, "sent in all"]]
    seen = [["seen", *names, "sent in all"]]
    for name, src in zip(names, ranks, strict=True):
        in_all = "any" if plan.wanted is None else _number(plan.wanted[src])
        expected.append([name, *(_expected(plan, src, dst) for dst in ranks), in_all])
        sizes = [plan.seen.payload_bytes.get((src, dst), 0) for dst in ranks]
        seen.append([name, *(f"{size:,}" if size else "." for size in sizes), f"{plan.seen.bytes_from(rank=src):,}"])
    tables = Table(expected).lines(), Table(seen).lines()
    lines = [f"{left}     {right}" for left, right in zip(*tables, strict=True)]
    if len(plan.unit.members) > len(ranks):
        lines.append(f"and {count_text(len(plan.unit.members) - len(ranks), 'more rank')}")
    return "\n".join(["bytes from (row) to (column)", *lines])


def _expected(plan: _Plan, src: int, dst: int) -> str:
    if plan.pattern is None:
        return "any" if src != dst else "."
    if (src, dst) not in plan.pairs:
        return "."
    if plan.wanted is None or plan.pattern == "doubling":
        return "some"
    return _number(plan.wanted[src] / sum(src == each for each, _ in plan.pairs))


# Who sends to whom in the textbook's patterns, between group ranks 0 ... n-1 ------------------------------------------


def edges_of(pattern: Pattern, ranks: int) -> list[frozenset[Edge]]:
    """All the ways in which so many ranks can form this pattern: to the left or to the right, from each root, ...

    For two ranks most patterns are one.
    """
    match pattern:
        case "ring":
            return [frozenset((rank, (rank + step) % ranks) for rank in range(ranks) if ranks > 1) for step in (1, -1)]
        case "star":
            spokes = ([(root, leaf) for leaf in range(ranks) if leaf != root] for root in range(ranks))
            return [way for each in spokes for way in _ways(each)]
        case "tree":
            return [way for root in range(ranks) for tree in _binomial(ranks, root) for way in _ways(tree)]
        case "doubling":
            return [frozenset(_hypercube(core, pairs)) for core, pairs in _folded(ranks)]
        case "all":
            return [frozenset((src, dst) for src in range(ranks) for dst in range(ranks) if src != dst)]


def _ways(outward: Sequence[Edge]) -> list[frozenset[Edge]]:
    """From the root, as in a broadcast; to it, as in a reduce; both, as in an all-reduce."""
    down, up = frozenset(outward), frozenset((child, parent) for parent, child in outward)
    return [down, up, down | up]


def _binomial(ranks: int, root: int) -> Iterator[list[Edge]]:
    """The two trees in use, by ranks counted from the root: a child is its parent with a bit set above the highest
    (gloo), or below the lowest (MPICH)."""
    gloo = [(child - (1 << child.bit_length() - 1), child) for child in range(1, ranks)]
    mpich = [(child & child - 1, child) for child in range(1, ranks)]
    for tree in (gloo, mpich):
        yield [((parent + root) % ranks, (child + root) % ranks) for parent, child in tree]


def _folded(ranks: int) -> Iterator[tuple[list[int], list[Edge]]]:
    """Doubling needs a power of two: the ranks beyond it hand their data to a partner first, and get it back last.

    The partners are the first ranks, or (MPICH) each of the first ones has its neighbour as partner.
    """
    power = 1 << (ranks.bit_length() - 1)
    rest = ranks - power
    yield list(range(power)), [(rank, power + rank) for rank in range(rest)]
    for stays in (0, 1):
        pairs = [(2 * i + stays, 2 * i + 1 - stays) for i in range(rest)]
        yield [core for core, _ in pairs] + list(range(2 * rest, ranks)), pairs


def _hypercube(core: Sequence[int], pairs: Sequence[Edge]) -> Iterator[Edge]:
    """In step k the core's ranks exchange with the one 2^k away, their numbers differ in bit k; and so do the pairs."""
    for place, rank in enumerate(core):
        for bit in range((len(core) - 1).bit_length()):
            yield rank, core[place ^ (1 << bit)]
    for one, other in pairs:
        yield from ((one, other), (other, one))
