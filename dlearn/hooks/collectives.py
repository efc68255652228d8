"""Every communication op of torch.distributed, seen at the dispatcher.

All of them, whoever calls (Python, DDP's C++ reducer, FSDP, functional collectives, any thread), go through torch's
dispatcher as `c10d::...` ops. We register a Python kernel for each at the key `BackendSelect`, which lies below
autograd and above the CPU and CUDA kernels and is free for c10d. It notes the call and hands it on, unchanged,
to the kernel that would have run without us. (The `Autograd` key misses functional collectives and inference mode;
replacing the CPU kernel would have to rebuild its options; see the dispatcher notes in docs/how-it-works.md.)

The end of a collective comes from the future of its Work, never by waiting. Point-to-point Works have no future: their end
is the return of `Work.wait`, so that is patched, and the hook holds each Work until then (a second `wait` would hang).
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, ProcessGroup, Work

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo
from dlearn.hooks.callers import caller
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, GroupFact, PointToPoint, TensorInfo

WORKS_HELD = 1000
WORK_BYTES_HELD = 64 << 20
"""A Work keeps its tensors alive, so we hold few: beyond either limit the oldest is let go, and counted."""


@dataclass(frozen=True)
class _Op:
    """One c10d op: its name at the dispatcher and in `torch.distributed`, and the names of its arguments."""

    schema: str
    name: str
    gives: str = ""
    gets: str = ""
    group: str = "process_group"


_COLLECTIVES = (
    _Op("allreduce_", "all_reduce", gives="tensors"),
    _Op("allreduce_coalesced_", "all_reduce_coalesced", gives="tensors"),
    _Op("broadcast_", "broadcast", gives="tensors"),
    _Op("reduce_", "reduce", gives="tensors"),
    _Op("allgather_", "all_gather", gives="input_tensors", gets="output_tensors"),
    _Op("_allgather_base_", "all_gather_single", gives="input_tensor", gets="output_tensor"),
    _Op("allgather_coalesced_", "all_gather_coalesced", gives="input_list", gets="output_lists"),
    _Op("allgather_into_tensor_coalesced_", "all_gather_single_coalesced", gives="inputs", gets="outputs"),
    _Op("reduce_scatter_", "reduce_scatter", gives="input_tensors", gets="output_tensors"),
    _Op("_reduce_scatter_base_", "reduce_scatter_single", gives="input_tensor", gets="output_tensor"),
    _Op("reduce_scatter_tensor_coalesced_", "reduce_scatter_single_coalesced", gives="inputs", gets="outputs"),
    _Op("gather_", "gather", gives="input_tensors", gets="output_tensors"),
    _Op("scatter_", "scatter", gives="input_tensors", gets="output_tensors"),
    _Op("alltoall_", "all_to_all", gives="input_tensors", gets="output_tensors"),
    _Op("alltoall_base_", "all_to_all_single", gives="input", gets="output"),
    _Op("barrier", "barrier"),
    _Op("monitored_barrier_", "monitored_barrier"),
)
_POINT_TO_POINT = (
    _Op("send", "send", gives="tensors"),
    _Op("recv_", "recv", gives="tensors"),
    _Op("recv_any_source_", "recv", gives="tensors"),
)


def install(emit: Emit) -> Undo:
    """Report every c10d op to `emit` until the returned function is called. SetupError if this torch does not fit."""
    _self_test()
    return _install(emit)


def _install(emit: Emit) -> Undo:
    library = torch.library.Library("c10d", "IMPL")
    groups = _Groups(emit)
    waiting = _WaitingWorks(emit)
    for op in _COLLECTIVES:
        signature = _Signature(op)
        kernel = _collective_kernel(signature, emit, groups, waiting)
        library.impl(op.schema, kernel, "BackendSelect", with_keyset=True)
    for op in _POINT_TO_POINT:
        signature = _Signature(op)
        kernel = _p2p_kernel(signature, emit, groups, waiting)
        library.impl(op.schema, kernel, "BackendSelect", with_keyset=True)
    restore_wait = waiting.patch_wait()

    def undo() -> None:
        library._destroy()
        restore_wait()
        waiting.release()

    return undo


def _collective_kernel(
    signature: _Signature, emit: Emit, groups: _Groups, waiting: _WaitingWorks
) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        number = None
        try:
            group = groups.of(args[signature.group])
            number = _note_collective(signature, args, group, emit)
        except Exception as error:
            emit.failed(signature.op.name, error)
        try:
            result = signature.redispatch(keyset & _AFTER, *args)
        except BaseException as error:
            if number is not None:
                emit.end(number, by="return", error=type(error).__name__)
            raise
        if number is not None:
            try:
                work = signature.work_of(result)
                if work is None:
                    emit.end(number, by="return")
                elif not group.end_by_callback:
                    # NCCL completes its futures when the kernel is queued, so a callback would lie.
                    emit.end(number, by=NOT_OBSERVED)
                elif not _call_back(number, work, emit):
                    waiting.hold(work, number, signature.size(args))
            except Exception as error:
                emit.failed(signature.op.name, error)
        return result

    return kernel


def _note_collective(signature: _Signature, args: tuple[Any, ...], group: _Group, emit: Emit) -> int:
    made_by = caller(sys._getframe(2))
    root = args[signature.root] if signature.root is not None else None
    inputs = _tensors(args, signature.gives)
    outputs = _tensors(args, signature.gets)
    if signature.op.name == "broadcast" and group.rank != root:
        inputs, outputs = (), inputs
    bucket = made_by.bucket
    return emit.event(
        Collective,
        op=signature.op.name,
        group=group.name,
        seq=next(group.collectives),
        inputs=inputs,
        outputs=outputs,
        root=root,
        role=made_by.role,
        launcher=made_by.launcher,
        backward=made_by.backward,
        bucket_index=bucket.index() if bucket is not None else None,
        phase=made_by.phase,
        site=made_by.site,
    )


def _call_back(number: int, work: Work, emit: Emit) -> bool:
    """Have the Work's future tell the end. False where it has none (gloo's reduce_scatter finishes inside `wait`)."""
    try:
        future = work.get_future()
    except RuntimeError:
        return False

    def done(future: Any) -> None:
        error = ""
        try:
            future.value()
        except Exception as failure:  # The operation's own error, of whatever class: the user sees it at `wait`.
            error = type(failure).__name__
        emit.end(number, by="callback", error=error)

    future.add_done_callback(done)
    return True


def _p2p_kernel(
    signature: _Signature, emit: Emit, groups: _Groups, waiting: _WaitingWorks
) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        number = None
        try:
            group = groups.of(args[signature.group])
            made_by = caller(sys._getframe(1))
            number = emit.event(
                PointToPoint,
                op=signature.op.name,
                group=group.name,
                seq=next(group.p2ps),
                peer=args[signature.peer] if signature.peer is not None else None,
                tag=args[signature.tag],
                tensors=_tensors(args, signature.gives),
                phase=made_by.phase,
                site=made_by.site,
            )
        except Exception as error:
            emit.failed(signature.op.name, error)
        try:
            result = signature.redispatch(keyset & _AFTER, *args)
        except BaseException as error:
            if number is not None:
                emit.end(number, by="return", error=type(error).__name__)
            raise
        if number is not None:
            try:
                work = Work.unbox(result)
                waiting.hold(work, number, signature.size(args), any_source=signature.peer is None)
            except Exception as error:
                emit.failed(signature.op.name, error)
        return result

    return kernel


class _Signature:
    """Where an op's arguments and its Work stand, read from the schema of the installed torch."""

    def __init__(self, op: _Op) -> None:
        overload = _overload(op.schema)
        names = [argument.name for argument in overload._schema.arguments]
        returns = [str(each.type) for each in overload._schema.returns]
        missing = [name for name in (op.gives, op.gets, op.group) if name and name not in names]
        if missing:
            raise SetupError(
                f"torch {torch.__version__} has another c10d::{op.schema} than dlearn knows (no argument"
                f" {missing[0]!r}). Install torch 2.13."
            )
        self.op = op
        self.group = names.index(op.group)
        self.gives = names.index(op.gives) if op.gives else None
        self.gets = names.index(op.gets) if op.gets else None
        self.root = names.index("root_rank") if "root_rank" in names else None
        self.tag = names.index("tag") if "tag" in names else -1
        self.peer = next((names.index(name) for name in ("dst", "src") if name in names), None)
        self.redispatch = overload._handle.redispatch_boxed
        self._returns = len(returns)
        self._work = next((i for i, each in enumerate(returns) if each.endswith("c10d.Work")), None)

    def size(self, args: tuple[Any, ...]) -> int:
        """Bytes of the tensors that a Work of this call keeps alive."""
        return sum(each.logical_bytes for where in (self.gives, self.gets) for each in _tensors(args, where))

    def work_of(self, result: Any) -> Work | None:
        if self._work is None:
            return None
        return Work.unbox(result if self._returns == 1 else result[self._work])


