"""What is repeated in a sequence, so that it is shown once, with the number of times."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple


class Repeat(NamedTuple):
    """`length` items from `at` on, which stand there `times` times in a row."""

    at: int
    length: int
    times: int


def repeats(
    items: Sequence[Hashable],
    *,
    longest: int,
    fits: Callable[[int, int], bool] = lambda at, length: True,
    any_order: bool = False,
) -> Iterator[Repeat]:
    """Cut a sequence into repeats of at most `longest` items: at each place the one that covers most, else one item.

    `fits(at, length)` says which may be taken. `any_order`: where that covers more, also the same items in another
    order each time.
    """
    kinds: dict[Hashable, int] = {}
    numbers = [kinds.setdefault(item, len(kinds)) for item in items]
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        places[number].append(place)
    at = 0
    while at < len(numbers):
        mine = places[numbers[at]]
        again = bisect_right(mine, at)
        # In order, what is repeated begins with the same item each time.
        lengths = [place - at for place in mine[again : again + longest] if place - at <= longest]
        best = _longest(numbers, Repeat(at, 1, 1), lengths, fits, most=2 * longest)
        if any_order:
            lengths = list(range(1, min(longest, len(numbers) - at) + 1))
            best = _longest(numbers, best, lengths, fits, order=sorted)
        yield best
        at += best.length * best.times


def _longest(
    numbers: list[int],
    best: Repeat,
    lengths: list[int],
    fits: Callable[[int, int], bool],
    most: int | None = None,
    order: Callable[[list[int]], list[int]] = list,
) -> Repeat:
    """The repeat that covers most, if more than `best`. One that covers `most` repeats all that a longer one would."""
    at = best.at
    for length in lengths:
        if most is not None and best.length * best.times >= most:
            break
        first, times = order(numbers[at : at + length]), 1
        while order(numbers[at + times * length : at + (times + 1) * length]) == first:
            times += 1
        if times > 1 and length * times > best.length * best.times and fits(at, length):
            best = Repeat(at, length, times)
    return best
