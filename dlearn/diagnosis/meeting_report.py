"""Every sentence about processes that wait for others to come, as to a group or to RPC."""

from collections.abc import Iterator, Sequence

from dlearn.diagnosis.hang_detection import Hang, inside, last_seen
from dlearn.diagnosis.hang_report import NAMES_LISTED, Notes, call_text
from dlearn.diagnosis.meetings import Absent, Meeting, meetings
from dlearn.shown import count_text, first_few, listed, waits
from dlearn.trace import Trace

_SITES_LISTED = 3


def meeting_report(
    trace: Trace, told: Sequence[Hang], notes: Notes = None
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Write a sentence, and who reports it, for each wait that the hangs `told` do not explain."""
    hung = {rank for hang in told for rank in hang.waiting}
    for meeting in meetings(trace):
        wanted = {each.rank for each in meeting.absent}
        if not wanted or not wanted <= hung:
            yield meeting.inside[0], _meeting_sentence(meeting, trace, notes)


def _meeting_sentence(meeting: Meeting, trace: Trace, notes: Notes) -> str:
    """Write "rank 0 waits in new_group (train.py:8) for rank 1, which is at train.py:5"."""
    calls, count = meeting.calls, len(meeting.inside)
    who = f"{count} ranks" if count > NAMES_LISTED else trace.labels.listed(meeting.inside)
    sites = first_few([*dict.fromkeys(call.site for call in calls)], _SITES_LISTED)
    only = 0 < len(calls[0].ranks) < len(trace.processes)
    members = f" of {trace.labels.together(calls[0].ranks)}" if only else ""
    text = f"{who} {waits(count)} in {calls[0].op}{members} ({sites})"
    if meeting.namesakes:
        others = trace.labels.listed(meeting.namesakes)
        why = "new_group must be called by all ranks for every group"
        return f"{text}; {others} made another group of the same name: {why}"
    if meeting.apart:
        return f"{text} and do not meet: {_why_apart(meeting, trace)}"
    if meeting.absent:
        names = [_name(each, trace) for each in meeting.absent]
        text += f" for {listed(names)}{_why_absent(meeting, trace, notes)}"
    if meeting.unseen:
        lost = trace.labels.listed(meeting.unseen)
        return f"{text}; the file of {lost} is not here, so whether it came is not known"
    ends = meeting.known and not meeting.absent
    return f"{text}; all have called it, and it does not end" if ends else text


def _name(absent: Absent, trace: Trace) -> str:
    """Return the label of its process, else the rank or the name that is wanted."""
    if absent.rank is not None:
        return trace.label(absent.rank)
    return absent.who if isinstance(absent.who, str) else f"rank {absent.who}"


def _why_absent(meeting: Meeting, trace: Trace, notes: Notes) -> str:
    """Write ", which is at train.py:5", or what is known of each of several that have not come."""
    doing = {**last_seen(trace), **(notes or {})}
    last = {process.rank: process.rendezvous[-1:] for process in trace.processes}
    texts, strangers = [], []
    for absent in meeting.absent[:NAMES_LISTED]:
        name = _name(absent, trace)
        if absent.rank is None:
            strangers.append(name)
            continue
        call = inside(trace).get(absent.rank)
        does = doing.get(absent.rank, "has not called it")
        if call is not None:
            does = f"is in {call_text(call)}"
        for came in last[absent.rank]:
            if came.op == meeting.calls[0].op and came.size != meeting.calls[0].size:
                does = f"called it for {count_text(came.size, 'rank')} and {does}"
        if len(meeting.absent) == 1:
            return f", which {does}"
        texts.append(f"{name} {does}")
    if texts:
        texts += [f"no process has called it as {listed(strangers)}"] if strangers else []
        return f"; {'; '.join(texts)}"
    what = "name" if meeting.calls[0].names else "rank"
    who = f"this {what}" if len(strangers) == 1 else f"these {what}s"
    return f": no process with {who} has called it here"


def _why_apart(meeting: Meeting, trace: Trace) -> str:
    """Say why the names differ: torch makes them of the number of groups that a process has."""
    made = {process.rank: len(process.groups) for process in trace.processes}
    each = ", ".join(f"{trace.label(rank)} had made {made[rank]:,}" for rank in meeting.inside)
    return f"torch names such a group by how many groups its process has made, and {each}"
