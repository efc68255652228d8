"""What clocks have got wrong: an operation that ends on one rank before it has begun on another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlearn.events.clocks import ALL_WAIT
from dlearn.events.event_table import NONE
from dlearn.events.process import Process
from dlearn.join.tables.operation_table import OperationTable


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
