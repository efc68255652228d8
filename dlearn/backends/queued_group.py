"""A process group in Python: one thread carries out its collectives, in the order of their calls.

So `async_op=True` and DDP's overlap work as they do on gloo.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work
from torch.futures import Future

from dlearn import recorder
from dlearn.backends.tensors import check, check_reduction

Tensors = list[torch.Tensor]


class QueuedGroup(ProcessGroup):
    """A process group in Python; subclasses say how its collectives are carried out."""

    backend_name: str
    who: str  # The name in error messages.

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Python ends and joins such a thread at exit; a daemon thread would abort the process.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=self.backend_name, initializer=self._remember_thread
        )
        self._thread_id = 0

    def _remember_thread(self) -> None:
        self._thread_id = threading.get_ident()

    def getBackendName(self) -> str:
        return self.backend_name

    def _queue(
        self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
        work: Callable[[], None], result: Any = None, *,
        root: int | None = None, splits: Sequence[int] = (),
    ) -> Work:  # fmt: skip
        """Check the tensors, report the collective, and let the thread carry out `work`."""
        check([*inputs, *outputs], self, self.who)
        given = () if outputs is inputs else outputs
        outer = recorder.operation(name, self, inputs, outputs=given, root=root, splits=splits)
        done: Future[Any] = Future()
        inference = any(tensor.is_inference() for tensor in (*inputs, *outputs))

        def carry_out() -> None:
            try:
                with torch.inference_mode(inference), outer:
                    work()
            except Exception as error:  # It is raised where the program waits for the work.
                done.set_exception(error)
            else:
                done.set_result(outputs if result is None else result)

        if threading.get_ident() == self._thread_id:
            # The callback of a collective that has just ended calls another one (PowerSGD does). In
            # the queue it would wait for itself. Every rank runs it now, so the order is the same.
            carry_out()
        else:
            self._thread.submit(carry_out)
        return QueuedWork(done)

    def _reduce_op(self, options: Any, tensors: Sequence[torch.Tensor]) -> object:
        """Return SUM, MAX, ...; raise SetupError, before anything is queued, where a type has no such reduction."""
        op: object = ReduceOp.SUM if options is None else options.reduceOp
        for tensor in tensors:
            check_reduction(op, tensor.dtype, self.who)
        return op

    # What the calls of torch, old and new, have in common --------------------------------------

    _all_reduce: Callable[[Tensors, object], Work]
    _gather_list: Callable[[Tensors, torch.Tensor], Work]
    _scatter_list: Callable[[torch.Tensor, Sequence[torch.Tensor], object], Work]
    """Subclasses have these: `_gather_list` fills a list of n tensors, `_scatter_list` reduces one."""

    def allreduce(self, tensors: Any, options: Any = None) -> Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._all_reduce(tensors, self._reduce_op(options, tensors))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        """Gather one tensor from each rank into a list."""
        if isinstance(inputs, list):
            (outputs,), (inputs,) = outputs, inputs
        return self._gather_list(outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Work:  # type: ignore
        """Reduce a list of n tensors over the ranks; rank r gets tensor r."""
        if isinstance(outputs, list):
            (outputs,), (inputs,) = outputs, inputs
        return self._scatter_list(outputs, inputs, self._reduce_op(options, [outputs]))


class QueuedWork(Work):
    """The work of a collective that the thread carries out."""

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
