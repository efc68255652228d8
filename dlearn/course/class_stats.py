"""What a class expected: the prediction files of all students, counted; no name and no path is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlearn.course.predictions import FILE, Prediction, answer_text, kept_in
from dlearn.errors import DlearnError
from dlearn.shown import Paragraph, Shown, Table

ANSWERS_SHOWN, FEWEST = 3, 3
"""Of each question the most frequent first answers; an answer that fewer students gave is not shown."""


@dataclass(frozen=True, repr=False)
class ClassStats(Shown):
    """Of each question every student's first and last prediction."""

    students: int
    pairs: dict[str, tuple[tuple[Prediction, Prediction], ...]]

    def paragraphs(self) -> Iterator[Paragraph]:
        yield f"{self.students} students have predicted something, in {len(self.pairs)} questions"
        rows = [["question", "students", "right at first", "right at last", "most expected at first"]]
        for id, pairs in sorted(self.pairs.items()):
            first = sum(pair[0].right is True for pair in pairs)
            last = sum(pair[1].right is True for pair in pairs)
            rows.append([id, str(len(pairs)), str(first), str(last), self.expected(id)])
        yield Table(rows, numbers=3)

    def expected(self, id: str) -> str:
        """The most frequent first answers, as text with their numbers; rare ones could tell who gave them."""
        counts = Counter(answer_text(first.expected) for first, _ in self.pairs[id])
        often = [f"{answer} ({count})" for answer, count in counts.most_common(ANSWERS_SHOWN) if count >= FEWEST]
        return ", ".join(often) or f"no answer {FEWEST} times"


def stats(folder: str | Path) -> ClassStats:
    """Of all prediction files below a folder, one for each student. DlearnError where there is none, or one is damaged.

    A student whose file lies there twice is counted twice: a copy cannot be told from a second student.
    """
    files = sorted(Path(folder).rglob(FILE.name))
    if not files:
        raise DlearnError(f"below {folder} is no {FILE.name}: collect those that lie beside the students' notebooks")
    pairs: dict[str, list[tuple[Prediction, Prediction]]] = {}
    for file in files:
        for id, kept in kept_in(file).items():
            pairs.setdefault(id, []).append((kept[0], kept[-1]))
    return ClassStats(len(files), {id: tuple(each) for id, each in pairs.items()})
