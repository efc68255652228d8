"""The ring as a backend of torch: DDP and every other program runs on it, unchanged.

    import dlearn.collectives
    torch.distributed.init_process_group("dlearn_ring")

All-reduce, reduce-scatter and all-gather go step by step; everything else is left to gloo. A collective is queued to
one thread, so that `async_op=True` and DDP's overlap work as they do on gloo; its steps are ordinary sends of an inner
process group, which pass torch's dispatcher, where a recording sees them.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from dlearn import recorder
from dlearn.collectives import ring
from dlearn.collectives.exchange import GLASS_BOX, check, check_sizes, combiner, in_place
from dlearn.errors import not_installed

Tensors = list[torch.Tensor]

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
    raise RuntimeError("ranks of MPI meet once per init_process_group; they are not restarted.")


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


class Queued(ProcessGroup):
    """A process group in Python: one thread carries out its collectives, in the order of their calls."""

    backend_name: str
    who = GLASS_BOX
    """What refuses a tensor."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Python itself ends and joins such a thread at exit; a daemon thread would abort the process there.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=self.backend_name, initializer=self._remember_thread
        )
        self._thread_id = 0

    def _remember_thread(self) -> None:
        self._thread_id = threading.get_ident()

    def getBackendName(self) -> str:
        return self.backend_name

    def _queue(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        work: Callable[[], None],
        result: Any = None,
        *,
        root: int | None = None,
        splits: Sequence[int] = (),
    ) -> Work:
        check([*inputs, *outputs], self, self.who)
        given = () if outputs is inputs else outputs
        outer = recorder.operation(name, self, inputs, outputs=given, root=root, splits=splits)
        done: Future[Any] = Future()
        inference = any(tensor.is_inference() for tensor in (*inputs, *outputs))

        def carry_out() -> None:
            try:
                with torch.inference_mode(inference), outer:
                    work()
            except Exception as error:  # Whatever it is, it belongs to the one who waits.
                done.set_exception(error)
            else:
                done.set_result(outputs if result is None else result)

        if threading.get_ident() == self._thread_id:
            # Called by the callback of a collective that has just ended (PowerSGD does): in the queue it would wait
            # for itself. It is its turn on every rank, so ranks still agree on the order.
            carry_out()
        else:
            self._thread.submit(carry_out)
        return Done(done)

    def _asked(self, options: Any, tensors: Sequence[torch.Tensor]) -> object:
        """SUM, MAX, ...; refused here, before anything is queued, if it makes no sense of these tensors."""
        op: object = dist.ReduceOp.SUM if options is None else options.reduceOp
        for tensor in tensors:
            combiner(op, tensor.dtype, self.who)
        return op

    # What the calls of torch, old and new, have in common ------------------------------------------------------------

    _all_reduce: Callable[[str, Tensors, object], Work]
    _gather_list: Callable[[Tensors, torch.Tensor], Work]
    _scatter_list: Callable[[torch.Tensor, Sequence[torch.Tensor], object], Work]
    """Of one tensor for each rank, all or the own."""

    def allreduce(self, tensors: Any, options: Any = None) -> Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._all_reduce("all_reduce", tensors, self._asked(options, tensors))

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Work:
        return self._all_reduce("all_reduce_coalesced", tensors, self._asked(options, tensors))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        """One tensor from each rank, into a list."""
        (into,), (mine,) = (outputs, inputs) if isinstance(inputs, list) else ([outputs], [inputs])
        return self._gather_list(into, mine)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Work:  # type: ignore[override]
        """The own part of a list of tensors, summed over the ranks."""
        (output,), (parts,) = (outputs, inputs) if isinstance(outputs, list) else ([outputs], [inputs])
        return self._scatter_list(output, parts, self._asked(options, [output]))


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

    def _all_reduce(self, name: str, tensors: Tensors, op: object) -> Work:
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


class Done(Work):
    """A collective that the thread carries out."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._future.value()


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
