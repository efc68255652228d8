"""Grade a folder of submissions, each in processes of its own: marks as a table, CSV or JSON.

A submission is a student's program: it can do whatever the user can who grades it. Grade in a container.
"""

import csv
import io
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from ast import FunctionDef
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import IO

from dlearn.course.catalogue import check, find
from dlearn.course.exercise import Grade
from dlearn.course.notebook_code import parsed
from dlearn.errors import DlearnError
from dlearn.shown import Paragraph, Shown, Table

OUTPUT_BYTES = 10_000_000  # What a submission may print before it is ended.
PROCESSES = 64  # How many it may have at once.
MEMORY_BYTES = 4_000_000_000  # What each process may allocate, where the system counts it (Linux).
LOOK_SECONDS = 0.1
FINDING_SHOWN = 90
MOODLE = "_assignsubmission_file_"  # Ends the name of a student's folder.
BY_ITSELF = "Does it run by itself, in an empty folder?"
PROGRAM = "import sys; from dlearn.course.submissions import check_file; check_file(*sys.argv[1:])"


@dataclass(frozen=True)
class StudentMark:
    """A student's grade, and how long it took. A point if it passes, else none."""

    student: str
    grade: Grade
    seconds: float

    @property
    def points(self) -> int:
        return int(self.grade.passed)


@dataclass(frozen=True, repr=False)
class Marks(Shown):
    """The marks of a folder, or of the first of its `students`."""

    exercise: str
    students: int
    marks: tuple[StudentMark, ...] = ()

    def paragraphs(self) -> Iterator[Paragraph]:
        passed = sum(each.points for each in self.marks)
        yield f"{self.exercise}: {passed} of {len(self.marks)} passed. A point each, full or none."
        rows = [["student", "points", "finding"]]
        for each in self.marks:
            finding = each.grade.finding.partition("\n")[0]
            short = f"{finding[:FINDING_SHOWN]}..." if len(finding) > FINDING_SHOWN else finding
            rows.append([each.student, str(each.points), short])
        yield Table(rows, numbers=1)

    def to_csv(self) -> str:
        """Return a head and a line for each student, in which no cell is a formula."""
        text = io.StringIO()
        head: tuple[str, ...] = ("student", "exercise", "points", "seconds", "right", "finding")
        head += ("hint", "second_hint")
        rows = [head]
        for each in self.marks:
            found, took = each.grade, f"{each.seconds:.1f}"
            row = (each.student, self.exercise, str(each.points), took, found.right, found.finding)
            rows.append((*row, *found.hints, "", "")[: len(head)])
        csv.writer(text, lineterminator="\n").writerows([map(_plain, row) for row in rows])
        return text.getvalue()

    def to_json(self) -> str:
        """Return Gradescope's results.json: a test for each student."""
        tests = []
        for each in self.marks:
            name = f"{self.exercise} ({each.student})"
            test = {"name": name, "score": each.points, "max_score": 1}
            status = "passed" if each.grade.passed else "failed"
            tests.append({**test, "status": status, "output": str(each.grade)})
        return json.dumps({"tests": tests}, indent=1) + "\n"


def _plain(cell: str) -> str:
    """Return a cell that no spreadsheet reads as a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t") else cell


def grade(
    exercise: str, folder: str | Path, *, function: str | None = None, seconds: float = 120.0,
    tell: Callable[[Marks], object] | None = None,
) -> Marks:  # fmt: skip
    """Grade each submission of a folder; the student's name chooses the data.

    `tell` gets the marks so far: before the first submission runs, and after each. Raises DlearnError
    if there is no such exercise, or no submission.
    """
    students = submissions(exercise, Path(folder))
    tell = tell or (lambda marks: None)
    marks = Marks(exercise, len(students))
    tell(marks)
    for student, files in students.items():
        begin = time.monotonic()
        found = _grade(exercise, student, files, function or "", seconds)
        mark = StudentMark(student, found, time.monotonic() - begin)
        marks = replace(marks, marks=(*marks.marks, mark))
        tell(marks)
    return marks


def submissions(exercise: str, folder: Path) -> dict[str, list[Path]]:
    """Return each student's files, .py and .ipynb: NAME.py, or all below NAME/.

    Of several the one that is called as the exercise counts. A file of that name in the folder itself
    makes it one student's. Raises DlearnError if there is no such exercise, or no submission.
    """
    find(exercise)
    if not folder.is_dir():
        what = "is a file: give the folder that holds it" if folder.exists() else "does not exist"
        raise DlearnError(f"{folder} {what}")
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if file.suffix in (".py", ".ipynb") and not hidden:
            found[parts[0].removesuffix(MOODLE) if parts[1:] else file.stem].append(file)
    if not found:
        how = "put each student's file there, or folder"
        raise DlearnError(f"in {folder} is no .py and no .ipynb: {how}")
    if any(file.parent == folder for file in found.get(exercise, ())):
        found = defaultdict(list, {folder.resolve().name: found[exercise]})
    for student, files in found.items():
        found[student] = [file for file in files if file.stem == exercise] or files
    return found


def failed(exercise: str, finding: str, hint: str) -> Grade:
    """Return the grade of what could not be checked."""
    return Grade(exercise, False, (), finding, (hint,))


def _grade(exercise: str, student: str, files: list[Path], function: str, seconds: float) -> Grade:
    """Grade one student's file in a new session; its processes are ended at a limit, or after."""
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        hint = f"Call the one to be graded {exercise}.py or {exercise}.ipynb."
        return failed(exercise, f"there are {len(files)} files, {names}: which?", hint)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        result = Path(folder) / "grade.json"
        given = exercise, str(files[0].resolve()), function, student, str(result)
        command = [sys.executable, "-c", PROGRAM, *given]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
        try:
            limit = _wait(process, output, seconds)
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if limit is not None:
            return failed(exercise, *limit)
        if result.is_file():
            return Grade(**json.loads(result.read_text(encoding="utf-8")))
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 500))
        finding = output.read().decode(errors="replace").strip() or "it ended without a word"
    return failed(exercise, finding, BY_ITSELF)


