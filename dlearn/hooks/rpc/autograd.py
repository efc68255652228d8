"""The graph that distributed autograd goes through: each worker's own piece of it, and when its nodes run.

A worker meets the nodes of its piece when tensors pass the pickler, or, on the driver, when the
backward pass begins; and hooks them, for they run later. The send of the last reply is made by C++
after that: it is found when the first node runs, and not hooked any more (the engine may run it in
another thread). Nothing here keeps a node alive, and with it the tensors that it saved: its number
stands in its own `metadata`.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._C._distributed_autograd import _current_context, _retrieve_context
from torch.nn.modules import module as modules
from torch.utils.weak import WeakTensorKeyDictionary

from dlearn.events.event import AutogradNode, AutogradRun
from dlearn.hooks import Emit
from dlearn.hooks.patches import guarded
from dlearn.hooks.rpc.rpc_state import describe_all, watch_runs

MOST_CONTEXTS = 16  # At once, that a parameter is used in: its node is the same in all of them.


class Graph:
    """This worker's pieces of the graphs of all contexts: their nodes and these nodes' runs, reported to `emit`."""

    def __init__(self, emit: Emit) -> None:
        self._on = True
        self._emit = emit
        self._owners: Any = WeakTensorKeyDictionary()
        self._parents: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], str]] = WeakKeyDictionary()
        """The module that a parameter or a module made while recording is in, and its name there."""
        self._handles = [
            modules.register_module_parameter_registration_hook(self._registers(self._owners)),
            modules.register_module_module_registration_hook(self._registers(self._parents)),
        ]
        self._key = object()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._growing: set[int] = set()  # Contexts in which C++ may have made nodes since then.
        self._tasks: dict[int, int] = {}  # The context of each of the engine's tasks.

    def stop(self) -> None:
        self._on = False
        for handle in self._handles:
            handle.remove()

    def _registers(self, owners: Any) -> Any:
        def register(owner: nn.Module, name: str, value: Any) -> None:
            if value is not None:
                within = ref(owner), name
                guarded(self._emit, "a parameter's name", owners.__setitem__, value, within)

        return register

    def _name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in its outermost module, "conv.weight", or nothing."""
        path: list[str] = []
        within = self._owners.get(parameter)
        while within is not None and len(path) < 32:
            path.insert(0, within[1])
            owner = within[0]()
            within = self._parents.get(owner) if owner is not None else None
        return ".".join(path)

    def tensors(self, context: int, tensors: Sequence[torch.Tensor]) -> None:
        """Take in the nodes of tensors that pass the pickler, on their way out or in."""
        if context < 0:  # A value that is fetched: the request was read in C++.
            try:
                context = _current_context()._context_id()
            except RuntimeError:
                return
        self._growing.add(context)
        self._capture(context, tensors, hook=True)

    def backward(self, context: int, roots: Sequence[torch.Tensor]) -> None:
        """Take in the nodes of a backward pass that begins at these roots, on this worker."""
        self._growing.discard(context)
        self._capture(context, roots, hook=True)

    def _capture(self, context: int, tensors: Sequence[torch.Tensor] = (), *, hook: bool) -> None:
        """Report the nodes that are new."""
        known = _piece(context)
        if known is None:
            return
        crossings = [*known._send_functions().items(), *known._recv_functions().items()]
        messages = {id(node): message for message, node in crossings}
        starts = [node for _, node in crossings] + [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        with self._lock:
            met = [node for node in starts if self._meet(node, context, hook)]
            while met:
                node = met.pop()
                following = [child for child, _ in node.next_functions if child is not None]
                met += [child for child in following if self._meet(child, context, hook)]
                self._report(node, context, messages.get(id(node)), following)

    def _meet(self, node: Any, context: int, hook: bool) -> bool:
        """Number the node, unless it is known already."""
        numbers: dict[int, int] | None = node.metadata.get(self._key)
        if numbers is None:
            numbers = node.metadata[self._key] = {}
            if hook:
                self._watch(node, numbers)
        if context in numbers:
            return False
        numbers[context] = next(self._numbers)
        if len(numbers) > MOST_CONTEXTS:
            del numbers[next(iter(numbers))]
        return True

    def _report(self, node: Any, context: int, message: int | None, following: Sequence[Any]) -> None:
        self._emit.event(
            AutogradNode,
            context=context,
            node=node.metadata[self._key][context],
            name=node.name(),
            shapes=tuple(tuple(info.shape) for info in node._input_metadata),
            parameter=self._name_of(node.variable) if hasattr(node, "variable") else "",
            message=message,
            next=tuple(child.metadata[self._key][context] for child in following),
        )

    def _watch(self, node: Any, numbers: dict[int, int]) -> None:
        collects, crosses = hasattr(node, "variable"), node.name().endswith("RecvRpcBackward")

        def begins(gradients: Sequence[torch.Tensor | None]) -> dict[str, Any] | None:
            context = self._context_of(torch._C._current_graph_task_id(), numbers, collects) if self._on else None
            if context is None:
                return None
            if context in self._growing:
                self._growing.discard(context)
                self._capture(context, hook=False)
            tensors = describe_all(gradients) if crosses else ()
            return {"context": context, "node": numbers[context], "tensors": tensors, "start_ns": time.monotonic_ns()}

        def ends(facts: dict[str, Any]) -> None:
            end_ns = time.monotonic_ns()
            self._emit.event(AutogradRun, end_ns=end_ns, ended_by="hook", phase="backward", **facts)

        watch_runs(self._emit, node, begins, ends)

    def _context_of(self, task: int, numbers: dict[int, int], collects: bool) -> int | None:
        """Return a task's context. Of several (a parameter's node), nodes that ran before tell it."""
        if task not in self._tasks:
            if len(numbers) != 1:
                return None
            (context,) = numbers
            if collects:
                return context if _piece(context) is not None else None
            self._tasks[task] = context
        context = self._tasks[task]
        return context if context in numbers else None


def _piece(context: int) -> Any:
    """Return this worker's piece of a context; None if released, or not joined yet."""
    try:
        return _retrieve_context(context)
    except RuntimeError:
        return None
