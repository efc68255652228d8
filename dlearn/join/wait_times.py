"""What times say: how long operations waited for the last rank, and which clocks are wrong."""

from collections.abc import Sequence

import numpy as np

from dlearn.events.clocks import ALL_WAIT
from dlearn.events.event import PointToPoint
from dlearn.events.event_table import NONE
from dlearn.events.process import Process
from dlearn.join.columns import disjoint
from dlearn.join.ends import End
from dlearn.join.joining import operations
from dlearn.join.selection import Selection, once
from dlearn.join.tables.operation_table import Operation, OperationTable


def waited_until_ns(operation: Operation, end: End) -> int | None:
    """Return until when this rank waited: the last rank's call. None where that did not come, or is not known.

    A rank that was done before the last one called did not wait: its data went ahead into a buffer.
    """
    if operation.is_call or operation.refused:
        return end.start_ns  # A callee begins when it is asked, and what is refused waits for no rank.
    may_be_unseen = operation.unseen or (isinstance(end, PointToPoint) and len(operation.ends) == 1)
    if operation.missing or (may_be_unseen and end.end_ns is None):
        return None
    done_before = end.end_ns is not None and end.end_ns <= operation.last_arrival_ns
    return end.start_ns if done_before else operation.last_arrival_ns


@once
def waiting(trace: Selection) -> dict[int, int]:
    """Return the ns in which at least one operation waited for a rank, for each such rank."""
    asked = operations(trace)
    calls = asked.calls
    came_later = calls.last_arrival_ns > calls.start_ns
    waited = came_later & (calls.end_ns > calls.last_arrival_ns)
    for place in np.flatnonzero(came_later & ~calls.ended).tolist():
        operation = asked[int(calls.operation[place])]
        end = operation.ends[place - int(np.searchsorted(calls.operation, calls.operation[place]))]
        waited[place] = waited_until_ns(operation, end) is not None
    waited &= ~asked.table.waits_for_none[asked.rows][calls.operation]
    last_rank = calls.last_rank[calls.operation[waited]]
    start_ns, until_ns = calls.start_ns[waited], calls.last_arrival_ns[waited]
    ranks, seen_first = np.unique(last_rank, return_index=True)
    covered: dict[int, int] = {}
    for rank in ranks[np.argsort(seen_first)]:
        begun, over = disjoint(start_ns[last_rank == rank], until_ns[last_rank == rank])
        covered[int(rank)] = int((over - begun).sum())
    return covered


def clock_problems(processes: Sequence[Process], met: OperationTable) -> list[str]:
    """Say what keeps the times of several clocks from being compared."""
    never = sorted({process.header.host for process in processes if process.clock.error_ns is None})
    if never:
        who = ", ".join(never[:8]) + (", ..." if len(never) > 8 else "")
        return [
            f"the clock of host {who} was never compared with that of the others, or only in"
            " readings that no clock can give: compare no times with it"
        ]
    wrong = _backwards_by(processes, met)
    wrong = wrong[wrong > 0]
    if not len(wrong):
        return []
    return [
        f"{len(wrong):,} of {len(met):,} operations end before they can, by up to {wrong.max() / 1000:,.1f} us"
        " beyond the bound of the clocks' error: one of the hosts' clocks was set, or did not run evenly"
    ]


def _backwards_by(processes: Sequence[Process], met: OperationTable) -> np.ndarray:
    """Return how many ns operations end on one rank before they begin on another, less the bounds."""
    events = met.events
    error_ns = np.zeros(len(events))
    for process in processes:
        clock, mine = process.clock, events.rank == process.rank
        error_ns[mine] = [clock.error_at(at - clock.offset_ns) for at in events.start_ns[mine].tolist()]
    op = events.of_firsts(lambda first: getattr(first, "op", ""), object)
    begun = np.where(op == "recv", -np.inf, events.start_ns - error_ns)
    over = np.where((op == "send") | (events.end_ns == NONE), np.inf, events.end_ns + error_ns)
    backwards = met.over_ends(np.maximum, begun) - met.over_ends(np.minimum, over)
    waits = np.array([each.sender is not None or each.op.startswith(ALL_WAIT) for each in met.classes], bool)
    return np.asarray(backwards[waits[met.like] & ~met.is_missing & ~met.failed])
