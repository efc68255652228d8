"""Exercises: each solution passes, each catalogued wrong answer fails with its own message. Predictions are kept.

For a class: submissions graded within limits, as CSV, and predictions counted without names.
"""

import csv
import functools
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import all_end

from dlearn import lessons
from dlearn.cli import main
from dlearn.course import ResultError, assert_one_device, submissions
from dlearn.errors import DlearnError

COURSE = Path(__file__).parent.parent / "course"
sys.path.insert(0, str(COURSE / "solutions"))
MODULES = [importlib.import_module(path.stem) for path in sorted((COURSE / "solutions").glob("*.py"))]
SOLUTIONS = {re.match(r"Exercise `(\w+)`", module.__doc__)[1]: module for module in MODULES}
RING = Path(SOLUTIONS["ring"].__file__).read_text()


@pytest.fixture(autouse=True)
def _elsewhere(own_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(COURSE.parent))


WRONG = {(id, told[0]): (submission, told) for id, of in SOLUTIONS.items() for submission, *told in of.WRONG}
"""Each message of each exercise once."""


@pytest.mark.slow
@pytest.mark.parametrize("id", SOLUTIONS)
def test_right_answers_pass_on_every_number_of_ranks(id):
    for submission in SOLUTIONS[id].RIGHT:
        grade = lessons.check(id, submission, student="" if id == "five_hangs" else "a student")
        assert grade.passed, str(grade)


@pytest.mark.slow
@pytest.mark.parametrize(("id", "told"), [*WRONG])
def test_a_wrong_answer_fails_with_its_own_message(id, told):
    """The finding, and the hint where the mistake has one of its own."""
    submission, (finding, *hint) = WRONG[id, told]
    grade = lessons.check(id, submission, seconds=4)
    assert not grade.passed
    assert finding in grade.finding
    assert all(each in grade.hint for each in hint)
    assert str(grade).endswith(f"Hint: {grade.hint}")


def test_every_exercise_has_a_solution_and_no_hint_or_finding_holds_a_line_of_it():
    with pytest.raises(DlearnError, match="no exercise 'rings'") as caught:
        lessons.check("rings", None)
    assert {*str(caught.value).partition("there are: ")[2].rstrip(".").split(", ")} == SOLUTIONS.keys()
    shown = (COURSE.parent / "dlearn" / "course" / "tasks.toml").read_text().replace(" ", "")
    for module in SOLUTIONS.values():
        source = Path(module.__file__).read_text().splitlines()
        lines = {line.replace(" ", "") for line in source if len(line) > 19 and not line.startswith(('"', "def", "im"))}
        assert [line for line in lines if line in shown] == []


def crashes(tensor):
    if torch.distributed.get_rank() == 0:
        raise ValueError(f"of {len(tensor)} numbers, and the first is {tensor[0]}")


def test_an_exception_is_a_finding_and_students_have_data_of_their_own():
    told = [lessons.check("ring", crashes, student=student).finding for student in ("anna", "ben", "anna")]
    anna, ben, again = (re.search(r"ValueError: of 1200 numbers, and the first is (\S+)", each)[1] for each in told)
    assert anna == again != ben


@pytest.mark.parametrize(
    ("id", "submission", "finding"),
    [
        ("ring", None, "give a function, f(tensor), and not NoneType"),
        ("ring", lambda: None, "<lambda> cannot be called as f(tensor): too many positional arguments"),
        ("ring", functools.partial(crashes, tensor=1), "partial cannot be called as f(tensor): too many"),
        ("save_and_load", crashes, "give the functions (save, load), and not function"),
        ("save_and_load", (crashes, crashes), "crashes cannot be called as save(mine, write): too many"),
    ],
)
def test_what_cannot_be_called_as_the_task_says_gets_a_finding(id, submission, finding):
    grade = lessons.check(id, submission)
    assert not grade.passed
    assert finding in grade.finding


@pytest.mark.parametrize(
    ("left", "ranks", "finding", "says"),
    [
        ((1, 2), 1, "", "what one device computes: it begins"),  # a single result is no n-th of anything
        ((4, 8), 2, "too_large", "(2 times that)"),
        ((1, 2), 2, "too_small", "(1/2 of that)"),
        ((7, 7), 2, "zero_grad", "computes: it begins with 7, 7 instead of 2, 4"),
        ((2, float("nan")), 2, "", "nan"),
    ],
)
def test_a_recognised_mistake_is_named_and_nan_is_no_result(left, ranks, finding, says):
    mistakes = {"zero_grad": lambda rank: torch.tensor([7.0, 7.0])}
    with pytest.raises(ResultError) as caught:
        assert_one_device({1: torch.tensor(left) / 1.0}, torch.tensor([2.0, 4.0]), ranks=ranks, mistakes=mistakes)
    assert caught.value.finding == finding
    assert says in str(caught.value)


