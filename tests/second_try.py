"""A second try, in CI only: what failed is noted, and run once more, alone, when all other tests are done.

pytest --second-try FILE          note each failing test in FILE; the exit status says only whether pytest could run
python tests/second_try.py FILE   run those again: 1 if one fails twice; a flaky one is named, with its first output
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 20
"""Where more have failed, the machine is not to blame."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", metavar="FILE", type=Path, help="note failing tests in FILE, and go on")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("second_try")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notes(file))


class Notes:
    """Keeps what failed, and how."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"{title}:\n{text}" for title, text in report.sections]
            said = "\n".join([report.longreprtext, *sections])
            with self._file.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps({"test": report.nodeid, "said": said}) + "\n")

    pytest_collectreport = (
        pytest_runtest_logreport  # A file that cannot be read as tests: with -n nothing else says so.
    )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK


def main(file: Path) -> int:
    notes = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    first = {note["test"]: note["said"] for note in reversed(notes)}
    if len(first) > MOST:
        print(f"{len(first)} tests failed, so many that none is run again.")
        return 1
    twice = [test for test in first if subprocess.run([sys.executable, "-m", "pytest", "-m", "", test]).returncode]
    for test in first.keys() - set(twice):
        print(f"{first[test]}\nFLAKY: {test} failed as above, and passed alone.")
    for test in twice:
        print(f"FAILED TWICE: {test}")
    return 1 if twice else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
