"""The memory of a rank while it trains: parameters, gradients, DDP's buckets, optimizer state and activations.

`dlearn.record(..., sources=["memory"])`. Counted whenever autograd saves a tensor or takes one out again, and before
and after each step of an optimizer: the storages of the tensors that a model and its optimizers hold, each once, and
the tensors that autograd saves for the backward pass (activations; a model's input is one). Derived: the buckets. DDP
makes them in C++; they have room for each gradient. It counts all anew each time: a small model's step takes two to
four times as long.

Not seen: what operators hold while they run, losses computed outside of the model, the caches of allocators; and
activations that other `saved_tensors_hooks` keep, as those of checkpointing, or that torch.func makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dlearn.events.memory_held import MemoryHeld
from dlearn.events.source import Emit, Kind, Source, Undo


def install(emit: Emit) -> Undo:
    """Hook into the calls of models and the steps of optimizers, until undone."""
    from torch.autograd import graph
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from dlearn.hooks.patches import Patches

    holds = Holds(emit)
    undo = Patches()
    undo.callback(holds.leave)
    undo.replace(graph, "disable_saved_tensors_hooks", holds.outside)
    for handle in (
        register_module_forward_pre_hook(holds.enter_module),
        register_module_forward_hook(holds.leave_module, always_call=True),
        register_optimizer_step_pre_hook(holds.see_optimizer),
        register_optimizer_step_post_hook(holds.see_optimizer),
    ):
        undo.callback(handle.remove)
    return undo.close


class Holds:
    """The models and optimizers of this process, and what autograd has saved."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._models: WeakSet[Any] = WeakSet()
        self._parts: WeakSet[Any] = WeakSet()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._shards: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        """Of a module, the parts of its parameters, also while the whole ones stand in their place."""
        self._inside: Any = None
        self._hooks: Any = None
        self._saved: WeakSet[Saved] = WeakSet()
        self._last: dict[str, Any] = {}

    # Hooks ------------------------------------------------------------------------------------------------------------

    def enter_module(self, module: Any, _: Any) -> None:
        """Begin to watch what autograd saves, at the outermost module: that is the model."""
        if is_traced() or self._inside is not None or not may_watch_saved():
            return
        if module not in self._parts:
            self._models.add(module)
            self._parts.update(module.modules())
        self._look()
        self._inside = module
        self._watch()

    def leave_module(self, module: Any, *_: Any) -> None:
        if not is_traced() and self._inside is module:
            self.leave()
            self._look()

    def leave(self) -> None:
        """Stop watching; also at the end, after a call that an interrupt cut off: torch calls no hook then."""
        self._inside = None
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def outside(self, disable: Any) -> Any:
        """Let go of autograd while torch.func runs, which works with no hook that saves tensors."""

        @contextmanager
        def wrapper(*args: Any) -> Iterator[None]:
            inside = self._inside if self._hooks is not None else None
            self.leave()
            with disable(*args):
                yield
            if inside is not None:
                self._inside = inside
                self._watch()

        return wrapper

    def _watch(self) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self._hooks = saved_tensors_hooks(self._save, self._take)
        self._hooks.__enter__()

    def see_optimizer(self, optimizer: Any, *_: Any) -> None:
        if not is_traced():
            self._optimizers.add(optimizer)
            self._look()

    def _save(self, tensor: Any) -> Saved:
        saved = Saved(tensor)
        self._saved.add(saved)
        self._look()
        return saved

    def _take(self, saved: Saved) -> Any:
        self._look()
        return saved.tensor

    # Counting ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Report what is held, if that has changed."""
        try:
            found = self._count()
            if found != self._last:
                self._emit.event(MemoryHeld, **found)
                self._last = found
        except Exception as error:
            self._emit.failed("counting memory", error)

    def _count(self) -> dict[str, Any]:
        kept, gathered = self._parameters()
        state = (value for each in self._optimizers for of_one in each.state.values() for value in of_one.values())
        seen: set[int] = set()
        counted = {
            "parameters": count_new(kept, seen),
            "gathered": count_new(gathered, seen),
            "gradients": count_new((each.grad for each in (*kept, *gathered)), seen),
            "state": count_new(state, seen),
        }
        saved = {(storage_of(each.tensor), size_of(each.tensor)) for each in self._saved}
        new = (size for storage, size in saved if storage and storage not in seen)
        counted["activations"] = sum(new)
        return counted | self._facts(kept, gathered)

    def _parameters(self) -> tuple[list[Any], list[Any]]:
        """Return what is kept, whole or as this rank's part; and what FSDP has gathered."""
        kept: dict[int, Any] = {}
        gathered: dict[int, Any] = {}
        for module in (part for model in self._models for part in model.modules()):
            for name, each in module._parameters.items():
                shards = self._shards.setdefault(module, {})
                if each is None:
                    continue
                if hasattr(each, "device_mesh"):
                    shards[name] = each
                elif name in shards:
                    gathered[id(each)] = each
                own = shards.get(name, each)
                kept[id(own)] = own
        return list(kept.values()), list(gathered.values())

    def _facts(self, kept: list[Any], gathered: list[Any]) -> dict[str, Any]:
        """Return what the textbook's formulas need: optimizers, sharding, ranks, the model's bytes."""
        from torch.nn.parallel import DistributedDataParallel

        names = sorted({type(each).__name__ for each in self._optimizers})
        parallel = [each for each in self._models if isinstance(each, DistributedDataParallel)]
        meshes = [each.device_mesh.size() for each in kept if hasattr(each, "device_mesh")]
        buckets = 0
        for model in parallel:
            copied = [each for each in model.parameters() if each.requires_grad and not model.gradient_as_bucket_view]
            buckets += sum(map(size_of, copied))
        way = "FSDP2" if meshes else "DDP" if parallel else ""
        return {
            "buckets": buckets,
            "model": sum(map(size_of, kept)),
            "optimizers": ", ".join(names),
            "way": "ZeRO-1" if way == "DDP" and "ZeroRedundancyOptimizer" in names else way,
            "ranks": max([1, *meshes, *(each.process_group.size() for each in parallel)]),
        }


