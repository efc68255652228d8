"""One process being recorded: the hooks report here, and it is written down.

A guest in the training process: an error here is printed once, on stderr, counted in the footer, and never raised into
the program that is being recorded.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dlearn.events.agent_log import log_path
from dlearn.events.event import (
    NOT_OBSERVED,
    Bucket,
    Collective,
    Counters,
    Event,
    Header,
    Line,
    PointToPoint,
    RpcCall,
    Span,
)
from dlearn.events.job_facts import RETURNED, Place
from dlearn.events.mpi_facts import ANY_TAG
from dlearn.events.options import Options
from dlearn.events.writer import Writer
from dlearn.hooks import gate
from dlearn.hooks.c10d.groups import Groups
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.network.clock import ClockServer, gather
from dlearn.hooks.network.sockets import RPC, Sockets
from dlearn.hooks.patches import guarded
from dlearn.hooks.rpc.rpc_agent_log import AgentLog
from dlearn.recorder import sources
from dlearn.recorder.hang_watch import HangWatch

LONGEST_SPAN = 200
"""Characters of a span's name that are kept."""
ENDS_SECONDS = 0.05
"""How long `measure="phase"` waits before an operation for those under way to end."""
OUTSIDE = -1
"""The number of every event outside the steps that were asked for."""


