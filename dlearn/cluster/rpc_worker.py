"""A rank as an RPC worker: on loopback, over TCP."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

TRANSPORTS, CHANNELS = ["uv"], ["basic"]
"""TCP for all of it. torch's default on one host is shared memory, whose bytes no counter has."""

WORKER_THREADS = 8

_FALSE_ALARMS = (
    # init_rpc does so itself, in every torch since 2.0 (pytorch issue 149393).
    "You are using a Backend <",
    # torch.distributed.optim compiles its optimizers when it is imported, and says "always".
    "`torch.jit.script` is deprecated",
    "`torch.jit.script_method` is deprecated",
    "`torch.jit.interface` is deprecated",
    "`TorchScript` support for functional optimizers is deprecated",
)


@contextmanager
def worker(name: str, rank: int, world_size: int, recording: Any = None, store: Any = None) -> Iterator[None]:
    """Be RPC worker `name` in the block, and serve at the end until all others are there."""
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=WORKER_THREADS, init_method="env://", _transports=TRANSPORTS, _channels=CHANNELS
    )
    if recording is not None:
        recording.meet = partial(meet, store, world_size)
    where: dict[str, Any] = {"rank": rank, "world_size": world_size, "rpc_backend_options": options}
    own_name = f"worker{name}" if name.isdigit() else name
    with _without_false_alarms():
        rpc.init_rpc(own_name, **where)  # type: ignore[no-untyped-call]
        if recording is not None:
            _open_connections(rank, world_size)
            recording.meet()
            recording.watch_rpc_sockets(opened=True)
            recording.meet()  # No worker's first call comes before the other end counts.
        yield
        rpc.shutdown()


@contextmanager
def _without_false_alarms() -> Iterator[None]:
    """Hide torch's false alarms. A warnings filter would not do: torch sets it aside."""
    show = warnings.showwarning

    def show_others(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(_FALSE_ALARMS):
            show(message, *args, **kwargs)

    warnings.showwarning = show_others
    try:
        yield
    finally:
        warnings.showwarning = show


def _open_connections(rank: int, world_size: int) -> None:
    """Open all connections now, so that their own bytes belong to no call."""
    import torch
    import torch.distributed.rpc as rpc

    from dlearn.hooks.rpc.rpc_state import observing

    with observing():
        opened = [
            rpc.rpc_async(other, torch.add, args=(torch.ones(1), 1)) for other in range(world_size) if other != rank
        ]
        torch.futures.wait_all(opened)


_meetings = itertools.count()
MEETING_SECONDS = 10.0


def meet(store: Any, world_size: int) -> None:
    """Wait until all workers are here; nothing of it goes over RPC's connections."""
    key = f"dlearn: meeting {next(_meetings)}"
    if store.add(key, 1) == world_size:
        store.set(f"{key}, all", "yes")
    with suppress(RuntimeError):  # One of them has died: the others learn that elsewhere.
        store.wait([f"{key}, all"], timedelta(seconds=MEETING_SECONDS))
