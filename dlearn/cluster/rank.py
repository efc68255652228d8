"""The life of one rank: wait for a call, set up, run the function, report, wait for the others."""

import faulthandler
import importlib
import io
import itertools
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from dlearn.cluster import descendants, rank_protocol, rpc_worker
from dlearn.cluster.answers import answer_of_call, answer_of_exception, flush, name_of_end
from dlearn.cluster.payload import Unpacker, adopt
from dlearn.cluster.rank_protocol import FINISH, Call, Enter, HostPosition, Listen
from dlearn.errors import SetupError
from dlearn.network.namespace import NotPermitted

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SHARED_MEMORY = {"UCX_TLS": "self,sm"}  # Without this each rank of MPI opens ports on the machine.


def main(control: Connection, output: Connection, enter: Enter | None = None) -> None:
    """Serve calls until asked to end. Runs in a process of one thread, which leads its process group."""
    if enter is not None and not _enter_network(enter, control):
        return
    descendants.end_with_parent()
    descendants.adopt()
    _redirect(output)
    with suppress(SetupError):  # A torch that does not fit: the first call reports it.
        importlib.import_module("dlearn.recorder")  # One that was spawned loads it while it waits.
    rank = _Rank(control)
    with suppress(EOFError):
        while (asked := control.recv()) is not None:
            if isinstance(asked, Listen):
                rank.listen(asked)
            elif not rank.serve(asked):
                break
    with suppress(Exception):  # The connection is closed: no process would read it.
        _leave_mpi()
    flush()
    # Threads of gloo and of the user may still run: an orderly exit of the interpreter would fail on
    # them. A DataLoader's workers are in the rank's process group; a daemon has left it.
    descendants.end_children()
    os.killpg(0, signal.SIGKILL)


def _leave_mpi() -> None:
    """Leave the MPI job, together with all other ranks. A rank that fails is ended instead."""
    if "mpi4py.MPI" not in sys.modules:
        return
    import torch.distributed as dist
    from mpi4py import MPI

    if dist.is_initialized():
        dist.destroy_process_group()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _enter_network(enter: Enter, control: Connection) -> bool:
    """Enter a network, and send its device to the parent. Return False if that is not permitted."""
    with suppress(BrokenPipeError):  # The parent is gone.
        try:
            device = enter()
        except NotPermitted as error:
            control.send(str(error))
            return False
        control.send("")
        if device is not None:
            rank_protocol.send_descriptor(control, device)
            os.close(device)
        return True
    return False


def _redirect(output: Connection) -> None:
    """Send everything that is printed, by Python, C++ or a child process, to the cluster."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(output.fileno(), number)
        raw = open(number, "wb", 0, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", line_buffering=True))


class _Rank:
    """The state that a rank keeps from call to call: the stores of its process groups, its RPC worker."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._stores: list[Any] = []
        self._unpacker = Unpacker()
        self._worker: AbstractContextManager[None] | None = None
        self._stack: TextIO | None = None
        self._listener: socket.socket | None = None
        self._pmi: int | None = None

    def listen(self, asked: Listen) -> None:
        self._listener = socket.create_server((asked.address, 0), backlog=asked.backlog)
        self._control.send(self._listener.getsockname())

    def serve(self, call: Call) -> bool:
        """Run one call. Return False if this process is to end after it."""
        if call.backend == "mpi":
            self._receive_pmi()
        listener, self._listener = self._listener, None
        recording = None
        try:
            _prepare(call)
            self._listen_for_stack_signal(call)
            recording = _start_recording(call)
            self._meet(call, listener)
            functions, args = self._unpacker.unpack(call.payload, keep=call.keep)
            with self._rpc_worker(call, recording), _gate(call, recording):
                outcome = answer_of_call(functions[call.rank], args, call.environment)
        except BaseException as error:
            outcome = answer_of_exception(error, call.environment)
        if "dlearn.hooks.gate" in sys.modules:
            sys.modules["dlearn.hooks.gate"].leave()
        flush()
        if recording is not None:
            recording.count()  # While all are here: a connection to a rank that has ended cannot be read any more.
            recording.function_ended(name_of_end(outcome))
        self._control.send(outcome)
        # The others may still need this rank's connections: leave only together.
        stays = False
        with suppress(EOFError):
            stays = self._control.recv() == FINISH and call.keep
        if recording is not None:
            recording.stop(quiet=self._worker is not None)
        flush()
        with suppress(OSError):
            self._control.send(rank_protocol.CLOSED)
        return stays

    def _listen_for_stack_signal(self, call: Call) -> None:
        """Have the rank write its stack on a signal, whatever it is stuck in."""
        file = rank_protocol.stack_file(call.folder, call.rank)
        before, self._stack = self._stack, open(file, "w")  # noqa: SIM115
        faulthandler.register(rank_protocol.STACK_SIGNAL, file=self._stack, all_threads=False)
        if before is not None:
            before.close()

    def _meet(self, call: Call, listener: socket.socket | None) -> None:
        """Meet the other ranks: in the MPI job, in a store, and in a process group if asked for."""
        import torch.distributed as dist

        if call.gate:
            importlib.import_module("dlearn.hooks.gate").forget_timeouts()
        if call.backend == "mpi":
            self._join_mpi(call)
        if call.init and dist.is_initialized():
            if listener is not None:
                listener.close()
            return
        if not dist.is_initialized():
            self._stores.clear()
        store = _open_store(call, listener)
        self._stores.append(store)
        if call.init:
            _init_process_group(call, store)

    def _receive_pmi(self) -> None:
        """Receive the connection to the manager of the MPI job, which follows the first call."""
        if self._pmi is None:
            self._pmi = rank_protocol.receive_descriptor(self._control)
            os.set_inheritable(self._pmi, False)

    def _join_mpi(self, call: Call) -> None:
        """Join the MPI job. SetupError without MPICH, or if MPI has been finalized."""
        for name, value in SHARED_MEMORY.items():
            os.environ.setdefault(name, value)
        os.environ.update(PMI_RANK=str(call.rank), PMI_SIZE=str(call.world_size))
        if "mpi4py.MPI" not in sys.modules:
            os.environ["PMI_FD"] = str(self._pmi)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise SetupError(f"mpi4py cannot load MPI here ({why}): pip install mpich") from None
        # What this rank starts is no member of the job, and must not speak for it.
        os.environ.pop("PMI_FD", None)
        if MPI.Is_finalized():
            raise SetupError(
                "an earlier function of these ranks has called MPI.Finalize, and MPI cannot begin"
                " again in a process: leave Finalize to the cluster."
            )
        if MPI.COMM_WORLD.Get_size() != call.world_size:
            library = MPI.Get_library_version().split("\n")[0].strip("\x00 ")
            what = f"an MPI that is not MPICH's ({library})"
            raise SetupError(f"mpi4py has loaded {what}: pip install mpich")

    def _rpc_worker(self, call: Call, recording: Any) -> AbstractContextManager[None]:
        """Return the RPC worker for this call. torch sets RPC up once in a process: a kept rank stays one."""
        if not call.rpc:
            return nullcontext()
        if self._worker is not None:
            if recording is not None:
                recording.watch_rpc_sockets(opened=True)
            # Others may call functions of this call: all ranks must have unpacked it.
            rpc_worker.meet(self._stores[-1], call.world_size)
            return nullcontext()
        worker = rpc_worker.worker(call.name, call.rank, call.world_size, recording, self._stores[-1])
        if not call.keep:
            return worker
        self._worker = worker
        worker.__enter__()
        return nullcontext()


