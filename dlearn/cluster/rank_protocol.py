"""What a pool and its ranks send each other: calls, requests, open files."""

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dlearn.cluster.payload import Environment
from dlearn.events.options import Options

LOOPBACK = "127.0.0.1"
FINISH, CLOSED = "finish", "closed"
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class HostPosition:
    """A rank's number on its host, the ranks there, and the interface that leads to the others."""

    interface: str
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Call:
    """One call for one rank. `store` is where rank 0 listens; with `keep` the process stays."""

    payload: bytes
    environment: Environment
    rank: int
    world_size: int
    name: str
    backend: str
    init: bool
    job: str
    folder: str
    record: Options | None
    keep: bool
    rpc: bool = False
    store: tuple[str, int] = (LOOPBACK, 0)
    position: HostPosition | None = None
    gate: str = ""
    own_log: bool = False
    """Beside an engine: the rank takes the agent's log out of its stderr, by its own host's clock."""


@dataclass(frozen=True)
class Listen:
    """A request to rank 0, before its call: open the store's socket."""

    address: str
    backlog: int


Enter = Callable[[], int | None]
"""Moves a process of one thread into a network; its device, if the parent is to hold that. Or NotPermitted."""


def stack_file(folder: str | Path, rank: int) -> Path:
    """Return the file into which a rank writes its stack when STACK_SIGNAL arrives."""
    return Path(folder, f"stack-{rank}.txt")


# Not by multiprocessing's `send_handle`: its receiver answers with a byte on the same connection (on
# macOS, and from Python 3.14 on everywhere), which another thread of the sender might take.


def send_descriptor(connection: Connection, descriptor: int) -> None:
    """Send an open file or socket to the process at the other end."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        socket.send_fds(channel, [b"d"], [descriptor])


def receive_descriptor(connection: Connection) -> int:
    """Return the open file or socket that was sent. EOFError if the sender has ended."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        raise EOFError
    return descriptors[0]
