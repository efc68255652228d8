"""Runs that hang. The clock ends them; on a busy machine that may be before the ranks are stuck."""

from collections.abc import Callable
from typing import Any

from dlearn import Cluster
from dlearn.cluster.run import Run
from dlearn.errors import TraceError

FIRST_SECONDS, MOST_SECONDS = 1.0, 32.0

Stuck = Callable[[Run], bool]


def end_when(stuck: Stuck, cluster: Cluster, function: Any, *args: Any) -> Run:
    """A run that was ended when it was `stuck`: if it was not yet, it is run again, for twice as long."""
    seconds = FIRST_SECONDS
    while True:
        run = cluster.run(function, *args, timeout=seconds, check=False)
        if seconds >= MOST_SECONDS or stuck(run):
            return run
        seconds *= 2


def in_calls(*numbers: int) -> Stuck:
    """So many ranks are inside a call, each in its group's call of this number."""

    def stuck(run: Run) -> bool:
        try:
            events = run.trace.events
        except TraceError:
            return False  # No rank has come so far as to write its first line.
        first: dict[int, int] = {}
        for event in events:
            if event.end_ns is None and hasattr(event, "seq"):
                first.setdefault(event.rank, event.seq)
        return sorted(first.values()) == list(numbers)

    return stuck
