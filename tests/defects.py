"""How strong are the tests? One deliberate defect after the other is put into a copy, and its test has to tell.

    make test-defects                     all of tests/defects.toml and tests/wrong_answers.toml
    python tests/defects.py NAME ...      those of these names (PATTERN* too)

A defect is a text that stands once in a file of the last commit, and what stands there instead. The test that it names
has caught it if it fails with the defect and passes without. A wrong answer is a defect in what a lesson measures. It
is caught if a cell that answers its question (DM5, say) fails first, by an assertion.
"""

import contextlib
import fnmatch
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import pytest

HOME = Path(__file__).parent.parent
AT_ONCE = 2
"""So many copies, each with a defect of its own, as this many cores have."""
MOST_SECONDS = 300
LESSON = "tests/test_notebooks.py::test_the_notebook_runs_and_every_text_of_its_pictures_can_be_read"


@dataclass
class Defect:
    """A text that stands once in a file, and what stands there instead; `why` says what a user would see.

    `told_by` is the test that tells of it, and `question` what the failing cell of a lesson has to be tagged with.
    """

    name: str
    file: str
    was: str
    becomes: str
    why: str
    told_by: str
    question: str = ""

    def applied(self, text: str) -> str:
        assert text.count(self.was) == 1, f"{self.name}: its text stands {text.count(self.was)} times in {self.file}"
        return text.replace(self.was, self.becomes)

    def told_in(self, output: str) -> bool:
        """Whether a cell that answers the question failed by an assertion, or no question was asked."""
        failed = rf"AssertionError in a cell with the tags \[.*'{self.question}'.*\]"
        return not self.question or bool(re.search(failed, output))


def defects() -> list[Defect]:
    with (HOME / "tests/defects.toml").open("rb") as file:
        found = [Defect(**each) for each in tomllib.load(file)["defect"]]
    with (HOME / "tests/wrong_answers.toml").open("rb") as file:
        for question, each in tomllib.load(file).items():
            told_by = f"{LESSON}[{each.pop('lesson')}]"
            found.append(Defect(question, **each, told_by=told_by, question=question))
    return found


class Copy:
    """The last commit in a folder of its own; what runs there imports dlearn from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed: dict[str, bool] = {}  # Which tests pass here without a defect.
        subprocess.run(["git", "clone", "--quiet", HOME, folder], check=True)

    def write(self, file: str, text: str) -> None:
        """Change a file; what was compiled of it may look as new as it is."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def status(self, test: str) -> tuple[int | None, str]:
        """Return pytest's exit status for one test, and its output; None if it did not end."""
        facts = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", test]
        with tempfile.TemporaryFile("w+") as output:
            pipes = {"stdout": output, "stderr": DEVNULL, "start_new_session": True}
            process = subprocess.Popen(command, cwd=self.folder, env=os.environ | facts, **pipes)
            try:
                status = process.wait(MOST_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # A defect may leave processes behind.
                process.wait()
            output.seek(0)
            return status, output.read()

    def catches(self, defect: Defect) -> bool:
        text = (self.folder / defect.file).read_text(encoding="utf-8")
        self.write(defect.file, defect.applied(text))
        try:
            status, output = self.status(defect.told_by)
        finally:
            self.write(defect.file, text)
        if defect.told_by not in self.passed:
            self.passed[defect.told_by] = self.status(defect.told_by)[0] == pytest.ExitCode.OK
        tells = status == pytest.ExitCode.TESTS_FAILED and defect.told_in(output)
        return tells and self.passed[defect.told_by]


def main(names: list[str]) -> int:
    chosen = [each for each in defects() if not names or any(fnmatch.fnmatch(each.name, name) for name in names)]
    begin = time.monotonic()
    survivors: list[Defect] = []
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def look(defect: Defect) -> None:
        copy, at = free.get(), time.monotonic()
        try:
            caught = copy.catches(defect)
        finally:
            free.put(copy)
        if not caught:
            survivors.append(defect)
        took = time.monotonic() - at
        print(f"{'caught' if caught else 'NOT CAUGHT':10} {defect.name} {took:.0f} s  {defect.told_by}", flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(AT_ONCE):
            free.put(Copy(Path(folder) / f"copy-{number}"))
        list(pool.map(look, chosen))  # Raises what one of them raised.
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} defects are caught, {minutes:.0f} minutes")
    for each in survivors:
        print(f"  not caught: {each.name} ({each.file}): {each.why}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
