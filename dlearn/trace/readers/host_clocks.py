"""The clocks of hosts, compared by what ends on all ranks at once: collectives that nobody leaves before all have come.

The kernels of one end within microseconds of each other on all ranks of a host, while their starts lie up to
milliseconds apart. So the median difference of the ends is by how much two clocks differ, and the largest deviation
from it the error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from dlearn.trace.clocks import ALL_WAIT
from dlearn.trace.event import Collective, Header, Line
from dlearn.trace.job_facts import ClockReading

Call = tuple[str, int, str]
"""A group, a number in it, an op."""


def compare(ranks: Sequence[tuple[Header, list[Line]]]) -> None:
    """Add a reading to the lines of each host's first rank: against the host of the first of all, through others if
    the two have no operation in common."""
    ends: dict[str, dict[Call, list[int]]] = defaultdict(lambda: defaultdict(list))
    for header, lines in ranks:
        for line in lines:
            if isinstance(line, Collective) and line.op.startswith(ALL_WAIT) and line.end_ns is not None:
                ends[header.host][line.group, line.seq, line.op].append(line.end_ns)
    first = ranks[0][0].host if ranks else ""
    known, waiting = {first: (0, 0)}, [first]
    while waiting:
        near = waiting.pop(0)
        for host in sorted(ends.keys() - known.keys()):
            common = ends[near].keys() & ends[host].keys()
            if not common:
                continue
            apart = {call: round(median(ends[near][call]) - median(ends[host][call])) for call in common}
            offset = round(median(apart.values()))
            error = max(abs(each - offset) for each in apart.values())
            known[host] = (known[near][0] + offset, known[near][1] + error)
            waiting.append(host)
            lines = next(lines for header, lines in ranks if header.host == host)
            lines.append(
                ClockReading(
                    at_ns=round(median(ends[host][call][0] for call in common)),
                    offset_ns=known[host][0],
                    error_ns=known[host][1],
                    reference=f"host {first}",
                    rounds=len(common),
                )
            )
