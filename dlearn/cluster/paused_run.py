"""A run whose calls wait at a gate until you let them through."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

from dlearn.cluster.run import Run
from dlearn.errors import DlearnError, GateError, SetupError
from dlearn.live.gate_server import GateServer
from dlearn.live.paused_job import PausedJob
from dlearn.live.paused_page import PausedPage
from dlearn.shown import Paragraph, Table


class PausedRun(PausedJob, Run):
    """A run that is under way. Its ranks are ended when it is forgotten, or the kernel is gone."""

    @classmethod
    def of(cls, run: Run, gate_server: GateServer, finish: Callable[[], Run], end: Callable[[], None]) -> PausedRun:
        """Begin a run: `finish` follows its ranks to the end, `end` ends them."""
        paused = cls(**vars(run))
        paused.gate_server, paused.trace_folder = gate_server, run.folder / "trace"
        paused._job = _Job(run, gate_server, finish, end)
        weakref.finalize(paused, paused._job.end)
        return paused

    _job: _Job
    _page: PausedPage | None = None

    def join(self, timeout: float | None = None) -> PausedRun:
        """Wait for the end, and raise what `Cluster.run` would. DlearnError if it has not come after `timeout`."""
        job = self._job
        job.thread.join(timeout)
        if job.thread.is_alive():
            raise GateError(f"this run has not ended after {timeout} s; {self._why_not()}")
        if self.gate_server.trouble:
            raise DlearnError(self.gate_server.trouble)
        self.error, self.network = job.run.error, job.run.network
        if job.failure or self.error:
            raise job.failure or self.error  # type: ignore[misc]
        return self

    @property
    def under_way(self) -> bool:
        return self._job.thread.is_alive()

    def end(self) -> None:
        self._job.end()
        self._job.thread.join()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Show its stage while it is under way; without anywidget no buttons act on it."""
        if not self.under_way:
            return {"text/html": self._repr_html_(), "text/plain": str(self)}
        self._page = self._page or PausedPage(self, self.folder.name)
        with suppress(SetupError):
            self._page.open()
        return {"text/html": self._page.html(), "text/plain": str(self)}

    def paragraphs(self) -> Iterator[Paragraph]:
        if not self.under_way:
            yield from Run.paragraphs(self)
            return
        yield f"held: {len(self.gate_server.calls)} calls wait at the gate, {len(self.schedule)} were let through"
        yield Table([("rank", "now"), *((str(name), now) for name, now in self.ranks.items())], numbers=0)
        yield from self.hang_by(settled=False).sentences


class _Job:
    """The thread that follows the ranks. It does not hold the run that the user has, which ends it when forgotten."""

    failure: BaseException | None = None

    def __init__(self, run: Run, gate_server: GateServer, finish: Callable[[], Run], end: Callable[[], None]) -> None:
        self.run, self.gate_server, self._finish, self._end_ranks = run, gate_server, finish, end
        gate_server.on_trouble = self.end
        self.thread = threading.Thread(target=self._follow, daemon=True, name="dlearn-paused-run")
        self.thread.start()

    def _follow(self) -> None:
        try:
            if self._finish().error is None:
                self.gate_server.finish()
        except BaseException as error:
            self.failure = error
        finally:
            self.gate_server.close()

    def end(self) -> None:
        if self.thread.is_alive():
            self._end_ranks()
            self.gate_server.close()
