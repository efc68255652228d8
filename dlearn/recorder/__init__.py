"""Record what this process sends: `with dlearn.record("traces/ddp"):`.

Installs the hooks, stamps what they report with number, time, thread and enclosing span, appends it to this process's
file, and undoes everything at the end.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch._C._distributed_c10d import ProcessGroup

from dlearn.errors import TraceError
from dlearn.hooks.c10d.collectives import note_collective, note_p2p
from dlearn.hooks.mpi.mpi_hook import plain as unrecorded
from dlearn.recorder.headers import make_header, own_header, own_path, refuse_other_traces
from dlearn.recorder.recording import OUTSIDE, Recording
from dlearn.trace.event import Header
from dlearn.trace.options import Measure, Options

__all__ = [
    "Outer",
    "Posted",
    "Recording",
    "make_header",
    "operation",
    "posted",
    "record",
    "span",
    "start",
    "step",
    "unrecorded",
]

_active: Recording | None = None
_followed: Header | None = None
"""The header of a recording that goes on in the process's children."""


@contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    measure: Measure | None = "span",
    checksums: bool = False,
    max_bytes: int = 2 << 30,
    graph: bool = False,
    steps: Container[int] | None = None,
    hang_after: float | None = None,
    gather: bool = False,
    sources: Sequence[str] = (),
) -> Iterator[None]:
    """Record every message of this process into `folder`, one file per process.

    `measure="span"` reads the kernel's counters of bytes on the wire at both ends of the recording and of each span;
    "phase" before each operation, too, after waiting until they stand still, which changes the times. `checksums`
    adds one to each send, and to what each rank gives to a collective. `max_bytes` limits the file; what it keeps out
    is counted, and every result says so. `graph` adds the graph of each distributed autograd context, and when each
    of its nodes runs.

    `steps=range(10, 12)` records these steps of a long job only, each as a span "step 10": step 0 is what comes before
    the optimizer's first step has returned. `hang_after=30` prints who waits for whom when nothing has happened for 30
    seconds, while it hangs. `gather` brings the files of other hosts to rank 0's folder at the end, through the job's
    own store, which is kept, with its port, until then; rank 0 waits for them. `sources=["tcp_store"]` turns on
    recorders that are off by default, by the name of an installed one, or "module:NAME" (docs/new-recorder.md).

    Raises TraceError if this process is being recorded already, or `folder` holds a trace; SetupError if the installed
    torch does not fit, or an option makes no sense.
    """
    options = Options(measure, checksums, max_bytes, graph, steps, hang_after, gather, sources)
    recording = start(Path(folder), header=own_header(), options=options)
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


class Outer:
    """A collective of a Python process group, while it is under way."""

    def __init__(self, recording: Recording | None, number: int) -> None:
        self._recording, self._number = recording, number

    def __enter__(self) -> None:
        if self._recording is not None:
            self._recording.enter(self._number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._recording is not None:
            self._recording.leave(self._number)
            self._recording.end(self._number, by="return", error=kind.__name__ if kind is not None else "")


class Posted:
    """A send or receive of a Python process group. If nobody waits for it, its end is not observed."""

    def __init__(self, recording: Recording | None, number: int) -> None:
        self._recording, self._number = recording, number
        if recording is not None:
            recording.posted.add(number)

    def ended(self, *, peer: int | None = None, error: str = "") -> None:
        """The program has waited for it, or found it complete; `peer` is who sent what came from any source."""
        if self._recording is not None and self._number in self._recording.posted:
            self._recording.posted.remove(self._number)
            self._recording.end(self._number, by="wait", error=error, peer=peer)


def operation(
    op: str,
    group: ProcessGroup,
    tensors: Sequence[torch.Tensor],
    *,
    outputs: Sequence[torch.Tensor] = (),
    root: int | None = None,
    splits: Sequence[int] = (),
) -> Outer:
    """Report a collective that a Python process group carries out itself; it starts now.

    What is sent inside `with operation(...):`, on whatever thread, is its steps; it ends there. Python process groups
    do not pass torch's dispatcher, where the others are seen. `splits` are the bytes for each rank, where they differ.
    """

    def note(to: Recording) -> int:
        known, checksums = to.groups.of(group), to.options.checksums
        return note_collective(op, known, tensors, outputs, to, root=root, splits=splits, checksums=checksums)

    return Outer(*_noted(op, note))


def posted(op: str, group: ProcessGroup, tensor: torch.Tensor, *, peer: int | None, tag: int) -> Posted:
    """Report a "send" or "recv" that a Python process group carries out itself: it starts now, and ends by `ended()`.

    `peer` is a rank of the group; None receives from any.
    """

    def note(to: Recording) -> int:
        return note_p2p(op, to.groups.of(group), tensor, peer, tag, to, checksums=to.options.checksums)

    return Posted(*_noted(op, note))


def _noted(op: str, note: Callable[[Recording], int]) -> tuple[Recording | None, int]:
    """Who has noted it, as which event; None where nobody records, or it could not be noted."""
    if _active is not None:
        try:
            return _active, note(_active)
        except Exception as error:
            _active.failed(op, error)
    return None, OUTSIDE


def step(number: int, *, offset_bytes: int, whole_bytes: int) -> AbstractContextManager[None]:
    """What this thread sends inside is step `number` of its collective, and begins at that offset of the whole."""
    facts = {"step": number, "offset_bytes": offset_bytes, "whole_bytes": whole_bytes}
    return nullcontext() if _active is None else _active.step(facts)


def start(
    folder: Path,
    *,
    header: Header,
    options: Options | None = None,
    sorted_stderr: bool = False,
    alone: bool = False,
    follow: bool = False,
    lazy: bool = False,
) -> Recording:
    """Install every hook and write into `folder` until `stop()`. For `record`, the cluster's ranks and `dlearn run`.

    With `sorted_stderr` whoever reads this process's stderr keeps the RPC agent's log. `alone`: all ranks are on this
    host, and known to whoever started them. `follow` records children that the process forks as well, if they send
    anything, and a program that takes its place; a `lazy` recording makes its file when there is something to write.
    """
    global _active, _followed
    if _active is not None:
        raise TraceError("this process is being recorded already: end the other recording first.")
    path = folder / f"{header.host}-{header.pid}.jsonl"
    if not follow:
        refuse_other_traces(folder, header)
    _active = Recording(
        own_path(path) if follow else path,
        header,
        options or Options(),
        sorted_stderr=sorted_stderr,
        alone=alone,
        lazy=lazy,
        ended=_forget,
    )
    _followed = header if follow else None
    atexit.register(_active.stop)
    return _active


def leave() -> None:
    """End a recording that was to go on in this process's children: in a cluster's rank the cluster itself records."""
    if _active is not None and _followed is not None:
        _active.stop()


def _forget(recording: Recording) -> None:
    global _active
    if _active is recording:
        _active = None


def _after_fork() -> None:
    global _active
    if _active is None:
        return
    if _followed is None:
        _active.let_go()
        _active = None
    else:
        header = make_header(job=_followed.job)
        _active.go_on_in_child(header, own_path(_active.path.parent / f"{header.host}-{header.pid}.jsonl"))


os.register_at_fork(after_in_child=_after_fork)
