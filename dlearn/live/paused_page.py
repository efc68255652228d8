"""A paused job in a notebook: its stage, on which each call at the gate waits on its wire, and buttons.

The HTML holds the state of when it was shown. With a kernel and anywidget a bridge (play/bridge.js)
sends each new state to the page, and each click to the job.
"""

import threading
import time
import weakref
from typing import Any

from dlearn.errors import DlearnError
from dlearn.events.printable import printable
from dlearn.live.paused_job import PausedJob, rank_text
from dlearn.shown import in_a_notebook

AGAIN_SECONDS = 1.0  # Between two looks at the ranks, if no call comes to the gate.
SETTLE_SECONDS = 0.3  # After a change: for the changes that follow at once.
MOST_SENT = 1000  # Waiting calls that a page gets.
State = dict[str, Any]


class PausedPage:
    """The stage of one paused job. It does not keep the job alive."""

    def __init__(self, job: PausedJob, name: str) -> None:
        self._name, self._gate = name, job.gate_server
        self._job = weakref.ref(job)
        self._wires: dict[tuple[int, int], None] = {}
        self._last = ""
        self._widget: Any = None
        self._sending = threading.Lock()

    def state(self) -> State:
        """Return what the page shows: the ranks, the calls that wait, and what the other ranks do."""
        from dlearn.play.packing import MIDDLE, circle

        job, names = self._job(), self._gate.names
        number = {name: rank for rank, name in enumerate(names)}
        waiting = []
        for call in list(self._gate.calls):
            to = MIDDLE if call.to in (None, call.rank) else number[call.to]
            ends = number[call.rank], to
            receives = call.op == "recv"
            self._wires[ends[::-1] if receives and to != MIDDLE else ends] = None
            facts: State = {"rank": number[call.rank], "to": to, "receives": receives}
            facts |= {"op": printable(call.op), "bytes": call.bytes, "site": printable(call.site)}
            waiting.append(facts)
        state, hang, doing = "over", "", {}
        if job is not None and job.under_way:
            state = "open" if self._gate.is_open else "paused"
            hang, doing = job.hang, job.ranks
        now = []
        for name in names:
            # Without the call and its line of code: a box is small, and the call is on its wire.
            words, _, _ = doing.get(name, "has ended").partition(": ")
            now.append(printable(words.partition(" (")[0]))
        return {
            "lanes": [printable(rank_text(name)) for name in names],
            "stage": circle(len(names), self._wires),
            "waiting": waiting[:MOST_SENT],
            "now": now,
            "hang": hang,
            "passed": len(self._gate.passed),
            "last": self._last,
            "state": state,
        }

    def html(self) -> str:
        """Return the stage as it is now. A page that runs no scripts lists the calls and ranks in words."""
        from dlearn.play.page import frame, pack

        job = self._job()
        words = [str(call) for call in self._gate.calls[:MOST_SENT]]
        if job is not None:
            words += [f"{name}: {now}" for name, now in job.ranks.items()]
        return frame("paused", self._name, "A held job", pack(self.state(), {}), words=words)

    def open(self) -> None:
        """Join the stages of this job on the page, later ones too. Raises SetupError without anywidget."""
        from dlearn.play.page import widget

        if self._widget is not None or not in_a_notebook():
            return
        needed_by = "a stage whose buttons act on the run"
        self._widget = widget(self._name, self.state(), needed_by=needed_by)
        self._widget.on_msg(lambda _, clicked, __: self._obey(clicked))
        threading.Thread(target=self._follow, daemon=True, name="dlearn-paused-page").start()

    def _follow(self) -> None:
        """Send each new state to the page, until the job has ended."""
        state = ""
        while state != "over":
            with self._gate.changed:
                self._gate.changed.wait(AGAIN_SECONDS)
                self._gate.changed.wait_for(self._gate.all_wait, SETTLE_SECONDS)
            began = time.thread_time()
            state = self._send()
            time.sleep(10 * (time.thread_time() - began))  # A large trace takes a while to read.

    def _send(self) -> str:
        """Send the state to the page if it is new; return whether the job is paused, open or over."""
        with self._sending:  # A click sends one, too, which must not replace that of the end.
            state = self._widget.state = self.state()
        return str(state["state"])

    def _obey(self, clicked: dict[str, Any]) -> None:
        """Act on a click. It waits for no rank: a call that it lets through waits already."""
        job = self._job()
        if job is None or not job.under_way:
            return
        try:
            match clicked:
                case {"act": "free"}:
                    job.free()
                    self._last = "the gate is open"
                case {"act": "step"}:
                    self._passed(job.let_through_now())
                case {"act": "release", "rank": int(rank)} if 0 <= rank < len(self._gate.names):
                    self._passed(job.let_through_now(self._gate.names[rank]))
        except DlearnError as error:
            self._last = str(error)
        self._send()

    def _passed(self, call: object) -> None:
        self._last = "nothing of it waits now"
        if call is not None:
            self._last = f"let through: {printable(str(call))}"
