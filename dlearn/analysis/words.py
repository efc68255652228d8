"""Every sentence that dlearn prints about a trace."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from dlearn.analysis.hangs import Hang, hangs, inside
from dlearn.analysis.joining import messages_of, operations, payload_bytes, sums_of
from dlearn.analysis.traffic import Traffic, traffic, traffic_of
from dlearn.analysis.waiting import waiting
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace

_NAMES_SHOWN = 4
"""Parameters of a bucket in one sentence."""
_NAMES_LISTED = 8
"""Ranks in one sentence."""
_SIZES_SHOWN = 8
"""Different sizes of messages in one sentence."""
_KINDS_SHOWN = 40
"""Sentences about kinds of operations, for one part of a trace."""


_HOW = {"derived": "derived from the backend's algorithm", "missing": "missing: expected, never came"}


class Explanation(msgspec.Struct, frozen=True):
    """Who sent what to whom, in words and as a table. `part` is what was explained: a step, or the whole trace."""

    part: str
    sentences: tuple[str, ...]
    traffic: Traffic

    def __str__(self) -> str:
        return "\n".join([*self.sentences, "", str(self.traffic)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        head, *rows = self.traffic.rows()
        cells = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
        body = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in rows
        )
        return f"<ul>{items}</ul><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def explain(trace: Trace) -> Explanation:
    """What was sent to whom, in words: in the last step (the last span whose name begins with "step"), or in all."""
    steps = [name for name in trace.spans if name.startswith("step")]
    everything = operations(trace)
    asked = operations(trace.within(steps[-1])) if steps else everything
    part = steps[-1] if steps else "the whole trace" if trace.selected_from is None else "this part of the trace"
    sentences = [overview(trace)]
    if steps:
        before = [operation for operation in everything if _is_setup(operation)]
        sentences += _told("Before training", before, trace)
    sentences += _told(f"In {part}" if steps else "In all", asked, trace)
    sent = traffic_of(asked, trace)
    sentences.append(totals(part, sent))
    sentences += [f"Problem: {problem}." for problem in trace.problems]
    return Explanation(part, tuple(sentences), sent)


def overview(trace: Trace) -> str:
    """How large the job was, and how much of it is explained."""
    everything = operations(trace)
    names = sorted({operation.group.backend for operation in everything})
    backends = ", ".join(names) or "no process group used"
    explained = 0
    known: Counter[str] = Counter()
    for operation in everything:
        answer = sums_of(operation)
        if not isinstance(answer, str):
            explained += 1
            for pair in answer:
                known[pair.how] += pair.message_count
    kinds = ", ".join(f"{count:,} {_HOW.get(how, how)}" for how, count in known.most_common()) or "none"
    return (
        f"{count_text(len(trace.processes), 'rank')} ({backends}): {explained:,} of"
        f" {count_text(len(everything), 'operation')} explained by {count_text(known.total(), 'message')} ({kinds})."
    )


def totals(part: str, sent: Traffic) -> str:
    """The bytes that each rank sent; one number where all sent the same."""
    each: Counter[int] = Counter(dict.fromkeys(sent.ranks, 0))
    for (src, _), size in sent.payload_bytes.items():
        each[src] += size
    if len(set(each.values())) == 1:
        told = f"every rank sends {next(iter(each.values())):,} B of payload"
    else:
        told = _list([f"{sent.labels[rank]} sends {size:,} B" for rank, size in each.items()]) + " of payload"
    missing = f"; {sent.by_how['missing']:,} B were expected and never came" if "missing" in sent.by_how else ""
    return f"In {part} {told}, {sent.total_bytes:,} B in all{missing}."


def count_text(count: int, noun: str) -> str:
    """ "1 rank", "2,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _is_setup(operation: Operation) -> bool:
    return all(end.phase == "setup" for end in operation.ends)


