"""A pipeline: of which micro-batches a stage keeps what the backward pass needs.

The names tell: a rank's spans F0, F1, ... and B0, B1, ... are the forward and the backward passes of micro-batch 0, 1,
... What lies between the two is kept. Nobody sees it, so it is inferred.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from dlearn.analysis.walking.steps import Change
from dlearn.trace.event import Span

BOARD = "Micro-batches kept from their forward to their backward pass (inferred)"
NOTE = "Spans F0 and B0 are taken for the forward and the backward pass of micro-batch 0; what is kept is inferred."
_NAME = re.compile(r"([FB])(\d{1,4})")


def kept(works: Iterable[Span]) -> dict[tuple[int, int], tuple[Change, str]]:
    """Rank and number of a span of a pipeline -> what its rank keeps from then on, and that in words."""
    passes = sorted((each for each in works if _NAME.fullmatch(each.name)), key=lambda each: each.start_ns)
    names = {(each.rank, each.name) for each in passes}
    held: dict[int, set[int]] = defaultdict(set)
    found: dict[tuple[int, int], tuple[Change, str]] = {}
    for each in passes:
        way, number = each.name[0], int(each.name[1:])
        if not {(each.rank, f"F{number}"), (each.rank, f"B{number}")} <= names:
            continue
        now = held[each.rank]
        if way == "F":
            now.add(number)
        else:
            now.discard(number)
        text, share = (f"micro-batch {number}", 1.0) if way == "F" else ("", 0.0)
        change = Change(BOARD, each.rank, number, text, share)
        found[each.rank, each.number] = change, f" Kept for backward passes to come: {len(now)} (inferred)."
    return found
