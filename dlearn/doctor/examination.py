"""All checks, one after the other: each looks at one thing and returns a Finding. Nothing here prints.

Those of torch run in this process: the first that fails says why, and the others are not asked where
torch is missing.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlearn.doctor import machine
from dlearn.doctor.machine import Finding

NEEDED = ("loopback", "torch", "recorder", "gloo")
"""To record a job here. All else is good to have."""


def examine() -> Iterator[Finding]:
    """Yield one finding after the other, as they become known; torch takes seconds to load."""
    yield from (machine.system(), machine.loopback(), machine.other_people(), machine.mpi())
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # an agent that calls itself warns of its own end
    interface = machine.loopback_interface()
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, TP_SOCKET_IFNAME=interface)
    torch = _tried("torch")
    yield torch
    for name in list(CHECKS)[1:]:
        if torch.verdict == "missing":
            yield Finding(name, "not known", "not asked, because of torch", "see torch, then ask again")
        else:
            yield _tried(name)


def lacking(findings: Sequence[Finding]) -> list[str]:
    """The names of what keeps a job from being recorded on this machine."""
    fit = {finding.name for finding in findings if finding.verdict in ("ok", "warning")}
    return [name for name in NEEDED if name not in fit]


def _tried(name: str) -> Finding:
    check, remedy = CHECKS[name]
    try:
        with _without_lines_of_cpp():
            return check()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        found = "".join(c if c.isprintable() else " " for c in f"{type(error).__name__}: {text}")
        return Finding(name, "missing", found, remedy)


@contextmanager
def _without_lines_of_cpp() -> Iterator[None]:
    """Gloo of torch 2.9 and older prints who is connected, from C++: what it prints is no finding."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def torch_build() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("built without torch.distributed")
    return judge_build(torch.__version__, torch.version.cuda)


def judge_build(version: str, cuda: str | None, driver: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    """A build without CUDA is worth a warning beside an NVIDIA driver."""
    if cuda is not None:
        return Finding("torch", "ok", f"{version}, CUDA {cuda}")
    if driver.exists():
        remedy = "for NCCL install this torch's build for CUDA, see pytorch.org/get-started"
        return Finding("torch", "warning", f"{version}, no CUDA, beside an NVIDIA driver", remedy)
    return Finding("torch", "ok", f"{version}, no CUDA")


def recorder() -> Finding:
    from dlearn.hooks.c10d.collectives import self_test

    self_test()
    found = "its self-test saw an all_reduce, start and end: dlearn fits this torch"
    return Finding("recorder", "ok", found)


def gloo() -> Finding:
    """Make a group of one rank, and sum over it."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return _sum("gloo", total.sum().item(), 3, "a group of one rank, summed over")


def counters() -> Finding:
    """Write 1,000 bytes into a connection, and read what the kernel counted."""
    from dlearn.hooks.network.sockets import RPC, Sockets

    facts: Any = _Facts()
    watched = Sockets(facts)
    watched.note_strangers()
    address = ("127.0.0.1", 0)
    with socket.create_server(address) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            if not watched.watch(RPC):
                reason = f"{sys.platform} tells no process about the bytes in its sockets"
                return judge_counters(None, facts.reason or reason)
            here.sendall(bytes(1000))
            return judge_counters(max(count or 0 for count in watched.sent_bytes()), "")


class _Facts:
    """What `Sockets` reports to."""

    reason = ""

    def fact(self, line: Any) -> None:
        self.reason = getattr(line, "reason", "")  # of NotMeasured

    def failed(self, where: str, error: Exception) -> None:
        raise error


def judge_counters(counted: int | None, reason: str) -> Finding:
    if counted == 1000:
        return Finding("socket counters", "ok", "the kernel counted 1,000 of 1,000 B written (TCP_INFO)")
    found = reason if counted is None else f"the kernel counted {counted:,} of 1,000 B written"
    return Finding("socket counters", "missing", found, CHECKS["socket counters"][1])


def rpc_worker() -> Finding:
    """Have a worker call itself, on the transport that `Cluster` uses."""
    import torch
    import torch.distributed.rpc as rpc

    from dlearn.cluster.rpc_worker import CHANNELS, TRANSPORTS

    if not rpc.is_available():
        raise RuntimeError("torch was built without TensorPipe")
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=(Path(folder) / "store").as_uri(), _transports=TRANSPORTS, _channels=CHANNELS
        )
        rpc.init_rpc("doctor", rank=0, world_size=1, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        total = rpc.rpc_sync("doctor", torch.add, args=(torch.ones(3), 1))
        rpc.shutdown(graceful=False)
    return _sum("RPC", total.sum().item(), 6, "a worker on loopback called itself")


def _sum(name: str, total: float, expected: int, found: str) -> Finding:
    if total == expected:
        return Finding(name, "ok", found)
    return Finding(name, "missing", f"{found}, and got {total} where {expected} is right", CHECKS[name][1])


CHECKS = {
    "torch": (torch_build, "python tools/install_torch.py in dlearn's folder, with this Python"),
    "recorder": (recorder, "install the torch that constraints.txt names: python tools/install_torch.py"),
    "gloo": (gloo, "if loopback is ok: python tools/install_torch.py in dlearn's folder brings a torch with gloo"),
    "socket counters": (counters, "bytes on the wire are not measured; all else works"),
    "RPC": (rpc_worker, "no rpc=True here; process groups work without it"),
}
"""Of torch: how it is checked, and what to do where that fails."""
