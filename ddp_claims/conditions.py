"""What a time depends on: with more ranks than cores, waiting for a core is part of every time; and on the network.

On the loopback interface a transfer is copying, which takes the same cores as computing does. Over a network that is
chosen it takes time, and no core but some of the switch's: only there is something to hide.
"""

from __future__ import annotations

from functools import cache

from dlearn.cluster.this_host import cores
from dlearn.network.namespace import refusal
from dlearn.shown import count_text


def ranks_on_cores(ranks: int) -> str:
    """Return "2 ranks on 2 cores", or that more ranks take turns."""
    said = f"{count_text(ranks, 'rank')} on {cores()} cores"
    return said if ranks <= cores() else f"{said}: they take turns, which is part of the times"


@cache
def no_network() -> str:
    """Return why no network can be chosen here; "" if one can."""
    return refusal()
