"""What the process groups written in Python accept: dense tensors on the CPU, and the reductions of torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from dlearn.errors import SetupError

_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, *_ORDERED, *_BITWISE)


def check(tensors: Sequence[torch.Tensor], group: ProcessGroup, who: str) -> None:
    """Raise SetupError, before anything is sent, for tensors that `who` cannot send."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise SetupError(
                f"{who} carry dense tensors on the CPU, not a {tensor.layout} one on {tensor.device};"
                " use torch's own collective."
            )
        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in sizes):
            raise SetupError("an expanded tensor has several items in one place of memory: call .contiguous() first.")
    if len({tensor.dtype for tensor in tensors}) > 1:
        types = [str(tensor.dtype) for tensor in tensors]
        raise SetupError(f"all tensors of a collective have one type, not {types}.")
    if group.rank() < 0:
        raise SetupError("this rank is no member of the group.")


def check_sizes(whole: torch.Tensor, share: torch.Tensor, ranks: int) -> None:
    """Raise SetupError unless `whole` has `ranks` times the items of `share`."""
    if whole.numel() != share.numel() * ranks:
        raise SetupError(
            f"with {ranks} ranks the large tensor has {ranks} times the items of the small one, not"
            f" {whole.numel():,} and {share.numel():,}."
        )


def check_root(root: int, ranks: int) -> None:
    """Raise SetupError unless `root` is a rank of the group."""
    if not 0 <= root < ranks:
        raise SetupError(f"the root is a rank of the group, 0 to {ranks - 1}, not {root}.")


def check_reduction(op: object, dtype: torch.dtype, who: str) -> None:
    """Raise SetupError where torch has no such reduction of this type (a mean of integers)."""
    kind, fractions = kind_of(op), dtype.is_floating_point or dtype.is_complex
    refused = (kind == ReduceOp.AVG and not fractions) or (kind in _BITWISE and fractions)
    if kind not in _REDUCTIONS or refused or (kind in _ORDERED and dtype.is_complex):
        raise SetupError(f"{who} know no {getattr(kind, 'name', kind)} of {dtype}.")


def kind_of(op: object) -> object:
    """Return SUM, MAX, ...: torch passes some operations inside an object of their own."""
    return getattr(op, "op", op)


@contextmanager
def in_one_row(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the items as one row: a view of a contiguous tensor, else a copy that is copied back."""
    if tensor.is_contiguous():
        yield tensor.detach().view(-1)
        return
    copy = tensor.detach().reshape(-1).contiguous()
    yield copy
    tensor.detach().copy_(copy.view(tensor.shape))
