"""What DistributedDataParallel does before it sends: its buckets, when each gradient is ready, and its forward pass.

DDP's reducer is C++. Its buckets can be read (`_get_zeros_like_grad_buckets`, on the training thread only: it takes the
reducer's mutex) and change at most once, when DDP rebuilds them in the order in which gradients came. The
ready times come from torch's own hook on each parameter. Which all-reduce carries which bucket is not decided here:
that is an inference, and lives in join/buckets.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from dlearn.hooks import Emit, Undo
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.ddp.stretches import Stretches
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches
from dlearn.hooks.private import untraced
from dlearn.trace.event import Bucket, Gradient


def install(host: Host) -> Undo:
    """Report buckets, ready gradients and stretches of every DDP model that runs from now on."""
    watch, stretches = _Watch(host, host.times), Stretches(host, host.times)

    @untraced
    def begins(ddp: DistributedDataParallel) -> None:
        try:
            watch.before_forward(ddp)
            stretches.forward_begins(ddp)
        except Exception as error:
            host.failed("DistributedDataParallel.forward", error)

    # What torch.compile never traces, so that it compiles the same as without us.
    def make(original: Any) -> Any:
        @contextmanager
        @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
        @untraced
        def _inside_ddp_forward(self: DistributedDataParallel) -> Iterator[None]:
            begins(self)
            with original(self):
                yield
            stretches.forward_ends(self)

        return _inside_ddp_forward

    undo = Patches()
    undo.callback(watch.remove)
    undo.callback(stretches.undo.close)
    undo.replace(DistributedDataParallel, "_inside_ddp_forward", make)
    return undo.close


class _Watch:
    """The DDP models of this process, numbered in the order of their first forward pass."""

    def __init__(self, emit: Emit, times: CudaTimes) -> None:
        self._emit, self._times = emit, times
        self._numbers = itertools.count()
        self._models: WeakKeyDictionary[DistributedDataParallel, tuple[int, bool]] = WeakKeyDictionary()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Read the buckets when they are new; DDP has just rebuilt them where it will."""
        rebuilt = bool(getattr(ddp, "_has_rebuilt_buckets", False))
        model, known_as = self._models.get(ddp, (None, None))
        if known_as == rebuilt:
            return
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        if model is None:
            model = next(self._numbers)
            self._watch_gradients(ddp, model, names)
        self._models[ddp] = (model, rebuilt)
        self._report_buckets(ddp, model, names, "rebuilt" if rebuilt else "first")

    def _report_buckets(self, ddp: DistributedDataParallel, model: int, names: dict[int, str], built: str) -> None:
        try:
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:
            return  # One with a sparse gradient has no buffer yet, and torch tells none of them: "bucket unknown".
        for bucket in buckets:
            self._emit.event(
                Bucket,
                model=model,
                index=bucket.index(),
                count=len(buckets),
                bytes=bucket.buffer().nbytes,
                parameters=tuple(names.get(id(each), "?") for each in bucket.parameters()),
                built=built,
                may_be_skipped=bool(getattr(ddp, "skip_all_reduce_unused_params", False)),
                phase="forward",
            )

    def _watch_gradients(self, ddp: DistributedDataParallel, model: int, names: dict[int, str]) -> None:
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                gpu = self._times.gpu(parameter.device)
                hook = self._ready(model, names[id(parameter)], parameter.nbytes, gpu)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _ready(self, model: int, name: str, size: int, gpu: torch.device | None) -> Any:
        @untraced
        def ready(parameter: torch.Tensor) -> None:
            try:
                task = torch._C._current_graph_task_id()
                now = self._times.mark(gpu)
                number = self._emit.event(
                    Gradient,
                    model=model,
                    parameter=name,
                    bytes=size,
                    backward=task if task >= 0 else None,
                    phase="backward",
                )
                if now is not None:
                    self._times.between(number, now, now)
            except Exception as error:
                self._emit.failed("gradient hook", error)

        return ready

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
