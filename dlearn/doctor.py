"""`dlearn doctor`: what works on this machine, and what to do about the rest.

A check returns what it has found, or raises Wanting. Where torch is missing, the checks after it are not made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from dlearn.errors import SetupError

if TYPE_CHECKING:
    import torch

Verdict = Literal["ok", "warning", "missing", "not known"]

NAME_WIDTH, VERDICT_WIDTH = len("socket counters"), len("not known")
NEEDED = ("loopback", "torch", "recorder", "gloo")
"""To record a job here. All else is good to have."""
LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 2.0
MPI_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing about this machine: what was found, and what to do where that is not good enough."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """The remedy stands where one is needed, below."""
        line = f"{self.name:<{NAME_WIDTH}}  {self.verdict:<{VERDICT_WIDTH}}  {self.found}"
        indent = " " * (NAME_WIDTH + VERDICT_WIDTH + 4)
        return f"{line}\n{indent}try: {self.remedy}" if self.remedy else line


class Wanting(Exception):
    """What a check has found is not good enough. Without a remedy, the check's is told."""

    def __init__(self, found: str, *, verdict: Verdict = "missing", remedy: str = "") -> None:
        super().__init__(found)
        self.verdict, self.remedy = verdict, remedy


def doctor(options: argparse.Namespace) -> None:
    """Raises SetupError where no job can be recorded here."""
    findings: list[Finding] = []
    for name in CHECKS:
        # One after the other, as they become known: torch takes seconds to load.
        if any(each.name == "torch" and each.verdict == "missing" for each in findings):
            finding = Finding(name, "not known", "not asked, because of torch", "see torch, then ask again")
        else:
            finding = tried(name)
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    missing = lacking(findings)
    if options.json:
        print(json.dumps({"can_record": not missing, "findings": [asdict(each) for each in findings]}, indent=2))
    if missing:
        raise SetupError(f"no job can be recorded on this machine; what it lacks, above: {', '.join(missing)}.")
    if not options.json:
        print("\nJobs can be recorded on this machine.")


def tried(name: str) -> Finding:
    """Make one check. What it fails with in a way that it does not know is told, too."""
    check, remedy = CHECKS[name]
    try:
        with _without_lines_of_cpp():
            return Finding(name, "ok", check())
    except Wanting as wanting:
        return Finding(name, wanting.verdict, str(wanting), wanting.remedy or remedy)
    except Exception as error:
        line = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        found = "".join(c if c.isprintable() else " " for c in line)
        return Finding(name, "missing", found, remedy)


def lacking(findings: Sequence[Finding]) -> list[str]:
    """The names of what keeps a job from being recorded on this machine."""
    fit = {finding.name for finding in findings if finding.verdict in ("ok", "warning")}
    return [name for name in NEEDED if name not in fit]


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


# The machine ----------------------------------------------------------------------------------------------------------


def system() -> str:
    """Name the system, the Python and the cores that this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found = f"{machine}; Python {platform.python_version()}, {sys.executable}; {cores} usable cores"
    if platform.system() != "Linux":
        remedy = "report to us what does not work; on Windows use WSL2: Cluster needs Linux or macOS"
        raise Wanting(f"{found}; dlearn was never run there", verdict="warning", remedy=remedy)
    if cores == 1:
        raise Wanting(found, verdict="warning", remedy="trust bytes, not times; or add a second core")
    return found


def loopback() -> str:
    """Bind it and send a byte through it."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=WAIT_SECONDS) as here,
            server.accept()[0] as there,
        ):
            here.sendall(b"1")
            there.settimeout(WAIT_SECONDS)
            there.recv(1)
    except OSError as error:
        raise Wanting(f"{LOOPBACK} cannot be used: {error}") from None
    name = _loopback_interface()
    if name is None:
        remedy = "set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME to its name in scripts"
        raise Wanting(f"{LOOPBACK} works; no interface is called lo or lo0", verdict="warning", remedy=remedy)
    return f"{LOOPBACK} works, on {name}"


