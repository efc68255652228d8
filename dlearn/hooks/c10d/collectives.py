"""Every communication op of torch.distributed, seen at the dispatcher.

We register a Python kernel for each op at the key `BackendSelect`, which lies below autograd and
above the CPU and CUDA kernels and is free for c10d. It notes the call and forwards it, unchanged,
to the kernel that would have run without us. docs/how-it-works.md says why other hooks miss calls.
Ends: works.py, and of work on a GPU cuda_times.py.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, ProcessGroup, Work
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dlearn.errors import SetupError
from dlearn.events.event import NOT_OBSERVED, REFUSED, Collective, PointToPoint
from dlearn.events.options import Options
from dlearn.hooks import Undo, callers, gate
from dlearn.hooks.c10d import c10d_ops as ops
from dlearn.hooks.c10d.c10d_ops import Signature, tensors_of
from dlearn.hooks.c10d.groups import Groups, OwnGroup
from dlearn.hooks.c10d.works import Callbacks, WaitingWorks, future_of
from dlearn.hooks.callers import caller
from dlearn.hooks.cuda_times import CudaTimes, Mark
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches, guarded
from dlearn.hooks.pipeline_passes import pass_of
from dlearn.hooks.private import unfit, untraced


def install(host: Host) -> Undo:
    """Report every c10d op to `host`, until undone. SetupError if this torch does not fit."""
    self_test()
    with Patches() as undo:
        undo.callback(host.times.close)
        _install(host, undo)
        undo.callback(callers.install(host))
        return undo.pop_all().close


def _install(host: Host, undo: Patches) -> None:
    for schema in ops.NAMES:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{schema}", "BackendSelect"):
            raise SetupError(
                f"another tool, or another recording, already watches c10d::{schema} in this process. Stop it first."
            )
    watch = _OpWatch(host)
    undo.callback(watch.callbacks.release)
    undo.callback(watch.waiting.release)
    undo.replace(Work, "wait", watch.waiting.watch_wait)
    undo.callback(watch.waiting.watch_wait_tensor(_AFTER))
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    for schema in ops.NAMES:
        kernel: Any = watch.kernel(Signature(schema))
        library.impl(schema, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]


def _error_text(error: BaseException) -> str:
    """Return the exception's class and the first sentence of torch's reason."""
    reason = str(error).partition("\n")[0]
    if reason.startswith("[/"):  # The place in C++ that raised it.
        reason = reason.partition("] ")[2]
    reason = reason.partition(". ")[0][:100]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


Args = tuple[Any, ...]


class _Call(NamedTuple):
    """A call that was noted: its event's number and group, and where the GPU was at its start."""

    number: int
    group: OwnGroup
    begun: Mark | None = None


class _OpWatch:
    """State shared by the kernels of one recording."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.waiting, self.callbacks = WaitingWorks(host), Callbacks(host)

    def kernel(self, signature: Signature) -> Callable[..., Any]:
        """Make the function that stands at the dispatcher for one op."""
        host, name = self._host, signature.name
        begins, launched = self._collective_begins, self._collective_launched
        if signature.is_p2p:
            begins, launched = self._p2p_begins, self._p2p_launched
        # A monitored barrier has no Work: it raises when it has waited in vain.
        raises_by = "return" if signature.work is None else REFUSED

        @untraced
        def kernel(keyset: Any, *args: Any) -> Any:
            if signature.is_traced(args):
                return signature.redispatch(keyset & _AFTER, *args)
            if gate.current is not None:
                group, given = args[signature.group], tensors_of(args, signature.gives)
                peer = args[signature.peer] if signature.peer is not None else None
                hold(name, ProcessGroup.unbox(group), given, peer=peer)
            call = guarded(host, name, begins, signature, args)
            try:
                result = signature.redispatch(keyset & _AFTER, *args)
            except BaseException as error:
                if call is not None:
                    host.end(call.number, by=raises_by, error=_error_text(error))
                raise
            if call is not None:
                guarded(host, name, launched, signature, args, call, result)
            return result

        return kernel

    def _collective_begins(self, signature: Signature, args: Args) -> _Call:
        pg = ProcessGroup.unbox(args[signature.group])
        group = self._host.groups.of(pg)
        root = args[signature.root] if signature.root is not None else None
        inputs, outputs = tensors_of(args, signature.gives), tensors_of(args, signature.gets)
        name, parts = signature.name, signature.parts(args)
        if name == "broadcast" and group.fact.rank != root:
            inputs, outputs = (), inputs
        number = note_collective(self._host, name, group, inputs, outputs, root=root, **parts)
        begun = None
        # What may be launched later, with others, has no end that is known.
        is_open = pg in distributed_c10d._world.pg_coalesce_state
        if group.on_gpu and not is_open and not name.endswith("_coalesced"):
            devices = [tensor.device for tensor in signature.tensors(args)]
            begun = self._host.times.mark(devices[0] if devices else None)
        return _Call(number, group, begun)

    def _collective_launched(self, signature: Signature, args: Args, call: _Call, result: Any) -> None:
        number, group, begun = call
        work = signature.work_of(result)
        if work is None and group.end_by_callback:
            self._host.end(number, by="return")
        elif work is None or not group.end_by_callback:
            # NCCL completes its futures when the kernel is queued, so a callback would lie.
            self._host.end(number, by=NOT_OBSERVED)
        elif signature.waits_at_once(args) and type(work) is Work:
            # The caller holds its tensors. (A Work of another class has a `wait` of its own.)
            self.waiting.hold(work, number)
        elif (future := future_of(work)) is not None:
            self.callbacks.watch(number, future)
        else:
            size = ops.bytes_of(signature.tensors(args))
            self.waiting.hold(work, number, size, output=signature.output(args))
        if begun is not None:
            self._host.times.collective(number, begun, work, group.fact.name)

    def _p2p_begins(self, signature: Signature, args: Args) -> _Call:
        group = self._host.groups.of(ProcessGroup.unbox(args[signature.group]))
        peer = args[signature.peer] if signature.peer is not None else None
        (tensor,) = tensors_of(args, signature.gives)
        number = note_p2p(self._host, signature.name, group, tensor, peer, args[signature.tag])
        return _Call(number, group)

    def _p2p_launched(self, signature: Signature, args: Args, call: _Call, result: Any) -> None:
        work = Work.unbox(result)
        size = ops.bytes_of(signature.tensors(args))
        self.waiting.hold(work, call.number, size, any_source=signature.peer is None)


def hold(op: str, group: ProcessGroup, tensors: Sequence[torch.Tensor], *, peer: int | None = None) -> None:
    """Wait in a paused job until this call may be made. `peer` is a rank of the group."""
    if gate.current is not None:
        if peer is not None and group in distributed_c10d._world.pg_group_ranks:
            peer = distributed_c10d.get_global_rank(group, peer)
        gate.current.wait(op, peer, ops.bytes_of(tensors))


def note_collective(
    host: Host,
    op: str,
    group: OwnGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    **facts: Any,
) -> int:
    """Report a collective, what this rank gives and gets, and these facts; return its number."""
    return host.event(
        Collective,
        op=op,
        group=group.fact.name,
        seq=next(group.collectives),
        inputs=tuple(map(ops.describe_one, inputs)),
        outputs=tuple(map(ops.describe_one, outputs)),
        checksum=ops.checksum(inputs) if host.options.checksums else None,
        **facts,
        **caller(sys._getframe())._asdict(),
    )


def note_p2p(host: Host, op: str, group: OwnGroup, tensor: torch.Tensor, peer: int | None, tag: int) -> int:
    """Report a send or a receive; return the event's number."""
    made_by = caller(sys._getframe())
    phase, micro_batch = pass_of(tensor) or (made_by.phase, None)
    offset, whole = ops.place_of(tensor)
    return host.event(
        PointToPoint,
        op=op,
        group=group.fact.name,
        seq=next(group.p2ps),
        peer=peer,
        tag=tag,
        tensors=(ops.describe_one(tensor),),
        offset_bytes=offset,
        whole_bytes=whole,
        checksum=ops.checksum([tensor]) if host.options.checksums and op == "send" else None,
        phase=phase,
        site=made_by.site,
        micro_batch=micro_batch,
    )


