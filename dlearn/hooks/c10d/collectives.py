"""Every communication op of torch.distributed, seen at the dispatcher.

All of them, whoever calls (Python, DDP's C++ reducer, FSDP, functional collectives, any thread), go through torch's
dispatcher as `c10d::...` ops. We register a Python kernel for each at the key `BackendSelect`, which lies below
autograd and above the CPU and CUDA kernels and is free for c10d. It notes the call and hands it on, unchanged,
to the kernel that would have run without us. (The `Autograd` key would miss functional collectives and inference
mode; a kernel in the place of the CPU one would have to rebuild options that Python cannot read.)

The end comes from the caller's own wait where it waits at once, else from the future of the Work; see works.py. When a
GPU was at it, CUDA events tell: cuda_times.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, ProcessGroup, Work
from torch.distributed import distributed_c10d

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo, callers
from dlearn.hooks.c10d.c10d_ops import (
    COLLECTIVES,
    POINT_TO_POINT,
    Signature,
    checksum,
    checksum_given,
    describe_one,
    here,
    overload_of,
    place_of,
    split_bytes,
    tensors_of,
)
from dlearn.hooks.c10d.groups import Groups, OwnGroup
from dlearn.hooks.c10d.works import Callbacks, WaitingWorks, future_of
from dlearn.hooks.callers import caller
from dlearn.hooks.compiler import untraced
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.host import Host
from dlearn.hooks.private import unfit
from dlearn.trace.event import NOT_OBSERVED, REFUSED, Collective, Event, Line, PointToPoint


def install(host: Host) -> Undo:
    """Report every c10d op to `host` until the returned function is called. SetupError if this torch does not fit.

    With the option `checksums`, of what is sent from point to point and given to collectives, too.
    """
    self_test()
    with ExitStack() as undo:
        undo.callback(host.times.close)
        undo.callback(_install(host, host.groups, host.times, host.options.checksums))
        undo.callback(callers.install(host))
        return undo.pop_all().close


def _install(emit: Emit, groups: Groups, times: CudaTimes, checksums: bool) -> Undo:
    collectives = here(COLLECTIVES)
    for op in (*collectives, *POINT_TO_POINT):
        overload_of(op.schema)
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{op.schema}", "BackendSelect"):
            raise SetupError(
                f"another tool, or another recording, already watches c10d::{op.schema} in this process. Stop it first."
            )
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    waiting = WaitingWorks(emit)
    callbacks = Callbacks(emit)
    for op in collectives:
        signature = Signature(op)
        kernel = _collective_kernel(signature, emit, groups, times, waiting, callbacks, checksums)
        library.impl(op.schema, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    for op in POINT_TO_POINT:
        signature = Signature(op)
        kernel = _p2p_kernel(signature, emit, groups, waiting, checksums)
        library.impl(op.schema, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    restore_wait = waiting.patch_wait()
    forget_wait_tensor = waiting.watch_wait_tensor(_AFTER)

    def undo() -> None:
        library._destroy()  # type: ignore[no-untyped-call]
        forget_wait_tensor()
        restore_wait()
        waiting.release()
        callbacks.release()

    return undo


def _collective_kernel(
    signature: Signature,
    emit: Emit,
    groups: Groups,
    times: CudaTimes,
    waiting: WaitingWorks,
    callbacks: Callbacks,
    checksums: bool,
) -> Callable[..., Any]:
    @untraced
    def kernel(keyset: Any, *args: Any) -> Any:
        if signature.is_traced(args):
            return signature.redispatch(keyset & _AFTER, *args)
        number = begun = None
        try:
            group = groups.of_boxed(args[signature.group])
            number = _note_boxed(signature, args, group, emit, checksums)
            if group.on_gpu and not _is_coalesced(signature, args):
                begun = times.mark(times.gpu(signature.device(args)))
        except Exception as error:
            emit.failed(signature.op.name, error)
        try:
            result = signature.redispatch(keyset & _AFTER, *args)
        except BaseException as error:
            if number is not None:
                # A monitored barrier has no Work: it raises when it has waited in vain.
                emit.end(number, by=REFUSED if signature.has_work else "return", error=type(error).__name__)
            raise
        if number is not None:
            try:
                work = signature.work_of(result)
                if work is None and group.end_by_callback:
                    emit.end(number, by="return")
                elif work is None or not group.end_by_callback:
                    # NCCL completes its futures when the kernel is queued, so a callback would lie.
                    emit.end(number, by=NOT_OBSERVED)
                elif signature.waits_at_once(args) and type(work) is Work:
                    # The caller holds its tensors. (A Work of another class has a `wait` of its own.)
                    waiting.hold(work, number)
                elif (future := future_of(work)) is not None:
                    callbacks.watch(number, future)
                else:
                    waiting.hold(work, number, signature.size(args), output=signature.output(args))
                if begun is not None:
                    times.collective(number, begun, work, group.name)
            except Exception as error:
                emit.failed(signature.op.name, error)
        return result

    return kernel


def _is_coalesced(signature: Signature, args: tuple[Any, ...]) -> bool:
    """Whether it may be launched later, together with others: then nothing that follows the call is its end."""
    if signature.op.name.endswith("_coalesced"):
        return True
    return ProcessGroup.unbox(args[signature.group]) in distributed_c10d._world.pg_coalesce_state


def _note_boxed(signature: Signature, args: tuple[Any, ...], group: OwnGroup, emit: Emit, checksums: bool) -> int:
    """A collective as the dispatcher hands it on."""
    root = args[signature.root] if signature.root is not None else None
    inputs, outputs = tensors_of(args, signature.gives), tensors_of(args, signature.gets)
    if signature.op.name == "broadcast" and group.rank != root:
        inputs, outputs = (), inputs
    splits = split_bytes(args, signature)
    return note_collective(
        signature.op.name, group, inputs, outputs, emit, root=root, splits=splits, checksums=checksums
    )


def note_collective(
    op: str,
    group: OwnGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    emit: Emit,
    *,
    root: int | None = None,
    splits: Sequence[int] = (),
    checksums: bool = False,
) -> int:
    """A collective with the tensors that this rank gives and gets.

    Those of a Python process group the dispatcher does not see; they come from `operation`.
    """
    made_by = caller(sys._getframe())
    return emit.event(
        Collective,
        op=op,
        group=group.name,
        seq=next(group.collectives),
        inputs=tuple(map(describe_one, inputs)),
        outputs=tuple(map(describe_one, outputs)),
        root=root,
        role=made_by.role,
        launcher=made_by.launcher,
        backward=made_by.backward,
        bucket_index=made_by.bucket_index,
        splits=tuple(splits),
        checksum=checksum_given(inputs) if checksums and inputs else None,
        phase=made_by.phase,
        site=made_by.site,
    )


def note_p2p(
    op: str, group: OwnGroup, tensor: torch.Tensor, peer: int | None, tag: int, emit: Emit, *, checksums: bool
) -> int:
    """A send or a receive."""
    made_by = caller(sys._getframe())
    offset, whole = place_of(tensor)
    return emit.event(
        PointToPoint,
        op=op,
        group=group.name,
        seq=next(group.p2ps),
        peer=peer,
        tag=tag,
        tensors=(describe_one(tensor),),
        offset_bytes=offset,
        whole_bytes=whole,
        checksum=checksum(tensor) if checksums and op == "send" else None,
        phase=made_by.phase,
        site=made_by.site,
    )


def _p2p_kernel(
    signature: Signature, emit: Emit, groups: Groups, waiting: WaitingWorks, checksums: bool
) -> Callable[..., Any]:
    tensors = signature.gives if signature.gives is not None else 0

    @untraced
    def kernel(keyset: Any, *args: Any) -> Any:
        if signature.is_traced(args):
            return signature.redispatch(keyset & _AFTER, *args)
        number = None
        try:
            group = groups.of_boxed(args[signature.group])
            peer = args[signature.peer] if signature.peer is not None else None
            (tensor,) = args[tensors]
            number = note_p2p(signature.op.name, group, tensor, peer, args[signature.tag], emit, checksums=checksums)
        except Exception as error:
            emit.failed(signature.op.name, error)
        try:
            result = signature.redispatch(keyset & _AFTER, *args)
        except BaseException as error:
            if number is not None:
                emit.end(number, by=REFUSED, error=type(error).__name__)
            raise
        if number is not None:
            try:
                work = Work.unbox(result)
                waiting.hold(work, number, signature.size(args), any_source=signature.peer is None)
            except Exception as error:
                emit.failed(signature.op.name, error)
        return result

    return kernel


_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_self_test_passed = False


def self_test() -> None:
    """Once per process: one op on a group that sends nothing must be seen, start and end, else torch does not fit."""
    global _self_test_passed
    if _self_test_passed:
        return
    probe = _Probe()
    undo = _install(probe, Groups(probe), CudaTimes(probe), checksums=False)
    try:
        pg = ProcessGroup(HashStore(), 0, 1)
        fake = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # The class itself in torch 2.8.
        pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, fake(0, 1))
        pg.allreduce([torch.zeros(1)]).wait()
    finally:
        undo()
    if probe.seen != ["Collective", "end"]:
        raise unfit(f"the self-test saw {probe.seen or 'nothing'} of one all_reduce")
    _self_test_passed = True


class _Probe:
    """What the self-test reports to."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        self.seen.append(kind.__name__)
        return 0

    def end(self, number: int, *, by: str, error: str = "", **facts: Any) -> None:
        self.seen.append("end")

    def enter(self, number: int) -> None:
        pass

    def leave(self, number: int) -> None:
        pass

    def fact(self, line: Line) -> None:
        pass

    def failed(self, where: str, error: Exception) -> None:
        self.seen.append(f"{where}: {error!r}")

    def dropped(self) -> None:
        pass
