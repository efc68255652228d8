"""The step that every algorithm here is made of: send one chunk of the tensor and receive another.

An algorithm is a plan of such steps. Each send is an ordinary `send` of torch, so a recording shows it as a message
that says which step it is, and which part of the tensor it has.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from dlearn import recorder
from dlearn.backends.tensors import check, check_reduction, in_one_row, kind_of
from dlearn.errors import PeerError, SetupError

T = TypeVar("T")

WHO = "glass-box collectives"  # The name in error messages.

_COMBINE: dict[object, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,  # and divided by the ranks at the end
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    ReduceOp.MAX: lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class Chunk(NamedTuple):
    """Items `start` to `stop` of the flat tensor."""

    start: int
    stop: int


class Exchange:
    """One collective on one rank: `flat` is the tensor as one row, [items]; ranks are those of the group.

    A tag of its own keeps its messages apart from others: ranks that disagree about size, type or root never meet,
    and end by the group's timeout. (A message larger than its receiver's buffer would make gloo end the process.)
    """

    def __init__(self, name: str, flat: torch.Tensor, group: ProcessGroup, op: object, about: object = "") -> None:
        if op is not None:
            check_reduction(op, flat.dtype, WHO)
        self.name = name
        self.flat = flat
        self.rank, self.size = group.rank(), group.size()
        self.whole = Chunk(0, flat.numel())
        self._group = group
        self._op = kind_of(op)
        self._tag = zlib.crc32(f"{name} {flat.dtype} {flat.numel()} {about}".encode()) >> 2

    def chunks(self, count: int) -> tuple[Chunk, ...]:
        """Cut the tensor into `count` chunks whose sizes differ by one item at most."""
        edges = [self.flat.numel() * i // count for i in range(count + 1)]
        return tuple(Chunk(*edge) for edge in pairwise(edges))

    def items(self, chunk: Chunk) -> torch.Tensor:
        """Return the items of a chunk, as a view."""
        return self.flat[chunk.start : chunk.stop]

    def sendrecv(
        self, step: int, outgoing: Chunk, incoming: Chunk, *, to: int, source: int, combine: bool = False
    ) -> None:
        """Send a chunk to rank `to` while receiving another one from rank `source`.

        What arrives overwrites the incoming chunk, or is combined with it. Empty chunks are not sent.
        Raises PeerError if a peer is gone, or does not answer within the group's timeout.
        """
        finish_send = self._begin_send(step, outgoing, to)
        finish_receive = self._begin_receive(step, incoming, source, combine)
        finish_send()
        finish_receive()

    def send(self, step: int, chunk: Chunk, *, to: int) -> None:
        self._begin_send(step, chunk, to)()

    def receive(self, step: int, chunk: Chunk, *, source: int, combine: bool = False) -> None:
        self._begin_receive(step, chunk, source, combine)()

    def finish(self, chunk: Chunk) -> None:
        """Turn the complete sums of a chunk into means if the operation is AVG."""
        if self._op == ReduceOp.AVG:
            self.items(chunk).div_(self.size)

    def _begin_send(self, step: int, chunk: Chunk, to: int) -> Callable[[], object]:
        """Begin to send; return the function that waits for the end."""
        if chunk.start == chunk.stop:
            return lambda: None
        problem = f"step {step}: rank {to} did not take what rank {self.rank} sends"
        offset_bytes = chunk.start * self.flat.element_size()
        with recorder.step(step, offset_bytes=offset_bytes, whole_bytes=self.flat.nbytes):
            work = self._name_peer(problem, lambda: self._group.send([self.items(chunk)], to, self._tag))
        return lambda: self._name_peer(problem, work.wait)

    def _begin_receive(self, step: int, chunk: Chunk, source: int, combine: bool) -> Callable[[], object]:
        """Begin to receive; return the function that waits for the data, and combines them."""
        if chunk.start == chunk.stop:
            return lambda: None
        problem = f"step {step}: nothing came from rank {source}"
        mine = self.items(chunk)
        arriving = torch.empty_like(mine) if combine else mine
        work = self._name_peer(problem, lambda: self._group.recv([arriving], source, self._tag))

        def finish() -> None:
            self._name_peer(problem, work.wait)
            if combine:
                _COMBINE[self._op](mine, arriving)

        return finish

    def _name_peer(self, problem: str, act: Callable[[], T]) -> T:
        """Raise PeerError where gloo fails; it refuses to begin a send to a peer that is gone already."""
        try:
            return act()
        except RuntimeError as error:
            why = str(error).splitlines()[0].rpartition("] ")[2]
            hint = "It is gone, never called this, or called it with another size or type"
            raise PeerError(f"{self.name}, {problem}. {hint}. (gloo: {why})") from error


# From a call to its steps -----------------------------------------------------------------------

Plan = Callable[[Exchange], None]  # The steps of an algorithm, as one rank takes them.


def in_place(name: str, plan: Plan, tensor: torch.Tensor, group: ProcessGroup, op: object, about: object = "") -> None:
    """Carry out `plan` on `tensor`; `name` as in "ring all_reduce"."""
    with in_one_row(tensor) as flat:
        plan(Exchange(name, flat, group, op, about))


@contextmanager
def reported(name: str, group: ProcessGroup | None, tensors: Sequence[torch.Tensor]) -> Iterator[ProcessGroup]:
    """Record what is done inside as one collective of the user's; yield `group`, or the default one."""
    if group is None and not dist.is_initialized():
        raise SetupError("there is no process group here: call init_process_group first, or run this on a Cluster.")
    known = group or dist.group.WORLD
    assert known is not None
    check(tensors, known, WHO)
    with recorder.operation(name, known, tensors):
        yield known


def all_reduce_by(name: str, plan: Plan) -> Callable[..., None]:
    """Return the `all_reduce(tensor, group=None, op=ReduceOp.SUM)` that carries out this plan."""

    def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM) -> None:
        """Put the sum (or `op`) of all ranks' tensors into each of them, in place."""
        with reported("all_reduce", group, [tensor]) as known:
            in_place(f"{name} all_reduce", plan, tensor, known, op)

    return all_reduce
