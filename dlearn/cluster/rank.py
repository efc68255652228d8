"""The life of one rank: wait for a call, set up, run the function, report, wait until all are done.

Runs in a process of its own. It ends when it is told to, when its connection closes, or when the process that
started it is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from dlearn.cluster import descendants, mpi_seat, rpc_worker
from dlearn.cluster.answers import (
    Returned,
    answer_of_exception,
    answer_of_value,
    call_on_rank,
    flush,
    name_of_end,
)
from dlearn.cluster.descriptors import receive_descriptor, send_descriptor
from dlearn.cluster.payload import Surroundings, Unpacker
from dlearn.errors import SetupError
from dlearn.events.options import Options
from dlearn.network.namespace import NotPermitted


@dataclass(frozen=True)
class HostPlace:
    """Where a rank runs when it is not the notebook's machine: the interface to the others, its number on this host."""

    interface: str
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Call:
    """One call for one rank. `store` is where rank 0 listens; with `keep` the process stays."""

    payload: bytes
    surroundings: Surroundings
    rank: int
    world_size: int
    name: str
    backend: str
    init: bool
    job: str
    folder: str
    record: Options | None
    keep: bool
    rpc: bool = False
    store: tuple[str, int] = ("127.0.0.1", 0)
    place: HostPlace | None = None
    gate: str = ""
    own_log: bool = False
    """Beside an engine: the rank takes the agent's log out of its stderr itself, by its own host's clock."""


@dataclass(frozen=True)
class Listen:
    """What a rank in a network of its own is asked before its call: to open the store's socket there."""

    address: str
    backlog: int


Enter = Callable[[], int | None]
"""Moves a process of one thread into a network of its own; its device, if the parent is to hold that; NotPermitted."""

FINISH, CLOSED = "finish", "closed"
STACK_SIGNAL = signal.SIGUSR1


def main(control: Connection, alive: Connection, output: Connection, enter: Enter | None = None) -> None:
    """Serve calls until told to end. The target of a rank's process."""
    if enter is not None and not _take_seat(enter, control):
        return
    # A notebook interrupts its whole process group; ranks are ended by the cluster, not by the keyboard.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # The fork server has it blocked.
    # What the function starts is started as in the notebook, not by a fork server just because this
    # rank was; and if it wants one, by its own: below ours are ranks, and what they left behind.
    multiprocessing.set_start_method(None, force=True)
    descendants.end_with_fork_server()
    descendants.adopt()
    _redirect(output)
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True, name="dlearn-parent").start()
    with contextlib.suppress(SetupError):  # A torch that does not fit: the first call says so.
        importlib.import_module("dlearn.recorder")  # Where it is not there yet, a spare loads it while it waits.
    rank = _Rank(control)
    while True:
        try:
            call = control.recv()
        except EOFError:
            break
        if call is None:
            break
        if isinstance(call, Listen):
            rank.listen(call)
            continue
        if not rank.serve(call):
            break
    with contextlib.suppress(Exception):  # Nobody is left to tell.
        mpi_seat.leave()
    flush()
    # Threads of gloo and of the user may still run, and an orderly interpreter exit would trip over them.
    _end_with_all_it_started()


def _take_seat(enter: Enter, control: Connection) -> bool:
    """Go into a network of its own, while there is one thread; its device is for the parent. False if refused."""
    with contextlib.suppress(BrokenPipeError):  # The parent is gone.
        try:
            device = enter()
        except NotPermitted as error:
            control.send(str(error))
            return False
        control.send("")
        if device is not None:
            send_descriptor(control, device)
            os.close(device)
        return True
    return False


def stack_file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"stack-{rank}.txt")


