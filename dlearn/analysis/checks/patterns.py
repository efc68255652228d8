"""Who sends to whom in the textbook's patterns, as sets of edges (sender, receiver) between group ranks 0 ... n-1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

Edge = tuple[int, int]
Pattern = Literal["ring", "star", "tree", "doubling", "all"]

NAMES: dict[str, str] = {
    "ring": "a ring",
    "star": "a star",
    "tree": "a binomial tree",
    "doubling": "recursive doubling",
    "all": "an all-to-all",
}
"""Each pattern, as a sentence calls it."""


def edges_of(pattern: Pattern, ranks: int) -> list[frozenset[Edge]]:
    """All the ways in which so many ranks can form this pattern: to the left or to the right, from each root, ...

    For two ranks most patterns are one.
    """
    match pattern:
        case "ring":
            return [frozenset((rank, (rank + step) % ranks) for rank in range(ranks) if ranks > 1) for step in (1, -1)]
        case "star":
            spokes = ([(root, leaf) for leaf in range(ranks) if leaf != root] for root in range(ranks))
            return [way for each in spokes for way in _ways(each)]
        case "tree":
            return [way for root in range(ranks) for tree in _binomial(ranks, root) for way in _ways(tree)]
        case "doubling":
            return [frozenset(_hypercube(core, pairs)) for core, pairs in _folded(ranks)]
        case "all":
            return [frozenset((src, dst) for src in range(ranks) for dst in range(ranks) if src != dst)]


def _ways(outward: Sequence[Edge]) -> list[frozenset[Edge]]:
    """From the root, as in a broadcast; to it, as in a reduce; both, as in an all-reduce."""
    down, up = frozenset(outward), frozenset((child, parent) for parent, child in outward)
    return [down, up, down | up]


def _binomial(ranks: int, root: int) -> Iterator[list[Edge]]:
    """The two trees in use, by ranks counted from the root: a child is its parent with a bit set above the highest
    (gloo), or below the lowest (MPICH)."""
    gloo = [(child - (1 << child.bit_length() - 1), child) for child in range(1, ranks)]
    mpich = [(child & child - 1, child) for child in range(1, ranks)]
    for tree in (gloo, mpich):
        yield [((parent + root) % ranks, (child + root) % ranks) for parent, child in tree]


def _folded(ranks: int) -> Iterator[tuple[list[int], list[Edge]]]:
    """Doubling needs a power of two: the ranks beyond it hand their data to a partner first, and get it back last.

    The partners are the first ranks, or (MPICH) each of the first ones has its neighbour as partner.
    """
    power = 1 << (ranks.bit_length() - 1)
    rest = ranks - power
    yield list(range(power)), [(rank, power + rank) for rank in range(rest)]
    for stays in (0, 1):
        pairs = [(2 * i + stays, 2 * i + 1 - stays) for i in range(rest)]
        yield [core for core, _ in pairs] + list(range(2 * rest, ranks)), pairs


def _hypercube(core: Sequence[int], pairs: Sequence[Edge]) -> Iterator[Edge]:
    """In step k the core's ranks exchange with the one 2^k away, their numbers differ in bit k; and so do the pairs."""
    for place, rank in enumerate(core):
        for bit in range((len(core) - 1).bit_length()):
            yield rank, core[place ^ (1 << bit)]
    for one, other in pairs:
        yield from ((one, other), (other, one))
