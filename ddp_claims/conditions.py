"""What a time depends on, in words: with more ranks than cores, waiting for a core is part of every time."""

from __future__ import annotations

import os

from dlearn.shown import count_text


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_on_cores(ranks: int) -> str:
    """ "2 ranks on 2 cores", or what it means that there are more ranks."""
    said = f"{count_text(ranks, 'rank')} on {cores()} cores"
    return said if ranks <= cores() else f"{said}: they take turns, which is part of the times"