def may_watch_saved() -> bool:
    """Return whether no other hook on what autograd saves is on, as that of checkpointing."""
    import torch
    from torch._C import _autograd

    top = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    again = torch._C._current_graph_task_id() != -1  # A part of the model is called once more by a backward pass.
    return top(False) is None and disabled is None and not again


def is_traced() -> bool:
    """Return whether torch.compile reads the hook instead of calling it: it must do nothing."""
    import torch

    return torch.compiler.is_compiling()


class Saved:
    """A tensor that autograd keeps for the backward pass, and lets go after it."""

    def __init__(self, tensor: Any) -> None:
        # An output that held itself would never be freed.
        self.tensor = tensor.detach()


def count_new(tensors: Iterable[Any], seen: set[int]) -> int:
    """Count the bytes of storages not `seen` yet, whatever views they have."""
    total = 0
    for each in tensors:
        storage = storage_of(each)
        if storage and storage not in seen:
            seen.add(storage)
            total += getattr(each, "_local_tensor", each).untyped_storage().nbytes()
    return total


def storage_of(value: Any) -> int:
    """Find the address of a tensor's memory, of a distributed one that of this rank's part; 0 if it has none."""
    local = getattr(value, "_local_tensor", value)
    strided = hasattr(local, "untyped_storage") and not local.is_sparse
    return int(local.untyped_storage().data_ptr()) if strided else 0


def size_of(tensor: Any) -> int:
    """Count the bytes of all of its elements, wherever they are."""
    return int(tensor.numel() * tensor.element_size())


SOURCE = Source("memory", install, (Kind(MemoryHeld),))
