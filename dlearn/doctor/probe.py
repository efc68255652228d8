"""What needs torch, asked one step after the other: `python -m dlearn.doctor.probe` prints a line of JSON for each.

A process of its own, so that whatever torch does here (be missing, abort, hang) is an answer, too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlearn.doctor.network import loopback_interface

Answer = dict[str, Any]


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    interface = loopback_interface()
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, TP_SOCKET_IFNAME=interface)
    for step, ask in STEPS.items():
        try:
            answer = ask()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {lines[0]}"}
        print(json.dumps({"step": step, **answer}), flush=True)
        if step == "torch" and "error" in answer:
            break
    os._exit(0)  # threads of torch's may take their time to end


def end_with_parent() -> None:
    """Who asks holds our stdin open; when it is gone, however it ended, nobody wants the answers."""
    sys.stdin.read()
    os._exit(1)


def ask_torch() -> Answer:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("built without torch.distributed")
    return {"version": torch.__version__, "cuda": torch.version.cuda}


def ask_recorder() -> Answer:
    from dlearn.hooks.collectives import self_test

    self_test()
    return {}


def ask_gloo() -> Answer:
    """A group of one rank, and a sum over it."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"sum": total.sum().item()}


def ask_counters() -> Answer:
    """Write 1,000 bytes into a connection, and read what the kernel counted."""
    from dlearn.hooks.sockets import RPC, Sockets

    facts: Any = _Facts()
    watched = Sockets(facts)
    watched.note_strangers()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            if not watched.watch(RPC):
                reason = facts.reason or f"{sys.platform} tells no process about the bytes in its sockets"
                return {"counted": None, "reason": reason}
            here.sendall(bytes(1000))
            return {"counted": max(count or 0 for count in watched.sent_bytes())}


class _Facts:
    """What `Sockets` reports to."""

    reason = ""

    def fact(self, line: Any) -> None:
        self.reason = getattr(line, "reason", "")  # of NotMeasured

    def failed(self, where: str, error: Exception) -> None:
        raise error


def ask_rpc() -> Answer:
    """A worker that calls itself, on the transport that `Cluster` uses."""
    import torch
    import torch.distributed.rpc as rpc

    from dlearn.cluster.rpc import CHANNELS, TRANSPORTS

    if not rpc.is_available():
        raise RuntimeError("torch was built without TensorPipe")
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=(Path(folder) / "store").as_uri(), _transports=TRANSPORTS, _channels=CHANNELS
        )
        rpc.init_rpc("doctor", rank=0, world_size=1, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        total = rpc.rpc_sync("doctor", torch.add, args=(torch.ones(3), 1))
        rpc.shutdown(graceful=False)
    return {"sum": total.sum().item()}


def ask_gpu() -> Answer:
    import torch
    import torch.distributed as dist

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    version: Any = torch.cuda.nccl.version
    nccl = ".".join(map(str, version())) if dist.is_nccl_available() else None
    return {"names": names, "nccl": nccl}


STEPS: dict[str, Callable[[], Answer]] = {
    "torch": ask_torch,
    "recorder": ask_recorder,
    "gloo": ask_gloo,
    "socket counters": ask_counters,
    "RPC": ask_rpc,
    "GPU": ask_gpu,
}


if __name__ == "__main__":
    main()
