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

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import ReduceOp, Work

from dlearn import recorder
from dlearn.collectives.backend import Queued
from dlearn.collectives.exchange import check, check_root, check_sizes, in_one_row
from dlearn.collectives.mpi_rows import Several, bytes_of, for_mpi, row_bytes
from dlearn.collectives.mpi_wait import MpiWork, wait_for
from dlearn.collectives.reduction import kind_of
from dlearn.errors import SetupError

Tensors = list[torch.Tensor]

WHO = "collectives over mpi4py"


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
        def work() -> None:
            self._reduce_scatter("reduce_scatter", output, list(parts), op)

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
                with Several(each) as blocks, in_one_row(mine) as row:
                    counts = blocks.counts if len(each) == self.size() else [mine.nbytes] * self.size()
                    self._wait(name, self._comm.Iallgatherv(bytes_of(row), [bytes_of(blocks.row), counts]))

        return self._queue(name, inputs, [tensor for each in into for tensor in each], work, result)

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        (mine,), into, root = inputs, outputs[0] if outputs else [], options.rootRank
        check_root(root, self.size())

        def work() -> None:
            with Several(into) as blocks, in_one_row(mine) as row:
                room = [bytes_of(blocks.row), blocks.counts] if self.rank() == root else None
                self._wait("gather", self._comm.Igatherv(bytes_of(row), room, root))

        return self._queue("gather", [mine], into, work, [into], root=root)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:  # type: ignore[override]
        (mine,), given, root = outputs, inputs[0] if inputs else [], options.rootRank
        check_root(root, self.size())

        def work() -> None:
            with Several(given, back=False) as blocks, in_one_row(mine) as row:
                sent = [bytes_of(blocks.row), blocks.counts] if self.rank() == root else None
                self._wait("scatter", self._comm.Iscatterv(sent, bytes_of(row), root))

        return self._queue("scatter", given, [mine], work, root=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        def work() -> None:
            with Several(inputs, back=False) as given, Several(outputs) as blocks:
                sent, room = [bytes_of(given.row), given.counts], [bytes_of(blocks.row), blocks.counts]
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
        seen = recorder.posted("send", self, tensor, peer=to, tag=tag)
        row = tensor.detach().reshape(-1).contiguous()
        request = self._comm.Isend(bytes_of(row), to, tag)
        return self._posted(f"send to rank {to}", request, ExitStack(), row, seen)

    def recv(self, tensors: Tensors, by: int, tag: int) -> Work:
        return self._receive(tensors, by, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, by: int | None, tag: int) -> Work:
        (tensor,) = tensors
        check(tensors, self, WHO)
        seen = recorder.posted("recv", self, tensor, peer=by, tag=tag)
        held = ExitStack()  # At its end what came is copied to where it belongs.
        row = held.enter_context(in_one_row(tensor))
        request = self._comm.Irecv(bytes_of(row), MPI.ANY_SOURCE if by is None else by, tag)
        name = f"recv from {'any rank' if by is None else f'rank {by}'}"
        return self._posted(name, request, held, row, seen)

    def _posted(
        self, name: str, request: MPI.Request, held: ExitStack, row: torch.Tensor, seen: recorder.Posted
    ) -> Work:
        # Nobody need keep the Work of a send, and MPI may read the row until somebody has seen the end.
        self._under_way = [each for each in self._under_way if each[0]]
        self._under_way.append((request, row))
        return MpiWork(request, held, row, seen, name, self._patience)

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
