"""Is the traffic the one that was asked for? For the tests of a course, and for pytest.

assert_traffic(run.trace, op="send", bytes_per_rank=2 * (n - 1) / n * size, pattern="ring")
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, get_args

from dlearn.analysis.volume.traffic import Traffic, traffic_of
from dlearn.diagnosis.hang_detection import hangs
from dlearn.diagnosis.hang_report import call_text, hang_sentence, missing_text
from dlearn.errors import DlearnError, TrafficError
from dlearn.events.event import Collective, PointToPoint
from dlearn.join.columns import grouped
from dlearn.join.gloo_schedules import SEGMENT_BYTES
from dlearn.join.joining import operations
from dlearn.join.operation_messages import why_unknown
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Table, count_text
from dlearn.trace import Trace

Bytes = float | Fraction
PerRank = Bytes | Mapping[int, Bytes] | None
Ops = str | tuple[str, ...] | None
Edge = tuple[int, int]
Pattern = Literal["ring", "star"]

_RANKS_SHOWN = 8
_WITHOUT_DATA = {"barrier", "monitored_barrier"}


def assert_traffic(
    trace: Trace,
    *,
    op: Ops = None,
    bytes_per_rank: PerRank = None,
    pattern: Pattern | None = None,
) -> None:
    """Raise TrafficError, with both traffic matrices, where ranks sent more, less or to others.

    `op` is a collective ("all_reduce"), or "send" for an algorithm written by hand; without it, all
    but barriers count. Each collective has to fit by itself; those named in a tuple count together,
    whatever is not there: an all-reduce is as good as a reduce-scatter and an all-gather. The sends
    of one process group count together, too, so select the span of one exercise:
    `trace.within("my ring")`. No such operation, one that hangs, or one whose messages are not
    known is a failure, too.

    `bytes_per_rank` is the payload that each rank sends, `2 * (n - 1) / n * S` in a ring all-reduce
    of S bytes; where the ranks differ, a dict (who is not in it sends nothing). All ranks together
    must send as much to the byte. A single one may be off by 4 n items a call, and one each MiB,
    because chunks need not come out even: give tensors of at least 100 n items. Nor is it wrong to
    fill up the tensor until it has equal chunks: then all ranks send the same, and in each message
    less than an item more.

    `pattern` says who sends to whom: "ring" (each to one neighbour, all the same way) or "star" (all
    from or to one rank). Not one pair more or less. With two ranks both are the same.
    """
    if pattern not in (None, *get_args(Pattern)):
        known = ", ".join(get_args(Pattern))
        raise DlearnError(f"there is no pattern {pattern!r} here; the patterns are: {known}")
    for unit in units(trace, op):
        plan = _plan(unit, bytes_per_rank, pattern)
        finding = _wrong_pairs(plan) or _wrong_sizes(plan)
        if finding:
            raise TrafficError(f"{finding}{unit.where}\n\n{_side_by_side(plan)}")


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
        """Name one of several collectives; nothing of sends."""
        first = self.operations[0]
        several = _is_p2p(first) or len(self.operations) > 1
        return "" if several else f", in {call_text(first.ends[0])}"


def units(trace: Trace, op: Ops) -> list[Unit]:
    """Select by `op`. Raise TrafficError where there is nothing, or not all is known and done."""
    everything = operations(trace)
    asked = [each for each in everything if _is_asked(each, op)]
    if not asked:
        others = Counter(each.op for each in everything).most_common(_RANKS_SHOWN)
        found = ", ".join(f"{count:,} × {name}" for name, count in others) or "no operation"
        wanted = " or ".join(op) if isinstance(op, tuple) else op or "operation with data"
        raise TrafficError(f"there is no {wanted} in this trace; there is: {found}")
    stuck = hangs(trace)
    if stuck:
        raise TrafficError(hang_sentence(stuck[0], trace))
    for each in asked:
        why = _why_unfit(each, trace)
        if why:
            raise TrafficError(f"{call_text(each.ends[0])}: {why}")
    if isinstance(op, tuple):
        return [Unit(tuple(asked), trace)]
    sends = grouped(filter(_is_p2p, asked), lambda each: id(each.group))
    collectives = [[each] for each in asked if not _is_p2p(each)]
    return [Unit(tuple(one), trace) for one in (*sends.values(), *collectives)]


def _is_asked(operation: Operation, op: Ops) -> bool:
    if op is None:
        return operation.op not in _WITHOUT_DATA
    names = (op,) if isinstance(op, str) else op
    # A recv without a send, too.
    return operation.op in names or ("send" in names and _is_p2p(operation))


def _is_p2p(operation: Operation) -> bool:
    return isinstance(operation.ends[0], PointToPoint)


def _why_unfit(operation: Operation, trace: Trace) -> str:
    """Say why it cannot be judged: lost lines, a message that never came, an unknown algorithm."""
    whole = {process.rank for process in trace.processes if process.complete}
    for rank in operation.group.members:
        if rank not in whole:
            file = f"the file of {trace.label(rank)}"
            return f"{file} is not here or not whole: what it sent is not known"
    for each in (operation, *operation.steps):
        if each.mismatch is not None:
            return str(each.mismatch)
        if each.missing:
            return missing_text(each, trace)
        for end in each.ends:
            if end.failed:
                return f"it failed on {trace.label(end.rank)}: {end.error}"
    reason = why_unknown(operation)
    return "" if reason is None else f"its messages are not known: {reason}"


@dataclass(frozen=True)
class _Plan:
    """What was asked of a unit, and seen; `pairs`: of the ways to form the pattern the nearest."""

    unit: Unit
    seen: Traffic
    wanted: dict[int, Fraction] | None
    pattern: Pattern | None
    pairs: frozenset[Edge]
    seen_pairs: frozenset[Edge]


def _plan(unit: Unit, bytes_per_rank: PerRank, pattern: Pattern | None) -> _Plan:
    members, seen = unit.members, traffic_of(unit.operations, unit.trace)
    wanted = None
    if isinstance(bytes_per_rank, Mapping):
        wanted = {rank: Fraction(bytes_per_rank.get(rank, 0)) for rank in members}
    elif bytes_per_rank is not None:
        wanted = dict.fromkeys(members, Fraction(bytes_per_rank))
    pairs = seen_pairs = frozenset(pair for pair, size in seen.payload_bytes.items() if size)
    if pattern is not None:
        pairs = min(_ways(pattern, members), key=lambda way: len(way ^ seen_pairs))
    return _Plan(unit, seen, wanted, pattern, pairs, seen_pairs)


def _ways(pattern: Pattern, members: tuple[int, ...]) -> Iterator[frozenset[Edge]]:
    """Yield all ways to form this pattern: to the left or to the right, from or to each root."""
    if pattern == "ring":
        right = zip(members, members[1:] + members[:1], strict=True)
        yield from _both_ways(right if len(members) > 1 else ())[:2]
    for root in members if pattern == "star" else ():
        # Outward, as in a broadcast; inward, as in a reduce; both, as in an all-reduce.
        yield from _both_ways([(root, rank) for rank in members if rank != root])


def _both_ways(edges: Iterable[Edge]) -> list[frozenset[Edge]]:
    there = frozenset(edges)
    back = frozenset((dst, src) for src, dst in there)
    return [there, back, there | back]


def _wrong_pairs(plan: _Plan) -> str:
    """Name the pair that sends and should not, or should and does not; or say that it is a star."""
    if plan.pattern is None or plan.seen_pairs == plan.pairs:
        return ""
    name, labels, members = f"a {plan.pattern}", plan.seen.labels, plan.unit.members
    hubs = set(members).intersection(*plan.seen_pairs)
    is_star = len(members) > 2 and len(hubs) == 1 and len(plan.seen_pairs) >= len(members) - 1
    if is_star and plan.pattern != "star":
        return f"everything goes through {labels[hubs.pop()]}: that is a star, and not {name}"
    extra, absent = sorted(plan.seen_pairs - plan.pairs), sorted(plan.pairs - plan.seen_pairs)
    src, dst = (extra or absent)[0]
    wrong = len(extra) + len(absent)
    more = f" ({count_text(wrong, 'pair')} wrong in all)" if wrong > 1 else ""
    if extra:
        size = plan.seen.payload_bytes[src, dst]
        return f"{labels[src]} sends {size:,} B to {labels[dst]}, in {name} nothing{more}"
    return f"{labels[src]} sends nothing to {labels[dst]}, in {name} it does{more}"


def _wrong_sizes(plan: _Plan) -> str:
    """Name the rank that sends too much or too little; nothing where the bytes are right."""
    if plan.wanted is None:
        return ""
    sent = {rank: plan.seen.bytes_from(rank=rank) for rank in plan.wanted}
    short = {rank: plan.wanted[rank] - sent[rank] for rank in sent}
    rank = max(short, key=lambda rank: abs(short[rank]))
    item = _item_bytes(plan.unit)
    first, *_ = of_unit = plan.unit.operations
    calls = 1 if _is_p2p(first) else len(of_unit)  # each of them is cut by itself
    slack = item * (4 * len(sent) * calls + int(max(plan.wanted.values())) // SEGMENT_BYTES)
    right = plan.seen.total_bytes == round(sum(plan.wanted.values())) and abs(short[rank]) <= slack
    if right or _is_filled_up(plan, short, item):
        return ""
    spread = max(short.values()) - min(short.values())
    equal = len(short) > 1 and spread <= slack and 2 * spread <= abs(short[rank])
    who = "each rank" if equal else plan.seen.labels[rank]
    about = "about " if equal and spread else ""
    return f"{who} sends {about}{_number(sent[rank])} B instead of {_number(plan.wanted[rank])} B"


def _item_bytes(unit: Unit) -> int:
    """Return the size of the largest item in any tensor."""
    sizes = [1]
    for end in (end for operation in unit.operations for end in operation.ends):
        tensors = (*end.inputs, *end.outputs) if isinstance(end, Collective) else end.tensors
        sizes += [each.logical_bytes // prod(each.shape) for each in tensors if prod(each.shape)]
    return max(sizes)


def _is_filled_up(plan: _Plan, short: Mapping[int, Fraction], item: int) -> bool:
    """Return whether the tensor was made longer, to have equal chunks: by under an item a message."""
    messages: Counter[int] = Counter()
    for (src, _), count in plan.seen.message_count.items():
        messages[src] += count
    few = all(0 <= -missing < item * messages[rank] for rank, missing in short.items())
    return few and len({plan.seen.bytes_from(rank=rank) for rank in short}) == 1


def _number(value: Fraction | int) -> str:
    return f"{float(value):,.1f}".removesuffix(".0")


def _side_by_side(plan: _Plan) -> str:
    """Show what was expected, on the left, and what was seen; of many ranks the first."""
    members = plan.unit.members
    ranks, sizes = members[:_RANKS_SHOWN], plan.seen.payload_bytes
    names = [plan.seen.labels[rank] for rank in ranks]
    expected = [["expected", *names, "sent in all"]]
    seen = [["seen", *names, "sent in all"]]
    for name, src in zip(names, ranks, strict=True):
        in_all = "any" if plan.wanted is None else _number(plan.wanted[src])
        expected.append([name, *(_expected(plan, src, dst) for dst in ranks), in_all])
        cells = [f"{sizes.get((src, dst), 0):,}" for dst in ranks]
        cells = ["." if cell == "0" else cell for cell in cells]
        seen.append([name, *cells, f"{plan.seen.bytes_from(rank=src):,}"])
    tables = zip(Table(expected).lines(), Table(seen).lines(), strict=True)
    lines = ["bytes from (row) to (column)", *(f"{left}     {right}" for left, right in tables)]
    if len(members) > len(ranks):
        lines.append(f"and {count_text(len(members) - len(ranks), 'more rank')}")
    return "\n".join(lines)


def _expected(plan: _Plan, src: int, dst: int) -> str:
    if plan.pattern is None:
        return "any" if src != dst else "."
    if (src, dst) not in plan.pairs:
        return "."
    if plan.wanted is None:
        return "some"
    return _number(plan.wanted[src] / sum(src == each for each, _ in plan.pairs))
