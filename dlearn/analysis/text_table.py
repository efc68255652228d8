"""Rows of cells as lines of text: names to the left, numbers to the right; counts with their nouns."""

from __future__ import annotations

from collections.abc import Sequence


def lines_of(table: Sequence[Sequence[str]], *, names: int) -> list[str]:
    """A line a row; the first `names` columns begin at the left, the others end at the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))] if table else []
    return [
        "  ".join(
            cell.ljust(width) if place < names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def ms(duration_ns: int) -> str:
    """ "18.14": with two decimals, for columns in ms."""
    return f"{duration_ns / 1e6:.2f}"


def count_text(count: int, noun: str) -> str:
    """ "1 rank", "2,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
