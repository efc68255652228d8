"""The stretches of a training step that send nothing: forward, backward and optimizer, from begin to end.

Of these torch's communication says nothing, and without them nobody knows what an all-reduce was hidden behind. They
are noted in programs with a DDP model only: from its first forward pass on. Each is one line, written when it is over.
The forward pass is the module's: what DDP itself sends before it (buckets to agree on, buffers) is not in it.
Of a model on a GPU they are launched only: when the GPU did it, `cuda_times.py` finds out.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlearn.hooks import Emit
from dlearn.hooks.cuda_times import CudaTimes, Mark
from dlearn.hooks.patches import Patches
from dlearn.hooks.private import untraced
from dlearn.trace.event import Stretch

_FAKES = torch._C._TorchDispatchModeKey.FAKE


class _Begun(NamedTuple):
    at_ns: int
    on_gpu: Mark | None


class Stretches:
    """When each stretch that has not ended began."""

    def __init__(self, emit: Emit, times: CudaTimes) -> None:
        self.undo = Patches()
        self._emit, self._times = emit, times
        self._follows = False
        self._gpu: torch.device | None = None
        self._forward: WeakKeyDictionary[DistributedDataParallel, _Begun] = WeakKeyDictionary()
        self._optimizer: dict[int, _Begun] = {}

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        if not self._follows:
            self._follows = True
            self._follow_backward()
            self._follow_optimizers()
        self._gpu = self._times.gpu(ddp.device)
        self._forward[ddp] = self._begins()

    @untraced
    def forward_ends(self, ddp: DistributedDataParallel) -> None:
        began = self._forward.pop(ddp, None)
        if torch.is_grad_enabled():  # Else it is an evaluation, and no part of a training step.
            self._note("forward", began)

    def _follow_backward(self) -> None:
        """`Tensor.backward` and `autograd.grad` reach the engine through this one name."""

        def make(original: Any) -> Any:
            @untraced
            def run_backward(*args: Any, **kwargs: Any) -> Any:
                # Inside another, as checkpointing runs parts again; or traced only, on fakes, by a compiler.
                if torch._C._current_graph_task_id() >= 0 or torch._C._get_dispatch_mode(_FAKES) is not None:
                    return original(*args, **kwargs)
                began = self._begins()
                try:
                    result = original(*args, **kwargs)
                except BaseException as failure:
                    self._note("backward", began, error=type(failure).__name__)
                    raise
                self._note("backward", began)
                return result

            return run_backward

        self.undo.replace(torch.autograd, "_engine_run_backward", make)

    def _follow_optimizers(self) -> None:
        @untraced
        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer[id(optimizer)] = self._begins()

        @untraced
        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._note("optimizer", self._optimizer.pop(id(optimizer), None))

        self.undo.callback(register_optimizer_step_pre_hook(begins).remove)
        self.undo.callback(register_optimizer_step_post_hook(ends).remove)

    def _begins(self) -> _Begun:
        """Now, and for a model on a GPU when its stream comes to this place."""
        on_gpu = self._times.mark(self._gpu)
        return _Begun(time.monotonic_ns(), on_gpu)

    def _note(self, phase: str, began: _Begun | None, *, error: str = "") -> None:
        if began is None:
            return
        try:
            facts = {"start_ns": began.at_ns, "end_ns": time.monotonic_ns(), "ended_by": "return", "error": error}
            number = self._emit.event(Stretch, phase=phase, **facts)
            if began.on_gpu is not None:
                self._times.between(number, began.on_gpu, self._times.mark(began.on_gpu.device))
        except Exception as failure:
            self._emit.failed(f"the end of {phase}", failure)