def _told(when: str, told: Sequence[Operation], trace: Trace) -> list[str]:
    """One sentence for each kind of operation, in the order of first call; equal ones are counted."""
    kinds: dict[Hashable, list[Operation]] = defaultdict(list)
    for operation in told:
        kinds[_kind(operation)].append(operation)
    groups = list(kinds.values())
    sentences = [f"{when}: {_sentence(group, trace)}" for group in groups[:_KINDS_SHOWN]]
    rest = groups[_KINDS_SHOWN:]
    if rest:
        sentences.append(
            f"{when}: {sum(len(group) for group in rest):,} more operations of {len(rest):,} more kinds;"
            " operations(trace) lists them."
        )
    return sentences


def _kind(operation: Operation) -> Hashable:
    return (
        operation.op,
        operation.what,
        operation.group.name,
        operation.problem,
        operation.missing,
        frozenset(payload_bytes(end) for end in operation.ends),
        operation.sender,
        operation.receiver,
    )


def _sentence(group: Sequence[Operation], trace: Trace) -> str:
    first = group[0]
    times = f", {len(group):,} times" if len(group) > 1 else ""
    phase = f" in {_phase(first)}" if first.ends[0].phase != "none" else ""
    size = payload_bytes(first.ends[0])
    what = shorten(first.what)
    if first.sender is not None and first.receiver is not None:
        pair = f"{trace.label(first.sender)} sends {trace.label(first.receiver)} {size:,} B ({what}){phase}{times}"
        return pair + (f"; {_missing(first, trace)}." if first.missing else ".")
    story = f"{first.op} of {size:,} B ({what}){phase}{times}" if what else f"{first.op}{phase}{times}"
    return f"{story}; {_routes(first, trace)}."


def _routes(operation: Operation, trace: Trace) -> str:
    answer = messages_of(operation)
    if operation.missing:
        return _missing(operation, trace)
    if isinstance(answer, str):
        return f"who sends to whom inside it is not known: {answer}"
    return routes(answer, trace)


def routes(found: Iterable[Message], trace: Trace) -> str:
    """Who sends how much to whom, the equal ones together: "0→2, 1→0, 2→1: 6,880 B each"."""
    sizes: Counter[tuple[int, int]] = Counter()
    hows: set[str] = set()
    for message in found:
        sizes[message.src, message.dst] += message.payload_bytes
        hows.add(message.how)
    by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair, size in sizes.items():
        by_size[size].append(pair)
    parts = []
    for size, pairs in by_size.items():
        arrows = ", ".join(f"{_short(src, trace)}→{_short(dst, trace)}" for src, dst in sorted(pairs)[:8])
        more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
        parts.append(f"{arrows}{more}: {size:,} B{' each' if len(pairs) > 1 else ''}")
    if len(parts) > _SIZES_SHOWN:
        parts[_SIZES_SHOWN:] = [f"and {len(parts) - _SIZES_SHOWN:,} more sizes"]
    return "; ".join(parts) + f" ({', '.join(sorted(hows))})" if parts else "nothing travels"


def shorten(what: str) -> str:
    """A list of many parameters with its first few names."""
    head, colon, names = what.partition(": ")
    listed = names.split(", ")
    if not colon or len(listed) <= _NAMES_SHOWN:
        return what
    return f"{head}: {', '.join(listed[:_NAMES_SHOWN])} and {len(listed) - _NAMES_SHOWN} more"


def _short(rank: int, trace: Trace) -> str:
    return trace.label(rank).removeprefix("rank ")


def _phase(operation: Operation) -> str:
    phase = operation.ends[0].phase
    return {
        "forward": "the forward pass",
        "backward": "the backward pass",
        "optimizer": "the optimizer's step",
    }.get(phase, phase)


def _missing(operation: Operation, trace: Trace) -> str:
    return f"{_list([trace.label(rank) for rank in operation.missing])} never {_verb(operation)}"


# Hangs ----------------------------------------------------------------------------------------------------------------


