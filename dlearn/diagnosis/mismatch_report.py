"""Every sentence about calls that do not fit together: which rank gave what, at which line."""

from collections.abc import Callable

from dlearn.diagnosis.hang_detection import other_tags
from dlearn.events.event import Collective, PointToPoint
from dlearn.join.columns import grouped
from dlearn.join.ends import End, logical_bytes, payload_bytes, tensors_of
from dlearn.join.mismatch import unequal_parts
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wording import ReasonKind, dtypes_text, tensors_text
from dlearn.shown import first_few
from dlearn.trace import Trace

_NAMES_LISTED = 8  # Ranks in one sentence.
_VALUES: dict[ReasonKind, tuple[str, Callable[[End], str]]] = {
    ReasonKind.DIFFERENT_SIZES: ("sizes", lambda end: f"{logical_bytes(end):,} B"),
    ReasonKind.DIFFERENT_DTYPES: ("dtypes", lambda end: dtypes_text(tensors_of(end))),
}
"""What the ranks gave differently, and how it reads for one of them."""


def mismatch_text(operation: Operation, trace: Trace) -> str:
    """Write "the ranks called it with different sizes: 48 B on rank 0, 4 B on ranks 1 and 2"."""
    mismatch = operation.mismatch
    if mismatch is None or operation.is_message:
        return _message_text(operation, trace)
    if mismatch.kind is ReasonKind.DIFFERENT_ROOTS:
        roots = _by_rank(operation, trace, lambda end: _root_text(end, operation, trace))
        return f"the ranks called it with different roots: {roots}"
    if mismatch.kind is ReasonKind.DIFFERENT_PARTS:
        return _parts_text(operation, trace)
    if mismatch.kind not in _VALUES:
        return str(mismatch)
    what, value = _VALUES[mismatch.kind]
    return f"the ranks called it with different {what}: {_by_rank(operation, trace, value)}"


def _by_rank(operation: Operation, trace: Trace, value: Callable[[End], str]) -> str:
    """Write "48 B on rank 0, 4 B on ranks 1 and 2", in the order of ranks."""
    texts = []
    for given, ends in grouped(operation.ends, value).items():
        texts.append(f"{given} on {trace.labels.together([end.rank for end in ends])}")
    return first_few(texts, _NAMES_LISTED)


def _parts_text(operation: Operation, trace: Trace) -> str:
    """Write "rank 0 sends 32 B to rank 1, which takes 16 B from it"."""
    calls = [end for end in operation.ends if isinstance(end, Collective)]
    texts, label = [], trace.label
    for src, dst, sent, taken in unequal_parts(calls, operation.group.members):
        if src == dst:
            texts.append(f"{label(src)} has {sent:,} B for itself, and takes {taken:,} B")
        else:
            sends = f"{label(src)} sends {sent:,} B to {label(dst)}"
            texts.append(f"{sends}, which takes {taken:,} B from it")
    return first_few(texts, _NAMES_LISTED, "; ")


def _root_text(end: End, operation: Operation, trace: Trace) -> str:
    if not isinstance(end, Collective) or end.root is None:
        return "no root"
    return f"root {trace.labels.short(operation.group.members[end.root])}"


def _message_text(operation: Operation, trace: Trace) -> str:
    """Write "rank 0 sends 8 B into a buffer of 4 B on rank 1"; "" of a message that fits."""
    mismatch, sender, receiver = operation.mismatch, operation.sender, operation.receiver
    if mismatch is None or sender is None or receiver is None:
        return operation.problem
    send, recv = operation.ends
    sent, taken = payload_bytes(send), payload_bytes(recv)
    src, dst = trace.label(sender), trace.label(receiver)
    text = f"{src} sends {sent:,} B into a buffer of {taken:,} B on {dst}"
    if mismatch.kind is ReasonKind.SMALL_BUFFER:
        return text
    if mismatch.kind is ReasonKind.LARGE_BUFFER:
        return f"{text}: the rest of it stays as it was"
    given, got = tensors_text(tensors_of(send)), tensors_text(tensors_of(recv))
    text = f"{src} sends {given}, {dst} receives it as {got}"
    if mismatch.kind is ReasonKind.OTHER_DTYPE:
        return f"{text}: the bits arrive, not the numbers"
    return f"{text}: the numbers arrive in another order of dimensions"


def tags_text(operation: Operation, trace: Trace) -> str:
    """Write "; rank 0 sends with tag 1, rank 1 waits for tag 2"; "" where they do not differ."""
    others = other_tags(operation, trace)
    if not others:
        return ""
    tags: dict[str, dict[str, None]] = {"send": {}, "recv": {}}
    for each in (operation, *others):
        call = each.ends[0]
        if isinstance(call, PointToPoint):
            tags[call.op][str(call.tag)] = None
    sent, wanted = (first_few(list(of), _NAMES_LISTED) for of in tags.values())
    src, dst = trace.label(operation.sender or 0), trace.label(operation.receiver or 0)
    return f"; {src} sends with tag {sent}, {dst} waits for tag {wanted}"


def called_at(operation: Operation, trace: Trace, call: str = "") -> str:
    """Write "rank 0 called broadcast at a.py:5, rank 1 all_reduce at a.py:7"; "" of one line."""
    ends = [end for end in operation.ends if end.site]
    if len({end.site for end in ends}) < 2:
        return ""
    one_op = len({end.op for end in ends}) == 1
    calls = [f"{trace.label(ends[0].rank)} called {call or ends[0].op} at {ends[0].site}"]
    for end in ends[1:]:
        op = "" if one_op else f"{end.op} "
        calls.append(f"{trace.label(end.rank)} {op}at {end.site}")
    return first_few(calls, _NAMES_LISTED)


def makers_text(operation: Operation, trace: Trace) -> str:
    """Say on which thread, and in which hook, each rank called it; "" if all on the program's."""
    ends = [end for end in operation.ends if isinstance(end, Collective)]
    if not any(end.thread or end.launcher == "comm hook" for end in ends):
        return ""
    first, *others = ends
    texts = [f"{trace.label(first.rank)} called it {_maker(first)}"]
    texts += [f"{trace.label(end.rank)} {_maker(end)}" for end in others]
    return first_few(texts, _NAMES_LISTED)


def _maker(end: Collective) -> str:
    thread = f"on thread {end.thread}" if end.thread else "on the program's own thread"
    if end.launcher != "comm hook":
        return thread
    bucket = "" if end.bucket_index is None else f" for bucket {end.bucket_index}"
    hook = f"in a communication hook{bucket}"
    return f"{hook}, {thread}" if end.thread else hook