def _overload(schema: str) -> Any:
    packet = getattr(torch.ops.c10d, schema, None)
    if packet is None:
        raise SetupError(f"torch {torch.__version__} has no op c10d::{schema}. Install torch 2.13.")
    return packet.default


@dataclass
class _Group:
    """A process group as this process sees it, with its counters."""

    name: str
    rank: int
    end_by_callback: bool
    collectives: Iterator[int]
    p2ps: Iterator[int]


class _Groups:
    """Process groups by identity: after destroy and init a new group has the old name, and its numbers start anew."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._known: WeakKeyDictionary[ProcessGroup, _Group] = WeakKeyDictionary()
        self._names: dict[str, int] = {}

    def of(self, boxed: Any) -> _Group:
        pg = ProcessGroup.unbox(boxed)
        group = self._known.get(pg)
        if group is None:
            group = self._known[pg] = self._meet(pg)
        return group

    def _meet(self, pg: ProcessGroup) -> _Group:
        fact = group_fact(pg)
        times = self._names[fact.name] = self._names.get(fact.name, 0) + 1
        if times > 1:
            fact = GroupFact(
                name=f"{fact.name}~{times}",
                backend=fact.backend,
                rank=fact.rank,
                size=fact.size,
                ranks=fact.ranks,
                default=fact.default,
            )
        self._emit.group(fact)
        return _Group(fact.name, fact.rank, fact.backend != "nccl", itertools.count(1), itertools.count(1))


def group_fact(pg: ProcessGroup) -> GroupFact:
    """Name, backend and members of a process group, as far as torch knows them."""
    registered = dist.distributed_c10d._world.pg_group_ranks.get(pg)
    return GroupFact(
        name=pg.group_name,
        backend=_backend_name(pg),
        rank=pg.rank(),
        size=pg.size(),
        ranks=tuple(registered) if registered else (),
        default=pg.group_desc == "default_pg",
    )


def _backend_name(pg: ProcessGroup) -> str:
    for device in ("cuda", "cpu"):
        try:
            return str(pg._get_backend(torch.device(device)).name())
        except RuntimeError:
            continue  # This group has no backend for that device.
    return "unknown"


class _WaitingWorks:
    """Works without a future, whose end nobody has seen yet."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: OrderedDict[int, tuple[Work, int, int, bool]] = OrderedDict()
        self._bytes = 0

    def hold(self, work: Work, number: int, size: int, *, any_source: bool = False) -> None:
        self._held[id(work)] = (work, number, size, any_source)
        self._bytes += size
        while len(self._held) > WORKS_HELD or (self._bytes > WORK_BYTES_HELD and len(self._held) > 1):
            _, (_, oldest, oldest_size, _) = self._held.popitem(last=False)
            self._bytes -= oldest_size
            self._emit.end(oldest, by=NOT_OBSERVED)
            self._emit.dropped()

    def patch_wait(self) -> Undo:
        original = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                self._ended(work, type(error).__name__)
                raise
            self._ended(work, "")
            return result

        Work.wait = wait  # type: ignore[method-assign]

        def restore() -> None:
            Work.wait = original  # type: ignore[method-assign]

        return restore

    def _ended(self, work: Work, error: str) -> None:
        held = self._held.pop(id(work), None)
        if held is None:
            return
        try:
            _, number, size, any_source = held
            self._bytes -= size
            peer = work._source_rank() if any_source and not error else None
            self._emit.end(number, by="wait", error=error, peer=peer)
        except Exception as failure:
            self._emit.failed("Work.wait", failure)

    def release(self) -> None:
        """At the end of the recording: nobody has waited for these."""
        for _, number, _, _ in self._held.values():
            self._emit.end(number, by=NOT_OBSERVED)
        self._held.clear()
        self._bytes = 0


