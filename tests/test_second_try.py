"""CI gives a test that fails a second try, alone: red is what fails twice, and what passes then is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = """
from pathlib import Path

def test_that_is_flaky():
    print("what it printed")
    before, seen = Path("seen").exists(), Path("seen").touch()
    assert before

def test_that_is_broken():
    assert not Path("seen").exists()

def test_that_works():
    assert True
"""


def run(folder, *command):
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100)


def write(folder, tests):
    hooks = f"import sys; sys.path.insert(0, {str(HERE)!r}); from second_try import *"
    (folder / "conftest.py").write_text(hooks, encoding="utf-8")
    (folder / "test_some.py").write_text(tests)


def test_what_fails_twice_is_red_and_what_passes_alone_is_named(tmp_path):
    write(tmp_path, TESTS)
    first = run(tmp_path, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--second-try=notes")
    assert first.returncode == 0
    assert "2 failed, 1 passed" in first.stdout
    second = run(tmp_path, HERE / "second_try.py", "notes")
    assert second.returncode == 1
    assert "what it printed" in second.stdout
    assert second.stdout.splitlines()[-2:] == [
        "FLAKY: test_some.py::test_that_is_flaky failed as above, and passed alone.",
        "FAILED TWICE: test_some.py::test_that_is_broken",
    ]
    assert run(tmp_path, "-m", "pytest").returncode == 1, "by hand a failure is a failure"


def test_what_cannot_run_is_no_failing_test(tmp_path):
    write(tmp_path, "this is no Python")
    assert run(tmp_path, "-m", "pytest", "--second-try=notes").returncode == 2
    (tmp_path / "notes").unlink()
    run(tmp_path, "-m", "pytest", "-n", "2", "--second-try=notes")
    assert "FAILED TWICE: test_some.py" in run(tmp_path, HERE / "second_try.py", "notes").stdout