class Recording:
    """One process being recorded; implements `events.source.Emit` and `hooks.host.Host`."""

    def __init__(
        self, path: Path, header: Header, options: Options, *, sorted_stderr: bool, alone: bool, lazy: bool
    ) -> None:
        self._clock = time.monotonic_ns
        self._said_refused = False
        self._outside = False
        self._step_span: int | None = None
        self._step_is_due = False
        self.undo = ExitStack()
        """Everything that `stop` gives back, the last first."""
        self.options = options
        self._measure = options.measure
        self.sockets = Sockets(self, measured=options.measure is not None)
        self.groups = Groups(self)
        self.times = CudaTimes(self)
        self._steps: dict[int, dict[str, Any]] = {}
        self._under_way: set[int] = set()
        self._wanted_steps = options.steps
        self._step = 0
        self._channels: Counter[tuple[Any, ...]] = Counter()
        self.last_ns = self._clock()
        """When anything was last reported."""
        self.meet: Callable[[], None] | None = None
        """Waits for all workers of a cluster, which opens RPC's connections before any worker uses them."""
        self._begin_file(path, header if lazy else None)
        ignore = self.sockets.ignored_ports.add
        self.clocks = ClockServer(self, path, self._clock, ignore, keep_store=options.gather, alone=alone)
        self.log = AgentLog(None if sorted_stderr else log_path(path))
        self._watch = HangWatch(self, path, options.hang_after) if options.hang_after else None
        try:
            if not lazy:
                self._writer.write(header)
            for source in sources.wanted(options.sources):
                self.undo.callback(sources.install(source, self))
            if self._watch is not None:
                self._watch.start()
        except BaseException:
            self.undo.close()
            self._writer.close()
            raise

    def _begin_file(self, path: Path, header: Header | None) -> None:
        """Begin the file of this process; with a header it is made when there is something to write."""
        self._writer = Writer(path, max_bytes=self.options.max_bytes, header=header)
        self._numbers = itertools.count()
        self._owner = threading.get_ident()
        self._open_spans: dict[int, list[int]] = {self._owner: []}
        self._span_names: dict[int, str] = {}
        self._hook_errors = self._works_dropped = self._left_out = 0
        self.posted: set[int] = set()
        """Sends and receives of Python process groups that the program has not waited for yet."""
        self.waiting: dict[int, int] = {}
        """When the operations that have not ended began, if `hang_after` is set."""

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        if self._wanted_steps is not None and self._is_outside(kind, facts):
            return OUTSIDE
        thread = threading.get_ident()
        spans = self._open_spans.get(thread) or self._open_spans[self._owner]
        if kind is PointToPoint and self._steps:
            facts |= self._steps.get(thread, {})
        watched = self._measure == "phase" and kind in (Collective, PointToPoint)
        if watched and not self._under_way.intersection(spans):
            self._count_before_operation()
        now = self._clock()
        number = facts["number"] = next(self._numbers)
        if watched:
            self._under_way.add(number)
        # The hook's own values have priority; written into its own dict, as this runs for every call.
        facts.setdefault("start_ns", now)
        if spans:
            facts.setdefault("parent", spans[-1])
        if thread != self._owner:
            facts.setdefault("thread", threading.current_thread().name)
        self._write(self._writer.event, kind, facts)
        if gate.current is not None:
            gate.current.noted()
        self.last_ns = now
        if self._watch is not None and kind in (Collective, PointToPoint, RpcCall):
            self.waiting[number] = now
        return number

    def end(self, number: int, *, by: str, error: str = "", **facts: Any) -> None:
        if number == OUTSIDE:
            return
        self.last_ns = now = self._clock()
        self.waiting.pop(number, None)
        self._under_way.discard(number)
        try:
            self._write(self._writer.end, number, at_ns=now, by=by, error=error, **facts)
        except Exception as failure:
            self.failed("the end of an operation", failure)

    def fact(self, line: Line) -> None:
        self._write(self._writer.write, line)

    def _write(self, write: Callable[..., None], *line: Any, **facts: Any) -> None:
        """Write a line. One that the system refuses is counted: the program goes on with a full disk.

        Raises OSError where there is no file that could say so.
        """
        try:
            write(*line, **facts)
        except OSError as error:
            if not self._writer.begun:
                raise
            if not self._said_refused:
                self._said_refused = True
                print(
                    f"dlearn: a line of the trace could not be written ({error.strerror}). The program goes on;"
                    " such lines are counted, and the trace says how many they are.",
                    file=sys.stderr,
                )

    def function_ended(self, error: str) -> None:
        """Note that the function that a cluster called has returned, or raised `error`."""
        self.fact(Place(at_ns=self._clock(), ended=error or RETURNED))

    def failed(self, where: str, error: Exception) -> None:
        self._hook_errors += 1
        if self._hook_errors == 1:
            print(
                f"dlearn: could not record {where} ({type(error).__name__}: {error}). The program goes on;"
                " further failures are only counted.",
                file=sys.stderr,
            )

    def dropped(self) -> None:
        self._works_dropped += 1

    def open_span(self, name: str, thread: int | None = None) -> int:
        """Open a span of this thread, or of another: optimizers may step on a thread of RPC."""
        spans = self._open_spans.get(thread, []) if thread is not None else []
        inside = {"parent": spans[-1] if spans else None} if thread is not None else {}
        try:
            text = str(name).encode("utf-8", "replace").decode()[:LONGEST_SPAN]
            number = self.event(Span, name=text, **inside)
            self._span_names[number] = text
        except Exception as error:  # The name may be any object.
            self.failed("a span", error)
            number = next(self._numbers)
        self.enter(number, thread)
        self.count()
        return number

    def close_span(self, number: int, thread: int | None = None) -> None:
        self.count()
        self.leave(number, thread)
        self.end(number, by="return")
        self._span_names.pop(number, None)

    def span_names(self) -> list[str]:
        """Return the program's spans that this thread is inside of, the outermost first."""
        inside = self._open_spans.get(threading.get_ident()) or self._open_spans[self._owner]
        return [self._span_names[number] for number in inside if number in self._span_names]

    def enter(self, number: int, thread: int | None = None) -> None:
        """Put what this thread reports from now on inside event `number`."""
        if number != OUTSIDE:
            self._open_spans.setdefault(thread or threading.get_ident(), []).append(number)

    def leave(self, number: int, thread: int | None = None) -> None:
        spans = self._open_spans.get(thread or threading.get_ident(), [])
        if number in spans:
            # Not those above it: a generator's span may close while another is open.
            spans.remove(number)

    # Steps that were asked for -------------------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Begin the step after `number` steps of the optimizer, with a span if it is wanted."""
        assert self._wanted_steps is not None
        self._close_step()
        self._step = number
        self._outside = number not in self._wanted_steps
        self._step_is_due = not self._outside
        if self._writer.begun:
            self._open_step()

    def _open_step(self) -> None:
        """Open the span of a wanted step; in a lazy recording, when there is something to write."""
        if self._step_is_due:
            self._step_is_due = False
            self._step_span = self.open_span(f"step {self._step}", self._owner)

    def _close_step(self) -> None:
        if self._step_span is not None:
            self.close_span(self._step_span, self._owner)
            self._step_span = None

    def _is_outside(self, kind: type[Event], facts: dict[str, Any]) -> bool:
        """Return whether this event is left out; number the sends of each channel in any case."""
        if kind is PointToPoint and facts["peer"] is not None and facts["tag"] != ANY_TAG:
            channel = (facts["op"], facts["group"], facts["peer"], facts["tag"])
            self._channels[channel] += 1
            facts["place"] = self._channels[channel]
        for name in ("parent", "run"):
            if facts.get(name) == OUTSIDE:
                facts[name] = None
        if not self._outside or kind is Bucket:
            self._open_step()
            return False
        self._left_out += kind is not Counters
        return True

    @contextmanager
    def step(self, facts: dict[str, Any]) -> Iterator[None]:
        """Add these facts to what this thread sends inside: which step of its collective it is."""
        self._steps[threading.get_ident()] = facts
        try:
            yield
        finally:
            del self._steps[threading.get_ident()]

    def count(self) -> None:
        """Write down the counters of bytes on the wire."""
        if not self.sockets.any:
            return
        try:
            still = self.sockets.settle() if self._measure == "phase" else None
            received = self.sockets.received_bytes()
            self.event(Counters, sent_bytes=self.sockets.sent_bytes(), received_bytes=received, still=still)
        except Exception as failure:
            self.failed("the counters of sockets", failure)

    def watch_rpc_sockets(self, *, opened: bool = False) -> None:
        """Take new connections for the agent's, if these are TCP. A cluster opens them first."""
        if (opened or self.meet is None) and self.sockets.watch(RPC):
            self.count()

    def disconnecting(self) -> None:
        """Read the counters of RPC's connections on all workers, before any worker closes them."""
        self.count()
        self.clocks.close()
        if self.meet is not None:
            self.meet()

    def count_phase(self) -> None:
        if self._measure == "phase":
            self.count()

    def _count_before_operation(self) -> None:
        # The program's wait returns before its operation's end is reported here.
        deadline = time.monotonic() + ENDS_SECONDS
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.0002)
        if not self._under_way:
            self.count()

    def stop(self, *, quiet: bool = False) -> None:
        """Give torch back, close the file. Idempotent. With `quiet` what RPC still sends by itself is waited for."""
        if quiet:
            self.sockets.settle()
        if self._watch is not None:
            self._watch.stop()
        self._close_step()
        self.undo.close()
        while self.posted:
            self.end(self.posted.pop(), by=NOT_OBSERVED)
        if self._writer.begun:
            self.sockets.note_strangers()
        self.count()
        facts = {"works_dropped": self._works_dropped, "left_out": self._left_out}
        try:
            self._writer.finish(at_ns=self._clock(), hook_errors=self._hook_errors, **facts)
        except OSError as error:
            self.failed("the end of the file", error)
        if self.options.gather:
            guarded(self, "the files of the other hosts", gather, self.clocks, self._writer.path)

    def let_go(self) -> None:
        """Close the file in a forked child (a DataLoader's worker) that is not recorded."""
        self._writer.close()

    def go_on_in_child(self, header: Header, path: Path) -> None:
        """Begin a file in a forked child that is recorded, too, if it ever sends anything."""
        self._writer.close()
        self._begin_file(path, header)
        self._step_span, self._step_is_due = None, self._wanted_steps is not None and not self._outside
        self.sockets.forget()
        self.times.forget()
        self.log.forget(log_path(path))
        self.clocks.forget(path)
        if self._watch is not None:
            self._watch = HangWatch(self, path, self._watch.after)
            self._watch.start()

    @property
    def path(self) -> Path:
        return self._writer.path

    @property
    def begun(self) -> bool:
        """Return whether this process has sent anything yet: a lazy recording has no file before."""
        return self._writer.begun
