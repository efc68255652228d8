"""The ring as a backend of torch: DDP and every other program runs on it, unchanged.

    import dlearn.collectives
    torch.distributed.init_process_group("dlearn_ring")

All-reduce, reduce-scatter and all-gather go step by step; everything else is left to gloo. The steps are ordinary
sends of an inner process group, which pass torch's dispatcher, where a recording sees them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.rendezvous import register_rendezvous_handler

from dlearn.collectives import ring
from dlearn.collectives.exchange import check, check_sizes, in_place
from dlearn.collectives.queued import Queued, Tensors
from dlearn.errors import not_installed

NAME, MPI4PY = "dlearn_ring", "mpi4py"


def register() -> None:
    """Make the backends of this package known to torch; once is enough.

    `init_process_group("mpi4py", init_method="mpi4py://")` works then; mpi4py is imported when somebody asks for it.
    """
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, lambda options, _: GlassBox(options), extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(
        MPI4PY, lambda options, _: _mpi_group().MpiGroup(options), extended_api=True, devices=["cpu"]
    )
    register_rendezvous_handler(MPI4PY, _meet)  # type: ignore[no-untyped-call]


def _meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    yield _mpi_group().meet()


def _mpi_group() -> Any:
    if importlib.util.find_spec("mpi4py") is None:
        raise not_installed("mpi4py", needed_by="the backend mpi4py")
    from dlearn.collectives import mpi_group

    return mpi_group


class Steps(ProcessGroup):
    """The inner process group, over gloo: what the steps are sent through."""

    def __init__(self, outer: GlassBox, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self.steps_of = outer
        self.gloo = gloo


class GlassBox(Queued):
    """A process group whose collectives can be watched step by step."""

    backend_name = NAME

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._steps = Steps(self, options)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._steps.gloo)

    def shutdown(self) -> None:
        """Called by destroy_process_group."""
        self._thread.shutdown()
        self._steps.shutdown()

    def abort(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._steps.abort()

    # Step by step -----------------------------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Work:
        return self._all_reduce(tensors, self._asked(options, tensors), "all_reduce_coalesced")

    def _all_reduce(self, tensors: Tensors, op: object, name: str = "all_reduce") -> Work:
        def steps() -> None:
            for tensor in tensors:
                in_place(f"ring {name}", ring.all_reduce_steps, tensor, self._steps, op)

        return self._queue(name, tensors, tensors, steps)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Work:
        op = self._asked(options, [input])
        check_sizes(input, output, self.size())
        steps = partial(ring.reduce_scatter_on, output, input, self._steps, op)
        return self._queue("reduce_scatter_single", [input], [output], steps)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Work:
        check_sizes(output, input, self.size())
        steps = partial(ring.all_gather_on, output, input, self._steps)
        return self._queue("all_gather_single", [input], [output], steps)

    def _gather_list(self, into: Tensors, mine: Any) -> Work:
        check(into, self)

        def steps() -> None:
            flat = mine.new_empty(mine.numel() * self.size())
            ring.all_gather_on(flat, mine, self._steps)
            for tensor, block in zip(into, flat.split(max(1, mine.numel())), strict=False):
                tensor.detach().copy_(block.view(tensor.shape))

        return self._queue("all_gather", [mine], into, steps, result=[into])

    def _scatter_list(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: object) -> Work:
        def steps() -> None:
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            check_sizes(flat, output, self.size())
            ring.reduce_scatter_on(output, flat, self._steps, op)

        return self._queue("reduce_scatter", parts, [output], steps)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


# Left to gloo ---------------------------------------------------------------------------------------------------------

_LEFT_TO_GLOO = (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def _hand_on(name: str) -> Callable[..., Any]:
    def method(self: GlassBox, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._steps, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in _LEFT_TO_GLOO:
    setattr(GlassBox, _name, _hand_on(_name))
