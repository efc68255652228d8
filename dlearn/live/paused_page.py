"""A paused job in a notebook: its stage, with each call at the gate at a rim, and buttons."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from dlearn.errors import DlearnError
from dlearn.events.printable import printable
from dlearn.live.held_stage import State, snippet, stage_of
from dlearn.live.paused_job import LOCKED_SECONDS, PATIENCE_SECONDS, PausedJob
from dlearn.shown import in_a_notebook

AGAIN_SECONDS = 1.0  # Between two looks at the ranks, if no call comes to the gate.
SETTLE_SECONDS = 0.3  # After a change: for the changes that follow at once.
ENOUGH_SECONDS = LOCKED_SECONDS + 1


class PausedPage:
    """The stage of one paused job. It does not keep the job alive."""

    def __init__(self, job: PausedJob, name: str) -> None:
        self._name, self._gate = name, job.gate_server
        self._job = weakref.ref(job)
        self._settled_at = -1  # The gate's changes when no rank could go on by itself.
        self._last = ""
        self._widget: Any = None
        self._sending = threading.Lock()

    def state(self) -> State:
        """Return what the page shows: the stage, what was clicked last, if the gate is open."""
        job = self._job()
        if job is None or not job.under_way:
            return stage_of(self._gate, {}, ()) | {"hang": "", "last": self._last, "state": "over"}
        hang = job.hang_by(settled=self._gate.changes == self._settled_at)
        state = "open" if self._gate.is_open else "paused"
        return hang.stage | {"hang": "\n".join(hang.sentences), "last": self._last, "state": state}

    def html(self) -> str:
        return snippet(self._name, "A held job", self.state())

    def open(self) -> None:
        """Join the stages of this job on the page, later ones too. Raises SetupError without anywidget."""
        from dlearn.play.page import widget

        if self._widget is not None or not in_a_notebook():
            return
        needed_by = "a stage whose buttons act on the run"
        self._widget = widget(self._name, self.state(), needed_by=needed_by)
        self._widget.on_msg(lambda _, clicked, __: _in_background(self._obey, clicked))
        _in_background(self._follow)

    def _follow(self) -> None:
        """Send each new state to the page, until the job has ended."""
        state = ""
        while state != "over":
            with self._gate.changed:
                self._gate.changed.wait(AGAIN_SECONDS)
                self._gate.changed.wait_for(self._gate.all_wait, SETTLE_SECONDS)
            began, seen = time.thread_time(), self._gate.changes
            state = self._send()
            self._settle(seen)
            time.sleep(10 * (time.thread_time() - began))  # A large trace takes a while to read.

    def _settle(self, seen: int) -> None:
        """Find out whether any rank can go on by itself, unless something happens meanwhile."""
        job = self._job() if self._settled_at != seen else None
        if job is not None and job.settles(
            lambda passed: seen != self._gate.changes or passed > ENOUGH_SECONDS, tell=False
        ):
            self._settled_at = seen

    def _send(self) -> str:
        """Send the state to the page if it is new; return whether the job is paused, open or over."""
        with self._sending:  # A click sends one, too, which must not replace that of the end.
            state = self._widget.state = self.state()
        return str(state["state"])

    def _obey(self, clicked: dict[str, Any]) -> None:
        job = self._job()
        if job is None or not job.under_way:
            return
        try:
            match clicked:
                case {"act": "free"}:
                    job.free()
                    self._last = "the gate is open"
                case {"act": "step"}:
                    self._say("let through", job.let_through_now())
                case {"act": "release", "rank": int(rank)} if 0 <= rank < len(self._gate.names):
                    self._say("let through", job.let_through_now(self._gate.names[rank]))
                case {"act": "until", "op": str(op)}:
                    self._say("waits", job.run_until(op=op, patience=PATIENCE_SECONDS))
        except DlearnError as error:
            self._last = str(error)
        self._send()

    def _say(self, what: str, call: object) -> None:
        self._last = "no such call waits now" if call is None else f"{what}: {printable(str(call))}"


def _in_background(act: Callable[..., object], *given: object) -> None:
    threading.Thread(target=act, args=given, daemon=True, name="dlearn-paused-page").start()
