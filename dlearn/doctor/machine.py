"""What can be asked of a machine without torch: the system, loopback, who else is here, MPI."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "warning", "missing", "not known"]


@dataclass(frozen=True)
class Finding:
    """One thing about this machine: what was found, and what to do where that is not good enough."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


LOOPBACK_NAMES = ("lo", "lo0")
"""Linux, macOS."""
WAIT_SECONDS = 2.0
MPI_SECONDS = 10.0
FIRST_PERSON, NOBODY = 1000, 65534
"""User ids below the first are the system's, on Linux."""


def system(name: str = platform.system(), cores: int | None = None) -> Finding:
    """Name the system, the Python and the cores that this process may run on."""
    cores = cores or _usable_cores()
    python = f"Python {platform.python_version()}, {sys.executable}"
    found = f"{name} {platform.release()}, {platform.machine()}; {python}; {cores} usable cores"
    if name != "Linux":
        remedy = "report to us what does not work; on Windows use WSL2: Cluster needs Linux or macOS"
        return Finding("system", "warning", f"{found}; dlearn was never run there", remedy)
    if cores == 1:
        return Finding("system", "warning", found, "trust bytes, not times; or add a second core")
    return Finding("system", "ok", found)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loopback_interface(interfaces: Sequence[str] | None = None) -> str | None:
    """Return its name; None where no interface has one of the usual names."""
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    return next((name for name in LOOPBACK_NAMES if name in interfaces), None)


def loopback(interfaces: Sequence[str] | None = None, address: str = "127.0.0.1") -> Finding:
    """Bind it and send a byte through it."""
    name = loopback_interface(interfaces)
    try:
        _send_a_byte(address)
    except OSError as error:
        remedy = "allow connections to 127.0.0.1 (a firewall, or a container without network?)"
        return Finding("loopback", "missing", f"{address} cannot be used: {error}", remedy)
    if name is None:
        found = f"{address} works; no interface is called lo or lo0"
        remedy = "set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME to its name in scripts"
        return Finding("loopback", "warning", found, remedy)
    return Finding("loopback", "ok", f"{address} works, on {name}")


def _send_a_byte(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(WAIT_SECONDS)
        with socket.create_connection(server.getsockname(), timeout=WAIT_SECONDS) as here:
            there, _ = server.accept()
            with there:
                here.sendall(b"1")
                there.settimeout(WAIT_SECONDS)
                there.recv(1)


def other_people(processes: Path = Path("/proc"), mine: int | None = None) -> Finding:
    """Look for processes of other people: to them loopback is open."""
    remedy = "no rpc=True beside people you do not trust: a container or a machine of your own"
    if not (processes / "1" / "status").exists():
        # A system without /proc, or one that shows everybody their own processes only.
        found = "this system does not tell whose processes run here"
        return Finding("other people", "not known", found, remedy)
    users = {_user_id(status) for status in processes.glob("[0-9]*/status")}
    users -= {None, NOBODY, os.getuid() if mine is None else mine}
    people = sorted(uid for uid in users if uid is not None and uid >= FIRST_PERSON)
    if not people:
        return Finding("other people", "ok", "none has a process here now")
    names = ", ".join(f"user {uid}" for uid in people)
    found = (
        f"also used by {names}. Loopback is not private: anyone here can connect to an RPC worker's"
        " port, and have it run code as you (it unpickles)"
    )
    return Finding("other people", "warning", found, remedy)


def _user_id(status: Path) -> int | None:
    """Return whose process it is: the line "Uid: 1000 1000 1000 1000"."""
    try:
        lines = status.read_text(errors="replace").splitlines()
    except OSError:
        return None  # it has ended meanwhile
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def mpi(python: str = sys.executable, *, seconds: float = MPI_SECONDS) -> Finding:
    """Load mpi4py in a process of its own: a library that does not fit ends the process."""
    remedy = "for lessons with MPI: pip install mpi4py mpich"
    command = [python, "-P", "-c", _MPI]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        found = f"mpi4py was not loaded within {seconds:g} s"
        return Finding("MPI", "missing", found, remedy)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        return Finding("MPI", "missing", f"mpi4py cannot be imported: {said[-1]}", remedy)
    library = " ".join(done.stdout.strip("\x00\n").partition("\n")[0].split())
    # The one that belongs to this library stands beside the interpreter.
    mpiexec = shutil.which("mpiexec.gforker", path=str(Path(python).parent))
    if mpiexec is None:
        found = f"{library}, but no mpiexec.gforker beside {python}"
        return Finding("MPI", "missing", found, remedy)
    return Finding("MPI", "ok", f"{library}, {mpiexec}")
