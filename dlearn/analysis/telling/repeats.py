"""What is repeated in a sequence, so that it is shown once, with the number of times."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

Repeat = tuple[int, int, int]
"""Where it begins, how many items, and how many times these stand there in a row."""


def repeats(
    items: Sequence[Hashable],
    *,
    longest: int,
    fits: Callable[[int, int], bool] = lambda at, length: True,
    any_order: bool = False,
) -> Iterator[Repeat]:
    """Cut a sequence into repeats of at most `longest` items.

    At each index it takes the repeat that covers most, else one item. `fits(at, length)` says which
    may be taken. `any_order`: where that covers more, also the same items in another order each time.
    """
    kinds: dict[Hashable, int] = {}
    numbers = [kinds.setdefault(item, len(kinds)) for item in items]
    positions: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        positions[number].append(index)

    def longer(best: Repeat, lengths: Iterable[int], order: Callable[[list[int]], list[int]]) -> Repeat:
        at = best[0]
        for length in lengths:
            # In order, one that covers so much repeats all that a longer one would.
            if order is list and best[1] * best[2] >= 2 * longest:
                break
            first, times = order(numbers[at : at + length]), 1
            while order(numbers[at + times * length : at + (times + 1) * length]) == first:
                times += 1
            if times > 1 and length * times > best[1] * best[2] and fits(at, length):
                best = at, length, times
        return best

    at = 0
    while at < len(numbers):
        # In order, what is repeated begins with the same item each time.
        same = positions[numbers[at]]
        later = same[bisect_right(same, at) : bisect_right(same, at + longest)]
        best = longer((at, 1, 1), (index - at for index in later), list)
        if any_order:
            best = longer(best, range(1, min(longest, len(numbers) - at) + 1), sorted)
        yield best
        at += best[1] * best[2]