def _tensors(args: tuple[Any, ...], index: int | None) -> tuple[TensorInfo, ...]:
    """The outsides of a Tensor, Tensor[] or Tensor[][] argument (absent where it equals its default)."""
    if index is None or index >= len(args):
        return ()
    return tuple(_describe(tensor) for tensor in _flatten(args[index]))


def _flatten(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    else:
        for each in argument:
            yield from _flatten(each)


def _describe(tensor: torch.Tensor) -> TensorInfo:
    logical = tensor.numel() * tensor.element_size()
    payload = logical
    if tensor.is_sparse:
        indices, values = tensor._indices(), tensor._values()
        payload = indices.numel() * indices.element_size() + values.numel() * values.element_size()
    return TensorInfo(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        logical_bytes=logical,
        payload_bytes=payload,
    )


_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_self_test_passed = False


def _self_test() -> None:
    """Once per process: one op on a group that sends nothing must be seen, start and end, or this torch does not fit."""
    global _self_test_passed
    if _self_test_passed:
        return
    for op in (*_COLLECTIVES, *_POINT_TO_POINT):
        _overload(op.schema)
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{op.schema}", "BackendSelect"):
            raise SetupError(
                f"another tool, or another recording, already watches c10d::{op.schema} in this process. Stop it first."
            )
    probe = _Probe()
    undo = _install(probe)
    try:
        pg = ProcessGroup(HashStore(), 0, 1)
        pg._register_backend(
            torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(0, 1)
        )
        pg.allreduce([torch.zeros(1)]).wait()
    finally:
        undo()
    if probe.seen != ["Collective", "end"]:
        raise SetupError(
            f"dlearn cannot record with torch {torch.__version__}: its self-test saw {probe.seen or 'nothing'}"
            " of one all_reduce. Install torch 2.13, or report this version to us."
        )
    _self_test_passed = True


class _Probe:
    """What the self-test reports to."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        self.seen.append(kind.__name__)
        return 0

    def end(self, number: int, *, by: str, error: str = "", peer: int | None = None) -> None:
        self.seen.append("end")

    def group(self, fact: GroupFact) -> None:
        pass

    def failed(self, where: str, error: Exception) -> None:
        self.seen.append(f"{where}: {error!r}")

    def dropped(self) -> None:
        pass
