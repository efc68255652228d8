"""How strong are the tests? One deliberate defect after the other is put into a copy, and a test has to tell.

    make test-defects                     all of tests/defects.toml
    python tests/defects.py NAME ...      those of these names (PATTERN* too)

A defect is a text that stands once in a file of the last commit, and what stands there instead. Tried is the test that
told of it last time; then the test files that call its function, in any process: the short ones first, and the slow
tests after all quick ones. A test that fails has caught it if it passes without the defect.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from types import CodeType
from typing import TypeVar

HOME = Path(__file__).parent.parent
AT_ONCE = 2
"""So many copies, each with a defect of its own, as this many cores have."""
QUICK, SLOW = "not slow", "slow"
OF_TEXTS = {"tests/test_defects.py", "tests/test_house.py"}
"""Tests that read dlearn's files, and see any change: left out."""
Task = TypeVar("Task")


@dataclass
class Defect:
    """A text that stands once in a file, and what stands there instead; `why` says what a user would see.

    `read_by` is the module that reads the file, where that is none of Python; `told_by` the test that tells of it.
    """

    name: str
    file: str
    was: str
    becomes: str
    why: str
    read_by: str = ""
    told_by: str = ""

    def applied(self, text: str) -> str:
        assert text.count(self.was) == 1, f"{self.name}: its text stands {text.count(self.was)} times in {self.file}"
        return text.replace(self.was, self.becomes)

    def function(self, text: str) -> int:
        """The first line of the innermost function around it, 1 for the module's own lines."""
        line = text[: text.index(self.was)].count("\n") + 1
        inside = [compile(text, self.file, "exec")] if self.file.endswith(".py") else []
        for code in inside:
            inside += [each for each in code.co_consts if isinstance(each, CodeType)]
        return max((c.co_firstlineno for c in inside if any(at == line for *_, at in c.co_lines())), default=1)


@dataclass
class Seen:
    """What a test file calls: its seconds, the tests that fail without any defect, and functions of dlearn by file."""

    seconds: float = 0.0
    failing: list[str] = field(default_factory=list)
    functions: dict[str, list[int]] = field(default_factory=dict)


def defects() -> list[Defect]:
    with (HOME / "tests/defects.toml").open("rb") as file:
        return [Defect(**each) for each in tomllib.load(file)["defect"]]


class Copy:
    """The last commit in a folder of its own; what runs there imports dlearn from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", HOME, folder], check=True)

    def write(self, file: str, text: str) -> None:
        """Change a file; what was compiled of it may look as new as it is."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def failing(self, *options: str, seconds: float, **more: str) -> list[str] | None:
        """Run pytest: the tests that fail, as CI's second try notes them; None if it did not come to its end."""
        path = os.pathsep.join([*filter(None, [more.pop("path", "")]), str(self.folder)])
        facts = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", **more}
        with tempfile.NamedTemporaryFile("r") as notes:
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--second-try={notes.name}", *options]
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | facts, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # A defect may leave processes behind.
                process.wait()
            return [json.loads(line)["test"] for line in notes] if status == 0 else None


# What each test file calls.

TRACER = """
import os, sys, threading
home, seen = {home!r}, set()

def note(frame, event, argument):
    code = frame.f_code
    if code.co_filename.startswith(home) and code not in seen:
        seen.add(code)
        with open({told!r}, "a") as file:
            file.write(f"{{os.path.relpath(code.co_filename, home)}} {{code.co_firstlineno}} {{code.co_name}}\\n")

sys.settrace(note)
threading.settrace(note)
"""
"""Tells of each function at once when it is first called, since a rank may be killed. It follows forks, and all that
Python starts; not the threads that C++ starts for a backward pass."""


def calls_of(copy: Copy, test_file: str, speed: str, scratch: Path) -> Seen:
    """Run one file of tests, and note what is called in all processes that it starts."""
    own = scratch / hashlib.sha256(f"{test_file} {speed}".encode()).hexdigest()[:12]
    own.mkdir()
    told = own / "told"
    told.touch()
    (own / "sitecustomize.py").write_text(TRACER.format(home=f"{copy.folder}/", told=str(told)))
    begin = time.monotonic()
    failing = copy.failing(test_file, "-m", speed, seconds=1_200, path=str(own)) or []
    functions: dict[str, set[int]] = defaultdict(set)
    for line in told.read_text().splitlines():
        file, at, name = line.split(" ")
        if file.startswith("dlearn/") and name != "<module>":
            functions[file].add(int(at))
    return Seen(time.monotonic() - begin, failing, {file: sorted(each) for file, each in functions.items()})


