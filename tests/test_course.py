"""Exercises: each solution passes, each catalogued wrong answer fails with its own message. Predictions are kept."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlearn import lessons
from dlearn.analysis import assert_fresh, assert_traffic
from dlearn.course import ResultError, assert_one_device, exercise
from dlearn.course.attempt import numbers
from dlearn.course.catalogue import EXERCISES
from dlearn.errors import DlearnError

pytestmark = pytest.mark.usefixtures("own_folder")

pytest_plugins = ["dlearn.course.pytest_plugin"]
sys.path.insert(0, str(Path(__file__).parent.parent / "course" / "solutions"))
import own_ring  # noqa: E402

MODULES = [importlib.import_module(path.stem) for path in sorted(Path(own_ring.__file__).parent.glob("*.py"))]
SOLUTIONS = {re.match(r"Exercise `(\w+)`", module.__doc__)[1]: module for module in MODULES}


def name(submission):
    """Of a function, or of a pair the second; of answers that are no code, none."""
    last = submission[-1] if isinstance(submission, tuple) else submission
    return getattr(last, "__name__", "answers")


right = [pytest.param(id, each, id=f"{id}-{name(each)}") for id, of in SOLUTIONS.items() for each in of.RIGHT]
wrong = [
    pytest.param(id, each, told, id=f"{id}-{name(each)}") for id, of in SOLUTIONS.items() for each, *told in of.WRONG
]


def test_every_exercise_has_solutions_and_wrong_answers():
    assert SOLUTIONS.keys() == EXERCISES.keys()
    for each in EXERCISES.values():
        assert each.hints.keys() == {*each.criteria} - {"sends"}, "that one is the same in every exercise"
    assert all(len(each.RIGHT) >= 2 and len(each.WRONG) >= 4 for each in SOLUTIONS.values())


@pytest.mark.slow
@pytest.mark.parametrize(("id", "submission"), right)
def test_a_right_answer_passes(id, submission):
    grade = lessons.check(id, submission, student="" if id == "five_hangs" else "a student")
    assert grade.passed, str(grade)
    assert grade.tried == EXERCISES[id].ranks


@pytest.mark.slow
@pytest.mark.parametrize(("id", "submission", "told"), wrong)
def test_a_wrong_answer_fails_with_its_own_message(id, submission, told):
    """`told` is a part of the finding, and of the hint where the mistake has one of its own."""
    grade = lessons.check(id, submission, seconds=4)
    assert not grade.passed
    finding, *hint = told
    assert finding in grade.finding
    assert all(each in grade.hint for each in hint)
    assert str(grade).endswith(f"Hint: {grade.hint}")


def crashes(tensor):
    raise ValueError(f"of {len(tensor)} numbers")


@pytest.mark.slow
def test_an_exception_of_a_submission_is_a_finding():
    grade = lessons.check("ring", crashes)
    assert not grade.passed
    assert "ValueError: of 1200 numbers" in grade.finding
    assert "test_course.py" in grade.finding


def with_old_names(tensor):
    warnings.warn("this name is deprecated", FutureWarning, stacklevel=1)
    own_ring.to_the_right(tensor)


@pytest.mark.slow
def test_a_warning_of_torchs_is_shown_once(capfd):
    assert lessons.check("ring", with_old_names).passed
    assert capfd.readouterr().out.count("FutureWarning: this name is deprecated") == 1


def test_an_unknown_exercise_names_those_that_there_are():
    with pytest.raises(DlearnError, match="no exercise 'rings'; there are: token, ring, tree_broadcast, hierarchical"):
        lessons.check("rings", crashes)


def test_no_hint_and_no_task_holds_a_solution():
    """Lines of the solutions, spaces aside, stand in nothing that a student is shown."""
    for id, each in EXERCISES.items():
        shown = "".join([each.asks, *each.hints.values()]).replace(" ", "")
        source = Path(SOLUTIONS[id].__file__).read_text().splitlines()
        lines = {
            line.replace(" ", "") for line in source if len(line.strip()) > 15 and not line.startswith(('"', "def"))
        }
        assert [line for line in lines if line in shown] == []


@pytest.mark.parametrize(
    ("id", "submission", "finding"),
    [
        ("ring", None, "give a function, f(tensor), and not NoneType"),
        ("ring", lambda: None, "<lambda> cannot be called as f(tensor): too many positional arguments"),
        ("ring", functools.partial(crashes, tensor=1), "partial cannot be called as f(tensor): too many"),
        ("column_row", crashes, "crashes cannot be called as f(x, columns, rows, bias): too many positional arguments"),
        ("save_and_load", crashes, "give the functions (save, load), and not function"),
        ("save_and_load", (crashes, crashes), "crashes cannot be called as save(mine, write): too many"),
    ],
)
def test_what_cannot_be_called_as_the_task_says_starts_no_rank(monkeypatch, id, submission, finding):
    monkeypatch.setattr(exercise, "attempt", lambda *_, **__: pytest.fail("ranks were started"))
    grade = lessons.check(id, submission)
    assert not grade.passed
    assert finding in grade.finding
    assert str(grade).endswith("Hint: Compare its parameters with those of the task.")


@pytest.mark.parametrize(
    ("left", "ranks", "finding", "says"),
    [
        ((1, 2), 1, "", "what one device computes: it begins"),  # a single result is no n-th of anything
        ((4, 8), 2, "too_large", "(2 times that)"),
        ((1, 2), 2, "too_small", "(1/2 of that)"),
        ((7, 7), 2, "zero_grad", "computes: it begins with 7, 7 instead of 2, 4"),
    ],
)
def test_a_recognised_mistake_is_named(left, ranks, finding, says):
    with pytest.raises(ResultError) as caught:
        assert_one_device(
            {1: torch.tensor(left) / 1.0},
            torch.tensor([2.0, 4.0]),
            ranks=ranks,
            mistakes={"zero_grad": lambda rank: torch.tensor([7.0, 7.0])},
        )
    assert caught.value.finding == finding
    assert says in str(caught.value)


# Predictions ----------------------------------------------------------------------------------------------------------


def test_a_prediction_is_kept_and_compared_before_and_after():
    first = lessons.predict("ring.bytes", 48_000)
    assert str(first) == "ring.bytes: you expect 48,000. Kept; now run the next cell."
    seen = first.against(24_000)
    assert seen.right is False
    assert "you expected 48,000, seen was 24,000: not so" in str(seen)
    assert lessons.predict("ring.bytes", 24_000).against(24_000).right is True
    lessons.predict("ring.way", "left", choices=("left", "right")).against("left")
    report = lessons.report()
    assert (report.before, report.after) == (1, 2)
    assert str(report).splitlines() == [
        "1 of 2 right at first, 2 at last",
        "ring.bytes: 48,000: not so; at last 24,000: right",
        "ring.way: left: right",
    ]


def test_a_table_of_who_to_whom_fits_only_if_every_cell_does():
    mine = lessons.predict("who", {"0>1": 100, "1>0": 100})
    assert mine.against({"0>1": 100, "1>0": 104}).right is False
    assert mine.against({"0>1": 100, "1>0": 104}, tolerance=0.05).right is True
    assert mine.against({"0>1": 100}).right is False


def test_an_empty_place_keeps_nothing():
    assert lessons.predict("ring.bytes", None) is None
    assert not Path("dlearn-predictions.json").exists()
    assert str(lessons.report()) == "no predictions yet"


def test_answers_that_cannot_be_meant_are_refused():
    with pytest.raises(DlearnError, match="'up' is none of the choices; these are: left, right"):
        lessons.predict("ring.way", "up", choices=("left", "right"))
    with pytest.raises(DlearnError, match="a number, a text or a dict, not list"):
        lessons.predict("ring.bytes", [1])
    for text in ("{", "[]", '{"a": []}', '{"a": [1]}', '{"a": [{"seen": 1}]}', '{"a": ["expected"]}'):
        Path("dlearn-predictions.json").write_text(text)
        with pytest.raises(DlearnError, match="holds no predictions: move it away"):
            lessons.report()


def test_what_is_kept_is_plain_json():
    lessons.predict("ring.bytes", 48_000)
    assert json.loads(Path("dlearn-predictions.json").read_text()) == {"ring.bytes": [{"expected": 48_000}]}


# In pytest ------------------------------------------------------------------------------------------------------------


def on_random_data(all_reduce):
    mine = numbers(600, dist.get_rank())
    all_reduce(mine)
    return mine


@pytest.mark.slow
def test_the_fixture_cluster_has_ranks_whose_sends_can_be_judged(cluster):
    n = len(cluster.names)
    run = cluster.run(on_random_data, own_ring.to_the_right)
    assert_traffic(run.trace, op="send", bytes_per_rank=2 * (n - 1) / n * 4800, pattern="ring")
    assert_fresh(run.trace, op="send")
    assert_one_device(run.results, sum(numbers(600, rank) for rank in range(n)))


@pytest.mark.slow
def test_the_fixture_graded_fails_with_finding_and_hint(graded):
    graded("ring", own_ring.to_the_right)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)stale data.*Hint: Follow one chunk"):
        graded("ring", own_ring.always_its_own_chunk)
