"""How answers show themselves: sentences and tables, as text in a terminal and as a card in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import msgspec

from dlearn.errors import optional

if TYPE_CHECKING:
    import pandas


class Table(NamedTuple):
    """Rows, a head first: `names` columns aligned left, `numbers` (or all) right, the rest left."""

    rows: Sequence[Sequence[str]]
    names: int = 1
    numbers: int | None = None
    title: str = ""

    def lines(self) -> list[str]:
        """Return the title, if there is one, and a line a row."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [self.title] if self.title else []
        for row in self.rows:
            lines.append("  ".join(map(self._padded, row, widths, range(len(row)))).rstrip())
        return lines

    def html(self) -> str:
        """Return an HTML table; the first row is the head, and each row begins with its name."""
        names = enumerate(self.rows[0])
        head = "".join(self._cell(text, column, "th", "col") for column, text in names)
        body = ""
        for first, *rest in self.rows[1:]:
            cells = [self._cell(text, column, "td") for column, text in enumerate(rest, 1)]
            body += f"<tr>{self._cell(first, 0, 'th', 'row')}{''.join(cells)}</tr>"
        title = f'<caption style="text-align:left">{html.escape(self.title)}</caption>' if self.title else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cell(self, text: str, column: int, tag: str, scope: str = "") -> str:
        side = "right" if self._is_number(column) else "left"
        scoped = f' scope="{scope}"' if scope else ""
        return f'<{tag}{scoped} style="text-align:{side}">{html.escape(text)}</{tag}>'

    def _padded(self, cell: str, width: int, column: int) -> str:
        return cell.rjust(width) if self._is_number(column) else cell.ljust(width)

    def _is_number(self, column: int) -> bool:
        end = None if self.numbers is None else self.names + self.numbers
        return column >= self.names and (end is None or column < end)


Paragraph = str | Table
Found = TypeVar("Found", bound=Any)
_ROWS_SHOWN = 40


class Shown:
    """Show an answer by its paragraphs, in a terminal and in a notebook. The first is the finding."""

    def paragraphs(self) -> Iterable[Paragraph]:
        """Return sentences and tables; an empty sentence is a blank line."""
        raise NotImplementedError

    def __str__(self) -> str:
        parts = [part if isinstance(part, str) else "\n".join(part.lines()) for part in self.paragraphs()]
        return "\n".join(parts)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        finding, *rest = self.paragraphs()
        shown = [_html(finding) if isinstance(finding, Table) else f"<p><strong>{html.escape(finding)}</strong></p>"]
        for of_text, group in groupby(rest, key=lambda part: isinstance(part, str)):
            parts = list(group)
            shown += [_list(map(str, parts))] if of_text else map(_html, parts)
        return "".join(shown)


class Result(msgspec.Struct, Shown, frozen=True):
    """A frozen value that shows itself."""

    __repr__ = Shown.__repr__

    def records(self) -> Iterable[Mapping[str, object]]:
        """Return its facts: for each row of `to_frame` the value of each column."""
        raise NotImplementedError

    def to_frame(self) -> pandas.DataFrame:
        """Return `records` as a table of pandas (needs pandas); times in ns, sizes in bytes."""
        return optional("pandas", needed_by="to_frame").DataFrame([*self.records()])


class Findings(Shown, tuple[Found, ...]):
    """What an analysis found, in its order: a tuple that shows itself as a table."""

    labels: RankNames

    @classmethod
    def of(cls, found: Iterable[Found], labels: RankNames) -> Self:
        """Keep what was found: results, or what has a method `row` of the ranks' names."""
        findings = cls(found)
        findings.labels = labels
        return findings

    def records(self) -> Iterator[Mapping[str, object]]:
        for each in self:
            yield from each.records() if isinstance(each, Result) else [each.row(self.labels)]

    def to_frame(self) -> pandas.DataFrame:
        """Return `records` as a table of pandas, as a `Result` does."""
        return optional("pandas", needed_by="to_frame").DataFrame([*self.records()])

    def paragraphs(self) -> Iterator[Paragraph]:
        rows = [*self.records()]
        cells = [[*map(str, row.values())] for row in rows[:_ROWS_SHOWN]]
        yield Table([[*rows[0]], *cells], numbers=0) if rows else "Nothing was found."
        yield from [f"and {len(rows) - _ROWS_SHOWN:,} more"] * (len(rows) > _ROWS_SHOWN)


