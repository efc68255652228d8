"""`dlearn doctor`: what works on this machine, and what to do about the rest.

A check returns what it found. It raises UserWarning for what a job can do without, and any other
error where something is missing.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from dlearn.errors import SetupError
from dlearn.events.this_host import cores

NEEDED = ("loopback", "torch", "recorder", "gloo")
"""What a job needs to be recorded here. All else is good to have."""
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing about this machine: what was found, and what to do where that is not enough."""

    name: str
    verdict: Literal["ok", "warning", "missing", "not known"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.name:<15}  {self.verdict:<9}  {self.found}"
        return f"{line}\n{'':28}try: {self.remedy}" if self.remedy else line


def doctor(options: argparse.Namespace) -> None:
    """Print each finding as it becomes known. Raise SetupError where no job can be recorded."""
    findings: list[Finding] = []
    missing: list[str] = []
    for name in CHECKS:
        if "torch" in missing:
            why, remedy = "not asked, because of torch", "see torch, then ask again"
            finding = Finding(name, "not known", why, remedy)
        else:
            finding = _make_check(name)
        findings.append(finding)
        if name in NEEDED and finding.verdict not in ("ok", "warning"):
            missing.append(name)
        if not options.json:
            print(finding, flush=True)
    if options.json:
        shown = {"can_record": not missing, "findings": findings}
        print(json.dumps(shown, indent=2, default=asdict))
    if missing:
        lacks = f"what it lacks, above: {', '.join(missing)}"
        raise SetupError(f"no job can be recorded on this machine; {lacks}.")
    if not options.json:
        print("\nJobs can be recorded on this machine.")


def _make_check(name: str) -> Finding:
    check, remedy = CHECKS[name]
    try:
        with _without_lines_of_cpp():
            return Finding(name, "ok", check())
    except UserWarning as warning:
        return Finding(name, "warning", str(warning), remedy)
    except Exception as error:  # Whatever torch or the system raises is what was found.
        named = "" if isinstance(error, SetupError) else f"{type(error).__name__}: "
        found = f"{named}{str(error).strip()}".splitlines()[0]
        return Finding(name, "missing", found, remedy)


@contextmanager
def _without_lines_of_cpp() -> Iterator[None]:
    """Hide what C++ prints: gloo of torch 2.9 and older tells who is connected."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def system() -> str:
    """Name the system, the Python and the cores that this process may run on."""
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}"
    python = f"Python {platform.python_version()}, {sys.executable}"
    found = f"{machine}; {python}; {cores()} usable cores"
    if platform.system() != "Linux":
        raise UserWarning(f"{found}; dlearn was never run there")
    return found


def loopback() -> str:
    """Connect to a server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=PATIENCE_SECONDS).close()
    return "127.0.0.1 works"


def mpi() -> str:
    """Load mpi4py in a process of its own: a library that does not fit ends the process."""
    load = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    command = [sys.executable, "-P", "-c", f"{load}; print(MPI.Get_library_version())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if done.returncode != 0:
        said = done.stderr.splitlines() or [f"its process ended with {done.returncode}"]
        raise SetupError(f"mpi4py cannot be imported: {said[-1]}")
    library = " ".join(done.stdout.replace("\0", "").splitlines()[0].split())
    if library.startswith("Open MPI"):
        raise UserWarning(f"{library}; clusters need MPICH's")
    return library


def torch_build() -> str:
    """Import torch, and have it use loopback alone, as ranks of a Cluster do."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # An agent warns when it ends itself.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # Linux, macOS
            os.environ.update(GLOO_SOCKET_IFNAME=name, TP_SOCKET_IFNAME=name)
    import torch

    if not torch.distributed.is_available():
        raise SetupError("it was built without torch.distributed")
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def recorder() -> str:
    """See whether the hooks fit this torch."""
    from dlearn.hooks.c10d.collectives import self_test

    self_test()
    return "its self-test saw an all_reduce, start and end: dlearn fits this torch"


def gloo() -> str:
    """Make a group of one rank, and sum over it."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(total := torch.ones(3))
    dist.destroy_process_group()
    return _right(total, 3, "a group of one rank, summed over")


def counters() -> str:
    """Write 1,000 bytes into a connection, and read what the kernel counted."""
    from dlearn.hooks.network.sockets import Sockets

    sockets = Sockets(SimpleNamespace(fact=lambda fact: None))
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0]:
            sockets.watch()
            here.sendall(bytes(1000))
            if 1000 not in sockets.sent_bytes():
                raise SetupError("this kernel counts no bytes of sockets; Linux 4.19 and newer do")
    return "the kernel counted 1,000 of 1,000 B written (TCP_INFO)"


def rpc_worker() -> str:
    """Have a worker call itself, on the transport that `Cluster` uses."""
    import torch
    import torch.distributed.rpc as rpc

    from dlearn.cluster.rpc_worker import CHANNELS, TRANSPORTS

    with tempfile.TemporaryDirectory() as folder:
        # torch takes the path as it is, and waits for ever where it was quoted, as `as_uri` does.
        ways: dict[str, Any] = {"_transports": TRANSPORTS, "_channels": CHANNELS}
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", **ways)
        rpc.init_rpc("doctor", rank=0, world_size=1, rpc_backend_options=options)  # type: ignore
        total = rpc.rpc_sync("doctor", torch.add, args=(torch.ones(3), 1))
        rpc.shutdown(graceful=False)
    return _right(total, 6, "a worker on loopback called itself")


def _right(total: Any, expected: int, found: str) -> str:
    if total.sum() != expected:
        raise SetupError(f"{found}, and got {total.sum()} where {expected} is right")
    return found


def permitted(how: str, found: str) -> str:
    """See whether a rank may have its own network: with a device in it, or with loopback alone."""
    from dlearn.network.namespace import refusal

    if refused := refusal(how):
        raise UserWarning(refused)
    return found


OWN_NETWORK = "ranks can have a network of their own, as slow as you say"
PRIVATE = "Cluster(rpc=True) keeps its workers where no other user of this machine reaches them"
TRUST = "other users here can reach RPC workers: rpc=True only if you trust them"
INSTALL = "python tools/install_torch.py in dlearn's folder, with this Python"
CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "system": (system, "Windows: use WSL2, Cluster needs Linux or macOS; tell us what fails"),
    "loopback": (loopback, "allow connections to 127.0.0.1 (a firewall? no network?)"),
    "MPI": (mpi, "for lessons with MPI: pip install mpi4py mpich"),
    "torch": (torch_build, INSTALL),
    "recorder": (recorder, f"install the torch that constraints.txt names: {INSTALL}"),
    "gloo": (gloo, f"if loopback is ok, a torch with gloo: {INSTALL}"),
    "socket counters": (counters, "bytes on the wire are not measured; all else works"),
    "network": (partial(permitted, "enter", OWN_NETWORK), "no Cluster(network=...) here; all else works"),
    "private": (partial(permitted, "unshare", PRIVATE), TRUST),
    "RPC": (rpc_worker, "no rpc=True here; process groups work without it"),
}
"""How each is checked, and what to do where that fails."""
