"""MPI as a backend of torch: a process group over mpi4py, without a torch built from source.

    import dlearn.backends
    torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")
    # mpiexec -n 3 python -m mpi4py train.py

Torch's ranks must be those of MPI.COMM_WORLD. Each collective is one of MPI's. MPI adds in an order
of its own: sums of floating point numbers differ from gloo's in the last bits. Half and bfloat16
are summed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import ReduceOp, TCPStore, Work

from dlearn import recorder
from dlearn.backends.queued_group import QueuedGroup, Tensors
from dlearn.backends.tensors import check, check_root, check_sizes, in_one_row, kind_of
from dlearn.errors import PeerError, SetupError

WHO = "collectives over mpi4py"
ONE_AT_A_TIME = f"{WHO} take one tensor a call, not several (coalesced): call them for each."
LOOPBACK = "127.0.0.1"

_SAME_NAMES = ("SUM", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPERATIONS: dict[object, MPI.Op] = {getattr(ReduceOp, op): getattr(MPI, op) for op in _SAME_NAMES}
_OPERATIONS |= {ReduceOp.PRODUCT: MPI.PROD, ReduceOp.AVG: MPI.SUM}  # A mean is divided at the end.
_HALF = (torch.float16, torch.bfloat16)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NUMBERS = (*_HALF, *_WHOLE, torch.float32, torch.float64, torch.complex64, torch.complex128)


class MpiGroup(QueuedGroup):
    """A process group whose collectives are MPI's. Raises SetupError where torch's ranks are not MPI's."""

    backend_name = "mpi4py"
    who = WHO

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._comm = _communicator(options)
        self._timeout_seconds: float = options.timeout.total_seconds()

    def shutdown(self) -> None:
        """End the thread and free the communicator; destroy_process_group calls it."""
        self._thread.shutdown()
        if not MPI.Is_finalized():
            self._comm.Free()

    # Torch calls these by their names in C++, which would ask a backend: there is none.

    def _get_backend(self, device: torch.device) -> MpiGroup:  # type: ignore[override]
        """Return this group: from 2.14 on, torch asks it whether sends can be joined into one call."""
        return self

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # Collectives: each is one call of MPI's, from a row of all inputs to a row of all outputs.

    def _call(
        self, name: str, begin: Callable[..., MPI.Request], inputs: Tensors, outputs: Tensors, *,
        op: Any = None, root: Any = None, sent_bytes: Any = (), room_bytes: Any = (), **facts: Any,
    ) -> Work:  # fmt: skip
        """Queue a call that calculates (`op`) with numbers, or moves bytes: of each rank so many."""
        check_root(root or 0, self.size())
        recorder.hold(name, self, inputs)
        more = [fact for fact in (_OPERATIONS.get(op), root) if fact is not None]

        def work() -> None:
            given, into = one_row(inputs), room_for(outputs)
            if op is not None:
                if given.dtype in _HALF:
                    given, into = given.float(), into.float()
                request = begin(given.numpy(), into.numpy(), *more)
            else:
                sent = [bytes_of(given), sent_bytes] if sent_bytes else bytes_of(given)
                room = [bytes_of(into), room_bytes] if room_bytes else bytes_of(into)
                request = begin(sent, room, *more)
            wait_for(request, name, self._timeout_seconds)
            if op == ReduceOp.AVG:
                into.div_(self.size())
            for tensor in outputs:
                part, into = into[: tensor.numel()], into[tensor.numel() :]
                tensor.detach().copy_(part.view(tensor.shape))

        return self._queue(name, inputs, outputs, work, root=root, **facts)

    def _reduce_op(self, options: Any, tensors: Sequence[torch.Tensor]) -> object:
        for tensor in tensors:
            if tensor.dtype not in _NUMBERS:
                raise SetupError(f"{WHO} do not calculate with {tensor.dtype}: convert it first.")
        return kind_of(super()._reduce_op(options, tensors))

    def _all_reduce(self, tensors: Tensors, op: object) -> Work:
        only(tensors)
        return self._call("all_reduce", self._comm.Iallreduce, tensors, tensors, op=op)

    def reduce(self, tensors: Tensors, options: Any) -> Work:  # type: ignore[override]
        tensor, root, op = only(tensors), options.rootRank, self._reduce_op(options, tensors)
        # Of the others torch promises nothing, and their tensors stay as they are.
        into = [tensor if self.rank() == root else torch.empty_like(tensor)]
        return self._call("reduce", self._comm.Ireduce, tensors, into, op=op, root=root, result=tensors)

    def reduce_scatter_single(
        self, output: Any, input: Any, options: Any = None, name: str = "reduce_scatter_single"
    ) -> Work:
        return self._scatter_list(output, [input], self._reduce_op(options, [input]), name)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        name = "reduce_scatter_single_coalesced"
        return self.reduce_scatter_single(only(outputs), only(inputs), options, name)

    def _scatter_list(self, output: Any, parts: Any, op: Any, name: str = "reduce_scatter") -> Work:
        check_sizes(room_for(parts), output, self.size())
        return self._call(name, self._comm.Ireduce_scatter_block, parts, [output], op=op)

    def broadcast(self, tensors: Tensors, options: Any) -> Work:  # type: ignore[override]
        only(tensors)
        is_root = self.rank() == options.rootRank

        def begin(given: Any, into: Any, root: int) -> MPI.Request:
            return self._comm.Ibcast(given if is_root else into, root)

        given, into = (tensors, []) if is_root else ([], tensors)
        return self._call("broadcast", begin, given, into, root=options.rootRank, result=tensors)

    def _gather_list(self, into: Tensors, tensor: torch.Tensor) -> Work:
        """Gather tensors that may differ in size."""
        call, sizes = self._comm.Iallgatherv, bytes_each(into)
        return self._call("all_gather", call, [tensor], into, room_bytes=sizes, result=[into])

    def all_gather_single(self, output: Any, input: Any, options: Any = None, name: str = "") -> Work:
        check_sizes(output, input, self.size())
        name = name or "all_gather_single"
        return self._call(name, self._comm.Iallgather, [input], [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        """Gather one tensor; DTensor calls it."""
        name = "all_gather_single_coalesced"
        return self.all_gather_single(only(outputs), only(inputs), options, name)

    def gather(self, outputs: Any, inputs: Tensors, options: Any) -> Work:  # type: ignore[override]
        into, root = outputs[0] if outputs else [], options.rootRank
        call, sizes = self._comm.Igatherv, bytes_each(into)
        return self._call("gather", call, inputs, into, room_bytes=sizes, root=root, result=[into])

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        given, root = inputs[0] if inputs else [], options.rootRank
        call, sizes = self._comm.Iscatterv, bytes_each(given)
        return self._call("scatter", call, given, outputs, sent_bytes=sizes, root=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        sent, room, call = bytes_each(inputs), bytes_each(outputs), self._comm.Ialltoallv
        return self._call("all_to_all", call, inputs, outputs, sent_bytes=sent, room_bytes=room)

    def all_to_all_single(
        self, output: Any, input: Any, output_rows: Any, input_rows: Any, options: Any = None
    ) -> Work:
        sent = bytes_of_rows(input, input_rows, self.size())
        room = bytes_of_rows(output, output_rows, self.size())
        facts = {"sent_bytes": sent, "room_bytes": room, "splits": sent if input_rows else ()}
        return self._call("all_to_all_single", self._comm.Ialltoallv, [input], [output], **facts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        return self._call("barrier", lambda *_: self._comm.Ibarrier(), [], [])

    def allreduce_coalesced(self, *_: Any, **__: Any) -> Work:
        raise SetupError(ONE_AT_A_TIME)

    # The names by which torch calls them, up to 2.13.
    allgather_coalesced = allreduce_coalesced
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # From one rank to another ------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        ended = self._posted("send", tensors, to, tag)
        request = self._comm.Isend(bytes_of(one_row(tensors)), to, tag)
        return MpiWork(request, f"send to rank {to}", self._timeout_seconds, ended, ExitStack())

    def recv(self, tensors: Tensors, by: int | None, tag: int) -> Work:
        ended = self._posted("recv", tensors, by, tag)
        held = ExitStack()  # At its end what came is copied to where it belongs.
        row = held.enter_context(in_one_row(tensors[0]))
        request = self._comm.Irecv(bytes_of(row), MPI.ANY_SOURCE if by is None else by, tag)
        sender = "any rank" if by is None else f"rank {by}"
        return MpiWork(request, f"recv from {sender}", self._timeout_seconds, ended, held)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _posted(self, op: str, tensors: Tensors, peer: int | None, tag: int) -> Callable[..., None]:
        check(tensors, self, WHO)
        recorder.hold(op, self, tensors, peer=peer)
        return recorder.posted(op, self, only(tensors), peer=peer, tag=tag)


def _communicator(options: Any) -> MPI.Intracomm:
    """Make a communicator of the group's members; no others take part."""
    world = MPI.COMM_WORLD
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(members) >= world.size or members[options.group_rank] != world.rank:
        raise SetupError(
            f"torch's rank {members[options.group_rank]} is rank {world.rank} of {world.size} in MPI,"
            " and they must be the same: start all ranks by one mpiexec, and give init_process_group"
            ' MPI\'s rank and size (init_method="mpi4py://" does).'
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise SetupError("this MPI is not for several threads (MPI_THREAD_MULTIPLE), which torch has.")
    everyone = world.Get_group()
    group = everyone.Incl(members)
    comm = world.Create_group(group)
    group.Free()
    everyone.Free()
    unrecorded: MPI.Intracomm = recorder.unrecorded(comm)  # Torch's calls are recorded.
    return unrecorded


def meet() -> tuple[Any, int, int]:
    """Return store, rank and size of an MPI job on one host; rank 0 serves it on loopback."""
    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    if here.size != world.size:
        raise SetupError(
            'init_method="mpi4py://" is for ranks on one host; on several give init_process_group'
            " a store of your own, with MPI's rank and size."
        )
    here.Free()
    if world.rank != 0:
        store = TCPStore(LOOPBACK, world.bcast(None), world.size, is_master=False)
    else:
        with socket.create_server((LOOPBACK, 0), backlog=4 * world.size) as listener:
            port = world.bcast(listener.getsockname()[1])
            facts: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            store = TCPStore(LOOPBACK, port, world.size, is_master=True, **facts)
    return store, world.rank, world.size


# Tensors as MPI takes them ----------------------------------------------------------------------


def only(tensors: Tensors) -> torch.Tensor:
    """Return the tensor of a call that could have several."""
    if len(tensors) != 1:
        raise SetupError(ONE_AT_A_TIME)
    return tensors[0]


def bytes_of(row: torch.Tensor) -> Any:
    """Return the row as bytes, whatever its type."""
    return row.view(torch.uint8).numpy()


def bytes_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


def bytes_of_rows(tensor: torch.Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Return the bytes for each rank: of as many rows as the program says, else of even shares."""
    counts = list(rows) or [len(tensor) // ranks] * ranks
    if len(counts) != ranks or sum(counts) != len(tensor):
        raise SetupError(f"{counts} rows for {ranks} ranks are not the {len(tensor)} of the tensor.")
    return [count * (tensor.nbytes // max(1, len(tensor))) for count in counts]


def one_row(tensors: Tensors) -> torch.Tensor:
    """Return all items in a row: a view of one contiguous tensor, else a copy."""
    flat = [tensor.detach().reshape(-1).resolve_conj() for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat) if flat else torch.empty(0)


def room_for(tensors: Tensors) -> torch.Tensor:
    """Return a row of memory for them. (FSDP gathers into a tensor in which its share lies.)"""
    return torch.empty(sum(map(torch.numel, tensors)), dtype=tensors[0].dtype if tensors else None)


# How a rank waits for MPI without taking its core away from the ranks that work -------------------
#
# MPICH waits by asking again and again. Here a wait sleeps between two questions. (Waiting 50 ms for
# a late rank, three ranks on two cores: the waiting ones use 3 ms of processor time, and inside a
# blocking call up to 57 ms, which they take from the late one.)

QUESTIONS = 20  # Before the first sleep: what is there at once is taken at once.
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 200e-6

_under_way: list[object] = []  # May be dropped; each holds memory that MPI may still use.


def wait_for(request: MPI.Request, name: str, seconds: float, status: Any = None) -> None:
    """Return when MPI has carried it out. PeerError after so many seconds."""
    for _ in range(QUESTIONS):
        if request.Test(status):
            return
        os.sched_yield()
    since, pause = time.monotonic(), FIRST_SLEEP_SECONDS
    while not request.Test(status):
        if (waited := time.monotonic() - since) > seconds:
            _under_way.append(request)
            raise PeerError(
                f"mpi4py {name}: Timed out waiting {waited:.1f} s for another rank. It is gone, or never called this."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_SLEEP_SECONDS)


class MpiWork(Work):
    """A send or a receive under way. When it is over, `held` is closed and `ended` called."""

    def __init__(self, request: MPI.Request, name: str, seconds: float, ended: Any, held: ExitStack) -> None:
        super().__init__()
        self._request, self._name, self._seconds = request, name, seconds
        self._ended, self._held = ended, held
        self._status = MPI.Status()
        self._done = False
        self._lock = threading.Lock()
        _under_way.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = min(self._seconds, timeout.total_seconds()) if timeout else self._seconds
        with self._lock:
            if not self._done:
                try:
                    wait_for(self._request, self._name, seconds, self._status)
                except BaseException as error:
                    self._ended(error=type(error).__name__)
                    raise
                self._finish()
        return True

    def is_completed(self) -> bool:
        with self._lock:
            if not self._done and self._request.Test(self._status):
                self._finish()
            return self._done

    def _source_rank(self) -> int:
        """Return the sender, which is known once it is there."""
        return self._status.Get_source()

    source_rank = _source_rank

    def _finish(self) -> None:
        self._done = True
        _under_way.remove(self)
        self._held.close()
        source = self._status.Get_source()
        self._ended(peer=source if source >= 0 else None)
