"""A held job in a notebook: its stage, on which what is held waits on its wire, with buttons that let it through.

The HTML holds the state of when it was shown. With a kernel and anywidget a bridge (play/bridge.js) tells
the page each new state, and the job what is clicked.
"""

from __future__ import annotations

import html
import threading
import time
import weakref
from typing import Any

from dlearn.errors import DlearnError
from dlearn.events.printable import printable
from dlearn.live.paused_job import PausedJob
from dlearn.shown import in_a_notebook

AGAIN_SECONDS = 1.0  # Between two looks at the ranks, if nothing comes to the gate.
SETTLE_SECONDS = 0.3  # So long it is waited, after a change, for those that follow at once.
MOST_SENT = 1000  # Waiting calls that a page is told of.
State = dict[str, Any]


class HeldPage:
    """The stage of one held job. It does not keep the job alive."""

    def __init__(self, job: PausedJob, name: str) -> None:
        self._name, self._keeper = name, job.gate_server
        self._job = weakref.ref(job)
        self._wires: dict[tuple[int, int], None] = {}
        self._last = ""
        self._widget: Any = None

    def state(self) -> State:
        """Return what the page shows: the ranks, the calls that wait, and what the other ranks do."""
        from dlearn.play.packing import circle

        job, names = self._job(), self._keeper.names
        number = {name: rank for rank, name in enumerate(names)}
        waiting = []
        for call in list(self._keeper.calls):
            facts: State = {"rank": number[call.rank], "op": printable(call.op), "bytes": call.bytes}
            facts |= {"to": None, "site": printable(call.site), "receives": call.op == "recv"}
            if call.to is not None:
                facts["to"] = number[call.to]
                ends = number[call.rank], number[call.to]
                self._wires[ends[::-1] if call.op == "recv" else ends] = None
            waiting.append(facts)
        state, hang, doing = "over", "", {}
        if job is not None and job.under_way:
            state = "open" if self._keeper.is_open else "held"
            hang, doing = job.hang, job.ranks
        now = []
        for name in names:
            # Without the call and its line of code: a box is small, and the call is on its wire.
            words, _, _ = doing.get(name, "has ended").partition(": ")
            now.append(printable(words.partition(" (")[0]))
        return {
            "lanes": [f"rank {name}" if isinstance(name, int) else printable(name) for name in names],
            "stage": circle(len(names), self._wires),
            "waiting": waiting[:MOST_SENT],
            "now": now,
            "hang": hang,
            "passed": len(self._keeper.passed),
            "last": self._last,
            "state": state,
        }

    def html(self) -> str:
        """Return the stage as it is now. A page that runs no scripts lists the calls and ranks in words."""
        from dlearn.play.page import frame, pack

        job = self._job()
        words = [str(call) for call in self._keeper.calls[:MOST_SENT]]
        if job is not None:
            words += [f"{name}: {now}" for name, now in job.ranks.items()]
        listed = "".join(f"<li>{html.escape(each)}</li>" for each in words)
        body = (
            '<div class="bar"></div><div class="picture"></div><p class="hang" role="status"></p>'
            '<p class="sentence" aria-live="polite"></p>'
            f'<div class="told"><ul>{listed}</ul></div>'
        )
        return frame("held", self._name, "A held job", body, pack(self.state(), {}))

    def open(self) -> None:
        """Join the stages of this job on the page, later ones too. Raises SetupError without anywidget."""
        from dlearn.play.bridge import widget

        if self._widget is not None or not in_a_notebook():
            return
        needed_by = "a stage whose buttons act on the run"
        self._widget = widget(self._name, self.state(), needed_by=needed_by)
        self._widget.on_msg(lambda _, asked, __: self._obey(asked))
        threading.Thread(target=self._follow, daemon=True, name="dlearn-held-page").start()

    def _follow(self) -> None:
        """Send each new state to the page, until the job has ended."""
        while True:
            with self._keeper.changed:
                self._keeper.changed.wait(AGAIN_SECONDS)
                self._keeper.changed.wait_for(self._keeper.all_wait, SETTLE_SECONDS)
            began = time.thread_time()
            state = self._tell()
            if state["state"] == "over":
                return
            time.sleep(10 * (time.thread_time() - began))  # A large trace takes a while to read.

    def _tell(self) -> State:
        state = self.state()
        if self._widget.state != state:
            self._widget.state = state
        return state

    def _obey(self, asked: dict[str, Any]) -> None:
        """Act on a click. It waits for no rank: what is let through waits already."""
        job = self._job()
        if job is None or not job.under_way:
            return
        try:
            match asked:
                case {"act": "free"}:
                    job.free()
                    self._last = "the gate is open"
                case {"act": "step"}:
                    self._passed(job.let_through_now())
                case {"act": "release", "rank": int(rank)} if 0 <= rank < len(self._keeper.names):
                    self._passed(job.let_through_now(self._keeper.names[rank]))
        except DlearnError as error:
            self._last = str(error)
        self._tell()

    def _passed(self, call: object) -> None:
        self._last = f"let through: {printable(str(call))}" if call is not None else "nothing of it waits now"
