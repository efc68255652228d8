"""After a first fault the other ranks get a moment, and more where other work takes the cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dlearn.cluster.crew import Grace

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux keeps a process on one core")

MOMENT_S = 0.1


@contextmanager
def processes(count: int, code: str) -> Iterator[list[int]]:
    """Processes on one and the same core, each of which has begun."""
    core = min(os.sched_getaffinity(0))
    pin = f"import os, sys, time; os.sched_setaffinity(0, [{core}]); print(flush=True)"
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            command = [sys.executable, "-c", f"{pin}\n{code}"]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(child.kill)
            child.stdout.readline()
            found.append(child.pid)
        yield found


def after_a_moment(grace: Grace, pids: list[int]) -> bool:
    time.sleep(2 * MOMENT_S)
    return grace.is_over(pids)


def test_a_rank_that_only_waits_gets_a_moment():
    with processes(1, "time.sleep(600)") as pids:
        assert not Grace(600, pids).is_over(pids)
        assert after_a_moment(Grace(MOMENT_S, pids), pids)


def test_a_rank_that_would_run_and_does_not_gets_more():
    with processes(8, "while True: pass") as pids:
        grace = Grace(MOMENT_S, pids[:2])
        assert not after_a_moment(grace, pids[:2])
        # Of those that have ended meanwhile nobody waits for anything.
        assert grace.is_over([])


def test_nobody_gets_more_for_ever(monkeypatch):
    monkeypatch.setattr("dlearn.cluster.crew.MOST_GRACE_SECONDS", MOMENT_S)
    with processes(8, "while True: pass") as pids:
        assert after_a_moment(Grace(MOMENT_S, pids), pids)
