"""Whose part is in which piece of the data: a collective's messages, replayed.

This is inferred, as no value is recorded: a message says which bytes it carries, and what its
sender can have had in them by then. In a sum every rank begins with its own share of each piece; a
receiver adds what comes from others, and takes over what already has its own share in it. Where
parts would be counted twice, it is not known what the rank made of them: "?". Only operations that
are known in full from their beginning are replayed: one unseen message may change what follows.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache
from itertools import chain, count

from dlearn.analysis.replay.steps import Change, StatePanel, WalkParts
from dlearn.events.event import Collective
from dlearn.join.ends import family_of_op
from dlearn.join.operation_messages import message_count, messages_of
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import RankNames, size_text
from dlearn.trace import Trace

_SUMS = ("all_reduce", "reduce", "reduce_scatter")
_MOST_PIECES = 128  # As many as gloo's ring of 64 ranks cuts its data into.
_MOST_NAMES = 4
_UNKNOWN = -1
_INFERRED = "What a rank holds is inferred from which parts were sent: values are never recorded."
_REDUCTION = "The sum may be a maximum or another reduction: which one, the trace does not say."
_NOT_SHOWN = "What ranks hold is not shown for"

Holding = dict[tuple[int, int], int]
"""(rank, piece) -> a bit for each member whose part is in it; `_UNKNOWN` where that is not known."""
Content = dict[int, int]  # The same by piece, of one message.


def pieces(trace: Trace, messages: Sequence[Message], walk: WalkParts) -> None:
    """Add a panel for each collective, with what each of its messages changes in it."""
    of_operation: dict[int, dict[int, Message]] = defaultdict(dict)
    for index, message in enumerate(messages):
        is_collective = isinstance(message.operation.ends[0], Collective)
        if message.whole_bytes and message.how != "missing" and is_collective:
            of_operation[id(message.operation)][index] = message
    not_shown: Counter[str] = Counter()
    summed = False
    for by_index in of_operation.values():
        shown = list(by_index.values())
        operation, whole_bytes = shown[0].operation, max(each.whole_bytes for each in shown)
        edges = {edge for each in shown for edge in (each.offset_bytes, _end(each))}
        cuts = sorted({*edges, 0, whole_bytes})
        if family_of_op(operation.op) == "all_to_all":
            _exchange(walk, operation, by_index, trace)
            continue
        begin = _begin(operation, shown, cuts)
        if begin is None:
            continue
        if len(cuts) > _MOST_PIECES + 1:
            not_shown[f"more than {_MOST_PIECES} pieces"] += 1
        elif not _from_the_beginning(operation, shown):
            not_shown["not all that was sent is here"] += 1
        else:
            summed |= _play(walk, operation, by_index, cuts, begin, trace)
    if walk.panels:
        walk.notes.append(_INFERRED)
    if summed:
        walk.notes.append(_REDUCTION)
    for why, times in not_shown.items():
        walk.notes.append(f"{_NOT_SHOWN} {times:,} of the collectives: {why}.")


def _from_the_beginning(operation: Operation, shown: Sequence[Message]) -> bool:
    """Return whether these are all messages of the operation, or the first of them.

    Of an observed step only the sender knows its part.
    """
    if shown[0].how != "derived" and (operation.unseen or any(each.sent_ns is None for each in shown)):
        return False
    if len(shown) == message_count(operation):
        return True
    every = [each for each in messages_of(operation) if each.how != "missing"]
    return sorted(map(_moment, shown)) == sorted(map(_moment, every))[: len(shown)]


def _moment(message: Message) -> int:
    """Return when it was sent; of a derived message, which has no time of its own, its step."""
    return message.step if message.how == "derived" else message.sent_ns or 0


def _begin(operation: Operation, messages: Sequence[Message], cuts: Sequence[int]) -> Holding | None:
    """Return what each rank has before anything is sent; None where this is not known for such an op."""
    members, op = operation.group.members, family_of_op(operation.op)
    whole = range(len(cuts) - 1)
    if any(each.sparse for end in operation.ends if isinstance(end, Collective) for each in end.inputs):
        return None  # Ranks gather indices and values, and each adds up for itself.
    if op in _SUMS:
        shares = {rank: 1 << bit for bit, rank in enumerate(members)}
        shares |= dict.fromkeys(operation.missing, 0)
        return {(rank, piece): shares[rank] for rank in members for piece in whole}
    begin = {(rank, piece): 0 for rank in members for piece in whole}
    if op == "broadcast":
        root = messages[0].src
        begin.update({(root, piece): 1 << members.index(root) for piece in whole})
    elif op == "all_gather":
        for piece in whole:
            owner = cuts[piece] * len(members) // cuts[-1]
            begin[members[owner], piece] = 1 << owner
    else:
        return None
    return begin


def _play(
    walk: WalkParts, operation: Operation, messages: dict[int, Message],
    cuts: Sequence[int], begin: Holding, trace: Trace,
) -> bool:  # fmt: skip
    """Add one operation to the walk; return whether a rank came to hold a whole sum."""
    members, summed = operation.group.members, family_of_op(operation.op) in _SUMS
    whole_sum = (1 << len(members)) - 1
    title = _title(operation, trace.labels, size_text(cuts[-1]), walk)
    names = [trace.labels.short(rank) for rank in members]

    @cache
    def held_of(mask: int) -> tuple[str, float, str, tuple[int, ...]]:
        owners = [] if mask == _UNKNOWN else [each for bit, each in enumerate(members) if mask >> bit & 1]
        return *_text(mask, names, summed=summed), tuple(owners)

    def change(rank: int, piece: int, mask: int) -> Change:
        text, share, _, owners = held_of(mask)
        return Change(title, rank, piece, text, share, owners)

    start = [change(*key, mask) for key, mask in begin.items()]
    walk.panels.append(StatePanel(title, tuple(start), operation=operation))
    contents = _contents(list(messages.values()), cuts, begin)
    holds = dict(begin)
    came = set[int]()
    for (index, message), content in zip(messages.items(), contents, strict=True):
        rank, held = message.dst, set[str]()
        for piece, sent in content.items():
            mask = holds[rank, piece] = merge(holds.get((rank, piece), 0), sent)
            came.add(mask)
            walk.changes[index].append(change(rank, piece, mask))
            held.add(held_of(mask)[2])
        walk.words[index] = _words(rank, held, list(content), len(cuts) - 1, trace)
    return summed and whole_sum in came


def _exchange(walk: WalkParts, operation: Operation, sent: dict[int, Message], trace: Trace) -> None:
    """Add an all-to-all: a rank has its own part for itself, and gets one from each other rank."""
    members, first = operation.group.members, next(iter(sent.values()))
    title = _title(operation, trace.labels, size_text(first.whole_bytes), walk)

    def came(dst: int, src: int) -> Change:
        return Change(title, dst, members.index(src), trace.labels.short(src), 1.0, (src,))

    start = tuple(came(rank, rank) for rank in members)
    walk.panels.append(StatePanel(title, start, operation=operation))
    for index, message in sent.items():
        walk.changes[index].append(came(message.dst, message.src))


def _title(operation: Operation, labels: RankNames, size: str, walk: WalkParts) -> str:
    """Return a title that no other panel has, by which a change finds its panel."""
    group, taken = operation.group, {panel.title for panel in walk.panels}
    of_group = "" if group.default else f" of group {group.name}"
    of_group = f" over {named}" if (named := group.named(labels)) else of_group
    name = f"{operation.op} #{operation.seq}{of_group}"
    what = f"{size}: whose part is in which piece (inferred)"
    again = (f"{name} ({number}), {what}" for number in count(2))
    return next(title for title in chain([f"{name}, {what}"], again) if title not in taken)


def _contents(messages: Sequence[Message], cuts: Sequence[int], begin: Holding) -> list[Content]:
    """Return what each message can hold: all that its sender had of the pieces in it."""
    holds, contents = dict(begin), [Content() for _ in messages]
    moments: list[Moments] = []
    for message in messages:
        left = _moment(message)
        arrived = left if message.how == "derived" else message.received_ns
        arrival = None if arrived is None else (arrived,)
        moments.append((message.src, (left,), message.dst, arrival))
    for index, arrives in replay(moments):
        message = messages[index]
        if arrives:
            for piece, mask in contents[index].items():
                holds[message.dst, piece] = merge(holds.get((message.dst, piece), 0), mask)
            continue
        first, end = bisect_left(cuts, message.offset_bytes), bisect_right(cuts, _end(message))
        for piece in range(first, end - 1):
            contents[index][piece] = holds.get((message.src, piece), 0)
    return contents


Moments = tuple[int, tuple[int, ...], int, tuple[int, ...] | None]
"""Sender, when it leaves, receiver, when it arrives (None: not seen), by the ranks' own clocks."""