def _wait(
    process: subprocess.Popen[bytes], output: IO[bytes], seconds: float
) -> tuple[str, str] | None:  # fmt: skip
    """Wait for its end; return the limit that it has reached, and a hint, or None."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if os.fstat(output.fileno()).st_size > OUTPUT_BYTES:
            printed = f"it printed more than {OUTPUT_BYTES:,} B and was ended"
            return printed, "Take the `print` out of your loops: which of them goes on and on?"
        if time.monotonic() > end:
            late = f"it was not done after {seconds:g} s and was ended"
            return late, "Which loop of yours does not end? Does the file do more than define?"
        if _processes(process.pid) > PROCESSES:
            many = f"it had more than {PROCESSES} processes and was ended"
            return many, "The grader starts the ranks: does your file start processes, too?"
        time.sleep(LOOK_SECONDS)
    return None


def _processes(session: int) -> int:
    """Count the processes of a session; 0 where the system has no /proc."""
    count = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            count += int(file.read_text().rpartition(")")[2].split()[3]) == session
    return count


# In the process of a submission -------------------------------------------------------------------


def check_file(exercise: str, file: str, function: str, student: str, result: str) -> None:
    """Check what a file hands in, and write the grade as JSON; `function` "": as the file says."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    path = Path(file)
    if path.stem != student:
        sys.path.insert(0, str(path.parent))  # it may hold modules of the student's own
    try:
        found = _checked(exercise, path, function, student)
    except SyntaxError as error:
        line = f"{Path(error.filename or file).name}, line {error.lineno}: {error.msg}"
        found = failed(exercise, line, "What is missing in that line, or before it?")
    except (Exception, SystemExit) as error:
        where = _line_of(error, path.name)
        found = failed(exercise, f"{where}{type(error).__name__}: {error}", BY_ITSELF)
    Path(result).write_text(json.dumps(asdict(found)), encoding="utf-8")


def _checked(exercise: str, file: Path, function: str, student: str) -> Grade:
    handed_in = parsed(file)
    wanted, name = handed_in.checked(exercise)
    wanted = function or wanted
    if file.suffix == ".ipynb":
        names = handed_in.run_definitions(wanted, name)
    else:
        names = runpy.run_path(str(file))
    try:
        answer = eval(wanted, names)
    except NameError as error:
        defined = [each.name for _, each in handed_in.statements if isinstance(each, FunctionDef)]
        there = f"; there is: {', '.join(defined)}" if defined else ""
        finding = f"{file.name} has no function {error.name!r}{there}"
        found = failed(exercise, finding, f"It has to be called `{error.name}`: is it spelled so?")
    else:
        if find(exercise).judge is not None and name:  # answers to what this name has chosen
            student = eval(name, names)
        found = check(exercise, answer, student=student)
    if handed_in.left_out and not found.passed:
        found = replace(found, finding=f"{found.finding}\n{handed_in.left_out}")
    return found


def _line_of(error: BaseException, name: str) -> str:
    """Return "NAME, line N: " of the line of that file by which an error came, else ""."""
    frames = [(Path(each.filename).name, each.lineno) for each in extract_tb(error.__traceback__)]
    lines = [f"{file}, line {line}: " for file, line in frames if file.startswith(name)]
    return lines[-1] if lines else ""