def _loopback_interface() -> str | None:
    """Its name on Linux, or on macOS."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def mpi() -> str:
    """Load mpi4py in a process of its own: a library that does not fit ends the process."""
    command = [sys.executable, "-P", "-c", _MPI]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=MPI_SECONDS)
    except subprocess.TimeoutExpired:
        raise Wanting(f"mpi4py was not loaded within {MPI_SECONDS:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise Wanting(f"mpi4py cannot be imported: {said[-1]}")
    library = " ".join(done.stdout.replace("\x00", "").strip().partition("\n")[0].split())
    if library.startswith("Open MPI"):
        raise Wanting(f"{library}; clusters need MPICH's", verdict="warning", remedy="pip install mpich")
    return library


# torch ----------------------------------------------------------------------------------------------------------------


def torch_build() -> str:
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # an agent that calls itself warns of its own end
    interface = _loopback_interface()
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, TP_SOCKET_IFNAME=interface)
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("built without torch.distributed")
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def recorder() -> str:
    from dlearn.hooks.c10d.collectives import self_test

    self_test()
    return "its self-test saw an all_reduce, start and end: dlearn fits this torch"


def gloo() -> str:
    """Make a group of one rank, and sum over it."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return _judge_sum(total, 3, "a group of one rank, summed over")


def counters() -> str:
    """Write 1,000 bytes into a connection, and read what the kernel counted."""
    from dlearn.hooks.network.sockets import RPC, Sockets
    from dlearn.trace.event import NotMeasured

    told: list[object] = []

    def fail(_: str, error: Exception) -> None:
        raise error

    host: Any = SimpleNamespace(fact=told.append, failed=fail)
    watched = Sockets(host)
    watched.note_strangers()
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            if not watched.watch(RPC):
                reasons = [line.reason for line in told if isinstance(line, NotMeasured)]
                raise Wanting((reasons or [f"{sys.platform} tells no process about the bytes in its sockets"])[-1])
            here.sendall(bytes(1000))
            counted = max(count or 0 for count in watched.sent_bytes())
    if counted != 1000:
        raise Wanting(f"the kernel counted {counted:,} of 1,000 B written")
    return "the kernel counted 1,000 of 1,000 B written (TCP_INFO)"


def rpc_worker() -> str:
    """Have a worker call itself, on the transport that `Cluster` uses."""
    import torch
    import torch.distributed.rpc as rpc

    from dlearn.cluster.rpc_worker import CHANNELS, TRANSPORTS

    if not rpc.is_available():
        raise RuntimeError("torch was built without TensorPipe")
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(
            # torch takes the path as it is, and waits for ever where it was quoted, as `as_uri` does.
            init_method=f"file://{folder}/store",
            _transports=TRANSPORTS,
            _channels=CHANNELS,
        )
        rpc.init_rpc("doctor", rank=0, world_size=1, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        total = rpc.rpc_sync("doctor", torch.add, args=(torch.ones(3), 1))
        rpc.shutdown(graceful=False)
    return _judge_sum(total, 6, "a worker on loopback called itself")


def _judge_sum(total: torch.Tensor, expected: int, found: str) -> str:
    if total.sum() != expected:
        raise Wanting(f"{found}, and got {total.sum()} where {expected} is right")
    return found


def private_ranks() -> str:
    """Try whether ranks could be where no other user of this machine reaches them."""
    from dlearn.network.namespace import refusal

    if refused := refusal("unshare"):
        raise Wanting(f"other users of this machine can reach RPC workers: {refused}", verdict="warning")
    return "Cluster(rpc=True) keeps its workers where no other user of this machine reaches them"


def chosen_network() -> str:
    """Try whether a rank could have a network of its own."""
    from dlearn.network.namespace import refusal

    if refused := refusal():
        raise Wanting(refused, verdict="warning")
    return "ranks can have a network of their own, as slow as you say"


CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "system": (system, ""),
    "loopback": (loopback, "allow connections to 127.0.0.1 (a firewall, or a container without network?)"),
    "MPI": (mpi, "for lessons with MPI: pip install mpi4py mpich"),
    "torch": (torch_build, "python tools/install_torch.py in dlearn's folder, with this Python"),
    "recorder": (recorder, "install the torch that constraints.txt names: python tools/install_torch.py"),
    "gloo": (gloo, "if loopback is ok: python tools/install_torch.py in dlearn's folder brings a torch with gloo"),
    "socket counters": (counters, "bytes on the wire are not measured; all else works"),
    "network": (chosen_network, "no Cluster(network=...) here; all else works"),
    "private": (private_ranks, "use rpc=True only beside people whom you trust"),
    "RPC": (rpc_worker, "no rpc=True here; process groups work without it"),
}
"""How each is checked, and what to do where that fails."""