def replay(messages: Iterable[Moments]) -> Iterator[tuple[int, bool]]:
    """Yield (index, whether it arrives) in each rank's order; if none fits, the earliest next."""
    messages, own = [*messages], defaultdict[int, list[tuple[tuple[int, ...], bool, int]]](list)
    for index, (src, left, dst, arrived) in enumerate(messages):
        own[src].append((left, False, index))
        if arrived is not None:
            own[dst].append((arrived, True, index))
    if all(arrived is None or left <= arrived for _, left, _, arrived in messages):
        every = sorted(chain.from_iterable(own.values()))  # The clocks agree.
        yield from ((index, arrives) for _, arrives, index in every)
        return
    waiting = [deque(sorted(events)) for events in own.values()]
    sent: set[int] = set()
    while heads := [events for events in waiting if events]:
        ready = [events for events in heads if not events[0][1] or events[0][2] in sent]
        _, arrives, index = min(ready or heads, key=lambda events: events[0]).popleft()
        sent.add(index)
        yield index, arrives


def _end(message: Message) -> int:
    """Return where it ends in the operation's data, in bytes."""
    return message.offset_bytes + (message.payload_bytes or 0)


def merge(held: int, came: int) -> int:
    """Return the sum of both, or, where the rank's own part is in `came` already, `came`."""
    if _UNKNOWN in (held, came):
        return _UNKNOWN
    if not held & came:
        return held | came
    return came if held & came == held else _UNKNOWN


