"""What every algorithm here is made of: in one step, send one part of the tensor and receive another.

An algorithm is a plan of such steps. Each part that is sent is an ordinary `send` of torch, so a recording shows it as
a message that says which step it is, and which part of the whole it carries.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from dlearn import recorder
from dlearn.errors import PeerError, SetupError

T = TypeVar("T")

GLASS_BOX = "glass-box collectives"
"""Who refuses something, in words."""

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Takes the second tensor into the first, in place."""

_COMBINE: dict[object, Combine] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,  # and divided by the ranks at the end
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    ReduceOp.MAX: lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


class Chunk(NamedTuple):
    """Items `start` to `stop` of the flat tensor."""

    start: int
    stop: int


class Exchange:
    """One collective under way, as one rank sees it. `flat` is the tensor as one row; ranks are group ranks.

    `tag` tells this collective's messages from others: ranks that disagree about its size, type or root never meet, and
    end by the group's timeout. (If a message is larger than its receiver's buffer, gloo ends the process.)
    """

    def __init__(self, name: str, flat: torch.Tensor, group: ProcessGroup, op: object, about: object = "") -> None:
        self.name = name
        self.flat = flat
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._combine = combiner(op, flat.dtype) if op is not None else None
        self._average = op is not None and kind_of(op) == ReduceOp.AVG
        self._tag = zlib.crc32(f"{name} {flat.dtype} {flat.numel()} {about}".encode()) >> 2

        self.whole = Chunk(0, flat.numel())
        self._scratch = flat.new_empty(0)

    def blocks(self, count: int) -> tuple[Chunk, ...]:
        """The whole in `count` parts, as even as they can be."""
        edges = [self.flat.numel() * i // count for i in range(count + 1)]
        return tuple(Chunk(*edge) for edge in pairwise(edges))

    def trade(
        self,
        step: int,
        *,
        give: Chunk | None = None,
        to: int | None = None,
        take: Chunk | None = None,
        by: int | None = None,
        combine: bool = False,
    ) -> None:
        """Send part `give` to rank `to` and receive part `take` from rank `by`, both at once; either may be left out.

        What comes replaces what is there, or is combined with it. Empty parts are not sent. Raises PeerError if a peer
        is gone, or does not answer within the group's timeout.
        """
        sending = receiving = None
        if give is not None and to is not None and give.stop > give.start:
            size, itemsize = self.flat.numel(), self.flat.element_size()
            with recorder.step(step, offset_bytes=give.start * itemsize, whole_bytes=size * itemsize):
                given = [self.flat[give.start : give.stop]]
                not_taken = f"step {step}: rank {to} did not take what rank {self.rank} sends"
                sending = self._unless_gone(lambda: self._group.send(given, to, self._tag), not_taken)
        if take is not None and by is not None and take.stop > take.start:
            mine = self.flat[take.start : take.stop]
            arriving = self._room(len(mine)) if combine else mine
            nothing_came = f"step {step}: nothing came from rank {by}"
            receiving = self._unless_gone(lambda: self._group.recv([arriving], by, self._tag), nothing_came)
        if sending is not None:
            self._unless_gone(sending.wait, not_taken)
        if receiving is not None:
            self._unless_gone(receiving.wait, nothing_came)
            if combine and self._combine is not None:
                self._combine(mine, arriving)

    def finish(self, part: Chunk | None = None) -> None:
        """Once all shares are combined in `part` (else in the whole): a mean is a sum divided by the ranks."""
        if self._average:
            start, stop = part or self.whole
            self.flat[start:stop].div_(self.size)

    def _room(self, count: int) -> torch.Tensor:
        if self._scratch.numel() < count:
            self._scratch = self.flat.new_empty(count)
        return self._scratch[:count]

    def _unless_gone(self, act: Callable[[], T], what: str) -> T:
        """Of a peer that is gone already, gloo refuses to begin a send or a receive."""
        try:
            return act()
        except RuntimeError as error:
            why = str(error).splitlines()[0].rpartition("] ")[2]
            hint = "It is gone, never called this, or called it with another size or type"
            raise PeerError(f"{self.name}, {what}. {hint}. (gloo: {why})") from error


@contextmanager
def in_one_row(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor` as one row of items: itself where it lies in one row, else a copy that is copied back at the end."""
    if tensor.is_contiguous():
        yield tensor.detach().view(-1)
        return
    copy = tensor.detach().reshape(-1).contiguous()
    yield copy
    tensor.detach().copy_(copy.view(tensor.shape))


def check(tensors: Sequence[torch.Tensor], group: ProcessGroup, who: str = GLASS_BOX) -> None:
    """Refuse, before anything is sent, what these algorithms cannot carry."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise SetupError(
                f"{who} carry dense tensors on the CPU, not a {tensor.layout} one on {tensor.device};"
                " use torch's own collective."
            )
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise SetupError("an expanded tensor has several items in one place of memory: call .contiguous() first.")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise SetupError(f"all tensors of a collective have one type, not {[str(each.dtype) for each in tensors]}.")
    if group.rank() < 0:
        raise SetupError("this rank is no member of the group.")


def check_sizes(whole: torch.Tensor, share: torch.Tensor, ranks: int) -> None:
    if whole.numel() != share.numel() * ranks:
        raise SetupError(
            f"with {ranks} ranks the large tensor has {ranks} times the items of the small one, not"
            f" {whole.numel():,} and {share.numel():,}."
        )


def check_root(root: int, ranks: int) -> None:
    if not 0 <= root < ranks:
        raise SetupError(f"the root is a rank of the group, 0 to {ranks - 1}, not {root}.")


# From a call to its steps ---------------------------------------------------------------------------------------------

Plan = Callable[[Exchange], None]
"""The steps of an algorithm, as one rank takes them."""


def in_place(name: str, plan: Plan, tensor: torch.Tensor, group: ProcessGroup, op: object, about: object = "") -> None:
    """Carry out `plan` on `tensor`; `name` as in "ring all_reduce"."""
    with in_one_row(tensor) as flat:
        plan(Exchange(name, flat, group, op, about))


@contextmanager
def reported(name: str, group: ProcessGroup | None, tensors: Sequence[torch.Tensor]) -> Iterator[ProcessGroup]:
    """Report what is done inside as the user's call of a collective; gives `group` or the default one."""
    if group is None and not dist.is_initialized():
        raise SetupError("there is no process group here: call init_process_group first, or run this on a Cluster.")
    known = group or dist.group.WORLD
    assert known is not None
    check(tensors, known)
    with recorder.operation(name, known, tensors):
        yield known


class AllReduce(Protocol):
    """The call of an algorithm's all-reduce."""

    def __call__(
        self, tensor: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
    ) -> None: ...


def all_reduce_by(name: str, plan: Plan) -> AllReduce:
    """Make the `all_reduce` that carries out this plan."""

    def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM) -> None:
        """Put the sum (or `op`) of all ranks' tensors into each of them, in place."""
        with reported("all_reduce", group, [tensor]) as known:
            in_place(f"{name} all_reduce", plan, tensor, known, op)

    return all_reduce


# What "reduce" means: how the shares of two ranks become one, item by item -------------------------------------------


def kind_of(op: object) -> object:
    """SUM, MAX, ...: torch passes some operations inside an object of their own."""
    return getattr(op, "op", op)


def combiner(op: object, dtype: torch.dtype, who: str = GLASS_BOX) -> Combine:
    """How `op` takes one tensor of this type into another. SetupError for what no algorithm here can do."""
    kind, fractions = kind_of(op), dtype.is_floating_point or dtype.is_complex
    refused = (kind == ReduceOp.AVG and not fractions) or (kind in _BITWISE and fractions)
    if kind not in _COMBINE or refused or (kind in _ORDERED and dtype.is_complex):
        raise SetupError(f"{who} know no {getattr(kind, 'name', kind)} of {dtype}.")
    return _COMBINE[kind]
