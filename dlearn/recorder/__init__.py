"""Record what this process sends: `with dlearn.record("traces/ddp"):`."""

import atexit
import itertools
import os
import socket
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from dlearn.errors import TraceError
from dlearn.events.event import FORMAT, Header
from dlearn.events.options import Measure, Options
from dlearn.events.store import read
from dlearn.events.this_host import kernel_id
from dlearn.events.writer import headers
from dlearn.hooks.c10d.collectives import hold as hold
from dlearn.hooks.c10d.collectives import note_collective, note_p2p
from dlearn.hooks.mpi.mpi_hook import unrecorded as unrecorded
from dlearn.hooks.network.clock import job_of_process
from dlearn.hooks.patches import ended
from dlearn.recorder.recording import OUTSIDE, Recording
from dlearn.version import __version__

_active: Recording | None = None
_followed: Header | None = None  # Of a recording that goes on in the process's children.


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
    "phase" before each operation, too, after waiting until they stand still, which changes the times; None reads none.
    `checksums` adds one to each send, and to what each rank gives to a collective. `max_bytes` limits the file; what
    it keeps out is counted, and every result says so. `graph` adds the graph of each distributed autograd context, and
    when each of its nodes runs.

    `steps=range(10, 12)` records these steps of a long job only, each as a span "step 10": step 0 is what comes before
    the optimizer's first step has returned. `hang_after=30` prints who waits for whom when nothing has happened for 30
    seconds, while it hangs. `gather` brings the files of other hosts to rank 0's folder at the end, through the job's
    own store, which is kept, with its port, until then; rank 0 waits for them. `sources=["tcp_store"]` turns on
    recorders that are off by default, by the name of an installed one, or "module:NAME" (docs/new-recorder.md).

    Raises TraceError if this process is being recorded already, or `folder` holds a trace; SetupError if the installed
    torch does not fit, or an option makes no sense.
    """
    options = Options(measure, checksums, max_bytes, graph, steps, hang_after, gather, sources)
    job, rank, world_size = job_of_process()
    header = make_header(job=job, rank=rank, world_size=world_size)
    recording = start(Path(folder), header=header, options=options)
    try:
        yield
    except Exception as error:
        recording.raised(error)
        raise
    finally:
        recording.stop()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a span of the program: `with dlearn.span("step 3"):`. Does nothing without a recording."""
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
    op: str,
    group: ProcessGroup,
    tensors: Sequence[torch.Tensor],
    *,
    outputs: Sequence[torch.Tensor] = (),
    root: int | None = None,
    splits: Sequence[int] = (),
) -> AbstractContextManager[None]:
    """Report a collective that a Python process group carries out itself; it starts now.

    What is sent inside `with operation(...):`, on whatever thread, is its steps; it ends there. Python process groups
    do not pass torch's dispatcher, where the others are seen. `splits` are the bytes for each rank, where they differ.
    """
    facts = {"root": root, "splits": tuple(splits)}
    recording, number = _noted(op, note_collective, group, tensors, outputs, **facts)
    return nullcontext() if recording is None else _inside(recording, number)


@contextmanager
def _inside(recording: Recording, number: int) -> Iterator[None]:
    with ended(recording, number):
        recording.enter(number)
        try:
            yield
        finally:
            recording.leave(number)


def posted(op: str, group: ProcessGroup, tensor: torch.Tensor, *, peer: int | None, tag: int) -> Callable[..., None]:
    """Report a "send" or "recv" that a Python process group carries out itself, and starts now.

    `peer` is a rank of the group; None receives from any. Return a function that reports the end
    when the program has waited for it: `ended(error="")`, with the sender as `peer` where any could be.
    """
    recording, number = _noted(op, note_p2p, group, tensor, peer, tag)
    return recording.posted(number) if recording is not None else lambda **_: None