def hang_sentences(found: Sequence[Hang], trace: Trace) -> list[str]:
    """One sentence for each hang; two that wait for each other share one."""
    told: list[str] = []
    rest = list(found)
    while rest:
        hang = rest.pop(0)
        other = next((each for each in rest if _wait_for_each_other(hang, each)), None)
        if other is None:
            told.append(hang_sentence(hang, trace))
            continue
        rest.remove(other)
        (a, call_a), (b, call_b) = _stuck_call(hang), _stuck_call(other)
        told.append(
            f"{trace.label(a)} and {trace.label(b)} wait for each other:"
            f" {trace.label(a)} in {call_text(call_a)}, {trace.label(b)} in {call_text(call_b)}"
        )
    return told


def _wait_for_each_other(one: Hang, other: Hang) -> bool:
    return len(one.waiting) == 1 and one.waiting == other.operation.missing and other.waiting == one.operation.missing


def _stuck_call(hang: Hang) -> tuple[int, Collective | PointToPoint]:
    return next((end.rank, end) for end in hang.operation.ends if end.rank in hang.waiting)


def hang_sentence(hang: Hang, trace: Trace) -> str:
    """ "rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it"."""
    operation = hang.operation
    end = next((end for end in operation.ends if end.rank in hang.waiting), operation.ends[0])
    who = _list([trace.label(rank) for rank in hang.waiting])
    verb = "waits" if len(hang.waiting) == 1 else "wait"
    if operation.missing:
        missing = _list([trace.label(rank) for rank in operation.missing])
        never = [_never(operation, rank, call, trace) for rank, call in hang.elsewhere.items()]
        more = [f"and {len(never) - _NAMES_LISTED:,} more"] if len(never) > _NAMES_LISTED else []
        return "; ".join([f"{who} {verb} for {missing} in {call_text(end)}", *never[:_NAMES_LISTED], *more])
    return f"{who} {verb} in {call_text(end)}; {_why_stuck(operation, trace)}"


def _never(operation: Operation, rank: int, call: Collective | PointToPoint | None, trace: Trace) -> str:
    where = f", it is in {call_text(call)}" if call is not None else ""
    return f"{trace.label(rank)} never {_verb(operation)}{where}"


def _why_stuck(operation: Operation, trace: Trace) -> str:
    if operation.problem:
        return operation.problem
    if operation.unseen:
        who = _list([trace.label(rank) for rank in operation.unseen])
        return f"the file of {who} is not here or not whole, so nobody knows whether it came"
    if operation.sender is None and operation.op == "recv":
        return "no message has come for it, from any rank"
    return "all ranks called it, and it does not end"


def whereabouts(trace: Trace, rank: int) -> str:
    """ "was in all_reduce #3 (quickstart.py:14)", or nothing if this rank was inside no call."""
    call = inside(trace, rank)
    return f"was in {call_text(call)}" if call is not None else ""


def call_text(call: Collective | PointToPoint) -> str:
    """ "all_reduce #3 (quickstart.py:14)": the operation, its number in the group, and the line of code."""
    site = f" ({call.site})" if call.site else ""
    return f"{call.op} #{call.seq}{site}"


def _verb(operation: Operation) -> str:
    if operation.sender is None and operation.receiver is None:
        return "called it"
    return "sent it" if operation.sender in operation.missing else "received it"


def _list(names: Sequence[str]) -> str:
    if len(names) > _NAMES_LISTED:
        return f"{', '.join(names[:_NAMES_LISTED])} and {len(names) - _NAMES_LISTED:,} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"


# Findings: the titles of pictures -------------------------------------------------------------------------------------


def finding(trace: Trace) -> str:
    """What a picture of this trace shows: a hang, else who sends how much and who is waited for longest."""
    stuck = hangs(trace)
    if stuck:
        return capital(hang_sentence(stuck[0], trace))
    waited = waiting(trace)
    sent = traffic_finding(traffic(trace))
    if not waited:
        return sent
    rank = max(waited, key=lambda rank: waited[rank])
    others = "the other" if len(trace.ranks) == 2 else "the others"
    longest = "" if len(waited) == 1 else " longest"
    return f"{sent}; {trace.label(rank)} keeps {others} waiting{longest}: {time_text(waited[rank])}"


