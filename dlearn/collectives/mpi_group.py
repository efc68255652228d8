"""MPI as a backend of torch: a process group over mpi4py. No compiler, and no torch built from source.

    import dlearn.collectives
    torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")     # mpiexec -n 3 python -m mpi4py train.py

Torch's ranks must be those of MPI.COMM_WORLD. Each collective is one of MPI's, queued to one thread, so that
`async_op=True` and DDP's overlap work as they do on gloo; sends and receives are MPI's Isend and Irecv. What only moves
travels as bytes, whatever its type. What is summed is summed by MPI, in an order of its own: sums of floating point
numbers differ from gloo's in the last bits. Types that MPI cannot calculate with (half, bfloat16, float8, complex32)
are summed in float32 (complex64) and rounded once, at the end. A mean is MPI's sum, divided by the ranks.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import ReduceOp, TCPStore, Work

from dlearn import recorder
from dlearn.collectives.backend import Queued
from dlearn.collectives.exchange import check, check_root, check_sizes, in_one_row, kind_of
from dlearn.collectives.mpi_wait import MpiWork, wait_for
from dlearn.errors import SetupError

Tensors = list[torch.Tensor]

WHO = "collectives over mpi4py"
LOOPBACK = "127.0.0.1"


class MpiGroup(Queued):
    """A process group whose collectives are MPI's. Raises SetupError where torch's ranks are not MPI's."""

    backend_name = "mpi4py"
    who = WHO

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._comm = _communicator(options)
        self._timeout_seconds = options.timeout.total_seconds()
        self._closing = threading.Event()
        self._under_way: list[tuple[MPI.Request, torch.Tensor]] = []

    def _queue(self, name: str, inputs: Sequence[torch.Tensor], *more: Any, **facts: Any) -> Work:
        recorder.hold(name, self, inputs)
        return super()._queue(name, inputs, *more, **facts)

    # torch asks for these by their names in C++. It would keep the others in a backend of its own, and there is none.

    def _get_backend(self, device: torch.device) -> MpiGroup:  # type: ignore[override]
        """From torch 2.14 on: who is asked whether sends can be joined into one call."""
        return self

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """Called by destroy_process_group."""
        self._thread.shutdown()
        if not MPI.Is_finalized():
            self._comm.Free()

    def abort(self) -> None:
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # What is calculated ----------------------------------------------------------------------------------------------

    def _all_reduce(self, name: str, tensors: Tensors, op: object) -> Work:
        def work() -> None:
            for tensor in tensors:
                with in_one_row(tensor) as row:
                    numbers, mpi_op = for_mpi(row, op)
                    self._wait(name, self._comm.Iallreduce(MPI.IN_PLACE, numbers.numpy(), mpi_op))
                    self._give_back(numbers, row, op)

        return self._queue(name, tensors, tensors, work)

    def reduce(self, tensors: Any, options: Any) -> Work:  # type: ignore[override]
        (tensor,), root, op = tensors, options.rootRank, self._asked(options, tensors)
        check_root(root, self.size())

        def work() -> None:
            with in_one_row(tensor) as row:
                numbers, mpi_op = for_mpi(row, op)
                if self.rank() != root:
                    return self._wait("reduce", self._comm.Ireduce(numbers.numpy(), None, mpi_op, root))
                self._wait("reduce", self._comm.Ireduce(MPI.IN_PLACE, numbers.numpy(), mpi_op, root))
                self._give_back(numbers, row, op)

        return self._queue("reduce", [tensor], [tensor], work, root=root)

    def _scatter_list(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: object) -> Work:
        work = partial(self._reduce_scatter, "reduce_scatter", output, parts, op)
        return self._queue("reduce_scatter", parts, [output], work)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Work:
        return self._reduce_scatter_singles("reduce_scatter_single", [output], [input], options)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        return self._reduce_scatter_singles("reduce_scatter_single_coalesced", outputs, inputs, options)

    def _reduce_scatter_singles(self, name: str, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        op = self._asked(options, inputs)
        for output, whole in zip(outputs, inputs, strict=True):
            check_sizes(whole, output, self.size())

        def work() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                parts = whole.detach().reshape(-1).tensor_split(self.size())
                self._reduce_scatter(name, output, parts, op)

        return self._queue(name, inputs, outputs, work)

    def _reduce_scatter(self, name: str, output: torch.Tensor, parts: Sequence[torch.Tensor], op: object) -> None:
        given, mpi_op = for_mpi(torch.cat([part.detach().reshape(-1) for part in parts]), op)
        with in_one_row(output) as row:
            mine = row if given.dtype == row.dtype else torch.empty_like(row, dtype=given.dtype)
            counts = [part.numel() for part in parts]
            self._wait(name, self._comm.Ireduce_scatter(given.numpy(), mine.numpy(), counts, mpi_op))
            self._give_back(mine, row, op)

    def _give_back(self, numbers: torch.Tensor, row: torch.Tensor, op: object) -> None:
        """The result in the tensor's own type."""
        if kind_of(op) == ReduceOp.AVG:
            numbers.div_(self.size())
        if numbers.data_ptr() != row.data_ptr():
            row.copy_(numbers)

    # What only moves -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, options: Any) -> Work:  # type: ignore[override]
        (tensor,), root = tensors, options.rootRank
        check_root(root, self.size())

        def work() -> None:
            with in_one_row(tensor) as row:
                self._wait("broadcast", self._comm.Ibcast(bytes_of(row), root))

        mine = self.rank() == root
        return self._queue("broadcast", tensors if mine else [], [] if mine else tensors, work, tensors, root=root)

    def _gather_list(self, into: Tensors, mine: torch.Tensor) -> Work:
        """They may differ in size."""
        return self._all_gather("all_gather", [into], [mine], [into])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        into = [[each[number] for each in outputs] for number in range(len(inputs))]
        return self._all_gather("all_gather_coalesced", into, inputs, outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Work:
        return self._all_gather_singles("all_gather_single", [output], [input])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        return self._all_gather_singles("all_gather_single_coalesced", outputs, inputs)

    def _all_gather_singles(self, name: str, outputs: Tensors, inputs: Tensors) -> Work:
        for output, mine in zip(outputs, inputs, strict=True):
            check_sizes(output, mine, self.size())
        return self._all_gather(name, [[output] for output in outputs], inputs, outputs)

    def _all_gather(self, name: str, into: Sequence[Tensors], inputs: Tensors, result: Any) -> Work:
        def work() -> None:
            for each, mine in zip(into, inputs, strict=True):
                with as_one_row(each) as blocks, in_one_row(mine) as row:
                    counts = sizes_of(each) if len(each) == self.size() else [mine.nbytes] * self.size()
                    self._wait(name, self._comm.Iallgatherv(bytes_of(row), [bytes_of(blocks), counts]))

        return self._queue(name, inputs, [tensor for each in into for tensor in each], work, result)

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        (mine,), into, root = inputs, outputs[0] if outputs else [], options.rootRank
        check_root(root, self.size())

        def work() -> None:
            with as_one_row(into) as blocks, in_one_row(mine) as row:
                room = [bytes_of(blocks), sizes_of(into)] if self.rank() == root else None
                self._wait("gather", self._comm.Igatherv(bytes_of(row), room, root))

        return self._queue("gather", [mine], into, work, [into], root=root)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        (mine,), given, root = outputs, inputs[0] if inputs else [], options.rootRank
        check_root(root, self.size())

        def work() -> None:
            with as_one_row(given, back=False) as blocks, in_one_row(mine) as row:
                sent = [bytes_of(blocks), sizes_of(given)] if self.rank() == root else None
                self._wait("scatter", self._comm.Iscatterv(sent, bytes_of(row), root))

        return self._queue("scatter", given, [mine], work, root=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        def work() -> None:
            with as_one_row(inputs, back=False) as given, as_one_row(outputs) as blocks:
                sent, room = [bytes_of(given), sizes_of(inputs)], [bytes_of(blocks), sizes_of(outputs)]
                self._wait("all_to_all", self._comm.Ialltoallv(sent, room))

        return self._queue("all_to_all", inputs, outputs, work)

    def all_to_all_single(
        self, output: Any, input: Any, output_rows: Sequence[int], input_rows: Sequence[int], options: Any = None
    ) -> Work:
        sent, taken = row_bytes(input, input_rows, self.size()), row_bytes(output, output_rows, self.size())

        def work() -> None:
            with in_one_row(input) as given, in_one_row(output) as row:
                name = "all_to_all_single"
                self._wait(name, self._comm.Ialltoallv([bytes_of(given), sent], [bytes_of(row), taken]))

        splits = sent if input_rows else ()
        return self._queue("all_to_all_single", [input], [output], work, splits=splits)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        return self._queue("barrier", [], [], lambda: self._wait("barrier", self._comm.Ibarrier()))

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # From one rank to another ----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        (tensor,) = tensors
        check(tensors, self, WHO)
        recorder.hold("send", self, [tensor], peer=to)
        seen = recorder.posted("send", self, tensor, peer=to, tag=tag)
        row = tensor.detach().reshape(-1).contiguous()
        return self._work(f"send to rank {to}", self._comm.Isend(bytes_of(row), to, tag), row, seen)

    def recv(self, tensors: Tensors, by: int | None, tag: int) -> Work:
        (tensor,) = tensors
        check(tensors, self, WHO)
        recorder.hold("recv", self, [tensor], peer=by)
        seen = recorder.posted("recv", self, tensor, peer=by, tag=tag)
        held = ExitStack()  # At its end what came is copied to where it belongs.
        row = held.enter_context(in_one_row(tensor))
        request = self._comm.Irecv(bytes_of(row), MPI.ANY_SOURCE if by is None else by, tag)
        sender = "any rank" if by is None else f"rank {by}"
        return self._work(f"recv from {sender}", request, row, seen, held)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _work(
        self, name: str, request: MPI.Request, row: torch.Tensor, seen: recorder.Posted, held: ExitStack | None = None
    ) -> Work:
        # Nobody need keep the Work of a send, and MPI may read the row until somebody has seen the end.
        self._under_way = [each for each in self._under_way if each[0]]
        self._under_way.append((request, row))
        return MpiWork(request, held or ExitStack(), row, seen, name, self._patience)

    # Waiting ---------------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """How many seconds a call may wait; none once the group is aborted."""
        return 0.0 if self._closing.is_set() else self._timeout_seconds

    def _wait(self, name: str, request: MPI.Request) -> None:
        wait_for(request, name, self._patience)


def _communicator(options: Any) -> MPI.Intracomm:
    """Of the group's members, who alone make it; collectives and messages of other groups do not mix with its own."""
    world = MPI.COMM_WORLD
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(members) >= world.size or members[options.group_rank] != world.rank:
        raise SetupError(
            f"torch's rank {members[options.group_rank]} is rank {world.rank} of {world.size} in MPI, and they must be"
            " the same: start all ranks by one mpiexec, and give init_process_group MPI's rank and size"
            ' (init_method="mpi4py://" does).'
        )
    with_all = world.Get_group()
    group = with_all.Incl(members)
    comm: MPI.Intracomm = recorder.unrecorded(world.Create_group(group))  # Recorded are torch's calls.
    group.Free()
    with_all.Free()
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise SetupError("this MPI cannot be used by several threads (MPI_THREAD_MULTIPLE), as torch does.")
    return comm


def meet() -> tuple[Any, int, int]:
    """Return store, rank and size: the ranks of an MPI job meet in a store that rank 0 serves on loopback.

    SetupError if they are on more than one host: they need a store that all can reach.
    """
    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    together = here.size == world.size
    here.Free()
    if not together:
        raise SetupError(
            'init_method="mpi4py://" is for ranks on one host; on several give init_process_group a store of your own,'
            " with MPI's rank and size."
        )
    if world.rank != 0:
        return TCPStore(LOOPBACK, world.bcast(None), world.size, is_master=False), world.rank, world.size
    with socket.create_server((LOOPBACK, 0), backlog=4 * world.size) as listener:
        port = world.bcast(listener.getsockname()[1])
        store = TCPStore(
            LOOPBACK, port, world.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, 0, world.size


# Tensors as MPI takes them --------------------------------------------------------------------------------------------


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
# Of truth values, as torch has it: their sum is "or", their product "and".
_OF_TRUTH: dict[object, MPI.Op] = {
    ReduceOp.SUM: MPI.BOR,
    ReduceOp.PRODUCT: MPI.BAND,
    ReduceOp.MIN: MPI.BAND,
    ReduceOp.MAX: MPI.BOR,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}


def for_mpi(row: torch.Tensor, op: object) -> tuple[torch.Tensor, MPI.Op]:
    """The items in a type that MPI calculates with: themselves, or a copy."""
    mpi_op = _OPERATIONS[kind_of(op)]
    if row.dtype == torch.bool:
        return row.view(torch.uint8), _OF_TRUTH[kind_of(op)]
    if row.is_floating_point() and row.element_size() < 4:
        return row.float(), mpi_op
    if row.dtype == torch.complex32:
        return row.to(torch.complex64), mpi_op
    return row, mpi_op


def bytes_of(row: torch.Tensor) -> Any:
    """What MPI sends of it, whatever its type."""
    return row.view(torch.uint8).numpy()


def row_bytes(tensor: torch.Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Bytes for each rank: of as many rows of the tensor as the program says, else of even shares."""
    size = tensor.nbytes
    if not rows:
        if len(tensor) % ranks:
            raise SetupError(f"{len(tensor)} rows cannot be shared out evenly to {ranks} ranks.")
        return [size // ranks] * ranks
    if len(rows) != ranks or sum(rows) != len(tensor):
        raise SetupError(f"{list(rows)} rows for {ranks} ranks do not make up the {len(tensor)} of the tensor.")
    return [count * (size // max(1, len(tensor))) for count in rows]


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


@contextmanager
def as_one_row(tensors: Sequence[torch.Tensor], *, back: bool = True) -> Iterator[torch.Tensor]:
    """Lay copies of the tensors in one row; with `back` they get at the end what the row then holds."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    row = torch.cat(flat) if flat else torch.empty(0)
    yield row
    if back and flat:
        for tensor, part in zip(tensors, torch.split(row, [len(each) for each in flat]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
