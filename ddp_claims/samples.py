"""Times with their spread, what they depend on, and when a difference of times counts as seen.

A median of n samples lies, with a probability that needs no assumption on how times are distributed, between the k-th
smallest and the k-th largest: that is the sign test (Conover, Practical Nonparametric Statistics, section 3.2). A claim
about times is confirmed only where this whole interval lies on its side.

With more ranks than cores, waiting for a core is part of every time. On the loopback interface a transfer is copying,
which takes the same cores as computing does. Over a network that is chosen it takes time, and no core but some of the
switch's: only there is something to hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from statistics import median

from dlearn.events.this_host import cores
from dlearn.network.namespace import refusal
from dlearn.shown import count_text

FEWEST = 10
"""Samples behind any statement about times."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing, or of one ratio in alternating pairs. At least `FEWEST`, else ValueError."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) < FEWEST:
            raise ValueError(f"{len(self.values)} samples; a statement about times needs {FEWEST}.")

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Return an interval with the true median, with a probability of at least 95 %."""
        ordered = sorted(self.values)
        k = depth(self.n)
        return ordered[k], ordered[-1 - k]

    @property
    def with_interval(self) -> str:
        """Return "1.38 (1.21 to 1.52)": the median and its interval."""
        low, high = self.interval
        return f"{self.median:.2f} ({low:.2f} to {high:.2f})"

    @property
    def middle_half(self) -> tuple[float, float]:
        """Return the spread: a quarter of the samples is below it, a quarter above."""
        ordered = sorted(self.values)
        quarter = self.n // 4
        return ordered[quarter], ordered[-1 - quarter]

    def text(self, unit: str, *, scale: float = 1.0, digits: int = 2) -> str:
        """Return "1.42 ms (middle half 1.30 to 1.61, n = 12)"."""
        low, high = self.middle_half
        shown = [f"{each * scale:.{digits}f}" for each in (self.median, low, high)]
        return f"{shown[0]}{unit and f' {unit}'} (middle half {shown[1]} to {shown[2]}, n = {self.n})"


def depth(n: int) -> int:
    """Count the samples to leave out at each end: P(at most k of n coins show heads) <= 2.5 %."""
    tail, k = 1 / 2**n, 0
    while tail + comb(n, k + 1) / 2**n <= (1 - CONFIDENCE) / 2:
        k += 1
        tail += comb(n, k) / 2**n
    return k


def ratios(above: Sequence[float], below: Sequence[float]) -> Samples:
    """Return the ratios of pairs that were measured in turn, so that slowdowns cancel."""
    return Samples(tuple(a / b for a, b in zip(above, below, strict=True)))


def ranks_on_cores(ranks: int) -> str:
    """Return "2 ranks on 2 cores", or that more ranks take turns."""
    said = f"{count_text(ranks, 'rank')} on {cores()} cores"
    return said if ranks <= cores() else f"{said}: they take turns, which is part of the times"


@cache
def no_network() -> str:
    """Return why no network can be chosen here; "" if one can."""
    return refusal()