def _html(part: Paragraph) -> str:
    return part.html() if isinstance(part, Table) else html.escape(part)


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences if sentence)
    return f"<ul>{items}</ul>" if items else ""


def in_a_notebook() -> bool:
    """Return whether a kernel runs this process. A terminal's IPython has none."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def first_few(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return "a, b and c"; of more names than `most`, "a, b and 3 more"."""
    if len(names) > most:
        return first_few(names, most)
    if len(names) < 2:
        return "".join(names) or "nobody"
    return f"{', '.join(names[:-1])} and {names[-1]}"


class RankNames(dict[int, str]):
    """The label of each rank; one that has no name of its own is "rank 2"."""

    def __missing__(self, rank: int) -> str:
        return f"rank {rank}"

    def short(self, rank: int) -> str:
        """Return "2" of a rank without a name; else its name."""
        return str(rank) if self[rank] == f"rank {rank}" else self[rank]

    def listed(self, ranks: Iterable[int]) -> str:
        """Return "rank 1, rank 2 and rank 3"."""
        return listed([self[rank] for rank in ranks])

    def together(self, ranks: Sequence[int], most: int = 3) -> str:
        """Return "rank 1", "ranks 1 and 2", "ranks 1, 2, 3 and 5 more"."""
        if len(ranks) == 1:
            return self[ranks[0]]
        if any(self[rank] != f"rank {rank}" for rank in ranks):
            return listed([self[rank] for rank in ranks], most)
        return f"ranks {listed(list(map(str, ranks)), most)}"


def capital(sentence: str, rank: int | None, labels: RankNames) -> str:
    """Begin a sentence about this rank with a capital, unless it begins with the rank's own name."""
    numbered = rank is not None and labels.short(rank) == str(rank)
    return capitalized(sentence) if numbered else sentence


def capitalized(title: str) -> str:
    """Return "Step 1", as a sentence begins."""
    return title[:1].upper() + title[1:]


def waits(count: int) -> str:
    """Return the verb of so many ranks that wait."""
    return "waits" if count == 1 else "wait"


def count_text(count: int, noun: str) -> str:
    """Return "1 rank", "2,000 messages"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


Scale = tuple[str, int]
"""The name of a unit, and how many of the smallest unit it is."""
_SIZES: tuple[Scale, ...] = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
_TIMES: tuple[Scale, ...] = (("µs", 10**3), ("ms", 10**6), ("s", 10**9))


def size_text(size: int | None) -> str:
    """Return "144 B", "28.9 kB", "4.00 MB": three digits, decimal units; "? B" of an unknown size."""
    if size is None:
        return "? B"
    return f"{size} B" if size < 1000 else _in_unit(size, unit_of(size))


def time_text(duration_ns: int) -> str:
    """Return "310 µs", "3.10 ms", "1.50 s": three digits."""
    return _in_unit(duration_ns, unit_of(duration_ns, _TIMES))


def ms(duration_ns: int) -> str:
    """Return "18.14": with two decimals, for columns in ms."""
    return f"{duration_ns / 1e6:.2f}"


def three_digits(number: float) -> str:
    """Return "1.50", "15.0", "150"."""
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{decimals}f}"


def unit_of(value: int, units: Sequence[Scale] = _SIZES) -> Scale:
    """Return the unit in which three digits show this value."""
    # 999.5 would be rounded to four digits, so it goes to the next unit.
    return next((unit for unit in units if value < 999.5 * unit[1]), units[-1])


def _in_unit(value: int, unit: Scale) -> str:
    return f"{three_digits(value / unit[1])} {unit[0]}"
