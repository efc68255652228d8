"""Record what this process sends: `with dlearn.record("traces/ddp"):`.

Installs the hooks, stamps what they report with number, time, thread and enclosing span, appends it to this process's
file, and undoes everything at the end. A guest in the training process: what goes wrong here is said once, on stderr,
counted in the footer, and never raised into the program that is being recorded.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import dlearn
from dlearn.errors import TraceError
from dlearn.hooks import collectives, ddp
from dlearn.trace.event import FORMAT, End, Event, Footer, GroupFact, Header, Span
from dlearn.trace.store import Writer

Clock = Callable[[], int]
LONGEST_SPAN = 200
"""Characters of a span's name that are kept."""

_active: Recording | None = None


@contextmanager
def record(folder: str | os.PathLike[str], *, max_bytes: int = 2 << 30) -> Iterator[None]:
    """Record every message of this process into `folder`, one file per process.

    `max_bytes` limits the file; what it keeps out is counted, and every result says so. Raises TraceError if this
    process is being recorded already, or `folder` holds another job's trace; SetupError if the installed torch does not
    fit.
    """
    recording = start(Path(folder), header=_own_header(), max_bytes=max_bytes)
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


def start(folder: Path, *, header: Header, max_bytes: int = 2 << 30, clock: Clock = time.monotonic_ns) -> Recording:
    """Install every hook and write into `folder` until `stop()`. For `record` and the cluster's ranks."""
    global _active
    if _active is not None:
        raise TraceError("this process is being recorded already: end the other recording first.")
    _refuse_other_jobs(folder, header.job)
    recording = Recording(folder, header=header, max_bytes=max_bytes, clock=clock)
    _active = recording
    atexit.register(recording.stop)
    return recording


class Recording:
    """One process being recorded; implements `hooks.Emit`."""

    def __init__(self, folder: Path, *, header: Header, max_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._owner = threading.get_ident()
        self._open_spans: dict[int, list[int]] = {self._owner: []}
        self._hook_errors = 0
        self._works_dropped = 0
        self._undo = ExitStack()
        self._writer = Writer(folder / f"{header.host}-{header.pid}.jsonl", max_bytes=max_bytes)
        try:
            self._writer.write(header)
            self._undo.callback(collectives.install(self))
            self._undo.callback(ddp.install(self))
        except BaseException:
            self._undo.close()
            self._writer.close()
            raise

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        now = self._clock()
        number = next(self._numbers)
        thread = threading.current_thread()
        spans = self._open_spans.get(thread.ident or 0) or self._open_spans[self._owner]
        self._writer.write(
            kind(
                number=number,
                start_ns=now,
                parent=spans[-1] if spans else None,
                thread="" if thread.ident == self._owner else thread.name,
                **facts,
            )
        )
        return number

    def end(self, number: int, *, by: str, error: str = "", peer: int | None = None) -> None:
        now = self._clock()
        try:
            self._writer.write(End(event=number, at_ns=now, by=by, error=error, peer=peer))
        except Exception as failure:
            self.failed("the end of an operation", failure)

    def group(self, fact: GroupFact) -> None:
        self._writer.write(fact)

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
        self._open_spans.setdefault(threading.get_ident(), []).append(number)
        return number

    def close_span(self, number: int) -> None:
        spans = self._open_spans.get(threading.get_ident(), [])
        if number in spans:
            # Not those above it: a generator's span may close while another is open.
            spans.remove(number)
        self.end(number, by="return")

    def stop(self) -> None:
        """Give torch back, close the file. Idempotent."""
        global _active
        if _active is self:
            _active = None
        atexit.unregister(self.stop)
        self._undo.close()
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
    """Of a process that the user started: rank and size from the default group, or from torchrun's variables."""
    environment = os.environ
    if dist.is_initialized():
        return make_header(job=_job_of_store(), rank=dist.get_rank(), world_size=dist.get_world_size())
    if "RANK" in environment and "WORLD_SIZE" in environment:
        meeting_point = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        job = f"{environment.get('TORCHELASTIC_RUN_ID', '')}@{meeting_point}"
        return make_header(job=job, rank=int(environment["RANK"]), world_size=int(environment["WORLD_SIZE"]))
    if multiprocessing.parent_process() is not None:
        # Ranks that a script spawns have nothing else in common yet.
        return make_header(job=f"children of {socket.gethostname()}-{os.getppid()}")
    return make_header(job=f"pid {os.getpid()}")


def _job_of_store() -> str:
    """The name that the first recorder of this job wrote into the job's own store. Waits for nobody."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # MPI's groups meet without one.
        return f"{socket.gethostname()}-{os.getppid()}"
    mine = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    answer: bytes = store.compare_set("dlearn/job", "", mine)
    return answer.decode()


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
