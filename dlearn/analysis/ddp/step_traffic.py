"""What one training step of an unmodified script sends, and whether all steps send the same."""

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from dlearn.analysis.ddp.training_steps import last_step
from dlearn.events.event_table import NONE
from dlearn.join.joining import operations
from dlearn.join.operation_messages import sums_of
from dlearn.join.tables.operations import Operations
from dlearn.join.training_phases import numbered_steps, step_of_rows
from dlearn.trace import Trace


class TypicalStep(NamedTuple):
    """The last of the steps that most others are like: `alike` of `steps`; `outside` are in none.

    `differs` is the title of the first step that differs, "" where none does.
    """

    title: str
    operations: Operations
    alike: int
    steps: int
    differs: str
    outside: int


def typical_step(trace: Trace) -> TypicalStep | None:
    """Compare the steps of a whole training; None where there are not two, or spans name them."""
    titles, asked = [*numbered_steps(trace.whole).values()], operations(trace)
    known = step_of_rows(trace.whole)
    known = np.append(known, np.full(len(asked.table.events) - len(known), NONE))  # RPC adds rows.
    step = asked.table.over_ends(np.maximum, known)[asked.rows]
    outside = int((step == NONE).sum())
    if trace is not trace.whole or last_step(trace) or len(titles) < 2 or outside == len(asked):
        return None
    calls = [Counter[Hashable]() for _ in titles]
    for one, places in asked.groups():
        kind = one.op, one.given_bytes, one.missing, frozenset(sums_of(one))
        for number in step[places[step[places] != NONE]].tolist():
            calls[number][kind] += 1
    sent = [frozenset(each.items()) for each in calls]
    usual, alike = Counter(filter(None, sent)).most_common(1)[0]
    last = max(number for number, each in enumerate(sent) if each == usual)
    differs = next((titles[number] for number, each in enumerate(sent) if each != usual), "")
    mine = Operations(asked.table, asked.rows[step == last], trace.labels)
    return TypicalStep(titles[last], mine, alike, len(titles), differs, outside)
