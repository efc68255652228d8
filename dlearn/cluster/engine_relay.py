"""What runs on an ipyparallel engine: it starts a rank beside itself, and forwards messages.

The engine is not the rank: one that hangs, exits or is ended leaves its engine usable. The notebook
asks again and again (`exchange`), each time for a moment; in between the engine is free for others.
The rank ends with its engine, and when the notebook stops asking.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from dlearn.cluster import spares
from dlearn.cluster.launch import DEATH_SECONDS, DEFAULT_START, RankProcess
from dlearn.cluster.payload import Surroundings
from dlearn.cluster.rank import Call
from dlearn.trace.rpc.agent_log import PIPE_BYTES

LEASE_SECONDS = 60.0
"""A rank whose notebook has not asked for so long has lost it, and is ended."""
OUTPUT_BYTES = 2 * PIPE_BYTES
"""As much of what a rank prints goes into one report: more than its pipe can hold."""
PIECE_BYTES = 8 << 20


@dataclass
class _Hosted:
    process: RankProcess
    heard: float
    folders: list[str] = field(default_factory=list)
    silent: bool = False


@dataclass(frozen=True)
class Report:
    """What came from a rank since the last one. `at_ns` is this host's monotonic clock; after `over` nothing comes."""

    output: bytes
    messages: tuple[Any, ...]
    over: bool
    exit_code: int | None
    at_ns: int
    note: str = ""


_hosted: dict[str, _Hosted] = {}
_forgotten: set[str] = set()
_watch: threading.Thread | None = None


def start(key: str) -> int | None:
    """Start a rank that is called `key` from now on; its pid. While torch is loading, that takes a while."""
    global _watch
    if _watch is None:
        _watch = threading.Thread(target=_end_the_forgotten, name="dlearn-lease", daemon=True)
        _watch.start()
    (process,) = spares.take(1, DEFAULT_START)
    _hosted[key] = _Hosted(process, time.monotonic())
    return process.pid


def ask(key: str, method: str, *args: Any) -> Any:
    """What the rank's `RankProcess.method(*args)` returns; None if the rank is gone."""
    hosted = _hosted.get(key)
    return getattr(hosted.process, method)(*args) if hosted is not None else None


def exchange(key: str, messages: list[Any], seconds: float) -> Report:
    """Pass `messages` on to the rank; what came from it, within `seconds`."""
    hosted = _hosted.get(key)
    if hosted is None:
        note = f"was ended by its engine, which had not heard from the notebook for {LEASE_SECONDS:.0f} s"
        return Report(b"", (), True, None, time.monotonic_ns(), note if key in _forgotten else "")
    hosted.heard = time.monotonic()
    rank = hosted.process
    if messages:
        # On a thread: a rank that does not read must not hold up the engine.
        here = [_moved_here(message, hosted) if isinstance(message, Call) else message for message in messages]
        threading.Thread(target=_send, args=(rank, here), daemon=True).start()
    ends: list[Any] = [rank.control, rank.sentinel, *([] if hosted.silent else [rank.output])]
    ready = connection.wait(ends, seconds)
    over, told = rank.sentinel in ready, []
    if rank.control in ready:
        try:
            while rank.control.poll(0):
                told.append(rank.control.recv())
        except (EOFError, ConnectionResetError):
            over = True
    exit_code = None
    if over:
        rank.wait(DEATH_SECONDS)
        exit_code = rank.exit_code
        rank.kill()  # What it had started.
    # Read after the messages: what the rank printed before its answer is in the pipe now, and comes before it.
    return Report(_read(hosted), tuple(told), over, exit_code, time.monotonic_ns())


def end(key: str) -> None:
    """End the rank now, with all it started, and have a fresh one wait for the next run."""
    hosted = _hosted.pop(key, None)
    if hosted is not None:
        hosted.process.kill()
        spares.turn_over(hosted.process.close, 1, DEFAULT_START)


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "trace").glob("*"))


def piece(folder: str, name: str, first: int) -> bytes:
    """Some of a recorded file, from byte `first` on; nothing at its end."""
    with Path(folder, "trace", name).open("rb") as file:
        file.seek(first)
        return file.read(PIECE_BYTES)


def _moved_here(call: Call, hosted: _Hosted) -> Call:
    """The call as it fits this host: the engine's environment and module path, the notebook's folder if it is here."""
    for folder in (call.folder, f"{call.folder}/trace"):
        os.mkdir(folder, 0o700)  # Others may read what is in the folder for temporary files.
    there = call.surroundings
    directory = there.directory if os.path.isdir(there.directory) else os.getcwd()
    own = [entry or os.getcwd() for entry in sys.path]
    path = own + [entry for entry in there.path if entry not in own]
    hosted.folders.append(call.folder)
    return replace(call, surroundings=Surroundings(dict(os.environ), directory, path, there.cells))


def _send(rank: RankProcess, messages: list[Any]) -> None:
    for message in messages:
        with suppress(OSError):  # It died; the next report tells.
            if isinstance(message, Call):
                rank.send(message)
            else:
                rank.control.send(message)


def _read(hosted: _Hosted) -> bytes:
    """What the rank has printed so far; its children may hold the pipe open, so never wait for its end."""
    parts, size = [], 0
    while size < OUTPUT_BYTES and not hosted.silent and hosted.process.output.poll(0):
        parts.append(os.read(hosted.process.output.fileno(), OUTPUT_BYTES))
        size += len(parts[-1])
        hosted.silent = not parts[-1]
    return b"".join(parts)


def _end_the_forgotten() -> None:
    while True:
        time.sleep(min(1.0, LEASE_SECONDS / 4))
        for key, hosted in list(_hosted.items()):
            if time.monotonic() - hosted.heard > LEASE_SECONDS:
                _forgotten.add(key)
                end(key)
                for folder in hosted.folders:
                    shutil.rmtree(folder, ignore_errors=True)
