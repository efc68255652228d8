"""Where calls are too many for bars: the share of each stretch of time that a rank spends in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from dlearn.draw.arrows import Color
from dlearn.draw.palette import Look, look
from dlearn.join.columns import disjoint, spread
from dlearn.trace.tables.operations import Calls


@dataclass(frozen=True)
class Busy:
    """For each rank and look, a share from 0 to 1 for each bin. Calls at the same time count once.

    In `waiting`, all of the rank's calls of that look wait for a last rank; in `transfer`, one or more do not.
    """

    calls: int
    transfer: dict[tuple[int, Look], np.ndarray]
    waiting: dict[tuple[int, Look], np.ndarray]


def busy_of(calls: Calls, *, start_ns: int, end_ns: int, bins: int) -> Busy:
    """Of the calls whose end was seen; all of the time from `start_ns` to `end_ns`, in `bins`."""
    width_ns = (end_ns - start_ns) / bins
    until_ns = np.where(calls.ended, calls.end_ns, calls.start_ns)
    start, end = (calls.start_ns - start_ns) / width_ns, (until_ns - start_ns) / width_ns
    middle = (calls.transfer_ns - start_ns) / width_ns
    # A call that was done before the last rank came has waited for nobody.
    middle = np.where(end <= middle, start, middle)
    transfer: dict[tuple[int, Look], np.ndarray] = {}
    waiting: dict[tuple[int, Look], np.ndarray] = {}
    looks = list(dict.fromkeys(map(look, calls.ops)))
    number = np.array([looks.index(look(name)) for name in calls.ops])
    kind = calls.rank * len(looks) + number[calls.op]
    for each in np.unique(kind[calls.ended]):
        mine = np.flatnonzero((kind == each) & calls.ended)
        key = (int(each) // len(looks), looks[int(each) % len(looks)])
        inside = _covered(start[mine], end[mine], bins)
        transfer[key] = _covered(middle[mine], end[mine], bins)
        waiting[key] = np.maximum(inside - transfer[key], 0)
    return Busy(len(calls), transfer, waiting)


def _covered(start: np.ndarray, end: np.ndarray, bins: int) -> np.ndarray:
    begun, over = disjoint(start, end)
    return spread(begun, over, over - begun, bins=bins)


def draw_busy(ax: Axes, busy: Busy, *, rank: int, right: float, box: tuple[float, float]) -> None:
    """Stacked from the bottom: what is transferred in its colour, what waits paler. A full strip is all of the time."""
    mine = {look: shares for (owner, look), shares in busy.transfer.items() if owner == rank}
    everything: list[tuple[Color, np.ndarray, str]] = []
    everything += [(look.color, shares, f"time in {look.family}") for look, shares in mine.items()]
    everything += [(look.pale, busy.waiting[rank, look], f"time waiting in {look.family}") for look in mine]
    # Calls of several kinds at the same time share the strip.
    if not everything:
        return
    whole = np.maximum(1, sum(shares for _, shares, _ in everything))
    lower = np.zeros(len(whole))
    for color, shares, gid in everything:
        upper = lower + shares / whole
        _draw_steps(ax, lower, upper, right=right, box=box, color=color, gid=gid)
        lower = upper


def _draw_steps(
    ax: Axes, lower: np.ndarray, upper: np.ndarray, *, right: float, box: tuple[float, float], color: Color, gid: str
) -> None:
    """Steps over time as an area from `lower` to `upper`, both from 0, the bottom of the box, to 1, its top."""
    top, bottom = box
    at = np.linspace(0, right, len(upper) + 1).repeat(2)[1:-1]
    above, below = (np.column_stack([at, bottom - edge.repeat(2) * (bottom - top)]) for edge in (upper, lower))
    outline = np.concatenate([above, below[::-1]])
    ax.add_collection(PolyCollection([outline], facecolor=color, edgecolor="none", zorder=2, gid=gid), autolim=False)
