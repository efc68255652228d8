"""State that RPC's hooks share: the ids that travel behind each message, and open calls."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch._C._distributed_autograd import _retrieve_context

from dlearn.events.event import RpcResult, RpcWindow, RRefFork, TensorInfo
from dlearn.hooks import Emit
from dlearn.hooks.c10d.c10d_ops import describe_one
from dlearn.hooks.c10d.works import Callbacks
from dlearn.hooks.host import Host
from dlearn.hooks.patches import guarded

# A C++ thread gets a new Python thread state each time it takes the lock, so threading.local would forget.
this_thread = threading.get_native_id


class CallId(NamedTuple):
    """A call, in all processes: the worker that made it, and its number there."""

    caller: int
    number: int


class AnsweredCall(NamedTuple):
    """A call that has been run: its context (-1: none), and the event of the run with its end, if there is one."""

    call: CallId
    context: int
    run: int | None = None
    returned_ns: int | None = None


class RpcCalls:
    """The calls under way. Keyed by thread where both moments of a call are on one thread."""

    def __init__(self, host: Host, graph: Any) -> None:
        self.host = host
        self.graph = graph  # Hears of each tensor that passes under a context (`autograd.Graph`).
        self.me = -1
        self.agent: Any = None
        self.numbers = itertools.count()
        self.function: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self.forks: dict[int, list[RRefFork]] = {}  # The RRefs that this thread is packing.
        self.answering: dict[int, AnsweredCall] = {}  # Whose result this thread will pack next.
        self.context: dict[int, int] = {}  # The distributed autograd context of each thread.
        self.contexts_open: dict[int, int] = {}
        self.futures = Callbacks(host)  # Calls whose reply never passes Python, or is empty there.
        self.fetched: set[int] = set()  # Threads to which the pickler has given a fetched value.
        self.waiting: dict[CallId, tuple[int, Any, int]] = {}
        """Calls without a reply: the number of the event, the future, and who was called."""

    def next_id(self) -> CallId:
        return CallId(self.me, next(self.numbers))

    def watch_graph(self, context: int, tensors: Sequence[torch.Tensor]) -> None:
        """Watch the nodes of tensors that a message brings or takes away, if that is asked for."""
        if self.graph is not None:
            guarded(self.host, "an RPC's data", self.graph.tensors, context, tensors)


_observing = threading.local()


@contextmanager
def observing() -> Iterator[None]:
    """Mark what this thread calls inside as no part of the program."""
    _observing.on = True
    try:
        yield
    finally:
        _observing.on = False


def observing_now() -> bool:
    """Return whether what this thread calls is no part of the program."""
    return getattr(_observing, "on", False)


def watch_runs(emit: Emit, node: Any, begins: Callable[[Any], Any], ends: Callable[[Any], object]) -> None:
    """Call `begins` with the gradients that a node of autograd gets at each run, and `ends` with what it returned.

    The hooks must not hold the node: it holds them. A run of which `begins` returns None is passed over.
    """
    began: dict[int, Any] = {}

    def before(gradients: Sequence[torch.Tensor | None]) -> None:
        task = torch._C._current_graph_task_id()
        guarded(emit, "a node of autograd", lambda: began.update({task: begins(gradients)}))

    def after(*_: Any) -> None:
        begun = began.pop(torch._C._current_graph_task_id(), None)
        if begun is not None:
            guarded(emit, "a node of autograd", ends, begun)

    node.register_prehook(before)
    node.register_hook(after)


def flatten(value: Any) -> Iterator[Any]:
    """Yield the values in lists, tuples and dicts, however deep."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, dict):
        yield from flatten(list(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that C++ sends of a value, each once; views are tensors of their own."""
    return list({id(item): item for item in flatten(value) if isinstance(item, torch.Tensor)}.values())


def result_of_cpp(calls: RpcCalls, value: Any, context: int | None, sender: int) -> RpcResult:
    """Describe what C++ has packed (of an error its text); watch gradients that go back for it."""
    if isinstance(value, Exception):
        return RpcResult(pickled_bytes=len(str(value).encode()))
    tensors = tensors_in(value)
    watch_crossings(calls, tensors, context, sender)
    return RpcResult(describe_all(tensors), needs_grad=any(tensor.requires_grad for tensor in tensors))


def describe_all(tensors: Sequence[torch.Tensor | None]) -> tuple[TensorInfo, ...]:
    """Describe tensors, with the payload that RPC sends."""
    return tuple([_describe(tensor) for tensor in tensors if tensor is not None])


def _describe(tensor: torch.Tensor) -> TensorInfo:
    """Describe a tensor whose storage TensorPipe sends: more than a view needs, less than an expanded tensor has.

    Unless that is wasteful: then torch copies the view first (`cloneSparseTensors` in torch/csrc/.../rpc/utils.cpp).
    """
    info = describe_one(tensor)
    if tensor.layout != torch.strided:
        return info
    stored = tensor.untyped_storage().nbytes()
    wasteful = stored >= 8 * 1024 and stored >= 2 * info.logical_bytes
    if wasteful or stored == info.logical_bytes:
        return info
    return msgspec.structs.replace(info, payload_bytes=stored)


# Gradients that go back for tensors that were sent ------------------------------------------------


def watch_return(calls: RpcCalls, context: int, to: int) -> None:
    """Report the gradients that `to` sends to the node that C++ has just made for its own call."""
    sent = _retrieve_context(context)._send_functions()
    message = max(sent)

    def arrived(gradients: Sequence[torch.Tensor | None], _: object) -> None:
        now = time.monotonic_ns()
        facts = {"to": to, "context": context, "message": message, "start_ns": now, "end_ns": now}
        report = partial(_gradients, calls, "gradient", gradients, ended_by="return")
        guarded(calls.host, "a gradient that comes", report, **facts)

    sent[message].register_hook(arrived)


def watch_crossings(calls: RpcCalls, tensors: Sequence[torch.Tensor], context: int | None, to: int | None) -> None:
    """Report the gradients that go back later, for tensors that arrived through autograd."""
    for tensor in tensors:
        node = tensor.grad_fn
        if context is not None and node is not None and node.name().endswith("RecvRpcBackward"):
            watch_crossing(calls, node, None, context, to)


def watch_crossing(calls: RpcCalls, node: Any, message: int | None, context: int, to: int | None) -> None:
    """Report the gradients that leave through this node of autograd, once."""
    if "dlearn" not in node.metadata:
        node.metadata["dlearn"] = True
        begins = partial(_gradients, calls, "crossing", to=to, context=max(context, 0), message=message)
        watch_runs(calls.host, node, begins, partial(calls.host.end, by="return"))


def _gradients(calls: RpcCalls, op: str, gradients: Sequence[torch.Tensor | None], **facts: Any) -> int:
    return calls.host.event(RpcWindow, op=op, tensors=describe_all(gradients), phase="backward", **facts)
