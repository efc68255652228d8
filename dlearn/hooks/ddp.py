"""What DistributedDataParallel does before it sends: its buckets and its ready gradients.

DDP's reducer is C++. Its buckets can be read on the training thread (`_get_zeros_like_grad_buckets`
takes the reducer's mutex), and change at most once, when DDP rebuilds them in the order in which
gradients came. join/buckets.py infers which all-reduce sends which bucket.

Forward, backward and optimizer are reported as well, from the first DDP model on (with FSDP the
optimizer). On a GPU the call only launches them, and cuda_times.py finds their times.
"""

import itertools
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlearn.events.event import Bucket, Gradient, PhaseSpan
from dlearn.events.job_facts import DdpModel, OptimizerMade
from dlearn.hooks import Undo, callers
from dlearn.hooks.callers import site_of
from dlearn.hooks.cuda_times import Mark
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.private import untraced


def install(host: Host) -> Undo:
    """Report buckets, ready gradients and phases of every DDP model that runs from now on."""
    undo = Patches()
    watch = _Watch(host, undo)
    phases = Phases(host, watch, undo)

    def made(_: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        watch.number_of(ddp)
        phases.follow(ddp.device)

    # What torch.compile never traces, so that it compiles the same as without us.
    def make(original: Any) -> Any:
        @contextmanager
        @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
        @untraced
        def _inside_ddp_forward(self: DistributedDataParallel) -> Iterator[None]:
            guarded(host, "DistributedDataParallel.forward", phases.forward_begins, self)
            with original(self):
                yield
            phases.forward_ends(self)

        return _inside_ddp_forward

    callers.fsdp2_reduces.append(phases.follow_optimizers)
    undo.callback(callers.fsdp2_reduces.clear)
    undo.around(host, DistributedDataParallel, "__init__", after=made)
    undo.replace(DistributedDataParallel, "_inside_ddp_forward", make)
    return undo.close


class _Watch:
    """The DDP models of this process, numbered in the order in which they were made."""

    def __init__(self, host: Host, undo: Patches) -> None:
        self._emit, self._groups, self._times, self._undo = host, host.groups, host.times, undo
        self._numbers: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        self._known_as: WeakKeyDictionary[DistributedDataParallel, bool] = WeakKeyDictionary()
        self._made = itertools.count()

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Read the buckets when they are new; DDP has just rebuilt them where it will."""
        rebuilt = bool(getattr(ddp, "_has_rebuilt_buckets", False))
        if self._known_as.get(ddp) == rebuilt:
            return
        self._known_as[ddp] = rebuilt
        model = self.number_of(ddp)
        try:
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:
            return  # With a sparse gradient one has no buffer yet: "bucket unknown".
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        for bucket in buckets:
            self._emit.event(
                Bucket,
                model=model,
                index=bucket.index(),
                count=len(buckets),
                bytes=bucket.buffer().nbytes,
                built="rebuilt" if rebuilt else "first",
                parameters=tuple(names.get(id(each), "?") for each in bucket.parameters()),
                may_be_skipped=bool(getattr(ddp, "skip_all_reduce_unused_params", False)),
                phase="forward",
            )

    def number_of(self, ddp: DistributedDataParallel) -> int:
        """Return the model's number; describe one that is new, and watch its gradients."""
        if ddp in self._numbers:
            return self._numbers[ddp]
        model = self._numbers[ddp] = next(self._made)
        sizes: dict[str, int] = {}
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad:
                sizes[name] = parameter.nbytes
                hook = partial(self._ready, model, name)
                self._undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        group, site = self._groups.of(ddp.process_group).fact.name, site_of(sys._getframe(1))
        names, size = tuple(sizes), sum(sizes.values())
        fact = DdpModel(model=model, group=group, site=site, parameters=names, bytes=size)
        self._emit.fact(fact)
        return model

    def models_of(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        found = []
        for ddp, model in self._numbers.items():
            if not held.isdisjoint(map(id, ddp.module.parameters())):
                found.append(model)
        return tuple(sorted(found))

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


# Phases of a training step ------------------------------------------------------------------------

_FAKES = torch._C._TorchDispatchModeKey.FAKE
_Begun = tuple[int, Mark | None]
"""When a phase began, and for a model on a GPU where its stream was."""


class Phases:
    """Phases of a training step that have not ended, and when they began."""

    def __init__(self, host: Host, watch: _Watch, undo: Patches) -> None:
        self._emit, self._times, self._watch, self._undo = host, host.times, watch, undo
        self._device: torch.device | None = None
        self._forward: WeakKeyDictionary[DistributedDataParallel, _Begun] = WeakKeyDictionary()
        self._optimizer: dict[int, _Begun] = {}
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._optimizers_made = itertools.count()
        self._follows_optimizers = self._follows_backward = False

    @untraced
    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        self._watch.before_forward(ddp)
        self.follow(ddp.device)
        self._forward[ddp] = self._begins()

    @untraced
    def forward_ends(self, ddp: DistributedDataParallel) -> None:
        began = self._forward.pop(ddp, None)
        if torch.is_grad_enabled():  # Else it is an evaluation, and no part of a training step.
            facts = {"synced": bool(ddp.require_backward_grad_sync), "training": ddp.training}
            self._note("forward", began, of=self._watch.number_of(ddp), **facts)

    def follow(self, device: torch.device | None) -> None:
        """Watch all optimizers, and the name by which `Tensor.backward` reaches the engine."""
        self._device = device
        if self._follows_backward:
            return
        self._follows_backward = True

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

        self._undo.wrap(torch.autograd, "_engine_run_backward", run_backward)
        self.follow_optimizers()

    def follow_optimizers(self) -> None:
        if self._follows_optimizers:
            return
        self._follows_optimizers = True

        @untraced
        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer[id(optimizer)] = self._begins()

        @untraced
        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            began = self._optimizer.pop(id(optimizer), None)
            if began is not None:
                number = guarded(self._emit, "an optimizer", self._number_of, optimizer)
                self._note("optimizer", began, of=number)

        self._undo.callback(register_optimizer_step_pre_hook(begins).remove)
        self._undo.callback(register_optimizer_step_post_hook(ends).remove)

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the optimizer's number, by its first step; describe one that is new."""
        number = self._optimizers.get(optimizer)
        if number is None:
            number = self._optimizers[optimizer] = next(self._optimizers_made)
            name, models = type(optimizer).__name__, self._watch.models_of(optimizer)
            self._emit.fact(OptimizerMade(optimizer=number, name=name, models=models))
        return number

    def _begins(self) -> _Begun:
        return time.monotonic_ns(), self._times.mark(self._device)

    def _note(self, phase: str, began: _Begun | None, **facts: Any) -> None:
        def report(start_ns: int, on_gpu: Mark | None) -> None:
            times = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "ended_by": "return"}
            site = site_of(sys._getframe(1))
            number = self._emit.event(PhaseSpan, phase=phase, site=site, **facts, **times)
            if on_gpu is not None:
                self._times.between(number, on_gpu, self._times.mark(on_gpu.device))

        if began is not None:
            guarded(self._emit, f"the end of {phase}", report, *began)


# Steps that are counted without the user's help ----------------------------------------------------


def install_steps(host: Host) -> Undo:
    """Report to `host` each step of the program's optimizer, where only some steps are recorded.

    Of several optimizers, of the first that is still there: each phase may have its own.
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
