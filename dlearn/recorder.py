"""Record what this process sends: `with dlearn.record("traces/ddp"):`.

Installs the hooks, stamps what they report with number, time, thread and enclosing span, appends it to this process's
file, and undoes everything at the end. A guest in the training process: what goes wrong here is said once, on stderr,
counted in the footer, and never raised into the program that is being recorded.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import ProcessGroup

import dlearn
from dlearn.errors import TraceError
from dlearn.hooks import autograd, collectives, ddp, rpc
from dlearn.hooks.groups import Groups
from dlearn.hooks.job import job_of_process
from dlearn.hooks.rpc_agent_log import AgentLog
from dlearn.hooks.rpc_state import Watchers
from dlearn.hooks.sockets import Sockets
from dlearn.trace.agent_log import log_path
from dlearn.trace.event import FORMAT, Collective, Counters, End, Event, Footer, Header, Line, PointToPoint, Span
from dlearn.trace.options import Measure, Options
from dlearn.trace.store import Writer

Clock = Callable[[], int]
LONGEST_SPAN = 200
"""Characters of a span's name that are kept."""
ENDS_SECONDS = 0.05
"""How long `measure="phase"` waits before an operation for those under way to end."""

_active: Recording | None = None


@contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    measure: Measure | None = "span",
    checksums: bool = False,
    max_bytes: int = 2 << 30,
    graph: bool = False,
) -> Iterator[None]:
    """Record every message of this process into `folder`, one file per process.

    `measure="span"` reads the kernel's counters of bytes on the wire at both ends of the recording and of each span;
    "phase" before each operation, too, after waiting until they stand still, which changes the times. `checksums` adds
    one to each send. `max_bytes` limits the file; what it keeps out is counted, and every result says so. `graph` adds
    the graph of each distributed autograd context, and when each of its nodes runs.

    Raises TraceError if this process is being recorded already, or `folder` holds another job's trace; SetupError if
    the installed torch does not fit.
    """
    recording = start(Path(folder), header=_own_header(), options=Options(measure, checksums, max_bytes, graph))
    try:
        yield
    finally:
        recording.stop()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a stretch of the program: `with dlearn.span("step 3"):`. Does nothing while nobody records."""
    recording = _active
    if recording is None:
        yield
        return
    number = recording.open_span(name)
    try:
        yield
    finally:
        recording.close_span(number)


def operation(
    op: str, group: ProcessGroup, tensors: Sequence[torch.Tensor], *, outputs: Sequence[torch.Tensor] = ()
) -> Outer:
    """Report a collective that a Python process group carries out itself; it starts now.

    What is sent inside `with operation(...):`, on whatever thread, is its steps; it ends there. Python process groups
    do not pass torch's dispatcher, where the others are seen.
    """
    recording = _active
    return Outer(recording, recording.begin(op, group, tensors, outputs) if recording is not None else None)


@contextmanager
def step(number: int, *, offset_bytes: int, whole_bytes: int) -> Iterator[None]:
    """What this thread sends inside is step `number` of its collective, and begins at that offset of the whole."""
    recording = _active
    if recording is None:
        yield
        return
    with recording.step({"step": number, "offset_bytes": offset_bytes, "whole_bytes": whole_bytes}):
        yield


def start(
    folder: Path,
    *,
    header: Header,
    options: Options | None = None,
    clock: Clock = time.monotonic_ns,
    sorted_stderr: bool = False,
) -> Recording:
    """Install every hook and write into `folder` until `stop()`. For `record` and the cluster's ranks.

    With `sorted_stderr` whoever reads this process's stderr keeps the RPC agent's log.
    """
    global _active
    if _active is not None:
        raise TraceError("this process is being recorded already: end the other recording first.")
    _refuse_other_jobs(folder, header.job)
    recording = Recording(folder, header=header, options=options or Options(), clock=clock, sorted_stderr=sorted_stderr)
    _active = recording
    atexit.register(recording.stop)
    return recording


class Recording:
    """One process being recorded; implements `hooks.Emit`."""

    def __init__(self, folder: Path, header: Header, options: Options, clock: Clock, sorted_stderr: bool) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._owner = threading.get_ident()
        self._open_spans: dict[int, list[int]] = {self._owner: []}
        self._hook_errors = 0
        self._works_dropped = 0
        self._undo = ExitStack()
        self._measure = options.measure
        self._sockets = Sockets(self)
        self._groups = Groups(self)
        self._steps: dict[int, dict[str, Any]] = {}
        self._under_way: set[int] = set()
        self.meet: Callable[[], None] | None = None
        """Waits for all workers of a cluster, which opens RPC's connections before anybody uses them."""
        self._writer = Writer(folder / f"{header.host}-{header.pid}.jsonl", max_bytes=options.max_bytes)
        try:
            self._writer.write(header)
            self._undo.callback(collectives.install(self, self._groups, checksums=options.checksums))
            self._undo.callback(ddp.install(self))
            log = AgentLog(None if sorted_stderr else log_path(self._writer.path))
            self._undo.callback(log.close)
            watchers = Watchers(
                log.open, self._sockets.note_strangers, self.watch_rpc_sockets, self._disconnecting, self._phase
            )
            if options.graph:
                watchers, undo = autograd.install(self, watchers)
                self._undo.callback(undo)
            self._undo.callback(rpc.install(self, watchers))
            if self._measure is not None:
                self._undo.callback(self._sockets.install(self._groups.name, self.count))
        except BaseException:
            self._undo.close()
            self._writer.close()
            raise

    def event(self, kind: type[Event], /, **facts: Any) -> int:
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
        # What the hook itself has given counts; written into its own dict, as this runs for every call.
        facts.setdefault("start_ns", now)
        if spans:
            facts.setdefault("parent", spans[-1])
        if thread != self._owner:
            facts.setdefault("thread", threading.current_thread().name)
        self._writer.write(kind(**facts))
        return number

    def end(self, number: int, *, by: str, error: str = "", peer: int | None = None) -> None:
        now = self._clock()
        if self._under_way:
            self._under_way.discard(number)
        try:
            self._writer.write(End(event=number, at_ns=now, by=by, error=error, peer=peer))
        except Exception as failure:
            self.failed("the end of an operation", failure)

    def fact(self, line: Line) -> None:
        self._writer.write(line)

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

    def open_span(self, name: str) -> int:
        try:
            number = self.event(Span, name=str(name).encode("utf-8", "replace").decode()[:LONGEST_SPAN])
        except Exception as error:  # The name is anybody's object.
            self.failed("a span", error)
            number = next(self._numbers)
        self.enter(number)
        self.count()
        return number

    def close_span(self, number: int) -> None:
        self.count()
        self.leave(number)
        self.end(number, by="return")

    def enter(self, number: int) -> None:
        """What this thread reports from now on happens inside event `number`."""
        self._open_spans.setdefault(threading.get_ident(), []).append(number)

    def leave(self, number: int) -> None:
        spans = self._open_spans.get(threading.get_ident(), [])
        if number in spans:
            # Not those above it: a generator's span may close while another is open.
            spans.remove(number)

    def begin(
        self, op: str, group: ProcessGroup, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> int | None:
        """A collective of a Python process group starts; its number."""
        try:
            known = self._groups.of(group)
            return collectives.note_python_collective(op, known, tensors, outputs, self)
        except Exception as error:
            self.failed(op, error)
            return None

    @contextmanager
    def step(self, facts: dict[str, Any]) -> Iterator[None]:
        thread = threading.get_ident()
        before = self._steps.get(thread)
        self._steps[thread] = facts
        try:
            yield
        finally:
            del self._steps[thread]
            if before is not None:
                self._steps[thread] = before

    def count(self) -> None:
        """Write down the counters of bytes on the wire."""
        if self._measure is None or not self._sockets.any:
            return
        try:
            still = self._sockets.settle() if self._measure == "phase" else None
            received = self._sockets.received_bytes()
            self.event(Counters, sent_bytes=self._sockets.sent_bytes(), received_bytes=received, still=still)
        except Exception as failure:
            self.failed("the counters of sockets", failure)

    def watch_rpc_sockets(self, *, opened: bool = False) -> None:
        """An agent stands: its connections are there, if they are TCP. A cluster has to open them first."""
        if self._measure is not None and (opened or self.meet is None) and self._sockets.watch_rpc():
            self.count()

    def _disconnecting(self) -> None:
        """Before anybody closes RPC's connections, everybody reads what went over them."""
        self.count()
        if self.meet is not None:
            self.meet()

    def _phase(self) -> None:
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
        global _active
        if quiet:
            self._sockets.settle()
        if _active is self:
            _active = None
        atexit.unregister(self.stop)
        self._undo.close()
        self.count()
        self._close_file()

    def _close_file(self) -> None:
        footer = Footer(
            at_ns=self._clock(),
            lines=self._writer.lines,
            not_written=self._writer.not_written,
            hook_errors=self._hook_errors,
            works_dropped=self._works_dropped,
        )
        try:
            self._writer.write(footer)
        except OSError as error:
            self.failed("the end of the file", error)
        self._writer.close()

    def let_go(self) -> None:
        """In a forked child (a DataLoader's worker): the parent records, the child does not."""
        self._writer.close()


class Outer:
    """A collective of a Python process group, while it is under way."""

    def __init__(self, recording: Recording | None, number: int | None) -> None:
        self._recording, self._number = recording, number

    def __enter__(self) -> None:
        if self._recording is not None and self._number is not None:
            self._recording.enter(self._number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._recording is not None and self._number is not None:
            self._recording.leave(self._number)
            self._recording.end(self._number, by="return", error=kind.__name__ if kind is not None else "")


def make_header(*, job: str, rank: int | None = None, name: str = "", world_size: int | None = None) -> Header:
    """The first line of this process's file."""
    return Header(
        format=FORMAT,
        job=job,
        host=socket.gethostname(),
        pid=os.getpid(),
        torch=str(torch.__version__),
        dlearn=dlearn.__version__,
        start_ns=time.monotonic_ns(),
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        rank=rank,
        name=name,
        world_size=world_size,
    )


def _own_header() -> Header:
    job, rank, world_size = job_of_process()
    return make_header(job=job, rank=rank, world_size=world_size)


def _refuse_other_jobs(folder: Path, job: str) -> None:
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as stream:
            first = stream.readline(1 << 20)
        try:
            other = msgspec.json.decode(first, type=Header)
        except msgspec.MsgspecError:
            continue  # No trace file; `Trace.load` will say so.
        if other.job != job:
            raise TraceError(
                f"{folder} holds a trace of another job already ({path.name}); nothing is overwritten."
                " Give another folder."
            )


def _forget_in_child() -> None:
    global _active
    if _active is not None:
        _active.let_go()
        _active = None


os.register_at_fork(after_in_child=_forget_in_child)