@contextmanager
def _gate(call: Call, recording: Any) -> Iterator[None]:
    """Have the calls of the block wait at the gate of a paused run."""
    if not call.gate:
        yield
        return
    gate = importlib.import_module("dlearn.hooks.gate")
    gate.hold(call.gate, recording, call.rank, call.world_size)
    yield
    gate.function_over()


def _prepare(call: Call) -> None:
    import torch

    from dlearn.hooks import callers

    adopt(call.environment)
    position = _position(call)
    address, port = call.store
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, position.interface))
    os.environ.update(
        RANK=str(call.rank), LOCAL_RANK=str(position.local_rank), WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(position.local_world_size), MASTER_ADDR=address, MASTER_PORT=str(port),
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        # Forked ranks would otherwise all draw the fork server's numbers, the same in every run.
        sys.modules["numpy"].random.seed()
    callers.cell_names.update({file: name for file, (name, _) in call.environment.cells.items()})


def _position(call: Call) -> HostPosition:
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), names[0])
    return call.position or HostPosition(loopback, call.rank, call.world_size)


def _start_recording(call: Call) -> Any:
    from dlearn import recorder

    recorder.leave()
    if call.record is None:
        return None
    name, size = "" if call.name.isdigit() else call.name, call.world_size
    header = recorder.make_header(job=call.job, rank=call.rank, name=name, world_size=size)
    how: dict[str, Any] = {"options": call.record, "sorted_stderr": not call.own_log}
    one_host = _position(call).local_world_size == size
    return recorder.start(Path(call.folder, "trace"), header=header, alone=one_host, **how)


def _open_store(call: Call, listener: socket.socket | None) -> Any:
    """Return the store in which ranks meet. Rank 0 serves it on its socket, bound to one address.

    A tutorial's own `init_process_group("gloo")` meets in it, too, on loopback. Each init has a prefix:
    after destroy and init again, old addresses must not be found.
    """
    from urllib.parse import parse_qs, urlparse

    from torch._C._distributed_c10d import PrefixStore, TCPStore

    serving: dict[str, Any] = {"is_master": False}
    if listener is not None:
        descriptor = listener.detach()  # Of the store from now on.
        serving = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    store = TCPStore(*call.store, call.world_size, **serving)
    numbers = itertools.count(1)

    def meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        asked = parse_qs(urlparse(url).query)
        rank = int(asked.get("rank", [str(call.rank)])[0])
        world_size = int(asked.get("world_size", [str(call.world_size)])[0])
        yield PrefixStore(f"init {next(numbers)}", store), rank, world_size
        raise RuntimeError("a cluster's ranks meet once per init_process_group; they are not restarted.")

    # The function `rendezvous` hides the module of the same name.
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = meet
    return store


def _init_process_group(call: Call, store: Any) -> None:
    import torch
    import torch.distributed as dist

    if call.backend == "mpi" or call.backend.startswith("dlearn_"):
        import dlearn.backends  # noqa: F401  (it makes its backends known)
    if call.backend == "nccl":
        gpus, position = torch.cuda.device_count(), _position(call)
        if gpus < position.local_world_size:
            raise SetupError(
                f"backend 'nccl' needs one GPU per rank: {position.local_world_size}, and this machine has {gpus}."
                " Use backend='gloo', or fewer ranks."
            )
        torch.cuda.set_device(position.local_rank)
    backend = "mpi4py" if call.backend == "mpi" else call.backend
    dist.init_process_group(backend, store=store, rank=call.rank, world_size=call.world_size)
