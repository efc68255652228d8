"""Ranks in networks of their own: private ones, and ones of a chosen speed.

A client of torch's RPC can have a worker run anything, with its user's rights, and a store of
torch's accepts every client. So the first private rank makes a network namespace with nothing in it
but loopback, and the others follow it. Where that is not permitted, the system's tables of
connections show who has reached them. On a network of a chosen speed a switch stands between the
ranks' own.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dlearn.cluster import warm_pool
from dlearn.cluster.rank_process import RankGroup, RankProcess, start_rank
from dlearn.cluster.rank_protocol import LOOPBACK, receive_descriptor
from dlearn.errors import SetupError
from dlearn.events.this_host import sockets_of
from dlearn.network import namespace
from dlearn.network.live import LiveNetwork, SwitchProcess
from dlearn.network.namespace import NetworkNamespace, NotPermitted

_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _LISTENS = "01", "0A"


def start_private(count: int) -> list[RankProcess]:
    """Start ranks in one network that no other process is in. NotPermitted where there can be none."""
    if sys.platform != "linux":
        raise NotPermitted("only Linux has network namespaces")
    with warm_pool.ended_on_error() as ranks:
        while len(ranks) < count:
            ranks.append(start_rank(partial(enclose, ranks[0].pid if ranks else None), LOOPBACK))
            if len(ranks) == 1:
                _check_entered(ranks)  # The others follow it.
        _check_entered(ranks[1:])
        return ranks


def _check_entered(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        if refusal := rank.refusal():
            raise NotPermitted(refusal)


def enclose(first: int | None) -> None:
    """Move this process, of one thread, into a new network, or into that of the process `first`."""
    if first is None:
        namespace.unshare()
        namespace.bring_up(b"lo")
    else:
        _follow(first)
    namespace.name_hosts({"127.0.0.1": f"localhost {socket.gethostname()}"})


def _follow(first: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    refused = "the first rank's network cannot be entered"
    with ExitStack() as opened:
        try:
            user = opened.enter_context(open(f"/proc/{first}/ns/user"))
            network = opened.enter_context(open(f"/proc/{first}/ns/net"))
        except OSError as error:
            raise NotPermitted(f"{refused} ({error.strerror})") from None
        entered = not libc.setns(user.fileno(), 0) and not libc.setns(network.fileno(), 0)
        if not entered or libc.unshare(namespace.NEW_MOUNTS):
            raise NotPermitted(f"{refused} ({os.strerror(ctypes.get_errno())})")


class SwitchedGroup(RankGroup):
    """Ranks between which a switch forwards packets; it ends with the last of them."""

    def __init__(self, network: LiveNetwork, switch: SwitchProcess, pids: Sequence[int]) -> None:
        self._network, self._switch, self._pids = network, switch, set(pids)

    @property
    def loss(self) -> str:
        return "lost its network: the switch has ended" if self._switch.lost else ""

    def stop_slowing(self) -> None:
        self._network.let_compute()

    def closed(self, rank: RankProcess) -> None:
        self._pids.discard(rank.pid)
        if not self._pids:
            self._switch.close()


def start_switched(network: LiveNetwork, count: int) -> list[RankProcess]:
    """Start ranks in a network each, and a switch between them. SetupError where that is not permitted."""
    with ExitStack() as opened, warm_pool.ended_on_error() as ranks:
        for rank in range(count):
            own = NetworkNamespace(rank, count, network.packet_bytes, network.asked.window_bytes)
            ranks.append(start_rank(partial(namespace.enter, own), namespace.address(0)))
        devices = []
        for started in ranks:
            if refusal := started.refusal():
                raise SetupError(f"ranks cannot have a network of their own on this machine: {refusal}.")
            devices.append(receive_descriptor(started.control))
            opened.callback(os.close, devices[-1])
        pids = [started.pid for started in ranks]
        switch = network.connect(devices, pids, partial(warm_pool.kill_all, tuple(ranks)))
        try:
            group = SwitchedGroup(network, switch, pids)
            for started in ranks:
                started.group = group
        except BaseException:
            switch.close()
            raise
        return ranks


class TcpSocket(NamedTuple):
    """A socket in the system's tables: the ports of its two sides, its state, its user, its inode."""

    local: int
    remote: int
    state: str
    uid: int
    inode: int


def users_connected_to(pids: Iterable[int]) -> set[int]:
    """Return the users, except this one, with a connection to a port of one of these processes."""
    table = list(_tcp_sockets())
    own: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # It has just ended.
            own.update(inode for _, inode in sockets_of(pid))
    ports = {end.local for end in table if end.state == _LISTENS and end.inode in own}
    ends = {(end.remote, end.local) for end in table}
    users = set()
    for end in table:
        other_user = end.state == _ESTABLISHED and end.uid != os.getuid()
        on_this_machine = (end.local, end.remote) in ends  # Else the same port of another host.
        if end.remote in ports and other_user and on_this_machine:
            users.add(end.uid)
    return users


def _tcp_sockets() -> Iterator[TcpSocket]:
    for table in _TCP_TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                here, there = (int(side.rpartition(":")[2], 16) for side in (local, remote))
                yield TcpSocket(here, there, state, int(uid), int(inode))
