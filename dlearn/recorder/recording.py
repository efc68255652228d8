"""One process being recorded: the hooks report here, and it is written down.

A guest in the training process: an error here is printed once, on stderr, counted in the footer, and never raised into
the program that is being recorded.
"""

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dlearn.events import event as seen
from dlearn.events.agent_log import log_path
from dlearn.events.event import NOT_OBSERVED, Collective, Counters, Event, Header, PointToPoint
from dlearn.events.job_facts import EXITED, RETURNED, Heartbeat
from dlearn.events.mpi_facts import ANY_TAG
from dlearn.events.options import Options
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.source import Source, describe, find
from dlearn.events.writer import Writer
from dlearn.hooks import ddp, gate, pipeline_passes, profiler_ranges, rendezvous_calls
from dlearn.hooks.c10d import collectives
from dlearn.hooks.c10d.groups import Groups
from dlearn.hooks.callers import class_name, site_of_error
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.host import Host
from dlearn.hooks.mpi import mpi_hook
from dlearn.hooks.network.clock import ClockServer, gather
from dlearn.hooks.network.sockets import Sockets
from dlearn.hooks.patches import guarded
from dlearn.hooks.rpc import rpc_hook
from dlearn.hooks.rpc.rpc_agent_log import AgentLog
from dlearn.notices import notice
from dlearn.recorder.hang_watch import HangWatch

OWN = (
    collectives.install, ddp.install, mpi_hook.install, rpc_hook.install, collectives.install_groups,
    ddp.install_steps, rendezvous_calls.install, profiler_ranges.install,
    pipeline_passes.install,
)  # fmt: skip
"""dlearn's own recorders, in this order. One for another library: docs/new-recorder.md."""

LONGEST_SPAN = 200  # Characters of a span's name that are kept.
ENDS_SECONDS = 0.05
"""How long `measure="phase"` waits before an operation for those under way to end."""
_clock = time.monotonic_ns
OUTSIDE = -1  # The number of every event outside the steps that were asked for.


