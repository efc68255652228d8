"""How answers show themselves: rows of cells as lines of text or as HTML, lists, counts with their nouns."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import msgspec


class Shown(msgspec.Struct, frozen=True):
    """Show an answer as its text, in a terminal and in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


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


def first_few(names: Sequence[str], most: int, between: str = ", ") -> str:
    """ "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def html_list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"


def html_table(table: Sequence[Sequence[str]]) -> str:
    """The first row is the head; the first cell of each other row is its name."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table[0])
    body = ""
    for name, *row in table[1:]:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def ms(duration_ns: int) -> str:
    """ "18.14": with two decimals, for columns in ms."""
    return f"{duration_ns / 1e6:.2f}"


def count_text(count: int, noun: str) -> str:
    """ "1 rank", "2,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
