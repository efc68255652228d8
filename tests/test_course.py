"""Exercises: each solution passes, each catalogued wrong answer fails with its own message. Predictions are kept.

For a class: submissions graded within limits, as CSV, and predictions counted without names.
"""

import csv
import functools
import importlib
import json
import math
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
NOT_ONE_FUNCTION = ("five_hangs", "save_and_load")
RING = Path(SOLUTIONS["ring"].__file__).read_text()


@pytest.fixture(autouse=True)
def _elsewhere(own_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(COURSE.parent))


WRONG = {(id, *told): submission for id, of in SOLUTIONS.items() for submission, *told in of.WRONG}
"""Each finding and hint of each exercise once."""


@pytest.mark.slow
@pytest.mark.parametrize("id", SOLUTIONS)
def test_right_answers_pass_on_every_number_of_ranks(id):
    for submission in SOLUTIONS[id].RIGHT:
        grade = lessons.check(id, submission, student="" if id == "five_hangs" else "a student")
        assert grade.passed, str(grade)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids="-".join)
def test_a_wrong_answer_fails_with_its_own_message(wrong):
    """The finding, and the hint where the mistake has one of its own."""
    id, finding, *hint = wrong
    grade = lessons.check(id, WRONG[wrong])
    assert not grade.passed
    assert finding in grade.finding
    assert all(each in grade.hints[0] for each in hint)
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
        *((id, lambda: None, "<lambda> cannot be called as f(") for id in SOLUTIONS if id not in NOT_ONE_FUNCTION),
        ("ring", None, "give a function, f(tensor), and not NoneType"),
        ("ring", functools.partial(crashes, tensor=1), "partial cannot be called as f(tensor): too many"),
        ("save_and_load", crashes, "give the functions (save, load), and not function"),
        ("save_and_load", (crashes, crashes), "crashes cannot be called as save(mine, write): too many"),
    ],
)
def test_what_cannot_be_called_as_the_task_says_gets_a_finding(id, submission, finding):
    first, again = (lessons.check(id, submission, student=finding) for _ in range(2))
    assert str(first).startswith(f"{id}: not yet.\n{finding}"), "no rank is started"
    assert first.hint != again.hint, "the second time the second hint"


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
    assert str(first) == "ring.bytes: you predict 48,000. Kept; now run the next cell."
    assert json.loads(kept.read_text()) == {"ring.bytes": [{"expected": 48_000}]}
    assert "you predicted 48,000; the result was 24,000" in str(first.against(24_000))
    assert lessons.predict("ring.bytes", 24_000).against(24_000).right is True
    table = lessons.predict("ring.way", {"0>1": 100, "1>0": 100})
    assert [table.against({"0>1": 100, "1>0": 104}, tolerance=each).right for each in (0.0, 0.05)] == [False, True]
    told = str(lessons.report()).splitlines()
    assert told[1] == "ring.bytes: 48,000: not right; the last time 24,000: right"


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: lessons.predict("way", "up", choices=["left"]), "'up' is none of the choices; these are: left"),
        (lambda: lessons.predict("ring.bytes", "19,200"), "a number without quotes and commas, not '19,200'"),
        (lambda: lessons.predict("ring.bytes", [1]), "a number, a text or a dict, not list"),
        (lambda: lessons.stats("."), r"is no dlearn-predictions\.json: collect those"),
        (lambda: lessons.grade("ring", "."), r"is no \.py and no \.ipynb: put each student's file there"),
        (lambda: lessons.grade("ring", "nowhere"), "nowhere does not exist"),
        (lambda: lessons.grade("ring", __file__), r"\.py is a file: give the folder that"),
        (lambda: lessons.grade("rings", "."), "there is no exercise 'rings'"),
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
    assert main(["predictions", "class"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "5 students predicted, in 1 question"
    assert told.splitlines()[-1].split() == ["ring.steps", "5", "1", "3", "12", "(3)"]
    assert not any(each in told for each in ("anna", "ben", "carla", "dan", "eva", "class"))


def test_a_submission_is_ended_at_its_limits_with_all_that_it_has_started_and_its_cell_is_no_formula(monkeypatch):
    monkeypatch.setattr(submissions, "PROGRAM", "import runpy, sys; runpy.run_path(sys.argv[2])")  # without torch
    pid, given = Path("pid").resolve(), '{"exercise": "ring", "passed": true, "tried": [], "finding": "=1+1"}'
    forever = "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    Path("a.py").write_text(f"{forever}open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)")
    Path("b.py").write_text("while True:\n    print('x' * 1000)")
    Path("c.py").write_text("1 / 0")
    Path("d.py").write_text(f"import sys\nopen(sys.argv[5], 'w').write({given!r})")
    Path("e.py").write_text("import os, time\nfor _ in range(7):\n    os.fork()\ntime.sleep(600)")
    marks = lessons.grade("ring", Path(), seconds=5)
    rows = list(csv.DictReader(marks.to_csv().splitlines()))
    assert [row["student"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert [row["points"] for row in rows] == ["0", "0", "0", "1", "0"]
    assert rows[0]["finding"] == "it was not done after 5 s and was ended"
    assert all_end([int(pid.read_text())])
    assert rows[1]["finding"] == "it printed more than 10,000,000 B and was ended"
    assert rows[2]["finding"].endswith("ZeroDivisionError: division by zero")
    assert rows[3]["finding"] == "'=1+1"
    if sys.platform == "linux":
        assert rows[4]["finding"] == "it had more than 64 processes and was ended"
    tests = json.loads(marks.to_json())["tests"]
    assert [(each["score"], each["status"]) for each in tests[2:4]] == [(0, "failed"), (1, "passed")]
    assert str(marks).startswith("ring: 1 of 5 passed. A point each, full or none.")


def handed_in(folder, **cells):
    """Write a notebook of code cells."""
    told = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells.values()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ring.ipynb").write_text(json.dumps({"cells": told}))
    return folder / "ring.ipynb"


def test_of_a_notebook_only_what_the_function_needs_is_run(tmp_path):
    file = handed_in(
        tmp_path, magic="%matplotlib inline\nimport math\nN = [2]\nN.append(1 / 0)", no_python="def (:",
        uses="def ring(tensor):\n    return helper(tensor)", helper="def helper(x):\n    return math.pi * N[0] * x",
        checks="grade = lessons.check('ring', ring)\n1 / 0", shell="!ls\nring = ring",
    )  # fmt: skip
    handed = submissions.parsed(file)
    assert handed.checked("ring") == ("ring", "")
    names = handed.run_definitions("ring")
    assert names["ring"](1) == 2 * math.pi
    assert names.keys() - {"__builtins__", "__name__"} == {"math", "N", "helper", "ring"}
    assert handed.left_out == "cell 2 is left out: line 1: invalid syntax"


def test_submissions_lie_in_the_folder_or_in_one_of_each_student_and_several_files_are_a_question():
    handed_in(Path("class/anna/ring"), cell="ring = 1")
    handed_in(Path("class/anna/.ipynb_checkpoints"), cell="")
    Path("class/anna/helper.py").write_text("")
    Path("class/ben_12_ring.py").write_text("def rong(t): pass")
    Path("class/carla").mkdir()
    for name in ("a.py", "b.py"):
        Path("class/carla", name).write_text("")
    Path("class/dan.py").write_text("def ring(t)\n    pass")
    Path("class/eva.py").write_text("import not_here")
    checked = "lessons.check('ring', (mine, 1), student='f')\nlessons.check('ring', 3)"
    handed_in(Path("class/fay_assignsubmission_file_"), own="mine = 2", check=checked)
    rows = {each.student: each.grade.finding for each in lessons.grade("ring", "class").marks}
    assert rows == {
        "anna": "give a function, f(tensor), and not int",
        "ben_12_ring": "ben_12_ring.py has no function 'ring'; there is: rong",
        "carla": "there are 2 files, a.py, b.py: which?",
        "dan": "dan.py, line 1: expected ':'",
        "eva": "eva.py, line 1: ModuleNotFoundError: No module named 'not_here'",
        "fay": "give a function, f(tensor), and not tuple",
    }
    Path("class/ring.py").write_text("")
    assert submissions.submissions("ring", Path("class")) == {"class": [Path("class/ring.py")]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_assignment_for_nbgrader_passes_with_its_solution_and_fails_without():
    """And has the metadata of nbgrader's v3.json. `nbgrader validate` is not run here: docs/grading.md."""
    notebook = json.loads((COURSE / "examples/nbgrader/source/ring/ring.ipynb").read_text())
    _, imports, answer, test = notebook["cells"]
    common = {"schema_version": 3, "task": False}
    for cell, own in ((answer, {"grade_id": "ring"}), (test, {"grade_id": "check-ring", "points": 1})):
        of_answer = {"solution": cell is answer, "grade": cell is test, "locked": cell is test}
        assert cell["metadata"]["nbgrader"] == {**common, **own, **of_answer}
    names, right = {"__name__": "__main__"}, "".join(answer["source"])
    handed_out = re.sub("### BEGIN SOLUTION.*### END SOLUTION", "raise NotImplementedError", right, flags=re.DOTALL)
    exec("\n".join(["".join(imports["source"]), right, *test["source"]]), names)
    with pytest.raises(AssertionError, match="ring: not yet"):
        exec("\n".join([handed_out, *test["source"]]), names)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_submissions_are_graded_by_the_command_and_by_the_test_for_a_classroom(capsys):
    Path("handed in").mkdir()
    Path("handed in/right.py").write_text(f"{RING}\nring = to_the_right\n")
    Path("handed in/wrong.py").write_text(f"{RING}\nring = whole_tensors\n")
    assert main(["grade", "ring", "handed in", "--csv", "marks.csv"]) == 0
    said = capsys.readouterr()
    assert said.out == "marks.csv: ring: 1 of 2 passed. A point each, full or none.\n"
    assert said.err.count("runs as you") == 1
    told = re.findall(r"(\d of 2): (\w+): (\d) of 1 point", said.err)
    assert told == [("1 of 2", "right", "1"), ("2 of 2", "wrong", "0")]
    rows = {row["student"]: row for row in csv.DictReader(Path("marks.csv").read_text().splitlines(keepends=True))}
    assert "each rank sends 19,200 B instead of 12,800 B" in rows["wrong"]["finding"]
    assert rows["wrong"]["right"].endswith("the result is right")
    assert rows["wrong"]["hint"] != rows["wrong"]["second_hint"] != ""
    shutil.copy(COURSE / "examples" / "classroom" / "test_ring.py", ".")
    shutil.copy("handed in/right.py", "ring.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "dlearn.course.pytest_plugin", "test_ring.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
