"""The first line of a process's file: which job it belongs to, and which rank it is."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import torch

import dlearn
from dlearn.errors import TraceError
from dlearn.hooks.network.clock import clock_name
from dlearn.hooks.network.job import job_of_process
from dlearn.trace.event import FORMAT, Header
from dlearn.trace.store import read


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
        clock=clock_name(),
    )


def own_header() -> Header:
    job, rank, world_size = job_of_process()
    return make_header(job=job, rank=rank, world_size=world_size)


def own_path(path: Path) -> Path:
    """`path`, or one beside it: a program that takes the place of another (`exec`) has the same pid."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def refuse_other_traces(folder: Path, header: Header) -> None:
    """TraceError if the folder holds a trace of another job, or of this rank: then that job has run before."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as stream:
            first = stream.readline(1 << 20)
        try:
            other = msgspec.json.decode(first, type=Header)
        except msgspec.MsgspecError:
            continue  # No trace file; `Trace.load` will say so.
        if (other.host, other.pid) == (header.host, header.pid):
            continue  # This process's own, which is not written anew either.
        again = other.rank is not None and (other.rank, other.restart) == (header.rank, header.restart)
        same = header.job != "" and other.job == header.job
        if again or not (same or _may_be_one_job(path, other, header)):
            raise TraceError(
                f"{folder} holds a trace of another job already ({path.name}); nothing is overwritten."
                " Give another folder."
            )


def _may_be_one_job(path: Path, other: Header, header: Header) -> bool:
    """Whether the two have met already; or one does not know its job yet, and the other still runs and met nobody."""
    file = read(path)
    if header.job and header.job in file.joined:
        return True
    if (header.job and other.job) or file.joined or file.footer is not None:
        return False
    return other.clock != header.clock or _runs(other.pid)


def _runs(pid: int) -> bool:
    """Whether there is such a process on this host, as far as can be asked."""
    if sys.platform == "win32":  # There a signal, even 0, is no question.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