def _noted(
    op: str, note: Callable[..., int], group: ProcessGroup, *what: Any, **facts: Any
) -> tuple[Recording | None, int]:
    """Return the recording that has noted a call, and its event; None if none has."""
    if _active is not None:
        try:
            return _active, note(_active, op, _active.groups.of(group), *what, **facts)
        except Exception as error:
            _active.failed(op, error)
    return None, OUTSIDE


def step(number: int, *, offset_bytes: int, whole_bytes: int) -> AbstractContextManager[None]:
    """Mark what this thread sends inside as step `number`, at this offset, of its collective."""
    if _active is None:
        return nullcontext()
    return _active.step(step=number, offset_bytes=offset_bytes, whole_bytes=whole_bytes)


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

    With `sorted_stderr` the reader of this process's stderr keeps the RPC agent's log. `alone`: all ranks are on this
    host, and known to their launcher. `follow` records children that the process forks as well, if they send anything,
    and a program that replaces it by `exec`; a `lazy` recording makes its file when there is something to write.
    """
    global _active, _followed
    if _active is not None:
        raise TraceError("this process is being recorded already: end the other recording first.")
    if not follow:
        refuse_other_traces(folder, header)
    path = _path_of(folder, header, free=follow)
    facts = {"sorted_stderr": sorted_stderr, "alone": alone, "lazy": lazy}
    _active = Recording(path, header, options or Options(), **facts)
    _followed = header if follow else None
    atexit.register(_active.exiting)
    _active.undo.callback(_forget, _active)
    return _active


def leave() -> None:
    """End a recording that was to go on in this process's children: in a cluster's rank the cluster itself records."""
    if _active is not None and _followed is not None:
        _active.stop()


def _forget(recording: Recording) -> None:
    global _active
    atexit.unregister(recording.exiting)
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
        _active.go_on_in_child(header, _path_of(_active.path.parent, header, free=True))


os.register_at_fork(after_in_child=_after_fork)


# The first line of a file: which job the process belongs to, and which rank it is -------------------------------------


def make_header(*, job: str, rank: int | None = None, name: str = "", world_size: int | None = None) -> Header:
    return Header(
        format=FORMAT,
        job=job,
        host=socket.gethostname(),
        pid=os.getpid(),
        torch=str(torch.__version__),
        dlearn=__version__,
        start_ns=time.monotonic_ns(),
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        rank=rank,
        name=name,
        world_size=world_size,
        clock=kernel_id("time"),
    )


def _path_of(folder: Path, header: Header, *, free: bool) -> Path:
    """Return this process's file, or a `free` one beside it: `exec` keeps the pid of a program."""
    name = f"{header.host}-{header.pid}"
    others = (folder / f"{name}-{number}.jsonl" for number in itertools.count(2))
    paths = itertools.chain([folder / f"{name}.jsonl"], others)
    return next(path for path in paths if not (free and path.exists()))


def refuse_other_traces(folder: Path, header: Header) -> None:
    """Raise TraceError if the folder holds a trace of another job, or of this rank."""
    for path, other in headers(folder):
        if (other.host, other.pid) == (header.host, header.pid):
            continue  # This process's own, which is not written anew either.
        again = other.rank is not None and (other.rank, other.restart) == (header.rank, header.restart)
        same = header.job != "" and other.job == header.job
        if again or not (same or _may_be_one_job(path, other, header)):
            holds = f"{folder} holds a trace of another job already ({path.name})"
            raise TraceError(f"{holds}; nothing is overwritten. Give another folder.")


def _may_be_one_job(path: Path, other: Header, header: Header) -> bool:
    """Return whether they have met, or one knows no job and the other runs and has met none."""
    file = read(path)
    if header.job and header.job in file.joined:
        return True
    if (header.job and other.job) or file.joined or file.footer is not None:
        return False
    if other.clock != header.clock:
        return True  # Whether it runs on another host is not known.
    try:
        os.kill(other.pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # It runs, and is another user's.
    return True
