"""Short answers of students: what each kind is told, and what every entry of answers.toml has to hold."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import numpy
import pytest

from dlearn import lessons
from dlearn.course import questions
from dlearn.course.questions import fits
from dlearn.errors import DlearnError

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
ENTRIES = """
[ring.bytes]
value = 24_000
unit = "B"
hint = "2 (n-1) chunks, each one n-th"
why = "Each of four ranks sends six chunks."
wrong = [ {value = 48_000, hint = "that is what two ranks send"} ]
[ring.either]
any = ["left", [1, 2]]
hint = "follow one message"
[ring.about]
between = [2.0, 3.0]
hint = "more than one latency"
[ring.time]
within = 0.1
hint = "count the rounds"
wrong = [ {value = 80, hint = "that is in MB"} ]
[ring.who]
value = {"0" = 100, "1" = 200}
hint = "who waits for whom?"
[ring.same]
value = true
hint = "compare the bits"
"""


@pytest.fixture
def own_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "FILE", tmp_path / "answers.toml")
    questions.FILE.write_text(ENTRIES, encoding="utf-8")


@pytest.mark.parametrize(
    ("id", "value", "right"),
    [
        ("ring.bytes", 24_000.000000001, True),
        ("ring.bytes", numpy.int64(24_000), True),
        ("ring.bytes", "24000", False),
        ("ring.bytes", float("nan"), False),
        ("ring.bytes", (24_000, None), None),
        ("ring.either", " Left", True),
        ("ring.either", (1, 2), True),
        ("ring.either", [1, 2, 3], False),
        ("ring.about", 3, True),
        ("ring.about", 3.1, False),
        ("ring.about", "2.5", False),
        ("ring.who", {0: 100, 1: 200}, True),
        ("ring.who", {0: 100}, False),
        ("ring.who", {0: 100, 1: None}, None),
        ("ring.same", True, True),
        ("ring.same", 1, False),
    ],
)
def test_a_right_answer_is_right_in_each_form_and_no_other(own_entries, id, value, right):
    assert lessons.answer(id, value).right is right


def test_each_verdict_says_what_to_do_next(own_entries):
    assert str(lessons.answer("ring.bytes", None)) == ("ring.bytes: your turn: put your answer, in B, in place of None")
    assert str(lessons.answer("ring.bytes", 24_000)) == "ring.bytes: right: Each of four ranks sends six chunks."
    assert str(lessons.answer("ring.either", "left")) == "ring.either: right"
    assert str(lessons.answer("ring.bytes", 1)) == "ring.bytes: not yet: 2 (n-1) chunks, each one n-th"
    assert str(lessons.answer("ring.bytes", 48_000)) == "ring.bytes: not yet: that is what two ranks send"


def test_an_answer_is_compared_with_what_was_measured(own_entries):
    assert lessons.answer("ring.time", 95, measured=100).right is True
    assert str(lessons.answer("ring.time", 80, measured=100)) == "ring.time: not yet: that is in MB"
    assert lessons.answer("ring.time", 80, measured=None).right is None, "a machine without the counters"
    assert lessons.answer("ring.time", [95, 210], measured=(100, 200)).right is True


def test_what_cannot_be_compared_is_refused_in_one_sentence(own_entries):
    with pytest.raises(DlearnError, match=r"no answer 'ring\.byte' in answers\.toml; there is: ring\.bytes, ring\.e"):
        lessons.answer("ring.byte", 1)
    with pytest.raises(DlearnError, match="a number, a text, a list or a dict, not function"):
        lessons.answer("ring.bytes", lambda: 24_000)
    with pytest.raises(DlearnError, match="not set"):
        lessons.answer("ring.either", [{1}])


# What is in answers.toml ----------------------------------------------------------------------------------------------

EVERY = [(f"{lesson}.{name}", entry) for lesson, of in questions.entries().items() for name, entry in of.items()]
KEYS = {"value", "any", "between", "within", "unit", "hint", "why", "wrong"}


def expected(entry: dict) -> list:
    return [*entry.get("any", []), *entry.get("between", []), *([entry["value"]] if "value" in entry else [])]


def told(hint: str) -> list[object]:
    """The numbers and the words of a hint."""
    numbers = re.findall(r"\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?", hint)
    return [float(each.replace(",", "")) for each in numbers] + re.findall(r"\w{4,}", hint)


def problems(entry: dict) -> list[str]:
    found = [f"{key} is no key of an entry" for key in entry.keys() - KEYS]
    found += ["it has no hint"] * (not entry.get("hint"))
    found += ["of value, any and between there is more than one"] * (
        len(entry.keys() & {"value", "any", "between"}) > 1
    )
    for hint in [entry.get("hint", ""), *(each["hint"] for each in entry.get("wrong", []))]:
        values = expected(entry)
        found += [f"the hint {hint!r} tells {each}" for each in told(hint) for value in values if fits(each, value, 0)]
    for wrong in entry.get("wrong", []):
        right = [each for each in expected(entry) if fits(wrong["value"], each, entry.get("within", 0))]
        found += [f"the wrong {each} is right" for each in right if "between" not in entry]
    return found


def test_every_entry_has_a_hint_that_does_not_tell_the_answer():
    assert {id: problems(entry) for id, entry in EVERY if problems(entry)} == {}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"value": 1}, "it has no hint"),
        ({"value": 24_000, "hint": "24,000 B"}, "the hint '24,000 B' tells 24000.0"),
        ({"any": ["left"], "hint": "to the Left"}, "the hint 'to the Left' tells Left"),
        ({"value": 1, "any": [2], "hint": "?"}, "of value, any and between there is more than one"),
        ({"value": 1, "hint": "?", "wrong": [{"value": 1, "hint": "!"}]}, "the wrong 1 is right"),
        ({"value": 1, "hints": "?", "hint": "?"}, "hints is no key of an entry"),
    ],
)
def test_what_is_wrong_with_an_entry_is_found(entry, problem):
    assert problem in problems(entry)


def asked() -> dict[str, list[tuple[str, bool]]]:
    """Each id that a lesson asks: the lessons, and whether they give what was measured."""
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for source in sorted(NOTEBOOKS.glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) in ("lessons.answer", "course.answer"):
                given = {keyword.arg for keyword in call.keywords}
                found[ast.literal_eval(call.args[0])].append((source.stem, "measured" in given))
    return found


def test_every_entry_is_asked_in_its_lesson_and_every_question_has_an_entry():
    questions_asked = asked()
    assert questions_asked.keys() == {id for id, _ in EVERY}
    for id, entry in EVERY:
        lessons_of = {lesson for lesson, _ in questions_asked[id]}
        assert lessons_of == {id.partition(".")[0]}, id
        for _, measured in questions_asked[id]:
            assert measured != bool(expected(entry)), f"{id}: expected is either an entry or measured"
