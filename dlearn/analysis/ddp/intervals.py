"""Stretches of time as sorted intervals that do not touch: what they cover together, have in common, and leave out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""From, to, in ns."""


def union(found: Iterable[Interval]) -> list[Interval]:
    """What they cover; overlapping ones count once."""
    joined: list[Interval] = []
    for start, end in sorted(each for each in found if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What both cover."""
    return union((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)


def without(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What `a` covers and `b` does not."""
    left = union(a)
    for start, end in b:
        left = [
            piece for x in left for piece in ((x[0], min(x[1], start)), (max(x[0], end), x[1])) if piece[0] < piece[1]
        ]
    return left


def length_ns(found: Iterable[Interval]) -> int:
    """Of disjoint intervals."""
    return sum(end - start for start, end in found)