# Process groups as they are made and destroyed ------------------------------------------------


def install_groups(host: Host) -> Undo:
    """Describe each group, count the bytes in its sockets, and compare clocks with its other ranks."""
    groups, sockets, clocks, count = host.groups, host.sockets, host.clocks, host.count
    undo = Patches()
    present: list[str] = []
    for group in list(distributed_c10d._world.pg_map):
        guarded(host, "a process group", lambda pg=group: present.append(groups.of(pg).fact.name))
    sockets.begin(present)
    count()

    def making(*args: Any, **_: Any) -> None:
        sockets.making(args[4])  # The store in which its members meet.

    def made(result: Any, *args: Any, group_desc: Any = None, **_: Any) -> None:
        size, rank, ranks, _backend, store = args[:5]
        if isinstance(result[0], ProcessGroup):  # Else this process is no member.
            groups.made(result[0], ranks or range(size))
            if sockets.watch(groups.of(result[0]).fact.name):
                count()
        if group_desc == "default_pg":
            clocks.join("group", store, rank, size)

    def destroying(group: Any = None) -> None:
        all_groups = group is None or group is dist.GroupMember.WORLD
        if all_groups:
            clocks.close()
        sockets.watch()
        count()
        groups.destroying(None if all_groups else group)

    undo.callback(guarded, host, "the clocks", clocks.close)
    if dist.is_initialized():
        store = distributed_c10d._get_default_store()
        guarded(host, "the clocks", clocks.join, "group", store, dist.get_rank(), dist.get_world_size())
    undo.callback(groups.kept.clear)
    undo.around(host, distributed_c10d, "_new_process_group_helper", before=making, after=made)
    undo.around(host, DeviceMesh, "__init__", after=lambda _, mesh, *_a, **_k: groups.in_mesh(mesh))
    undo.around(host, DeviceMesh, "from_group", after=lambda mesh, *_, **_k: groups.in_mesh(mesh))
    for owner in (distributed_c10d, dist):
        undo.around(host, owner, "destroy_process_group", before=destroying)
    return undo.close


_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@cache  # Once per process.
def self_test() -> None:
    """Raise SetupError unless start and end of one op are seen."""
    probe: Any = _Probe()
    with Patches() as undo:
        _install(probe, undo)
        pg = ProcessGroup(HashStore(), 0, 1)
        fake = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # The class itself in torch 2.8.
        pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, fake(0, 1))
        pg.allreduce([torch.zeros(1)]).wait()
    if probe.seen != ["fact", "event", "end"]:
        raise unfit(f"the self-test saw {probe.seen or 'nothing'} of one all_reduce")


class _Probe:
    """A host that notes which of its methods the self-test calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.options, self.groups, self.times = Options(), Groups(self), CudaTimes(self)

    def __getattr__(self, name: str) -> Any:
        def called(*what: Any, **_: Any) -> int:
            self.seen.append(f"failed: {what}" if name == "failed" else name)
            return 0

        return called
