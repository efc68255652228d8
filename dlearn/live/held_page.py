"""A held job in a notebook: its stage, on which what is held waits on its wire, with buttons that let it through.

The HTML holds the state of when it was shown. With a kernel and anywidget a bridge (held_bridge.js) tells
the page each new state, and the job what is clicked.
"""

from __future__ import annotations

import html
import json
import threading
import time
import weakref
from importlib.resources import files
from typing import Any

from dlearn.errors import DlearnError, optional
from dlearn.events.printable import printable
from dlearn.live.held_job import HeldJob
from dlearn.live.live_display import in_a_notebook

AGAIN_SECONDS = 1.0  # Between two looks at the ranks, if nothing comes to the gate.
SETTLE_SECONDS = 0.3  # So long it is waited, after a change, for those that follow at once.
MOST_SENT = 1000  # Waiting calls that a page is told of.
State = dict[str, Any]


class HeldPage:
    """The stage of one held job. It does not keep the job alive."""

    def __init__(self, job: HeldJob, name: str) -> None:
        self._name, self._keeper = name, job.keeper
        self._job = weakref.ref(job)
        self._wires: dict[tuple[int, int], None] = {}
        self._last = ""
        self._widget: Any = None

    def state(self) -> State:
        """What the page shows: the ranks, the calls that wait, and what is known of the others."""
        from dlearn.play.packing import circle

        job, names = self._job(), self._keeper.names
        number = {name: place for place, name in enumerate(names)}
        held = list(self._keeper.calls)
        for call in held:
            if call.to is not None:
                ends = number[call.rank], number[call.to]
                self._wires[ends[::-1] if call.op == "recv" else ends] = None
        under_way = job is not None and job.under_way
        told = job.ranks if job is not None and under_way else {}
        return {
            "lanes": [f"rank {name}" if isinstance(name, int) else printable(name) for name in names],
            "stage": circle(len(names), self._wires),
            "waiting": [
                {
                    "rank": number[call.rank],
                    "to": None if call.to is None else number[call.to],
                    "op": printable(call.op),
                    "bytes": call.bytes,
                    "site": printable(call.site),
                    "receives": call.op == "recv",
                }
                for call in held[:MOST_SENT]
            ],
            # Without the call and its line of code: a box is small, and the call stands on its wire.
            "now": [printable(told.get(name, "has ended").partition(": ")[0].partition(" (")[0]) for name in names],
            "hang": job.hang if job is not None and under_way else "",
            "passed": len(self._keeper.passed),
            "last": self._last,
            "state": "over" if not under_way else "open" if self._keeper.is_open else "held",
        }

    def html(self) -> str:
        """The stage as it is now. A page that runs no scripts tells it in words."""
        from dlearn.play.page import script, style

        job = self._job()
        state = json.dumps(self.state()).replace("<", "\\u003c")
        words = "".join(f"<li>{html.escape(str(call))}</li>" for call in self._keeper.calls[:MOST_SENT])
        ranks = job.ranks.items() if job is not None else ()
        words += "".join(f"<li>{html.escape(f'{name}: {now}')}</li>" for name, now in ranks)
        return (
            f'<div class="dlearn-player dlearn-held mathjax_ignore tex2jax_ignore" data-held="{self._name}"'
            f' data-lm-suppress-shortcuts="true"><style>{style()}</style><p class="title">A held job</p>'
            '<div class="bar"></div><div class="picture"></div><p class="hang" role="status"></p>'
            f'<p class="sentence" aria-live="polite"></p><div class="told"><ul>{words}</ul></div>'
            f'<script type="application/json">{state}</script>'
            f"{script('elements.js', 'pictures.js', 'stage.js', 'held.js')}</div>"
        )

    def open(self) -> None:
        """Join the stages of this job on the page, those that come later, too."""
        if self._widget is not None or not in_a_notebook():
            return
        self._widget = _widget(self._name, self.state())
        self._widget.on_msg(lambda _, asked, __: self._obey(asked))
        threading.Thread(target=self._follow, daemon=True, name="dlearn-held-page").start()

    def _follow(self) -> None:
        """Tell the page whatever is new, until the job has ended."""
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
        """What was clicked. Nobody is waited for: what is let through waits already."""
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


def _widget(name: str, state: State) -> Any:
    anywidget = optional("anywidget", needed_by="a stage whose buttons act on the run")
    import traitlets

    class HeldWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        _esm = (files("dlearn.play") / "held_bridge.js").read_text(encoding="utf-8")
        run = traitlets.Unicode().tag(sync=True)
        state = traitlets.Dict().tag(sync=True)

    return HeldWidget(run=name, state=state)