def _text(mask: int, names: Sequence[str], *, summed: bool) -> tuple[str, float, str]:
    """Return "0+2", "3 of 8", "sum", or whose copy it is; the share, 0 to 1; and it in words."""
    if mask == _UNKNOWN:
        return "?", 0.0, "parts that are not known"
    inside = [name for bit, name in enumerate(names) if mask >> bit & 1]
    text = "+".join(inside)
    if not summed:
        return text, float(bool(inside)), f"the data of {text}"
    if len(inside) == len(names):
        return "sum", 1.0, "the whole sum"
    if len(inside) > _MOST_NAMES:
        text = f"{len(inside)} of {len(names)}"
    return text, len(inside) / len(names), text


def _words(rank: int, held: Set[str], pieces: Sequence[int], count: int, trace: Trace) -> str:
    """Write "Then rank 0 has 0+1 in piece 2 of 4"."""
    if not pieces:
        return ""
    first, last = pieces[0] + 1, pieces[-1] + 1
    where = "it all" if len(pieces) == count else f"piece {first} of {count}"
    if 1 < len(pieces) < count:
        where = f"pieces {first} to {last} of {count}"
    has = next(iter(held)) if len(held) == 1 else "different parts"
    return f"Then {trace.label(rank)} has {has} in {where}."
