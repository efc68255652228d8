"""MPI as a backend of torch: a process group over mpi4py, without a torch built from source.

    import dlearn.backends
    torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")
    # mpiexec -n 3 python -m mpi4py train.py

Torch's ranks must be those of MPI.COMM_WORLD. Each collective is one of MPI's. Data that only
moves travels as bytes, whatever its type. MPI adds in an order of its own: sums of floating point
numbers differ from gloo's in the last bits. Half and bfloat16 are summed in float32 and rounded
once, at the end. A mean is MPI's sum, divided by the ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import ReduceOp, TCPStore, Work

from dlearn import recorder
from dlearn.backends.mpi_wait import MpiWork, wait_for
from dlearn.backends.queued_group import QueuedGroup, Tensors
from dlearn.backends.tensors import check, check_root, check_sizes, in_one_row, kind_of
from dlearn.errors import SetupError

WHO = "collectives over mpi4py"
ONE_AT_A_TIME = f"{WHO} take one tensor a call, not several (coalesced): call them for each."
LOOPBACK = "127.0.0.1"

_OPERATIONS: dict[object, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,  # and divided by the ranks at the end
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
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

    def _queue(self, name: str, inputs: Sequence[torch.Tensor], *more: Any, **facts: Any) -> Work:
        check_root(facts.get("root") or 0, self.size())
        recorder.hold(name, self, inputs)
        return super()._queue(name, inputs, *more, **facts)

    def _wait(self, name: str, request: MPI.Request) -> None:
        wait_for(request, name, self._timeout_seconds)

    # Calculations ------------------------------------------------------------------------------

    def _reduce_op(self, options: Any, tensors: Sequence[torch.Tensor]) -> object:
        for tensor in tensors:
            if tensor.dtype not in _NUMBERS:
                raise SetupError(f"{WHO} do not calculate with {tensor.dtype}: convert it first.")
        return kind_of(super()._reduce_op(options, tensors))

    def _all_reduce(self, tensors: Tensors, op: object) -> Work:
        tensor = only(tensors)

        def work() -> None:
            with self._numbers(tensor, op) as row:
                self._wait("all_reduce", self._comm.Iallreduce(MPI.IN_PLACE, row, _OPERATIONS[op]))

        return self._queue("all_reduce", tensors, tensors, work)

    def reduce(self, tensors: Tensors, options: Any) -> Work:  # type: ignore[override]
        tensor, root, op = only(tensors), options.rootRank, self._reduce_op(options, tensors)
        mine = self.rank() == root

        def work() -> None:
            with self._numbers(tensor if mine else tensor.detach().clone(), op) as row:
                given, room = (MPI.IN_PLACE, row) if mine else (row, None)
                self._wait("reduce", self._comm.Ireduce(given, room, _OPERATIONS[op], root))

        return self._queue("reduce", tensors, list(tensors), work, root=root)

    def reduce_scatter_single(
        self, output: Any, input: Any, options: Any = None, name: str = "reduce_scatter_single"
    ) -> Work:
        op = self._reduce_op(options, [input])
        check_sizes(input, output, self.size())
        return self._scatter_list(output, [input], op, name)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        name = "reduce_scatter_single_coalesced"
        return self.reduce_scatter_single(only(outputs), only(inputs), options, name)

    def _scatter_list(self, output: Any, parts: Any, op: Any, name: str = "reduce_scatter") -> Work:
        def work() -> None:
            given = torch.cat([part.detach().reshape(-1) for part in parts])
            check_sizes(given, output, self.size())
            with self._numbers(output, op) as row:
                given = for_mpi(given)
                call = self._comm.Ireduce_scatter_block
                self._wait(name, call(given.numpy(), row, op=_OPERATIONS[op]))

        return self._queue(name, parts, [output], work)

    @contextmanager
    def _numbers(self, tensor: torch.Tensor, op: object) -> Iterator[Any]:
        """Yield the tensor as numbers that MPI can add; copy the result back."""
        with in_one_row(tensor) as row:
            numbers = for_mpi(row)
            yield numbers.numpy()
            if op == ReduceOp.AVG:
                numbers.div_(self.size())
            if numbers is not row:
                row.copy_(numbers)

    # Moves -------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, options: Any) -> Work:  # type: ignore[override]
        tensor, root = only(tensors), options.rootRank

        def work() -> None:
            with in_one_row(tensor) as row:
                self._wait("broadcast", self._comm.Ibcast(bytes_of(row), root))

        given, into = (tensors, []) if self.rank() == root else ([], tensors)
        return self._queue("broadcast", given, into, work, tensors, root=root)

    def _gather_list(self, into: Tensors, mine: torch.Tensor) -> Work:
        """Gather tensors that may differ in size."""
        call, sizes = self._comm.Iallgatherv, bytes_each(into)
        return self._move("all_gather", call, [mine], into, room_bytes=sizes, result=[into])

    def all_gather_single(self, output: Any, input: Any, options: Any = None) -> Work:
        return self._gather_single("all_gather_single", output, input)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        """Gather one tensor; DTensor calls it."""
        return self._gather_single("all_gather_single_coalesced", only(outputs), only(inputs))

    def _gather_single(self, name: str, output: Any, input: Any) -> Work:
        check_sizes(output, input, self.size())
        return self._move(name, self._comm.Iallgather, [input], [output])

    def gather(self, outputs: Any, inputs: Tensors, options: Any) -> Work:  # type: ignore[override]
        into, root = outputs[0] if outputs else [], options.rootRank
        call, sizes = self._comm.Igatherv, bytes_each(into)
        return self._move("gather", call, inputs, into, room_bytes=sizes, root=root, result=[into])

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        given, root = inputs[0] if inputs else [], options.rootRank
        call, sizes = self._comm.Iscatterv, bytes_each(given)
        return self._move("scatter", call, given, outputs, sent_bytes=sizes, root=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        sent, room, call = bytes_each(inputs), bytes_each(outputs), self._comm.Ialltoallv
        return self._move("all_to_all", call, inputs, outputs, sent_bytes=sent, room_bytes=room)

    def all_to_all_single(
        self, output: Any, input: Any, output_rows: Any, input_rows: Any, options: Any = None
    ) -> Work:
        sent = bytes_of_rows(input, input_rows, self.size())
        room = bytes_of_rows(output, output_rows, self.size())
        facts = {"sent_bytes": sent, "room_bytes": room, "splits": sent if input_rows else ()}
        return self._move("all_to_all_single", self._comm.Ialltoallv, [input], [output], **facts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        return self._queue("barrier", [], [], lambda: self._wait("barrier", self._comm.Ibarrier()))

    def _move(
        self, name: str, call: Callable[..., MPI.Request], inputs: Tensors, outputs: Tensors, *,
        sent_bytes: Any = (), room_bytes: Any = (), root: Any = None, **facts: Any,
    ) -> Work:  # fmt: skip
        """Queue a call of MPI's from a row of all inputs to a row of all outputs."""

        def work() -> None:
            given, into = one_row(inputs), one_row(outputs)
            sent = [bytes_of(given), sent_bytes] if sent_bytes else bytes_of(given)
            room = [bytes_of(into), room_bytes] if room_bytes else bytes_of(into)
            self._wait(name, call(sent, room, *([] if root is None else [root])))
            for tensor in outputs:
                part, into = into[: tensor.numel()], into[tensor.numel() :]
                tensor.detach().copy_(part.view(tensor.shape))

        return self._queue(name, inputs, outputs, work, root=root, **facts)

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
        seen = self._posted("send", tensors, to, tag)
        row = tensors[0].detach().reshape(-1).contiguous()
        request = self._comm.Isend(bytes_of(row), to, tag)
        return MpiWork(request, f"send to rank {to}", self._timeout_seconds, seen, ExitStack())

    def recv(self, tensors: Tensors, by: int | None, tag: int) -> Work:
        seen = self._posted("recv", tensors, by, tag)
        held = ExitStack()  # At its end what came is copied to where it belongs.
        row = held.enter_context(in_one_row(tensors[0]))
        request = self._comm.Irecv(bytes_of(row), MPI.ANY_SOURCE if by is None else by, tag)
        sender = "any rank" if by is None else f"rank {by}"
        return MpiWork(request, f"recv from {sender}", self._timeout_seconds, seen, held)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _posted(self, op: str, tensors: Tensors, peer: int | None, tag: int) -> recorder.Posted:
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


def for_mpi(row: torch.Tensor) -> torch.Tensor:
    """Return the items in a type that MPI calculates with: themselves, or a copy."""
    return row.float() if row.dtype in _HALF else row


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
    """Return a copy of all items. (FSDP's share lies in the tensor that it gathers into.)"""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0)