def _redirect(output: Connection) -> None:
    """Everything that is printed, by Python, C++ or a child process, goes to the cluster."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), encoding="utf-8", line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), encoding="utf-8", line_buffering=True)  # noqa: SIM115


def _end_with_parent(alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    _end_with_all_it_started()


def _end_with_all_it_started() -> None:
    """A DataLoader's workers are in the rank's process group; a daemon has left it."""
    descendants.end_children(os.getpid())
    os.killpg(0, signal.SIGKILL)


class _Rank:
    """What a rank keeps from call to call: the stores of its process groups."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._stores: list[Any] = []
        self._unpacker = Unpacker()
        self._worker: AbstractContextManager[None] | None = None
        self._stack: TextIO | None = None
        self._listener: socket.socket | None = None

    def listen(self, asked: Listen) -> None:
        self._listener = socket.create_server((asked.address, 0), backlog=asked.backlog)
        self._control.send(self._listener.getsockname())

    def _receive_listener(self) -> int:
        listener, self._listener = self._listener, None
        return receive_descriptor(self._control) if listener is None else listener.detach()

    def serve(self, call: Call) -> bool:
        """Run one call; False when this process should end after it."""
        if call.backend == "mpi":
            mpi_seat.receive(self._control)
        listener = self._receive_listener() if call.rank == 0 else None
        recording = None
        try:
            _enter(call)
            self._listen_for_stack_signal(call)
            recording = _start_recording(call)
            gate = importlib.import_module("dlearn.hooks.gate") if call.gate else None
            if gate is not None:
                gate.forget_timeouts()
            functions, args = self._set_up(call, listener)
            function = functions[call.rank]
            with self._rpc_worker(call, recording):
                if gate is not None:
                    gate.meet(call.gate, call.rank, call.world_size, recording)
                value = None
                if function is not None:
                    value = call_on_rank(function, args, call.surroundings)
                if gate is not None:
                    gate.function_over()
            outcome = answer_of_value(value) if function is not None else Returned(None)
        except BaseException as error:
            outcome = answer_of_exception(error, call.surroundings)
        if "dlearn.hooks.gate" in sys.modules:
            sys.modules["dlearn.hooks.gate"].leave()
        flush()
        if recording is not None:
            recording.count()  # While all are here: a connection to a rank that has ended cannot be read any more.
            recording.function_ended(name_of_end(outcome))
        self._control.send(outcome)
        # The others may still need this rank's connections: leave only together.
        keep_on = self._wait_for_finish()
        if recording is not None:
            recording.stop(quiet=self._worker is not None)
        flush()
        with contextlib.suppress(OSError):
            self._control.send(CLOSED)
        return keep_on and call.keep

    def _listen_for_stack_signal(self, call: Call) -> None:
        """On a signal, and whatever it is stuck in, the rank writes where it is."""
        before, self._stack = self._stack, open(stack_file(call.folder, call.rank), "w")  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=False)
        if before is not None:
            before.close()

    def _rpc_worker(self, call: Call, recording: Any) -> AbstractContextManager[None]:
        """torch can set RPC up once in a process: a rank that is kept stays a worker."""
        if not call.rpc:
            return nullcontext()
        if self._worker is not None:
            if recording is not None:
                recording.watch_rpc_sockets(opened=True)
            # Others may call what this call has brought: all ranks must have unpacked it.
            rpc_worker.meet(self._stores[-1], call.world_size)
            return nullcontext()
        worker = rpc_worker.worker(call.name, call.rank, call.world_size, recording, self._stores[-1])
        if not call.keep:
            return worker
        self._worker = worker
        worker.__enter__()
        return nullcontext()

    def _wait_for_finish(self) -> bool:
        try:
            return bool(self._control.recv() == FINISH)
        except EOFError:
            return False

    def _set_up(self, call: Call, listener: int | None) -> Any:
        import torch.distributed as dist

        if call.backend == "mpi":
            mpi_seat.take(call.rank, call.world_size)
        if call.init and dist.is_initialized():
            if listener is not None:
                os.close(listener)
        else:
            if not dist.is_initialized():
                self._stores.clear()
            store = _meet(call, listener)
            self._stores.append(store)
            if call.init:
                _init_process_group(call, store)
        return self._unpacker.unpack(call.payload, keep=call.keep)


def _enter(call: Call) -> None:
    import torch

    from dlearn.cluster.payload import take_over
    from dlearn.hooks import callers

    take_over(call.surroundings)
    place = _place(call)
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=call.store[0],
        MASTER_PORT=str(call.store[1]),
        GLOO_SOCKET_IFNAME=place.interface,
        TP_SOCKET_IFNAME=place.interface,
        NCCL_SOCKET_IFNAME=place.interface,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        # Forked ranks would otherwise all draw the fork server's numbers, the same in every run.
        sys.modules["numpy"].random.seed()
    callers.cell_names.update({file: name for file, (name, _) in call.surroundings.cells.items()})


def _place(call: Call) -> HostPlace:
    return call.place or HostPlace(_loopback_interface(), call.rank, call.world_size)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _start_recording(call: Call) -> Any:
    from dlearn import recorder

    recorder.leave()
    if call.record is None:
        return None
    header = recorder.make_header(
        job=call.job,
        rank=call.rank,
        name="" if call.name.isdigit() else call.name,
        world_size=call.world_size,
    )
    one_host = _place(call).local_world_size == call.world_size
    return recorder.start(
        Path(call.folder, "trace"),
        header=header,
        options=call.record,
        sorted_stderr=not call.own_log,
        alone=one_host,
    )


def _meet(call: Call, listener: int | None) -> Any:
    """The store where ranks find each other. Rank 0 serves it on a socket that is bound already, to one address."""
    from torch._C._distributed_c10d import TCPStore

    if listener is None:
        store = TCPStore(*call.store, call.world_size, is_master=False)
    else:
        store = TCPStore(
            *call.store,
            call.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    _offer(store, call)
    return store


def _offer(store: Any, call: Call) -> None:
    """Have a tutorial's own `init_process_group("gloo")` meet in this store, on loopback.

    Each init has a prefix: after destroy and init again, old addresses must not be found.
    """
    from urllib.parse import parse_qs, urlparse

    from torch._C._distributed_c10d import PrefixStore

    numbers = itertools.count(1)

    def meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        asked = parse_qs(urlparse(url).query)
        rank = int(asked.get("rank", [str(call.rank)])[0])
        world_size = int(asked.get("world_size", [str(call.world_size)])[0])
        yield PrefixStore(f"init {next(numbers)}", store), rank, world_size
        raise RuntimeError("a cluster's ranks meet once per init_process_group; they are not restarted.")

    # The function `rendezvous` hides the module of the same name.
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = meet


def _init_process_group(call: Call, store: Any) -> None:
    import torch
    import torch.distributed as dist

    if call.backend == "mpi" or call.backend.startswith("dlearn_"):
        import dlearn.backends  # noqa: F401  (it makes its backends known)
    if call.backend == "nccl":
        gpus, place = torch.cuda.device_count(), _place(call)
        if gpus < place.local_world_size:
            raise SetupError(
                f"backend 'nccl' needs one GPU per rank: {place.local_world_size}, and this machine has {gpus}."
                " Use backend='gloo', or fewer ranks."
            )
        torch.cuda.set_device(place.local_rank)
    backend = "mpi4py" if call.backend == "mpi" else call.backend
    dist.init_process_group(backend, store=store, rank=call.rank, world_size=call.world_size)