def sequence_finding(trace: Trace) -> str:
    """A hang, else who sends how much in how many messages."""
    stuck = hangs(trace)
    if stuck:
        return capital(hang_sentence(stuck[0], trace))
    sent = traffic(trace)
    count = sum(sent.message_count.values())
    return traffic_finding(sent) + (f", in {count_text(count, 'message')}" if count else "")


def stuck_reason(operation: Operation, end: Collective | PointToPoint, trace: Trace) -> str:
    """Why this rank did not come out of its call; nothing if it did."""
    if not (end.pending or end.failed):
        return ""
    if operation.missing:
        return _missing(operation, trace)
    return f"failed: {end.error}" if end.failed and not operation.problem else _why_stuck(operation, trace)


def traffic_finding(sent: Traffic) -> str:
    """The pattern of the bytes: "Each rank sends 28.9 kB to the rank before it"."""
    pairs = {pair: size for pair, size in sent.payload_bytes.items() if size}
    if not pairs:
        return "No message is known" if sent.unexplained else "No rank sends anything"
    names, ranks = sent.labels, sent.ranks
    senders, receivers = sorted({src for src, _ in pairs}), sorted({dst for _, dst in pairs})
    alike = _alike(list(pairs.values()))
    if len(pairs) == 1:
        return capital(f"{names[senders[0]]} sends {alike} to {names[receivers[0]]}, nothing comes back")
    if alike and len(pairs) == len(ranks) * (len(ranks) - 1):
        return f"Each rank sends {alike} to {'the other' if len(ranks) == 2 else 'every other rank'}"
    for step, neighbour in ((-1, "before"), (1, "after")):
        if alike and set(pairs) == _ring(ranks, step):
            return f"Each rank sends {alike} to the rank {neighbour} it"
    if alike and len(senders) == 1:
        others = "every other rank" if len(pairs) == len(ranks) - 1 else f"{len(pairs)} ranks"
        return capital(f"{names[senders[0]]} sends {alike} to {others}")
    if alike and len(receivers) == 1:
        return capital(f"{len(pairs)} ranks send {alike} each to {names[receivers[0]]}")
    from_each = {rank: sent.bytes_from(rank=rank) for rank in ranks}
    all_alike = _alike(list(from_each.values()))
    if all_alike:
        return f"Each rank sends {all_alike}, {size_text(sent.total_bytes)} in all"
    most = max(from_each, key=lambda rank: from_each[rank])
    return capital(f"{names[most]} sends the most: {size_text(from_each[most])} of {size_text(sent.total_bytes)}")


def _alike(sizes: Sequence[int]) -> str:
    """The one size that all these are, within 5 % (a ring's last chunk is smaller); nothing if they differ more."""
    least, most = min(sizes), max(sizes)
    if least < 0.95 * most:
        return ""
    return size_text(most) if least == most else f"about {size_text(round(sum(sizes) / len(sizes)))}"


def size_text(size: int) -> str:
    """ "144 B", "28.9 kB", "4.00 MB": three digits, decimal units."""
    if size < 1000:
        return f"{size} B"
    return _three_digits(size, (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)))


def time_text(duration_ns: int) -> str:
    """ "310 µs", "3.10 ms", "1.50 s": three digits."""
    return _three_digits(duration_ns, (("µs", 10**3), ("ms", 10**6), ("s", 10**9)))


def _three_digits(value: int, units: Sequence[tuple[str, int]]) -> str:
    # 999.5 would be rounded to four digits, so it goes to the next unit.
    name, scale = next((unit for unit in units if value < 999.5 * unit[1]), units[-1])
    number = value / scale
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{decimals}f} {name}"


def capital(sentence: str) -> str:
    """With a capital, unless it begins with the name of a rank that has none."""
    return sentence[:1].upper() + sentence[1:] if sentence.startswith("rank ") else sentence


def _ring(ranks: Sequence[int], step: int) -> set[tuple[int, int]]:
    return {(rank, ranks[(place + step) % len(ranks)]) for place, rank in enumerate(ranks)}
