"""Columns of numbers: rows that are equal, and spans of time, millions of them at once."""

import numpy as np

from dlearn.events.event_table import Mask, Rows


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
