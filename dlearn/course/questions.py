"""Compare short answers with the expected ones, which are data in answers.toml: right, or not yet and a hint."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from numbers import Real
from typing import Any

from dlearn.errors import DlearnError
from dlearn.shown import Shown

FILE = files("dlearn.course") / "answers.toml"
ROUNDING = 1e-9  # Relative difference that rounding may make.
HEADLINES = {None: "your turn", True: "right", False: "not yet"}


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """The outcome of one answer; `right` is None while there is nothing to compare."""

    id: str
    right: bool | None
    says: str = ""

    def paragraphs(self) -> Iterator[str]:
        colon = ": " if self.says else ""
        yield f"{self.id}: {HEADLINES[self.right]}{colon}{self.says}"


def answer(id: str, value: Any, *, measured: Any = None) -> Verdict:
    """Compare a number, a text, a list or a dict with the entry of that id, LESSON.NAME, or with what was measured.

    None, which the lesson leaves to fill in, is not compared. Raises DlearnError where there is no such entry, or
    where the type of the answer cannot be compared.
    """
    entry = find_entry(id)
    leaves = list(_leaves(value))
    if any(leaf is None for leaf in leaves):
        unit = f", in {entry['unit']}," if "unit" in entry else ""
        return Verdict(id, None, f"put your answer{unit} in place of None")
    strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Real | str)]
    if strange:
        raise DlearnError(f"{id}: an answer is a number, a text, a list or a dict, not {strange[0]}")
    if measured is None and not entry.keys() & {"value", "any", "between"}:
        return Verdict(id, None, "this run measured nothing to compare your answer with")
    if _accepts(entry, value, measured):
        return Verdict(id, True, entry.get("why", ""))
    return Verdict(id, False, _hint(entry, value))


def find_entry(id: str) -> dict[str, Any]:
    """Return the entry of that id. Raises DlearnError with the ids of its lesson where there is none."""
    lesson, _, name = id.partition(".")
    of_lesson = tomllib.loads(FILE.read_text(encoding="utf-8")).get(lesson, {})
    if name not in of_lesson:
        known = ", ".join(f"{lesson}.{each}" for each in of_lesson) or "no entry of this lesson"
        raise DlearnError(f"there is no answer {id!r} in answers.toml; there is: {known}")
    return dict(of_lesson[name])


def fits(given: Any, expected: Any, within: float) -> bool:
    """Compare part by part: numbers up to `within`, a share of the expected one, texts without case and spaces."""
    parts, wanted = _parts(given), _parts(expected)
    if parts is None or wanted is None:
        return parts is wanted and _fits(given, expected, within)
    return parts.keys() == wanted.keys() and all(fits(parts[key], wanted[key], within) for key in wanted)


def _fits(given: Any, expected: Any, within: float) -> bool:
    """Compare one number or text."""
    if isinstance(expected, str):
        return isinstance(given, str) and given.casefold().split() == expected.casefold().split()
    if not isinstance(given, Real) or isinstance(given, bool) != isinstance(expected, bool):
        return False
    return bool(abs(given - expected) <= max(within, ROUNDING) * abs(expected))


def _parts(value: Any) -> dict[int | str, Any] | None:
    """Return the parts of a list by their place, or of a dict by their name; None of what has no parts."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the value, or recursively the parts of a list or a dict."""
    parts = _parts(value)
    if parts is None:
        yield value
        return
    for part in parts.values():
        yield from _leaves(part)


def _accepts(entry: dict[str, Any], value: Any, measured: Any) -> bool:
    """Compare an answer with what was measured, a range, or the accepted values."""
    within = entry.get("within", 0.0)
    if measured is not None:
        return fits(value, measured, within)
    if "between" in entry:
        low, high = entry["between"]
        return isinstance(value, Real) and bool(low <= value <= high)
    accepted = entry["any"] if "any" in entry else [entry["value"]]
    return any(fits(value, each, within) for each in accepted)


def _hint(entry: dict[str, Any], value: Any) -> str:
    """Return the hint for this wrong answer, or the general one."""
    for known in entry.get("wrong", []):
        if fits(value, known["value"], entry.get("within", 0.0)):
            return str(known["hint"])
    return str(entry["hint"])
