"""What DistributedDataParallel does before it sends: its buckets and its ready gradients.

DDP's reducer is C++. Its buckets can be read on the training thread (`_get_zeros_like_grad_buckets`
takes the reducer's mutex), and change at most once, when DDP rebuilds them in the order in which
gradients came. Ready times come from torch's own hook on each parameter. join/buckets.py infers
which all-reduce sends which bucket.

Forward, backward and optimizer are reported as well, from the first forward pass of a DDP model on:
an all-reduce is hidden behind them. On a GPU the call only launches them, and cuda_times.py finds
their times.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlearn.events.event import Bucket, Gradient, PhaseSpan
from dlearn.hooks import Undo
from dlearn.hooks.cuda_times import Mark
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.private import untraced


def install(host: Host) -> Undo:
    """Report buckets, ready gradients and phases of every DDP model that runs from now on."""
    watch, phases = _Watch(host), Phases(host)

    @untraced
    def begins(ddp: DistributedDataParallel) -> None:
        watch.before_forward(ddp)
        phases.forward_begins(ddp)

    # What torch.compile never traces, so that it compiles the same as without us.
    def make(original: Any) -> Any:
        @contextmanager
        @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
        @untraced
        def _inside_ddp_forward(self: DistributedDataParallel) -> Iterator[None]:
            guarded(host, "DistributedDataParallel.forward", begins, self)
            with original(self):
                yield
            phases.forward_ends(self)

        return _inside_ddp_forward

    undo = Patches()
    undo.callback(watch.undo.close)
    undo.callback(phases.undo.close)
    undo.replace(DistributedDataParallel, "_inside_ddp_forward", make)
    return undo.close


class _Watch:
    """The DDP models of this process, numbered in the order of their first forward pass."""

    def __init__(self, host: Host) -> None:
        self._emit, self._times = host, host.times
        self._numbers = itertools.count()
        self._models: WeakKeyDictionary[DistributedDataParallel, tuple[int, bool]] = WeakKeyDictionary()
        self.undo = ExitStack()

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Read the buckets when they are new; DDP has just rebuilt them where it will."""
        rebuilt = bool(getattr(ddp, "_has_rebuilt_buckets", False))
        model, known_as = self._models.get(ddp, (None, None))
        if known_as == rebuilt:
            return
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        if model is None:
            model = next(self._numbers)
            for parameter in ddp.module.parameters():
                if parameter.requires_grad:
                    hook = partial(self._ready, model, names[id(parameter)])
                    self.undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        self._models[ddp] = (model, rebuilt)
        self._report_buckets(ddp, model, names, "rebuilt" if rebuilt else "first")

    def _report_buckets(self, ddp: DistributedDataParallel, model: int, names: dict[int, str], built: str) -> None:
        try:
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:
            return  # With a sparse gradient one has no buffer yet, and torch gives none of them: "bucket unknown".
        for bucket in buckets:
            self._emit.event(
                Bucket,
                model=model,
                index=bucket.index(),
                count=len(buckets),
                bytes=bucket.buffer().nbytes,
                parameters=tuple(names.get(id(parameter), "?") for parameter in bucket.parameters()),
                built=built,
                may_be_skipped=bool(getattr(ddp, "skip_all_reduce_unused_params", False)),
                phase="forward",
            )

    @untraced
    def _ready(self, model: int, name: str, parameter: torch.Tensor) -> None:
        guarded(self._emit, "gradient hook", self._report_ready, model, name, parameter)

    def _report_ready(self, model: int, name: str, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        backward = task if task >= 0 else None
        now = self._times.mark(parameter.device)
        facts = {"model": model, "parameter": name, "bytes": parameter.nbytes, "backward": backward}
        number = self._emit.event(Gradient, phase="backward", **facts)
        if now is not None:
            self._times.between(number, now, now)


# Phases of a training step --------------------------------------------------------------------------------------------


_FAKES = torch._C._TorchDispatchModeKey.FAKE


_Begun = tuple[int, Mark | None]
"""When a phase began, and for a model on a GPU where its stream was."""


class Phases:
    """Phases of a training step that have not ended, and when they began."""

    def __init__(self, host: Host) -> None:
        self.undo = Patches()
        self._emit, self._times = host, host.times
        self._device: torch.device | None = None
        self._forward: WeakKeyDictionary[DistributedDataParallel, _Begun] = WeakKeyDictionary()
        self._optimizer: dict[int, _Begun] = {}

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        is_first, self._device = self._device is None, ddp.device
        if is_first:
            self._follow()
        self._forward[ddp] = self._begins()

    @untraced
    def forward_ends(self, ddp: DistributedDataParallel) -> None:
        began = self._forward.pop(ddp, None)
        if torch.is_grad_enabled():  # Else it is an evaluation, and no part of a training step.
            self._note("forward", began)

    def _follow(self) -> None:
        """Watch all optimizers, and the name by which `Tensor.backward` reaches the engine."""

        def run_backward(original: Any, *args: Any, **kwargs: Any) -> Any:
            # Inside another, as checkpointing runs parts again; or traced only, on fakes, by a compiler.
            if torch._C._current_graph_task_id() >= 0 or torch._C._get_dispatch_mode(_FAKES) is not None:
                return original(*args, **kwargs)
            began, error = self._begins(), ""
            try:
                return original(*args, **kwargs)
            except BaseException as failure:
                error = type(failure).__name__
                raise
            finally:
                self._note("backward", began, error=error)

        @untraced
        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer[id(optimizer)] = self._begins()

        @untraced
        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._note("optimizer", self._optimizer.pop(id(optimizer), None))

        self.undo.wrap(torch.autograd, "_engine_run_backward", run_backward)
        self.undo.callback(register_optimizer_step_pre_hook(begins).remove)
        self.undo.callback(register_optimizer_step_post_hook(ends).remove)

    def _begins(self) -> _Begun:
        return time.monotonic_ns(), self._times.mark(self._device)

    def _note(self, phase: str, began: _Begun | None, *, error: str = "") -> None:
        def report(start_ns: int, on_gpu: Mark | None) -> None:
            times = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "ended_by": "return"}
            number = self._emit.event(PhaseSpan, phase=phase, error=error, **times)
            if on_gpu is not None:
                self._times.between(number, on_gpu, self._times.mark(on_gpu.device))

        if began is not None:
            guarded(self._emit, f"the end of {phase}", report, *began)


# Steps that are counted without the user's help -----------------------------------------------------------------------


def install_steps(host: Host) -> Undo:
    """Report to `host` each step of the program's optimizer, where only some steps are recorded.

    Of several optimizers, the first's that is still there: where each phase of a training has one of its own, the count
    goes on.
    """
    if host.options.steps is None:
        return lambda: None
    host.begin_step(0)
    numbers = itertools.count(1)
    counted: weakref.ref[Any] | None = None

    @untraced
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal counted
        if counted is None or counted() is None:
            counted = weakref.ref(optimizer)
        if counted() is optimizer:
            host.begin_step(next(numbers))

    return register_optimizer_step_post_hook(stepped).remove
