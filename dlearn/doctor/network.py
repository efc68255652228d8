"""Where ranks meet: the host's name, the loopback interface, and who else can reach it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dlearn.doctor.finding import Finding

LOOPBACK_NAMES = ("lo", "lo0")
"""Linux, macOS."""
NAME_SECONDS = 2.0
"""A name server that does not answer is asked for longer by torch."""
WAIT_SECONDS = 2.0

FIRST_PERSON, NOBODY = 1000, 65534
"""User ids below are the system's, on Linux."""


def hostname(
    name: str | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
    *,
    seconds: float = NAME_SECONDS,
) -> Finding:
    """Ranks of `Cluster` do not use it. Scripts do: gloo where GLOO_SOCKET_IFNAME is not set, and torchrun."""
    name = name or socket.gethostname()
    answer = _within(seconds, lambda: resolve(name))
    if answer is None:
        remedy = "for scripts on several hosts: put its address into the hosts file, or set GLOO_SOCKET_IFNAME"
        return Finding("hostname", "warning", f"{name} resolves to nothing within {seconds:g} s", remedy)
    listens = "" if answer.startswith("127.") else ": gloo listens there, in scripts that do not set GLOO_SOCKET_IFNAME"
    return Finding("hostname", "ok", f"{name} resolves to {answer}{listens}")


def _within(seconds: float, ask: Callable[[], str]) -> str | None:
    """Its answer; None where it fails, or takes longer: a question to a name server cannot be stopped, only left."""
    answers: list[str] = []

    def run() -> None:
        try:
            answers.append(ask())
        except OSError:
            return

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def loopback_interface(interfaces: Sequence[str] | None = None) -> str | None:
    """Its name; None where no interface has one of the usual names."""
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    return next((name for name in LOOPBACK_NAMES if name in names), None)


def loopback(interfaces: Sequence[str] | None = None, address: str = "127.0.0.1") -> Finding:
    """Bind it and send a byte through it."""
    name = loopback_interface(interfaces)
    try:
        _send_a_byte(address)
    except OSError as error:
        remedy = "allow connections to 127.0.0.1 (a firewall, or a container without network?)"
        return Finding("loopback", "missing", f"{address} cannot be used: {error}", remedy)
    if name is None:
        remedy = "set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME to its name in scripts"
        return Finding("loopback", "warning", f"{address} works; no interface is called lo or lo0", remedy)
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
    """Whether other people's processes run here: to them loopback is open."""
    mine = os.getuid() if mine is None and hasattr(os, "getuid") else mine
    if not (processes / "1" / "status").exists():
        # A system without /proc, or one that shows everybody their own processes only.
        return Finding("other people", "not known", "this system does not tell whose processes run here", _REMEDY)
    users = {_user_id(status) for status in processes.glob("[0-9]*/status")} - {None, mine}
    people = sorted(uid for uid in users if uid is not None and uid >= FIRST_PERSON and uid != NOBODY)
    if not people:
        return Finding("other people", "ok", "none has a process here now")
    names = ", ".join(map(_name, people[:4])) + (", ..." if len(people) > 4 else "")
    found = f"also used by {names}. Loopback is not private: anyone here can connect to an RPC worker's port"
    return Finding("other people", "warning", f"{found}, and have it run code as you (it unpickles)", _REMEDY)


_REMEDY = "no rpc=True beside people you do not trust: a container or a machine of your own"


def _user_id(status: Path) -> int | None:
    """Of a process's status file: the line "Uid: 1000 1000 1000 1000"."""
    try:
        lines = status.read_text(errors="replace").splitlines()
    except OSError:
        return None  # it has ended meanwhile
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
