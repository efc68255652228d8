"""Grade a folder of submissions, each in processes of its own, with limits of time and output: lines of CSV.

A submission is a student's program: it can do whatever the user can who grades it. Grade in a container.
"""

from __future__ import annotations

import csv
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from dlearn.course.catalogue import check, find
from dlearn.course.exercise import Grade
from dlearn.errors import DlearnError

HEAD = ("student", "exercise", "passed", "seconds", "finding", "hint")
OUTPUT_BYTES = 100_000  # What a submission may print before it is ended.
LOOK_SECONDS = 0.1
PROGRAM = "import sys; from dlearn.course.submissions import check_file; check_file(*sys.argv[1:])"


def grade(exercise: str, folder: Path, *, function: str | None = None, seconds: float = 120.0) -> Iterator[str]:
    """Yield a head, and a line of CSV for each `STUDENT.py`; the student's name chooses the data.

    Raises DlearnError if there is no such exercise, or no submission.
    """
    find(exercise)
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DlearnError(f"in {folder} is no .py: put each student's file there, named by the student")
    yield _line(HEAD)
    for file in files:
        begin = time.monotonic()
        found = grade_one(exercise, file, function=function or exercise, seconds=seconds)
        took = f"{time.monotonic() - begin:.1f}"
        yield _line((file.stem, exercise, str(found.passed).lower(), took, found.finding, found.hint))


def grade_one(exercise: str, file: Path, *, function: str, seconds: float) -> Grade:
    """Grade one file in a new session; all its processes are ended at a limit, or afterwards."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        result = Path(folder) / "grade.json"
        command = [sys.executable, "-c", PROGRAM, exercise, str(file.resolve()), function, str(result)]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
        try:
            limit = _wait(process, output, seconds)
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not limit and result.is_file():
            return Grade(**json.loads(result.read_text(encoding="utf-8")))
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 500))
        finding = limit or output.read().decode(errors="replace").strip() or "it ended without a word"
    return Grade(exercise, passed=False, tried=(), finding=finding, hint="Does it run by itself?")


def _wait(process: subprocess.Popen[bytes], output: IO[bytes], seconds: float) -> str:
    """Wait for its end; return the limit that it has reached, or ""."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if os.fstat(output.fileno()).st_size > OUTPUT_BYTES:
            return f"it printed more than {OUTPUT_BYTES:,} B and was ended"
        if time.monotonic() > end:
            return f"it was not done after {seconds:g} s and was ended"
        time.sleep(LOOK_SECONDS)
    return ""


def _line(cells: tuple[str, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([_plain(cell) for cell in cells])
    return text.getvalue()


def _plain(cell: str) -> str:
    """Return a cell that no spreadsheet reads as a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t") else cell


def check_file(exercise: str, file: str, function: str, result: str) -> None:
    """Check the function of a file, and write the grade as JSON."""
    names = runpy.run_path(file)
    if function not in names:
        raise SystemExit(f"{Path(file).name} has no function {function!r}")
    found = check(exercise, names[function], student=Path(file).stem)
    Path(result).write_text(json.dumps(asdict(found)), encoding="utf-8")
