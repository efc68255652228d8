"""For a class: submissions graded within limits, as CSV, and predictions counted without names."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlearn import lessons
from dlearn.cli import main
from dlearn.course import submissions
from dlearn.course.exercise import Grade
from dlearn.errors import DlearnError

SOLUTIONS = Path(__file__).parent.parent / "course" / "solutions"
EXAMPLES = SOLUTIONS.parent / "examples"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOLUTIONS.parent.parent))


def predicted(student: str, *answers: float) -> None:
    folder = Path("class") / student
    folder.mkdir(parents=True)
    kept = [{"expected": answer, "seen": 6, "tolerance": 0.0} for answer in answers]
    (folder / "dlearn-predictions.json").write_text(json.dumps({"ring.steps": kept}))


def test_a_class_is_counted_without_names(capsys):
    for student, answers in {"anna": (12, 6), "ben": (12,), "carla": (12, 6), "dan": (6,), "eva": (3, 3)}.items():
        predicted(student, *answers)
    assert main(["lessons", "stats", "class"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "5 students have predicted something, in 1 questions"
    assert told.splitlines()[-1].split() == ["ring.steps", "5", "1", "3", "12", "(3)"]
    assert not any(name in told for name in ("anna", "ben", "carla", "dan", "eva", "class"))


def test_no_prediction_file_is_said():
    with pytest.raises(DlearnError, match=r"is no dlearn-predictions\.json: collect those"):
        lessons.stats(".")


def submitted(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def test_a_submission_is_ended_at_its_limits_with_all_that_it_has_started(monkeypatch):
    monkeypatch.setattr(submissions, "PROGRAM", "import runpy, sys; runpy.run_path(sys.argv[2])")  # without torch
    forever = "import subprocess, sys, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    file = submitted(
        "slow.py", f"{forever}open({str(Path('pid').resolve())!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    found = submissions.grade_one("ring", file, function="ring", seconds=5)
    assert found.finding == "it was not done after 5 s and was ended"
    child, end = Path(f"/proc/{Path('pid').read_text()}/cwd"), time.monotonic() + 30
    while child.exists() and time.monotonic() < end:  # Killed it is, and gone when the system comes to it.
        time.sleep(0.02)
    assert not child.exists()
    file = submitted("loud.py", "while True:\n    print('x' * 1000)")
    found = submissions.grade_one("ring", file, function="ring", seconds=60)
    assert found.finding == "it printed more than 100,000 B and was ended"


def test_a_program_that_fails_says_how():
    found = submissions.grade_one("ring", submitted("a.py", "1 / 0"), function="ring", seconds=60)
    assert found.finding.endswith("ZeroDivisionError: division by zero")
    found = submissions.grade_one("ring", submitted("b.py", "x = 1"), function="ring", seconds=60)
    assert found.finding == "b.py has no function 'ring'"


def test_a_line_of_csv_for_each_student_and_no_formula(monkeypatch):
    for name in ("b.py", "a.py"):
        submitted(name, "")
    told = Grade("ring", passed=False, tried=(2,), finding="=1+1", hint='say "n", or 3')
    monkeypatch.setattr(submissions, "grade_one", lambda *_, **__: told)
    rows = list(csv.reader(lessons.grade("ring", Path("."))))
    assert [row[0] for row in rows] == ["student", "a", "b"]
    assert rows[1][1:3] == ["ring", "false"]
    assert rows[1][4:] == ["'=1+1", 'say "n", or 3']


def test_an_empty_folder_and_an_unknown_exercise_are_said(capsys):
    assert main(["lessons", "grade", "ring", "."]) == 1
    assert "is no .py: put each student's file there" in capsys.readouterr().err
    assert main(["lessons", "grade", "rings", "."]) == 1
    assert "there is no exercise 'rings'" in capsys.readouterr().err


def test_gradescope_gets_points_and_the_finding():
    marks = 'student,exercise,passed,seconds,finding,hint\nring,ring,false,1.0,"too much, by far",Why?\n'
    done = subprocess.run(
        [sys.executable, EXAMPLES / "gradescope" / "results.py"], input=marks, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["tests"] == [
        {"name": "ring (ring.py)", "score": 0.0, "max_score": 1.0, "output": "too much, by far\n\nHint: Why?"}
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_test_for_a_classroom_passes_with_a_right_ring():
    shutil.copy(EXAMPLES / "classroom" / "test_ring.py", ".")
    Path("ring.py").write_text((SOLUTIONS / "own_ring.py").read_text() + "\nring = to_the_right\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "dlearn.course.pytest_plugin", "test_ring.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_right_and_wrong_submissions_are_graded_by_the_command(capsys):
    Path("handed in").mkdir()
    source = (SOLUTIONS / "own_ring.py").read_text()
    Path("handed in/right.py").write_text(source + "\nring = to_the_right\n")
    Path("handed in/wrong.py").write_text(source + "\nring = whole_tensors\n")
    assert main(["lessons", "grade", "ring", "handed in"]) == 0
    rows = {row["student"]: row for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    assert rows["right"]["passed"] == "true"
    assert rows["wrong"]["passed"] == "false"
    assert "each rank sends 19,200 B instead of 12,800 B" in rows["wrong"]["finding"]