def seen_by_tests(copies: list[Copy], speed: str, scratch: Path) -> dict[str, Seen]:
    """What each test file calls, by its path; kept in .defects until a line of dlearn or of a test changes."""
    every = (str(path.relative_to(HOME)) for path in (HOME / "tests").glob("test_*.py"))
    test_files = sorted({*every} - OF_TEXTS)
    kept = HOME / ".defects" / f"{speed.replace(' ', '_')}-{state()}.json"
    kept.parent.mkdir(exist_ok=True)
    before = json.loads(kept.read_text()) if kept.exists() else {}
    found = {name: Seen(**each) for name, each in before.items() if name in test_files}
    keep = threading.Lock()

    def look(copy: Copy, test_file: str) -> None:
        seen = calls_of(copy, test_file, speed, scratch)
        with keep:
            found[test_file] = seen
            kept.write_text(json.dumps({name: vars(each) for name, each in found.items()}))
            print(f"  {len(found)} of {len(test_files)}: {test_file} {seen.seconds:.0f} s", flush=True)

    in_copies(copies, [each for each in test_files if each not in found], look)
    return found


def state() -> str:
    """Short for all that the last commit holds in dlearn and its tests, but for the defects."""
    command = ["git", "ls-tree", "-r", "HEAD", "dlearn", "tests"]
    tree = subprocess.run(command, cwd=HOME, capture_output=True, check=True, text=True).stdout
    files = "".join(line for line in tree.splitlines() if "defects" not in line)
    return hashlib.sha256(files.encode()).hexdigest()[:16]


def in_copies(copies: list[Copy], tasks: Iterable[Task], work: Callable[[Copy, Task], None]) -> None:
    """Do `work(copy, task)` for every task, one at a time in each copy."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def work_in_a_free_one(task: Task) -> None:
        copy = free.get()
        try:
            work(copy, task)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(work_in_a_free_one, tasks))  # Raises what one of them raised.


# Which test tells of a defect.


def test_files_for(defect: Defect, text: str, seen: dict[str, Seen]) -> list[str]:
    """The test files that call something of the defect's file: first those that call its function, the short ones."""
    file = defect.read_by or defect.file
    function = defect.function(text)

    def order(name: str) -> tuple[bool, float]:
        return function not in seen[name].functions[file], seen[name].seconds

    return sorted((name for name, each in seen.items() if file in each.functions), key=order)


@contextmanager
def put_into(copy: Copy, defect: Defect) -> Iterator[None]:
    text = (copy.folder / defect.file).read_text(encoding="utf-8")
    copy.write(defect.file, defect.applied(text))
    try:
        yield
    finally:
        copy.write(defect.file, text)


def told_again(copy: Copy, defect: Defect) -> str:
    """The test that told of it last time, if it does so again."""
    if not defect.told_by:
        return ""
    any_speed = ("-m", f"{SLOW} or {QUICK}")
    with put_into(copy, defect):
        tells = copy.failing(defect.told_by, *any_speed, seconds=300)
    return defect.told_by if tells and copy.failing(defect.told_by, *any_speed, seconds=300) == [] else ""


def caught_by(copy: Copy, defect: Defect, seen: dict[str, Seen], speed: str, seconds: float) -> str:
    """The first test that fails with the defect and passes without; "" if the tests, or the seconds, are over."""
    text = (copy.folder / defect.file).read_text(encoding="utf-8")
    end = time.monotonic() + seconds
    for test_file in test_files_for(defect, text, seen):
        known = [*seen[test_file].failing]
        while time.monotonic() < end:
            left_out = [f"--deselect={test}" for test in known if "::" in test]
            options = (test_file, "-m", speed, "-x", "-o", "timeout=60", *left_out)
            with put_into(copy, defect):
                found = copy.failing(*options, seconds=max(1, end - time.monotonic())) or []
            for test in found:
                if copy.failing(test, "-m", speed, seconds=300) == []:
                    return test
            known += found
            if not found:
                break
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=120, help="of quick tests for one defect, and of slow ones")
    parser.add_argument("--quick", action="store_true", help="leave the slow tests out")
    options = parser.parse_args()
    chosen = [
        each for each in defects() if not options.names or any(fnmatch.fnmatch(each.name, one) for one in options.names)
    ]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        copies = [Copy(scratch / f"copy-{number}") for number in range(AT_ONCE)]
        for each in chosen:
            each.applied((copies[0].folder / each.file).read_text(encoding="utf-8"))
        left = still_there(chosen, copies, told_again)
        for speed in (QUICK,) if options.quick else (QUICK, SLOW):
            if left:
                print(f"What the {'quick' if speed == QUICK else 'slow'} tests call:", flush=True)
                seen = seen_by_tests(copies, speed, scratch)
                left = still_there(left, copies, partial(caught_by, seen=seen, speed=speed, seconds=options.seconds))
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(chosen) - len(left)} of {len(chosen)} defects are caught, {minutes:.0f} minutes")
    for each in left:
        print(f"  not caught: {each.name} ({each.file}): {each.why}")
    return bool(left)


def still_there(left: list[Defect], copies: list[Copy], catch: Callable[[Copy, Defect], str]) -> list[Defect]:
    """The defects of which `catch` names no test; says of each which test it was."""
    survivors: list[Defect] = []

    def look(copy: Copy, defect: Defect) -> None:
        begin = time.monotonic()
        test = catch(copy, defect)
        if not test:
            survivors.append(defect)
        took = time.monotonic() - begin
        print(f"{'caught' if test else 'NOT CAUGHT':10} {defect.name} {took:.0f} s  {test}", flush=True)

    in_copies(copies, left, look)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
