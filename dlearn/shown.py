"""How answers show themselves: sentences and tables, as text in a terminal and as a card in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec


class Table(NamedTuple):
    """Rows of cells, a head first. The first `names` columns begin at the left, the others, numbers, end at the right.

    The columns after the first `numbers` of these, if they are fewer, are words again.
    """

    rows: Sequence[Sequence[str]]
    names: int = 1
    numbers: int | None = None
    title: str = ""

    def lines(self) -> list[str]:
        """The title, if there is one, and a line a row."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        padded = (map(self._padded, row, widths, range(len(row))) for row in self.rows)
        return [*([self.title] if self.title else []), *("  ".join(cells).rstrip() for cells in padded)]

    def html(self) -> str:
        """The first row is the head; the first cell of each other row is its name."""
        head = "".join(self._cell(text, place, "th", "col") for place, text in enumerate(self.rows[0]))
        body = "".join(f"<tr>{self._html_row(row)}</tr>" for row in self.rows[1:])
        title = f'<caption style="text-align:left">{html.escape(self.title)}</caption>' if self.title else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _html_row(self, row: Sequence[str]) -> str:
        name = self._cell(row[0], 0, "th", "row")
        return name + "".join(self._cell(text, place, "td") for place, text in enumerate(row[1:], 1))

    def _cell(self, text: str, place: int, tag: str, scope: str = "") -> str:
        side = "right" if self._is_number(place) else "left"
        scoped = f' scope="{scope}"' if scope else ""
        return f'<{tag}{scoped} style="text-align:{side}">{html.escape(text)}</{tag}>'

    def _padded(self, cell: str, width: int, place: int) -> str:
        return cell.rjust(width) if self._is_number(place) else cell.ljust(width)

    def _is_number(self, place: int) -> bool:
        end = None if self.numbers is None else self.names + self.numbers
        return place >= self.names and (end is None or place < end)


Paragraph = str | Table


class Shown:
    """Show an answer by its paragraphs, in a terminal and in a notebook. The first is the finding."""

    def paragraphs(self) -> Iterable[Paragraph]:
        """Sentences and tables; an empty sentence is a blank line."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(line for part in self.paragraphs() for line in _lines(part))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        finding, *rest = self.paragraphs()
        shown = [_html(finding) if isinstance(finding, Table) else f"<p><strong>{html.escape(finding)}</strong></p>"]
        for of_text, group in groupby(rest, key=lambda part: isinstance(part, str)):
            alike = list(group)
            shown += [_list(map(str, alike))] if of_text else map(_html, alike)
        return "".join(shown)


class Answer(msgspec.Struct, Shown, frozen=True):
    """A frozen value that shows itself."""

    __repr__ = Shown.__repr__


def _lines(part: Paragraph) -> list[str]:
    return [part] if isinstance(part, str) else part.lines()


def _html(part: Paragraph) -> str:
    return part.html() if isinstance(part, Table) else html.escape(part)


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences if sentence)
    return f"<ul>{items}</ul>" if items else ""


def first_few(names: Sequence[str], most: int, between: str = ", ") -> str:
    """ "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class RankNames(dict[int, str]):
    """What people call each rank; one that has no name is "rank 2"."""

    def __missing__(self, rank: int) -> str:
        return f"rank {rank}"

    def short(self, rank: int) -> str:
        """ "2" of one that has no name; else its name."""
        return str(rank) if self[rank] == f"rank {rank}" else self[rank]

    def together(self, ranks: Sequence[int], most: int = 3) -> str:
        """ "rank 1", "ranks 1 and 2", "ranks 1, 2, 3 and 5 more"."""
        if len(ranks) == 1:
            return self[ranks[0]]
        numbered = all(self[rank] == f"rank {rank}" for rank in ranks)
        names = [self.short(rank) if numbered else self[rank] for rank in ranks]
        told = first_few(names, most) if len(names) > most else f"{', '.join(names[:-1])} and {names[-1]}"
        return "ranks " * numbered + told


def ms(duration_ns: int) -> str:
    """ "18.14": with two decimals, for columns in ms."""
    return f"{duration_ns / 1e6:.2f}"


def count_text(count: int, noun: str) -> str:
    """ "1 rank", "2,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