class Recording(Host):
    """One process being recorded: what every hook reports to."""

    def __init__(
        self, path: Path, header: Header, options: Options, *, sorted_stderr: bool, alone: bool, lazy: bool
    ) -> None:
        self.undo = ExitStack()  # Everything that `stop` gives back, the last first.
        self.options, self._wanted_steps = options, options.steps
        self._measured_phases = options.measure == "phase"
        self._said_refused = self._outside = self._step_is_due = False
        self._step = 0
        self._step_span: int | None = None
        self._steps: dict[int, dict[str, Any]] = {}
        self._under_way: set[int] = set()
        self._channels: Counter[tuple[Any, ...]] = Counter()
        self.last_ns = _clock()
        self._begin_file(path, header if lazy else None)
        self.sockets = Sockets(self, measured=options.measure is not None)
        self.groups, self.times = Groups(self), CudaTimes(self)
        ignore = self.sockets.ignored_ports.add
        self.clocks = ClockServer(self, path, ignore, keep_store=options.gather, alone=alone)
        self.log = AgentLog(None if sorted_stderr else log_path(path))
        self._watch: HangWatch | None = None
        try:
            if not lazy:
                self._writer.write(header)
            for install in OWN:
                self.undo.callback(install(self))
            for source in map(find, options.sources):
                self.undo.callback(source.install(_Announcing(self, source)))
            if options.hang_after:
                self._watch = HangWatch(self, path, options.hang_after)
        except BaseException:
            self.undo.close()
            self._writer.close()
            raise

    def _begin_file(self, path: Path, header: Header | None) -> None:
        """Begin the file of this process; with a header it is made when there is something to write."""
        self.path = path
        self._writer = Writer(path, max_bytes=self.options.max_bytes, header=header)
        self._numbers = itertools.count()
        self._owner = threading.get_ident()
        self._open_spans: dict[int, list[int]] = {self._owner: []}
        self._span_names: dict[int, str] = {}
        self._ranges: set[int] = set()
        self._hook_errors = self._works_dropped = self._left_out = 0
        self._posted: set[int] = set()
        """Sends and receives of Python process groups that the program has not waited for."""
        self.waiting = {}

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        if self._wanted_steps is not None and self._is_outside(kind, facts):
            return OUTSIDE
        thread = threading.get_ident()
        spans = self._open_spans.get(thread) or self._open_spans[self._owner]
        if self._ranges and kind is Counters:
            spans = [each for each in spans if each not in self._ranges]
        if kind is PointToPoint and self._steps:
            facts |= self._steps.get(thread, {})
        watched = self._measured_phases and kind in (Collective, PointToPoint)
        if watched and not self._under_way.intersection(spans):
            self._count_before_operation()
        now = _clock()
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
        if self._watch is not None and kind in (Collective, PointToPoint, seen.RpcCall, Rendezvous):
            self.waiting[number] = now
        return number

    def end(self, number: int, *, by: str, error: str = "", **facts: Any) -> None:
        if number == OUTSIDE:
            return
        self.last_ns = now = _clock()
        self.waiting.pop(number, None)
        self._under_way.discard(number)
        try:
            self._write(self._writer.end, number, at_ns=now, by=by, error=error, **facts)
        except Exception as failure:
            self.failed("the end of an operation", failure)

    def posted(self, number: int) -> Callable[..., None]:
        """Return what reports the end of a send or receive of a Python process group, once."""
        self._posted.add(number)

        def ended(*, peer: int | None = None, error: str = "") -> None:
            if number in self._posted:
                self._posted.remove(number)
                self.end(number, by="wait", error=error, peer=peer)

        return ended

    def fact(self, line: seen.Line) -> None:
        self._write(self._writer.write, line)

    def _write(self, write: Callable[..., object], *what: Any, **facts: Any) -> None:
        """Write a line; if the system refuses it, which is counted, say so once: the program goes on."""
        try:
            write(*what, **facts)
        except OSError as error:
            if not self._writer.begun:
                raise  # There is no file that could say so.
            if not self._said_refused:
                self._said_refused = True
                problem = f"a line of the trace could not be written ({error.strerror})"
                others = "such lines are counted, and the trace says how many they are"
                notice(f"{problem}. The program goes on; {others}.")

    def function_ended(self, error: str) -> None:
        self.fact(Heartbeat(at_ns=_clock(), ended=error or RETURNED))

    def exiting(self) -> None:
        """Note how the script ends, as the process exits, and end the recording."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.raised(error)
        elif self._writer.begun:
            self.fact(Heartbeat(at_ns=_clock(), ended=EXITED))
        self.stop()

    def raised(self, error: BaseException) -> None:
        """Note an exception that ends the process, with the innermost line of user code in it."""
        if self._writer.begun:
            site = guarded(self, "the line of an exception", site_of_error, error) or ""
            self.fact(Heartbeat(at_ns=_clock(), ended=class_name(error), site=site))

    def failed(self, where: str, error: Exception) -> None:
        self._hook_errors += 1
        if self._hook_errors == 1:
            problem = f"could not record {where} ({type(error).__name__}: {error})"
            others = "further failures are only counted"
            notice(f"{problem}. The program goes on; {others}.")

    def dropped(self) -> None:
        self._works_dropped += 1

    def open_span(self, name: str, thread: int | None = None, *, of_profiler: bool = False) -> int:
        """Open a span of this thread, or of another: optimizers may step on a thread of RPC."""
        spans = self._open_spans.get(thread, []) if thread is not None else []
        inside = {"parent": spans[-1] if spans else None} if thread is not None else {}
        text = ""
        try:
            text = str(name).encode("utf-8", "replace").decode()[:LONGEST_SPAN]
            number = self.event(seen.Span, name=text, of_profiler=of_profiler, **inside)
        except Exception as error:  # The name may be any object.
            self.failed("a span", error)
            number = next(self._numbers)
        self._span_names[number] = text
        self.enter(number, thread)
        if of_profiler:  # There may be thousands: no counters are read for them.
            self._ranges.add(number)
        else:
            self.count()
        return number

    def close_span(self, number: int, thread: int | None = None) -> None:
        if self._span_names.pop(number, None) is None:
            return  # One of the process that has forked this one.
        if number not in self._ranges:
            self.count()
        self._ranges.discard(number)
        self.leave(number, thread)
        self.end(number, by="return")

    def span_names(self) -> list[str]:
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
            spans = self._open_spans.get(self._owner, [])
            if self._step_span in spans:
                # A range open in it, as around optimizer.step(), does not contain the next step.
                del spans[spans.index(self._step_span) + 1 :]
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
        if not self._outside or kind in (seen.Bucket, Rendezvous):
            self._open_step()
            return False
        self._left_out += kind is not Counters
        return True

    @contextmanager
    def step(self, **facts: int) -> Iterator[None]:
        """Add these facts to what this thread sends inside: which step of its collective it is."""
        self._steps[threading.get_ident()] = facts
        try:
            yield
        finally:
            del self._steps[threading.get_ident()]

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
        while self._posted:
            self.end(self._posted.pop(), by=NOT_OBSERVED)
        if self._writer.begun:
            self.sockets.watch()
        self.count()
        facts = {"works_dropped": self._works_dropped, "left_out": self._left_out}
        try:
            self._writer.finish(at_ns=_clock(), hook_errors=self._hook_errors, **facts)
        except OSError as error:
            self.failed("the end of the file", error)
        if self.options.gather:
            guarded(self, "the files of the other hosts", gather, self.clocks, self.path)

    def let_go(self) -> None:
        """Close the file in a forked child (a DataLoader's worker) that is not recorded."""
        self._writer.close()

    def go_on_in_child(self, header: Header, path: Path) -> None:
        """Begin a file in a forked child that is recorded, too, if it ever sends anything."""
        self._writer.close()
        self._begin_file(path, header)
        self._step_span, self._step_is_due = None, self._wanted_steps is not None and not self._outside
        self.sockets.connections.clear()  # They are the parent's.
        self.times.forget()
        self.log.forget(log_path(path))
        self.clocks.forget(path)
        if self._watch is not None:
            self._watch = HangWatch(self, path, self._watch.after)

    @property
    def begun(self) -> bool:
        return self._writer.begun


class _Announcing:
    """The recording for an added Source: describes it in the file before its first event."""

    def __init__(self, recording: Recording, source: Source) -> None:
        self._recording, self._source = recording, source
        self._announced: Path | None = None

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        path = self._recording.path
        if self._announced != path:  # A forked child has a file of its own.
            self._announced = path
            self._recording.fact(describe(self._source))
        return self._recording.event(kind, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recording, name)
