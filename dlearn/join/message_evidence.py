"""Every message of a trace, and which of them the kernel's counters confirm."""

from collections.abc import Iterable
from operator import itemgetter

import numpy as np

from dlearn.events.event_table import Column, Mask, Rows
from dlearn.join.joining import all_ranks, operations
from dlearn.join.ledger import Ledger, SampleRange, ledger_of
from dlearn.join.operation_messages import columns_of, columns_of_calls, message_count, why_unknown
from dlearn.join.selection import Selection, once
from dlearn.join.tables.message_table import Messages, order_of_sending, together
from dlearn.join.tables.operations import Operations
from dlearn.join.wire import meters
from dlearn.join.wording import Reason, ReasonKind

MOST_MESSAGES = 1_000_000
"""That `messages` holds at once: about 100 MB. `traffic` sums without making them, and has no limit."""


@once
def messages(trace: Selection) -> Messages:
    """Return every message, in the order of sending, each from one rank to one; at most MOST_MESSAGES.

    Those of a collective are derived from the backend's algorithm, those of a glass-box collective observed. Operations
    whose messages are not known, or too many, are listed with the reason; one that sends nothing is not.
    """
    asked = operations(trace)
    called, contents = columns_of_calls(asked)
    fits = _fits(asked, np.bincount(called.operation, minlength=len(asked)))
    leaves, outer = asked.leaves()
    parts = [called.of(fits[called.operation])]
    for one, places in leaves.groups(np.flatnonzero(fits[outer] & ~leaves.is_call)):
        part = columns_of(one, leaves.times(places), places)
        parts.append(part._replace(operation=outer[part.operation]))
    columns = together(parts, order_of_sending(parts, asked))
    gave_none = fits.copy()
    gave_none[columns.operation] = False
    reasons = dict.fromkeys(np.flatnonzero(~fits).tolist(), Reason.of(ReasonKind.TOO_MANY, MOST_MESSAGES))
    for one, places in asked.groups(np.flatnonzero(gave_none)):
        if (reason := why_unknown(one)) is not None:
            reasons |= dict.fromkeys(places.tolist(), reason)
    agreed = confirmed(trace, columns.operation, columns.src, columns.dst)
    return Messages(asked, columns, contents, agreed, sorted(reasons.items(), key=itemgetter(0)))


def _fits(asked: Operations, counts: Column) -> Mask:
    """Return which operations get their messages; `counts` holds the numbers of those of calls."""
    for one, places in asked.groups(np.flatnonzero(~asked.is_call)):
        counts[places] = message_count(one)
    few = counts <= MOST_MESSAGES
    return np.asarray(few & (np.cumsum(np.where(few, counts, 0)) <= MOST_MESSAGES))


# Agreement of counters and predictions --------------------------------------------------------------------------------


def confirmed(trace: Selection, operation: Rows, src: Rows, dst: Rows) -> Mask:
    """Return which of these messages the sender's counters confirm; `operation` are indices of operations."""
    if not meters(trace.whole):
        return np.zeros(len(src), bool)
    asked, whole = operations(trace), operations(trace.whole)
    place = np.full(len(asked.table), -1, np.intp)  # So stays one that is a step of another in the whole.
    place[whole.rows] = np.arange(len(whole))
    place = place[asked.rows[operation]]
    return np.isin(_edge(trace.whole, place, src, dst), _agreements(trace.whole)) & (place >= 0)


def _edge(whole: Selection, operation: Rows, src: Rows, dst: Rows) -> Rows:
    """Return one number for the bytes of an operation from one rank to another."""
    ranks = _ranks(whole)
    return np.asarray((operation * len(ranks) + np.searchsorted(ranks, src)) * len(ranks) + np.searchsorted(ranks, dst))


@once
def _ranks(whole: Selection) -> Rows:
    return np.array(sorted(all_ranks(whole)))


@once
def _agreements(whole: Selection) -> Rows:
    """Return the edges where counters agree with predictions, around an operation or in all."""
    ledger = ledger_of(whole)
    entries, overall = ledger.entries, _exact_edges(ledger, ledger.whole)
    found = [np.empty(0, np.intp)]
    for rank, section, part in entries.sections():
        exact = _exact_edges(ledger, [(rank, section, section + 1)]) | overall
        for cell in np.unique(entries.cell[part]).tolist():
            agreed = {row.edge[1] for row in entries.cells[cell].rows if (rank, row.edge[1]) in exact}
            calls = entries.operation[part][entries.cell[part] == cell]
            found += [_edge(whole, calls, np.array(rank), np.array(dst)) for dst in agreed]
    return np.concatenate(found)


def _exact_edges(ledger: Ledger, ranges: Iterable[SampleRange]) -> set[tuple[int, int]]:
    """Return the (src, dst) that are explained to the byte between these samples of the ranks."""
    pairs, _ = ledger.pairs(ranges)
    unexplained = {(pair.src, pair.dst) for pair in pairs if pair.residue_bytes != 0}
    return {(pair.src, pair.dst) for pair in pairs} - unexplained
