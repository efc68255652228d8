"""The stretches of a training step that send nothing: forward, backward and optimizer, from begin to end.

Of these torch's communication says nothing, and without them nobody knows what an all-reduce was hidden behind. They
are noted in programs with a DDP model only: from its first forward pass on. Each is one line, written when it is over.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlearn.hooks import Emit, Undo
from dlearn.hooks.compiler import untraced
from dlearn.trace.event import Stretch


def install(emit: Emit) -> Undo:
    """Report how long each forward, backward and optimizer's step of a DDP program takes."""
    watch = _Watch(emit)
    pre_forward, post_forward = DistributedDataParallel._pre_forward, DistributedDataParallel._post_forward

    def _pre_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            watch.forward_begins(self)
        return pre_forward(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self: DistributedDataParallel, output: Any) -> Any:
        result = post_forward(self, output)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            watch.forward_ends(self)
        return result

    DistributedDataParallel._pre_forward = _pre_forward  # type: ignore[method-assign]
    DistributedDataParallel._post_forward = _post_forward  # type: ignore[method-assign]

    def undo() -> None:
        DistributedDataParallel._pre_forward = pre_forward  # type: ignore[method-assign]
        DistributedDataParallel._post_forward = post_forward  # type: ignore[method-assign]
        watch.undo.close()

    return undo


class _Watch:
    """When each stretch that has not ended began."""

    def __init__(self, emit: Emit) -> None:
        self.undo = ExitStack()
        self._emit = emit
        self._follows = False
        self._forward: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        self._optimizer: dict[int, int] = {}

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        try:
            if not self._follows:
                self._follows = True
                self._follow_backward()
                self._follow_optimizers()
            self._forward[ddp] = time.monotonic_ns()
        except Exception as error:
            self._emit.failed("the begin of a forward pass", error)

    def forward_ends(self, ddp: DistributedDataParallel) -> None:
        began = self._forward.pop(ddp, None)
        if torch.is_grad_enabled():  # Else it is an evaluation, and no part of a training step.
            self._note("forward", began)

    def _follow_backward(self) -> None:
        """`Tensor.backward` and `autograd.grad` reach the engine through this one name."""
        engine: Any = torch.autograd
        original = engine._engine_run_backward

        @untraced
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() >= 0:  # Inside another: checkpointing runs parts again.
                return original(*args, **kwargs)
            began = time.monotonic_ns()
            try:
                result = original(*args, **kwargs)
            except BaseException as failure:
                self._note("backward", began, error=type(failure).__name__)
                raise
            self._note("backward", began)
            return result

        engine._engine_run_backward = run_backward

        def restore() -> None:
            engine._engine_run_backward = original

        self.undo.callback(restore)

    def _follow_optimizers(self) -> None:
        @untraced
        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer[id(optimizer)] = time.monotonic_ns()

        @untraced
        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._note("optimizer", self._optimizer.pop(id(optimizer), None))

        self.undo.callback(register_optimizer_step_pre_hook(begins).remove)
        self.undo.callback(register_optimizer_step_post_hook(ends).remove)

    def _note(self, phase: str, began: int | None, *, error: str = "") -> None:
        if began is None:
            return
        try:
            ended = time.monotonic_ns()
            self._emit.event(Stretch, phase=phase, start_ns=began, end_ns=ended, ended_by="return", error=error)
        except Exception as failure:
            self._emit.failed(f"the end of {phase}", failure)
