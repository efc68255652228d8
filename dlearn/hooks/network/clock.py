"""Which job a process belongs to, and how its clock relates to the job's: four time stamps over the job's own store.

When a default group is made, a thread of each rank greets rank 0 through the store in which the
ranks have just met. A rank with another clock than rank 0 asks it for the time repeatedly, and
keeps the answer that was fastest (NTP, RFC 5905, section 8):

    this rank:  t1 ─ask─►            ─►t4      offset = ((t2 - t1) + (t3 - t4)) / 2
    rank 0:              ─►t2  t3─answer─►     error <= ((t4 - t1) - (t3 - t2)) / 2
"""

import json
import multiprocessing
import os
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dlearn.events.agent_log import log_path
from dlearn.events.job_facts import ClockReading, Joined, Peer
from dlearn.events.this_host import kernel_id
from dlearn.hooks import Emit
from dlearn.notices import notice

ROUNDS = 200
READING_SECONDS = 0.1  # Exchanges for one reading, and how long it may take; the best one counts.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
"""Between two readings; each pause is twice as long as that before. While either program is busy in Python, every
answer is late; and a job that is killed has no last reading."""
PATIENCE_SECONDS = 5.0
"""How long an answer is waited for; rank 0 waits as long for the last readings of the others."""


class ClockServer:
    """Rank 0 answers, the others ask; of the default group of this process, while there is one.

    A reference to the store keeps its port busy: it is let go when the group is destroyed, but
    with `keep_store`. With `alone` all ranks are on this host, and nothing is asked.
    """

    def __init__(
        self, emit: Emit, path: Path, ignore_port: Callable[[int], None], *, keep_store: bool, alone: bool
    ) -> None:
        self._emit, self.path, self._ignore_port = emit, path.resolve(), ignore_port
        self._keep_store, self._alone = keep_store, alone
        self._name = kernel_id("time")
        self._met: Counter[str] = Counter()
        self._prefix = ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.store: Store | None = None
        self.rank = 0
        self.peers: dict[int, Peer] = {}
        self.out_of_reach = False
        """Whether ranks met in a store that allows no questions, while some may be on other hosts."""

    def close(self) -> None:
        """Take the last readings, and end the threads."""
        if self._thread is None or self.store is None:
            return
        thread, store, self._thread = self._thread, self.store, None
        if not self._keep_store:
            self.store = None
        if self.rank == 0:
            with suppress(dist.DistError):  # Its server, on another rank, has gone; so the thread has ended, too.
                store.queue_push(self._prefix, json.dumps({"kind": "close"}))
        else:
            self._over.set()
        thread.join(2 * PATIENCE_SECONDS)

    def forget(self, path: Path) -> None:
        """Give up the threads in a forked child: they are its parent's."""
        self.path, self._thread, self.store = path.resolve(), None, None

    def join(self, where: str, store: Store | None, rank: int, size: int | None) -> None:
        """Start where ranks meet, for a default group or RPC: all find one name for the job."""
        if store is None or self._alone:  # MPI's groups meet without a store.
            return
        if job := word_in(store, "dlearn/job"):
            self._emit.fact(Joined(job=job))
        self.close()
        self._met[where] += 1
        known = innermost(store)
        launched = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
        others = size is not None and size > 1 and launched != (str(size), str(size))
        self.out_of_reach = others and not isinstance(known, TCPStore)
        if not others or not isinstance(known, TCPStore):
            return
        self._ignore_port(known.port)
        self._prefix = f"dlearn/desk {where} {self._met[where]}"
        self.rank, self.store = rank, store
        self._over = threading.Event()
        serve = self._answer if rank == 0 else self._ask
        # A clone holds no server, only a connection of its own.
        clone = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, args=(serve, clone), daemon=True, name="dlearn-clock")
        self._thread.start()

    def _run(self, serve: Callable[[Store], None], store: Store) -> None:
        try:
            serve(store)
        except dist.DistError:
            pass  # The store's server has gone, with rank 0: what was read is on file.
        except Exception as error:  # A full disk, an answer to an earlier recording.
            self._emit.failed("the clocks", error)

    def _answer(self, store: Store) -> None:
        """Answer as rank 0 until closed: note which ranks there are, and give them the time."""
        store.set_timeout(timedelta(days=30))
        asking: set[int] = set()
        closing = False
        while not closing or asking:
            note = json.loads(store.queue_pop(self._prefix))
            heard_ns = time.monotonic_ns()
            match note["kind"]:
                case "time":
                    store.queue_push(f"{self._prefix}/{note['rank']}", f"{heard_ns} {time.monotonic_ns()}")
                case "hello":
                    self._meet(note)
                    store.queue_push(f"{self._prefix}/{note['rank']}", self._hello())
                    if note["clock"] != self._name:
                        asking.add(note["rank"])
                case "bye":
                    asking.discard(note["rank"])
                    others = [[peer.rank, peer.host, peer.path] for peer in self.peers.values()]
                    store.queue_push(f"{self._prefix}/{note['rank']}", json.dumps(others))
                case "close":
                    closing = True
                    store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))

    def _ask(self, store: Store) -> None:
        """Greet rank 0; if it has another clock, read that now and then, and at the end."""
        queue = f"{self._prefix}/{self.rank}"
        store.queue_push(self._prefix, self._hello())
        wait = 0.001
        while not store.queue_len(queue):  # Rank 0 may be recorded later, or never.
            if self._over.wait(wait):
                return
            wait = min(2 * wait, 1.0)
        note = json.loads(store.queue_pop(queue))
        self._meet(note)
        if note["clock"] == self._name:
            return
        store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
        self._read(store, note["clock"])
        pause = FIRST_PAUSE_SECONDS
        while not self._over.wait(pause):
            self._read(store, note["clock"])
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._read(store, note["clock"])
        store.queue_push(self._prefix, json.dumps({"kind": "bye", "rank": self.rank}))
        for rank, host, path in json.loads(store.queue_pop(queue)):
            if host != socket.gethostname():
                self._emit.fact(Peer(rank=rank, host=host, path=path))

    def _read(self, store: Store, reference: str) -> None:
        """Ask for the time repeatedly, and note the answer whose error is smallest."""
        question = json.dumps({"kind": "time", "rank": self.rank})
        readings: list[tuple[int, int, int]] = []
        deadline = time.monotonic() + READING_SECONDS
        while not readings or (len(readings) < ROUNDS and time.monotonic() < deadline):
            asked = time.monotonic_ns()
            store.queue_push(self._prefix, question)
            answer = store.queue_pop(f"{self._prefix}/{self.rank}")
            came = time.monotonic_ns()
            heard, answered = map(int, answer.split())
            error = ((came - asked) - (answered - heard) + 1) // 2
            readings.append((error, ((heard - asked) + (answered - came)) // 2, came))
        error, offset, at = min(readings)
        rounds = len(readings)
        self._emit.fact(ClockReading(at_ns=at, offset_ns=offset, error_ns=error, reference=reference, rounds=rounds))

    def _hello(self) -> str:
        note = {"kind": "hello", "rank": self.rank, "host": socket.gethostname()}
        return json.dumps(note | {"path": str(self.path), "clock": self._name})

    def _meet(self, note: dict[str, Any]) -> None:
        peer = Peer(rank=note["rank"], host=note["host"], path=note["path"])
        self.peers[peer.rank] = peer
        self._emit.fact(peer)


# Which job ------------------------------------------------------------------------------------------------------------

_MPI_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Rank and size by MPICH's and Open MPI's mpiexec. (All processes of one host have the same parent.)"""


def job_of_process() -> tuple[str, int | None, int | None]:
    """Return job, rank and size, by the default group or the launcher; "" and None if not known."""
    environment = os.environ
    if dist.is_initialized():
        job = word_in(dist.distributed_c10d._get_default_store(), "dlearn/job")
        return job or f"{socket.gethostname()}-{os.getppid()}", dist.get_rank(), dist.get_world_size()
    if "RANK" in environment and "WORLD_SIZE" in environment:
        meeting_point = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        job = f"{environment.get('TORCHELASTIC_RUN_ID', '')}@{meeting_point}"
        return job, int(environment["RANK"]), int(environment["WORLD_SIZE"])
    for rank, size in _MPI_VARIABLES:
        if {rank, size} <= environment.keys():
            return f"{socket.gethostname()}-{os.getppid()}", int(environment[rank]), int(environment[size])
    if multiprocessing.parent_process() is not None:
        # Ranks that a script spawns have nothing else in common yet.
        return f"children of {socket.gethostname()}-{os.getppid()}", None, None
    return "", None, None


def word_in(store: Store | None, key: str) -> str:
    """Return the word that the first rank to ask writes there; "" if the store can hold nothing."""
    word = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
    try:
        return str(store.compare_set(key, "", word).decode()) if store is not None else ""
    except RuntimeError:
        return ""


def innermost(store: Store | None) -> Store | None:
    """Return the store itself below its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


# The files of other hosts ---------------------------------------------------------------------------------------------

PIECE_BYTES, PIECES_AHEAD = 1 << 20, 4
"""Files go through the job's store, which is there (no port, no password, no shared disk), but slow, and its memory
small: so compressed, in pieces, a few at a time."""
PIECE_SECONDS = 60.0  # How long the next piece, or room for it, is waited for.
_END = b"end"


def gather(clocks: ClockServer, path: Path) -> None:
    """Bring the files of other hosts to rank 0, which waits for them."""
    if clocks.store is None:
        if clocks.out_of_reach:
            notice("no files were gathered: the job's store is no TCPStore. Copy them by hand.")
        return
    store: Store = clocks.store.clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=PIECE_SECONDS))
    if clocks.rank:
        first = clocks.peers.get(0)
        if first is None or not (path.parent / Path(first.path).name).exists():
            for file in (path, log_path(path)):
                _send(store, f"dlearn/file/{clocks.rank}", file)
        return
    for rank, peer in sorted(clocks.peers.items()):
        name = Path(peer.path.replace("\\", "/")).name
        if (path.parent / name).exists():
            continue
        for target in (path.parent / name, log_path(path.parent / name)):
            _receive(store, f"dlearn/file/{rank}", target, f"rank {rank}'s file {peer.path} on host {peer.host}")


def _send(store: Store, queue: str, file: Path) -> None:
    if file.exists():
        with file.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                deadline = time.monotonic() + PIECE_SECONDS
                while store.queue_len(queue) >= PIECES_AHEAD:
                    if time.monotonic() > deadline:
                        return  # Rank 0 has stopped to take them, and says so.
                    time.sleep(0.001)
                store.queue_push(queue, zlib.compress(piece, 1))
    store.queue_push(queue, _END)


def _receive(store: Store, queue: str, target: Path, what: str) -> None:
    """Write each piece as it arrives: a file may not fit in memory, and half is better than none."""
    stream = None
    try:
        while (piece := store.queue_pop(queue)) != _END:
            stream = stream or target.open("xb")
            stream.write(zlib.decompress(piece))
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        notice(f"{what} did not come whole ({why}): copy it by hand.")
    finally:
        if stream is not None:
            stream.close()
