"""Prints the sentence of a hang (diagnosis/hang_report.py) while it lasts: who waits for whom.

If nothing was reported for a while, a thread notes where the program is. If the program is inside a
call as well, it reads the files of all processes of this host, and the lowest rank that waits
speaks.
"""

import sys
import threading
import time
from pathlib import Path
from traceback import walk_stack

from dlearn.errors import TraceError
from dlearn.events.event import PointToPoint
from dlearn.events.job_facts import Heartbeat
from dlearn.hooks.callers import site_of
from dlearn.hooks.host import Host
from dlearn.notices import notice

LOOKS = 20  # How often it looks before it speaks.
_WAITS = {("dlearn.hooks.c10d.works", "wait"), ("dlearn.hooks.mpi.mpi_calls", "_made")}
STOP_SECONDS = 5.0
"""How long the end of a recording waits for the thread: it may be reading a large trace."""


class HangWatch:
    """Watches one recording. `after` is in seconds."""

    def __init__(self, host: Host, path: Path, after: float) -> None:
        self._host, self._path, self.after = host, path, after
        self._program = threading.get_ident()
        self._over = threading.Event()
        self._noted_ns = self._reported_ns = -1
        self._thread = threading.Thread(target=self._look, daemon=True, name="dlearn-hang-watch")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(STOP_SECONDS)

    def _look(self) -> None:
        while not self._over.wait(self.after / LOOKS):
            if not self._host.begun:
                continue  # A launcher of ranks waits all the time, and is none of them.
            try:
                self._look_once(self._host.last_ns)
            except Exception as error:
                self._host.failed("a hang", error)
                return

    def _look_once(self, last_ns: int) -> None:
        quiet_seconds = (time.monotonic_ns() - last_ns) / 1e9
        if quiet_seconds >= self.after / 2 and self._noted_ns != last_ns:
            self._noted_ns = last_ns
            site = site_of(sys._current_frames().get(self._program))
            if site and not site.startswith("<"):  # Not the line by which Python came into a process.
                self._host.fact(Heartbeat(at_ns=time.monotonic_ns(), site=site))
        if quiet_seconds >= self.after and self._host.waiting and self._reported_ns != last_ns:
            self._reported_ns = last_ns
            self._report(quiet_seconds)

    def _report(self, seconds: float) -> None:
        # Only now: what reads traces is not loaded in a process that records one.
        from dlearn.diagnosis.hang_detection import hangs
        from dlearn.diagnosis.hang_report import report
        from dlearn.diagnosis.meeting_report import meeting_report
        from dlearn.trace import Trace

        try:
            trace = Trace.load(self._path.parent)
        except TraceError as error:
            notice(f"nothing has happened for {seconds:.0f} s, and why cannot be told: {error}")
            return
        me = next((process.rank for process in trace.processes if process.path.name == self._path.name), None)
        waits = _waits_for_a_message()
        # A send or a receive that the program does not wait for has no end that could be seen: no hang.
        current = [
            hang
            for hang in hangs(trace)
            if waits or me not in hang.waiting or not isinstance(hang.operation.ends[0], PointToPoint)
        ]
        said = [*(each[:2] for each in report(current, trace)), *meeting_report(trace, current)]
        for speaker, sentence in said:
            if speaker == me:
                notice(f"nothing has happened for {seconds:.0f} s: {sentence}.")


def _waits_for_a_message() -> bool:
    """Return whether a thread is inside `Work.wait`, or inside a call of mpi4py, where it waits."""
    for innermost in sys._current_frames().values():
        for frame, _ in walk_stack(innermost):
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITS:
                return True
    return False
