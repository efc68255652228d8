"""What a student expected, kept before the answer is known: a small file beside the notebook, and no server."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlearn.course.questions import fits
from dlearn.errors import DlearnError
from dlearn.shown import Paragraph, Shown, Table, count_text

FILE = Path("dlearn-predictions.json")
"""In the folder that the notebook runs in: {id: [{"expected": ..., "seen": ...}, ...]}, oldest first."""

MARKS = {True: "right", False: "not right", None: "not yet compared"}
ANSWERS_SHOWN, FEWEST = 3, 3  # The most frequent first answers, of at least so many students.

Answer = float | str | dict[str, float]  # The table: who -> whom ("0>1") and how much.


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """What was expected of one question; `right` once it is compared with what was seen."""

    id: str
    expected: Answer
    seen: Answer | None = None
    tolerance: float = 0.0

    @property
    def right(self) -> bool | None:
        return None if self.seen is None else fits(self.expected, self.seen, self.tolerance)

    def against(self, seen: Answer, *, tolerance: float = 0.0) -> Prediction:
        """Keep what was seen beside what was expected; numbers fit if they differ by no more than `tolerance`, a share
        of what was seen."""
        entries = _load()
        entries[self.id][-1].update(seen=seen, tolerance=tolerance)
        _save(entries)
        return Prediction(self.id, self.expected, seen, tolerance)

    def paragraphs(self) -> Iterator[str]:
        if self.seen is None:
            yield f"{self.id}: you predict {answer_text(self.expected)}. Kept; now run the next cell."
            return
        expected, seen = answer_text(self.expected), answer_text(self.seen)
        right = ": right" if self.right else ""
        yield f"{self.id}: you predicted {expected}; the result was {seen}{right}"


def predict(id: str, expected: Answer | None, *, choices: Sequence[str] = ()) -> Prediction | None:
    """Keep what a student expects, before the cell that shows it: a number, a choice, or a table of who -> whom.

    None, the dots that the lesson leaves, keeps nothing. A second answer is kept behind the first: `report()` shows
    the first and the last. Raises DlearnError where the answer is none of `choices`, or cannot be kept.
    """
    if expected is None:
        return None
    if choices and expected not in choices:
        raise DlearnError(f"{id}: {expected!r} is none of the choices; these are: {', '.join(choices)}")
    if isinstance(expected, str) and not choices and not expected.strip("0123456789., "):
        raise DlearnError(f"{id}: give a number without quotes and commas, not {expected!r}")
    if not isinstance(expected, int | float | str | dict):
        raise DlearnError(f"{id}: expected is a number, a text or a dict, not {type(expected).__name__}")
    entries = _load()
    entries.setdefault(id, []).append({"expected": expected})
    _save(entries)
    return Prediction(id, expected)


Pair = tuple[Prediction, Prediction]  # A student's first and last one.


@dataclass(frozen=True, repr=False)
class BeforeAndAfter(Shown):
    """For each question the first and the last prediction."""

    pairs: tuple[Pair, ...]

    def paragraphs(self) -> Iterator[str]:
        if not self.pairs:
            yield "no predictions yet"
            return
        before, after = _right(self.pairs)
        yield f"of {count_text(len(self.pairs), 'prediction')}, {before} right the first time, {after} the last time"
        for first, last in self.pairs:
            later = "" if last is first else f"; the last time {answer_text(last.expected)}: {MARKS[last.right]}"
            yield f"{first.id}: {answer_text(first.expected)}: {MARKS[first.right]}{later}"


def report() -> BeforeAndAfter:
    """Return the first and the last prediction of each question in this folder."""
    return BeforeAndAfter(tuple(_pairs_in(FILE).values()))


def _pairs_in(file: Path) -> dict[str, Pair]:
    """Return the first and the last prediction of each question of a file."""
    pairs = {}
    for id, entries in _load(file).items():
        kept = [Prediction(id, each["expected"], each.get("seen"), each.get("tolerance", 0.0)) for each in entries]
        pairs[id] = kept[0], kept[-1]
    return pairs


def _right(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Count the right predictions among the first ones, and among the last ones."""
    right = [each.right for pair in pairs for each in pair]
    return right[::2].count(True), right[1::2].count(True)


# A class -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ClassStats(Shown):
    """Of each question every student's first and last prediction."""

    students: int
    pairs: dict[str, list[Pair]]

    def paragraphs(self) -> Iterator[Paragraph]:
        questions = count_text(len(self.pairs), "question")
        yield f"{count_text(self.students, 'student')} predicted, in {questions}"
        rows = [["question", "students", "right first", "right last", "frequent first answers"]]
        for id, pairs in sorted(self.pairs.items()):
            first, last = _right(pairs)
            rows.append([id, str(len(pairs)), str(first), str(last), _most_expected(pairs)])
        yield Table(rows, numbers=3)


def _most_expected(pairs: Sequence[Pair]) -> str:
    """Return the most frequent first answers; rare ones could identify a student."""
    counts = Counter(answer_text(first.expected) for first, _ in pairs).most_common(ANSWERS_SHOWN)
    often = [f"{answer} ({count})" for answer, count in counts if count >= FEWEST]
    return ", ".join(often) or f"no answer {FEWEST} times"


def stats(folder: str | Path) -> ClassStats:
    """Count the predictions in all files below a folder, one file for each student.

    A copy of a file counts as another student. DlearnError without a file, or where one is damaged.
    """
    files = sorted(Path(folder).rglob(FILE.name))
    if not files:
        raise DlearnError(f"below {folder} is no {FILE.name}: collect those that lie beside the students' notebooks")
    pairs: dict[str, list[Pair]] = {}
    for file in files:
        for id, pair in _pairs_in(file).items():
            pairs.setdefault(id, []).append(pair)
    return ClassStats(len(files), pairs)


def answer_text(answer: Answer) -> str:
    if isinstance(answer, dict):
        return ", ".join(f"{key} {answer_text(value)}" for key, value in answer.items())
    return answer if isinstance(answer, str) else f"{answer:,}"


def _load(file: Path = FILE) -> dict[str, list[dict[str, Any]]]:
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if all(each and all("expected" in dict(one) for one in each) for each in entries.values()):
            return dict(entries)
    except (ValueError, AttributeError, TypeError):
        pass
    raise DlearnError(f"{file} holds no predictions: move it away, and predict again")


def _save(entries: dict[str, list[dict[str, Any]]]) -> None:
    """Write all anew, in one step: a kernel that dies leaves the old file or the new one."""
    beside = FILE.with_suffix(".part")
    beside.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    os.replace(beside, FILE)
