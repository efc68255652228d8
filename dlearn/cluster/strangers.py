"""Other users of this machine who have connected to ranks: found in the system's own table of connections."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED, LISTENS = "01", "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Connection(NamedTuple):
    """A line of such a table: ports of its two sides, state, user, and the number of the socket."""

    local: int
    remote: int
    state: str
    uid: int
    inode: str


def users_connected_to(pids: Iterable[int]) -> set[int]:
    """Return the users, but for our own, with a connection to a port of one of these processes."""
    table = [*_connections()]
    own = {inode for pid in pids for inode in _sockets(pid)}
    ports = {each.local for each in table if each.state == LISTENS and each.inode in own}
    others = [each for each in table if each.state == ESTABLISHED and each.uid != os.getuid()]
    ends = {(each.remote, each.local) for each in table}  # Else it leads elsewhere.
    return {each.uid for each in others if each.remote in ports and (each.local, each.remote) in ends}


def _connections() -> Iterator[Connection]:
    for table in TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                local_port, remote_port = (int(side.rpartition(":")[2], 16) for side in (local, remote))
                yield Connection(local_port, remote_port, state, int(uid), inode)


def _sockets(pid: int) -> Iterator[str]:
    with suppress(OSError):  # It has just ended.
        for link in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if found := _SOCKET.fullmatch(os.readlink(link)):
                    yield found[1]
