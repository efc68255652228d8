"""What is equal, as items and as rows of numbers; and spans of time, millions of them at once."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np

from dlearn.events.event_table import Mask, Rows

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> defaultdict[Key, list[Item]]:
    """Return the items of each key; keys and items stay in their order."""
    groups: defaultdict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def is_new(*columns: np.ndarray) -> Mask:
    """Return which rows differ from the row before them; the first row does."""
    new = np.zeros(len(columns[0]), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def number_rows(*columns: np.ndarray) -> tuple[Rows, Rows]:
    """Return the same number for rows that are equal in all columns, and the first row of each number."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), bool)
    for column in columns:  # One after the other: a copy of each may be large.
        new |= is_new(column[order])
    number = np.empty(len(order), np.intp)
    number[order] = np.cumsum(new) - 1
    return number, order[new]


def disjoint(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return spans that cover the same time, none of them twice; some are empty."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    begun = start[order]
    begun[1:] = np.maximum(begun[1:], reached[:-1])
    return begun, np.maximum(begun, reached)
