"""Tensors as MPI takes them: rows of items in one place of memory, in a type that it knows, or simply bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import ReduceOp

from dlearn.collectives.reduction import kind_of
from dlearn.errors import SetupError

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


class Several:
    """Tensors as one row, one behind the other; with `back` they get at the end what the row then holds."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, back: bool = True) -> None:
        self._tensors, self._back = tensors, back
        self.counts = [tensor.nbytes for tensor in tensors]

    def __enter__(self) -> Several:
        flat = [tensor.detach().reshape(-1) for tensor in self._tensors]
        self.row = torch.cat(flat) if flat else torch.empty(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._back or kind is not None:
            return
        edges = [0]
        for tensor in self._tensors:
            edges.append(edges[-1] + tensor.numel())
        for tensor, (start, stop) in zip(self._tensors, pairwise(edges), strict=True):
            tensor.detach().copy_(self.row[start:stop].view(tensor.shape))