def test_a_prediction_is_kept_as_plain_json_and_compared_before_and_after():
    kept = Path("dlearn-predictions.json")
    assert lessons.predict("ring.bytes", None) is None
    assert not kept.exists()
    assert str(lessons.report()) == "no predictions yet"
    first = lessons.predict("ring.bytes", 48_000)
    assert str(first) == "ring.bytes: you expect 48,000. Kept; now run the next cell."
    assert json.loads(kept.read_text()) == {"ring.bytes": [{"expected": 48_000}]}
    assert "you expected 48,000, seen was 24,000: not so" in str(first.against(24_000))
    assert lessons.predict("ring.bytes", 24_000).against(24_000).right is True
    table = lessons.predict("ring.way", {"0>1": 100, "1>0": 100})
    assert [table.against({"0>1": 100, "1>0": 104}, tolerance=each).right for each in (0.0, 0.05)] == [False, True]
    told = str(lessons.report()).splitlines()
    assert told[1] == "ring.bytes: 48,000: not so; at last 24,000: right"


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (
            lambda: lessons.predict("way", "up", choices=("left", "right")),
            "'up' is none of the choices; these are: left",
        ),
        (lambda: lessons.predict("ring.bytes", [1]), "a number, a text or a dict, not list"),
        (lambda: lessons.stats("."), r"is no dlearn-predictions\.json: collect those"),
        (lambda: [*lessons.grade("ring", Path())], r"is no \.py: put each student's file there"),
        (lambda: [*lessons.grade("rings", Path())], "there is no exercise 'rings'"),
    ],
)
def test_what_cannot_be_meant_is_refused(ask, told):
    with pytest.raises(DlearnError, match=told):
        ask()
    for text in ("{", "[]", '{"a": []}', '{"a": [1]}', '{"a": [{"seen": 1}]}', '{"a": ["expected"]}'):
        Path("dlearn-predictions.json").write_text(text)
        with pytest.raises(DlearnError, match="holds no predictions: move it away"):
            lessons.report()


def test_a_class_is_counted_without_names(capsys):
    for student, answers in {"anna": (12, 6), "ben": (12,), "carla": (12, 6), "dan": (6,), "eva": (3, 3)}.items():
        folder = Path("class") / student
        folder.mkdir(parents=True)
        kept = [{"expected": answer, "seen": 6, "tolerance": 0.0} for answer in answers]
        (folder / "dlearn-predictions.json").write_text(json.dumps({"ring.steps": kept}))
    assert main(["lessons", "stats", "class"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "5 students have predicted something, in 1 questions"
    assert told.splitlines()[-1].split() == ["ring.steps", "5", "1", "3", "12", "(3)"]
    assert not any(each in told for each in ("anna", "ben", "carla", "dan", "eva", "class"))


def test_a_submission_is_ended_at_its_limits_with_all_that_it_has_started_and_its_cell_is_no_formula(monkeypatch):
    monkeypatch.setattr(submissions, "PROGRAM", "import runpy, sys; runpy.run_path(sys.argv[2])")  # without torch
    pid, given = Path("pid").resolve(), '{"exercise": "ring", "passed": true, "tried": [], "finding": "=1+1"}'
    forever = "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    Path("a.py").write_text(f"{forever}open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)")
    Path("b.py").write_text("while True:\n    print('x' * 1000)")
    Path("c.py").write_text("1 / 0")
    Path("d.py").write_text(f"import sys\nopen(sys.argv[4], 'w').write({given!r})")
    rows = list(csv.DictReader(lessons.grade("ring", Path(), seconds=5)))
    assert [row["student"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["passed"] for row in rows] == ["false", "false", "false", "true"]
    assert rows[0]["finding"] == "it was not done after 5 s and was ended"
    assert all_end([int(pid.read_text())])
    assert rows[1]["finding"] == "it printed more than 100,000 B and was ended"
    assert rows[2]["finding"].endswith("ZeroDivisionError: division by zero")
    assert rows[3]["finding"] == "'=1+1"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_submissions_are_graded_by_the_command_and_by_the_test_for_a_classroom(capsys):
    Path("handed in").mkdir()
    Path("handed in/right.py").write_text(f"{RING}\nring = to_the_right\n")
    Path("handed in/wrong.py").write_text(f"{RING}\nring = whole_tensors\n")
    Path("handed in/without.py").write_text("x = 1")
    assert main(["lessons", "grade", "ring", "handed in"]) == 0
    rows = {row["student"]: row for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    assert {student: row["passed"] for student, row in rows.items()} == {
        "right": "true", "wrong": "false", "without": "false",
    }  # fmt: skip
    assert "each rank sends 19,200 B instead of 12,800 B" in rows["wrong"]["finding"]
    assert rows["without"]["finding"] == "without.py has no function 'ring'"
    gradescope = [sys.executable, COURSE / "examples" / "gradescope" / "results.py"]
    marks = "student,exercise,passed,seconds,finding,hint\nme,ring,false,1.0,too much,Why?\n"
    (told,) = json.loads(subprocess.check_output(gradescope, input=marks, text=True))["tests"]
    assert (told["score"], told["output"]) == (0.0, "too much\n\nHint: Why?")
    shutil.copy(COURSE / "examples" / "classroom" / "test_ring.py", ".")
    shutil.copy("handed in/right.py", "ring.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "dlearn.course.pytest_plugin", "test_ring.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
