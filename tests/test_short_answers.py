"""Short answers of students: every entry of answers.toml accepts what is right in each form, and nothing else."""

import ast
import re
import tomllib
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy
import pytest

from dlearn import lessons
from dlearn.errors import DlearnError

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
LESSONS: dict[str, dict[str, Any]] = tomllib.loads((files("dlearn.course") / "answers.toml").read_text("utf-8"))
EVERY = {f"{lesson}.{name}": entry for lesson, of in LESSONS.items() for name, entry in of.items()}
COMPARED = {id: entry for id, entry in EVERY.items() if entry.keys() & {"value", "any", "between"}}
NUMBER = next(id for id, entry in EVERY.items() if type(entry.get("value")) is int)


def other_forms(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [{key: numpy.float64(part) for key, part in reversed(value.items())}]
    if isinstance(value, list):
        return [tuple(value)]
    return [f" {value.title()}"] if isinstance(value, str) else [numpy.float64(value), value * (1 + 1e-12)]


def near_misses(value: Any) -> list[Any]:
    if isinstance(value, dict):
        first = next(iter(value))
        return [{first: value[first]}, {**value, first: "?"}, {**value, "more": 1}, {**value, first: -1}, [1]]
    if isinstance(value, list):
        return [[*value, 3], value[:-1], 7]
    return [f"{value}?", -1, float("nan"), [value], True]


@pytest.mark.parametrize("id", COMPARED)
def test_a_right_answer_is_right_in_each_form_and_no_other(id):
    entry = COMPARED[id]
    one = [entry["value"]] if "value" in entry else []
    for value in (*entry.get("any", []), *entry.get("between", []), *one):
        for form in (value, *other_forms(value)):
            verdict = lessons.answer(id, form)
            low, high = entry.get("between", (form, form))
            assert verdict.right is bool(low <= form <= high if "between" in entry else True), form
            assert str(verdict).startswith(f"{id}: right") == verdict.right
        for wrong in near_misses(value):
            assert lessons.answer(id, wrong).right is False, wrong
            assert str(lessons.answer(id, wrong)) == f"{id}: not yet: {entry['hint']}"
    for known in entry.get("wrong", []):
        assert str(lessons.answer(id, known["value"])) == f"{id}: not yet: {known['hint']}"


@pytest.mark.parametrize("id", EVERY)
def test_nothing_is_no_answer_and_no_hint_tells_the_right_one(id):
    entry = EVERY[id]
    assert entry.keys() <= {"value", "any", "between", "within", "unit", "hint", "why", "wrong"}
    assert len(entry.keys() & {"value", "any", "between"}) <= 1
    unit = f", in {entry['unit']}," if "unit" in entry else ""
    assert str(lessons.answer(id, None)) == f"{id}: your turn: put your answer{unit} in place of None"
    for hint in (entry["hint"], *(each["hint"] for each in entry.get("wrong", []))):
        numbers = re.findall(r"\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?", hint)
        told = [float(each.replace(",", "")) for each in numbers] + re.findall(r"\w{4,}", hint)
        assert not [each for each in told if id in COMPARED and lessons.answer(id, each).right], hint


def test_an_answer_is_compared_with_what_was_measured():
    (id,) = EVERY.keys() - COMPARED.keys()
    near = 100 * (1 + EVERY[id].get("within", 0) / 2)
    assert lessons.answer(id, near, measured=100).right is True
    assert lessons.answer(id, 300, measured=100).right is False
    assert lessons.answer(id, [near, 200], measured=(100, 200)).right is True
    assert lessons.answer(id, 80, measured=None).right is None, "a machine without the counters"


def test_what_cannot_be_compared_is_refused_in_one_sentence():
    with pytest.raises(DlearnError, match=rf"no answer '{NUMBER}s' in answers\.toml; there is: "):
        lessons.answer(f"{NUMBER}s", 1)
    with pytest.raises(DlearnError, match="a number, a text, a list or a dict, not set"):
        lessons.answer(NUMBER, [{1}])


def test_every_entry_is_asked_in_its_lesson_and_every_question_has_an_entry():
    asked: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for source in sorted(NOTEBOOKS.glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) in ("lessons.answer", "course.answer"):
                measured = "measured" in {keyword.arg for keyword in call.keywords}
                asked[ast.literal_eval(call.args[0])].append((source.stem, measured))
    assert asked.keys() == EVERY.keys()
    for id, places in asked.items():
        assert {lesson for lesson, _ in places} == {id.partition(".")[0]}, id
        assert {measured for _, measured in places} == {id not in COMPARED}, f"{id} is either expected or measured"
