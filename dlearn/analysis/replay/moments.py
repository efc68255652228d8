"""One collective, round by round: how much of the result each rank holds of each piece."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from dlearn.analysis.replay.steps import Change, StatePanel, WalkParts
from dlearn.analysis.replay.tensor_chunks import pieces
from dlearn.join.ends import family_of_op
from dlearn.join.message_evidence import messages as all_messages
from dlearn.join.tables.message_table import Message
from dlearn.shown import capitalized
from dlearn.trace import Trace


class Moments(msgspec.Struct, frozen=True):
    """The messages of one of so many `collectives`, by step.

    `held[round, member, piece]` is the share of the result, 0 to 1; nan: no data yet. After
    `halfway` rounds each piece is whole on exactly one rank; 0: never so before the end.
    """

    sent: Sequence[Message]
    collectives: int
    held: np.ndarray
    halfway: int


def moments(trace: Trace) -> Moments | str:
    """Replay the collective that sends most, torch's own last; else say why there is none."""
    found = all_messages(trace)
    asked, operation = found.operations, found.columns.operation
    known = asked.table.is_collective[asked.rows[operation]] & ~found.missing
    size = np.bincount(operation[known], found.columns.payload_bytes[known], len(asked))
    last = {int(asked.table.like[asked.rows[row]]): int(row) for row in np.flatnonzero(size)}
    why = [capitalized(sentence) for sentence in found.sentences()[1:]]
    for row in sorted(last.values(), key=lambda row: (bool(asked[row].role), -size[row])):
        sent = sorted(found.at(np.flatnonzero(operation == row)), key=attrgetter("step"))
        walk, op = WalkParts(), family_of_op(asked[row].op)
        (_straight if op in ("gather", "scatter") else pieces)(trace, sent, walk)
        if walk.panels:
            held = _after_each_round(sent, walk)
            once = ((held == 1).sum(axis=1) == 1).all(axis=1)[:-1]
            half = int(once.argmax()) if not once[0] else 0
            return Moments(sent, len(np.unique(operation)), held, half)
        why += walk.notes
    return (why or ["No collective sent data here."])[0]


def _straight(_: Trace, sent: Sequence[Message], walk: WalkParts) -> None:
    """Add a panel in which each message brings its receiver a whole piece."""
    ranks, op = sent[0].operation.group.members, family_of_op(sent[0].op)
    start = []
    for index, rank in enumerate(ranks):
        owner, home = (sent[0].src, rank) if op == "scatter" else (rank, sent[0].dst)
        start.append(Change("", owner, index, "its own", 1.0 if owner == home else 0.5))
    walk.panels.append(StatePanel("", tuple(start)))
    for number, each in enumerate(sent):
        index = ranks.index(each.dst if op == "scatter" else each.src)
        walk.changes[number] = [Change("", each.dst, index, "came", 1.0)]


def _after_each_round(sent: Sequence[Message], walk: WalkParts) -> np.ndarray:
    ranks, start = sent[0].operation.group.members, walk.panels[0].start
    held = [shares(start, ranks)]
    for _, numbers in groupby(range(len(sent)), key=lambda number: sent[number].step):
        changes = [each for number in numbers for each in walk.changes[number]]
        held.append(shares(changes, ranks, held[-1].copy()))
    return np.array(held)


def shares(changes: Iterable[Change], ranks: Sequence[int], held: Any = None) -> np.ndarray:
    """Write the share of the result into `held[rank, piece]`; nan where there are no data."""
    given = [*changes]
    if held is None:
        held = np.full((len(ranks), 1 + max((each.index for each in given), default=0)), np.nan)
    for each in given:
        held[ranks.index(each.rank), each.index] = each.share if each.text else np.nan
    return np.asarray(held)
