"""Every sentence that dlearn prints about a trace."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dlearn.analysis.hangs import Hang, inside
from dlearn.analysis.joining import messages, messages_of, operations, payload_bytes
from dlearn.analysis.traffic import Traffic, traffic
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace

_NAMES_SHOWN = 4


class Explanation(msgspec.Struct, frozen=True):
    """Who sent what to whom, in words and as a table. `part` is what was explained: a step, or the whole trace."""

    part: str
    sentences: tuple[str, ...]
    traffic: Traffic

    def __str__(self) -> str:
        return "\n".join([*self.sentences, "", str(self.traffic)])

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
    part = trace.within(steps[-1]) if steps else trace
    name = steps[-1] if steps else "the whole trace"
    sentences = [overview(trace)]
    if steps:
        before = [operation for operation in operations(trace) if _is_setup(operation)]
        sentences += _told("Before training", before, trace)
    sentences += _told(f"In {name}" if steps else "In all", operations(part), trace)
    sent = traffic(part)
    sentences.append(totals(name, sent))
    sentences += [f"Problem: {problem}." for problem in trace.problems]
    return Explanation(name, tuple(sentences), sent)


def overview(trace: Trace) -> str:
    """How large the job was, and how much of it is explained."""
    found = messages(trace)
    everything = operations(trace)
    backends = (
        ", ".join(sorted({operation.group.backend for operation in everything})) or "no process group used"
    )
    explained = len(everything) - len(found.unexplained)
    known = Counter(message.how for message in found)
    kinds = ", ".join(f"{count:,} {how}" for how, count in known.most_common()) or "none"
    return (
        f"{len(trace.processes)} ranks ({backends}): {explained} of {len(everything)} operations explained"
        f" by {len(found):,} messages ({kinds})."
    )


def totals(name: str, sent: Traffic) -> str:
    """The bytes that each rank sent; one number where all sent the same."""
    each = {rank: sent.bytes_from(rank=rank) for rank in sent.ranks}
    if len(set(each.values())) == 1 and each:
        told = f"every rank sends {next(iter(each.values())):,} B of payload"
    else:
        told = (
            ", ".join(f"{sent.labels[rank]} sends {size:,} B" for rank, size in each.items()) + " of payload"
        )
    missing = (
        f"; {sent.by_how['missing']:,} B were expected and never came" if "missing" in sent.by_how else ""
    )
    return f"In {name} {told}, {sent.total_bytes:,} B in all{missing}."


def _is_setup(operation: Operation) -> bool:
    return all(end.phase == "setup" for end in operation.ends)


def _told(when: str, told: Sequence[Operation], trace: Trace) -> list[str]:
    """One sentence for each kind of operation, in the order of first call; equal ones are counted."""
    kinds: dict[tuple[str, ...], list[Operation]] = defaultdict(list)
    for operation in told:
        kinds[_kind(operation)].append(operation)
    return [f"{when}: {_sentence(group, trace)}" for group in kinds.values()]


def _kind(operation: Operation) -> tuple[str, ...]:
    ends = (str(operation.sender), str(operation.receiver))
    size = str(sorted({payload_bytes(end) for end in operation.ends}))
    return (
        operation.op,
        operation.what,
        operation.group.name,
        operation.problem,
        str(operation.missing),
        size,
        *ends,
    )


def _sentence(group: Sequence[Operation], trace: Trace) -> str:
    first = group[0]
    times = f", {len(group)} times" if len(group) > 1 else ""
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
    who = _list([trace.label(rank) for rank in operation.missing])
    return f"{who} never called it"


# Hangs ----------------------------------------------------------------------------------------------------------------


def hang_sentence(hang: Hang, trace: Trace) -> str:
    """ "rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it"."""
    operation = hang.operation
    end = next((end for end in operation.ends if end.rank in hang.waiting), operation.ends[0])
    who = _list([trace.label(rank) for rank in hang.waiting])
    verb = "waits" if len(hang.waiting) == 1 else "wait"
    if not operation.missing:
        reason = operation.problem or "all ranks called it, and it does not end"
        return f"{who} {verb} in {call_text(end)}; {reason}"
    missing = _list([trace.label(rank) for rank in operation.missing])
    sentence = f"{who} {verb} for {missing} in {call_text(end)}"
    for rank, call in hang.elsewhere.items():
        sentence += f"; {trace.label(rank)} never {_verb(operation)}"
        if call is not None:
            sentence += f", it is in {call_text(call)}"
    return sentence


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
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"
