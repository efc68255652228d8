"""What "reduce" means: how the shares of two ranks become one, item by item."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import ReduceOp

from dlearn.errors import SetupError

GLASS_BOX = "glass-box collectives"
"""Who refuses something, in words."""

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Takes the second tensor into the first, in place."""

_COMBINE: dict[object, Combine] = {
    ReduceOp.SUM: lambda mine, theirs: mine.add_(theirs),
    ReduceOp.AVG: lambda mine, theirs: mine.add_(theirs),  # and divided by the ranks at the end
    ReduceOp.PRODUCT: lambda mine, theirs: mine.mul_(theirs),
    ReduceOp.MIN: lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    ReduceOp.MAX: lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    ReduceOp.BAND: lambda mine, theirs: mine.bitwise_and_(theirs),
    ReduceOp.BOR: lambda mine, theirs: mine.bitwise_or_(theirs),
    ReduceOp.BXOR: lambda mine, theirs: mine.bitwise_xor_(theirs),
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


def kind_of(op: object) -> object:
    """SUM, MAX, ...: torch passes some operations inside an object of their own."""
    return getattr(op, "op", op)


def combiner(op: object, dtype: torch.dtype, who: str = GLASS_BOX) -> Combine:
    """How `op` takes one tensor of this type into another. SetupError for what no algorithm here can do."""
    kind = kind_of(op)
    fits = (
        kind in _COMBINE
        and not (kind == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex))
        and not (kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex))
        and not (kind in _ORDERED and dtype.is_complex)
    )
    if not fits:
        raise SetupError(f"{who} know no {getattr(kind, 'name', kind)} of {dtype}.")
    return _COMBINE[kind]
