"""The ring as a backend of torch: DDP and every other program runs on it, unchanged.

    import dlearn.collectives
    torch.distributed.init_process_group("dlearn_ring")

All-reduce, reduce-scatter and all-gather go step by step, as ordinary sends of an inner process
group; gloo does everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from itertools import chain
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

from dlearn.backends.queued_group import QueuedGroup, Tensors
from dlearn.backends.tensors import check, check_sizes
from dlearn.collectives import ring
from dlearn.collectives.exchange import WHO, in_place


class StepGroup(ProcessGroup):
    """The inner process group, over gloo, through which a ring sends its steps."""

    def __init__(self, outer: RingGroup, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self.steps_of = outer
        self.gloo = gloo


class RingGroup(QueuedGroup):
    """A process group whose collectives are rings, and whose steps can be watched."""

    backend_name = "dlearn_ring"
    who = WHO

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._steps = StepGroup(self, options)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._steps.gloo)

    def shutdown(self) -> None:
        """End the thread and the inner group; destroy_process_group calls it."""
        self._thread.shutdown()
        self._steps.shutdown()

    def abort(self) -> None:
        """End both without waiting for what is queued."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._steps.abort()

    # Step by step -----------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Work:
        return self._all_reduce(tensors, self._reduce_op(options, tensors), "all_reduce_coalesced")

    def _all_reduce(self, tensors: Tensors, op: object, name: str = "all_reduce") -> Work:
        def steps() -> None:
            for tensor in tensors:
                in_place(f"ring {name}", ring.all_reduce_steps, tensor, self._steps, op)

        return self._queue(name, tensors, tensors, steps)

    def reduce_scatter_single(self, output: Any, input: Any, options: Any = None) -> Work:
        return self._scatter_each("reduce_scatter_single", [output], [input], options)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        return self._scatter_each("reduce_scatter_single_coalesced", outputs, inputs, options)

    def all_gather_single(self, output: Any, input: Any, options: Any = None) -> Work:
        return self._gather_each("all_gather_single", [output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        return self._gather_each("all_gather_single_coalesced", outputs, inputs)

    def _scatter_each(self, name: str, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        op = self._reduce_op(options, inputs)
        for output, input in zip(outputs, inputs, strict=True):
            check_sizes(input, output, self.size())

        def steps() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                ring.reduce_scatter_on(output, input, self._steps, op)

        return self._queue(name, inputs, outputs, steps)

    def _gather_each(self, name: str, outputs: Tensors, inputs: Tensors) -> Work:
        for output, input in zip(outputs, inputs, strict=True):
            check_sizes(output, input, self.size())

        def steps() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                ring.all_gather_on(output, input, self._steps)

        return self._queue(name, inputs, outputs, steps)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, options: Any = None) -> Work:
        """Gather each of several tensors; `outputs` has a list of them for each rank."""

        def steps() -> None:
            for mine, *into in zip(inputs, *outputs, strict=True):
                self._fill(into, mine)

        into = [*chain.from_iterable(outputs)]
        return self._queue("all_gather_coalesced", inputs, into, steps, result=outputs)

    def _gather_list(self, into: Tensors, mine: Any) -> Work:
        check(into, self, WHO)
        return self._queue("all_gather", [mine], into, lambda: self._fill(into, mine), result=[into])

    def _fill(self, into: Tensors, mine: torch.Tensor) -> None:
        """Gather a tensor from each rank into a list; they have as many items as `mine`."""
        flat = mine.new_empty(mine.numel() * self.size())
        ring.all_gather_on(flat, mine, self._steps)
        blocks = torch.split(flat, max(1, mine.numel()))
        for tensor, block in zip(into, blocks, strict=False):
            tensor.detach().copy_(block.view(tensor.shape))

    def _scatter_list(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: object) -> Work:
        def steps() -> None:
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            check_sizes(flat, output, self.size())
            ring.reduce_scatter_on(output, flat, self._steps, op)

        return self._queue("reduce_scatter", parts, [output], steps)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


# Left to gloo ---------------------------------------------------------------------------------

_LEFT_TO_GLOO = (
    "all_to_all_single", "alltoall", "alltoall_base", "barrier", "broadcast", "gather",
    "monitored_barrier", "recv", "recv_anysource", "reduce", "scatter", "send",
)  # fmt: skip


def _to_gloo(group: RingGroup, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(group._steps, name)(*args, **kwargs)


for _name in _LEFT_TO_GLOO:
    setattr(RingGroup, _name, partialmethod(_to_gloo, _name))
