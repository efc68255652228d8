"""Ranks that no other process of this machine reaches: their network has nothing in it but loopback.

Whoever connects to a worker of torch's RPC can have it run anything, with its user's rights, and a
store of torch's accepts everyone. So the first rank makes a user and a network namespace, and the
others follow it. These ranks have no way out, either.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from contextlib import ExitStack, suppress
from functools import partial

from dlearn.cluster import spares
from dlearn.cluster.launch import LOOPBACK, RankProcess, StartMethod, start_rank
from dlearn.cluster.rank import Listen
from dlearn.network import namespace
from dlearn.network.namespace import NotPermitted

SEAT_SECONDS = 60.0
"""How long a rank may take to come into its network: one that is spawned loads torch before."""


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
    with ExitStack() as opened:
        try:
            ways = [opened.enter_context(open(f"/proc/{first}/ns/{kind}")) for kind in ("user", "net")]
        except OSError as error:
            raise NotPermitted(f"the first rank's network cannot be entered ({error.strerror})") from None
        if any(libc.setns(way.fileno(), 0) for way in ways) or libc.unshare(namespace.NEW_MOUNTS):
            raise NotPermitted(f"the first rank's network cannot be entered ({os.strerror(ctypes.get_errno())})")


class EnclosedRank(RankProcess):
    """A rank in a network that this process is not in."""

    leaves_a_spare = False
    address = LOOPBACK
    """Of the first rank, in that network: no other can be asked for."""

    def listen(self, backlog: int, address: str = "") -> tuple[str, int]:
        """Have the rank itself open the socket: from here, its network cannot be reached."""
        with suppress(OSError, EOFError):  # It has ended; following it will tell.
            self.control.send(Listen(self.address, backlog))
            if self.control.poll(SEAT_SECONDS):
                found: tuple[str, int] = self.control.recv()
                return found
        return self.address, 0

    def refused(self) -> str:
        """Why it did not come into its network; "" if it did."""
        with suppress(EOFError, ConnectionResetError):
            if self.control.poll(SEAT_SECONDS):
                answer: str = self.control.recv()
                return answer
        return "a rank did not come into its network"


def start_ranks(count: int, start: StartMethod) -> list[EnclosedRank]:
    """Fresh ranks in a network of their own. NotPermitted where there can be none."""
    if sys.platform != "linux":
        raise NotPermitted("only Linux has network namespaces")
    ranks: list[EnclosedRank] = []
    try:
        for first in (True, False):
            enter = partial(enclose, None if first else ranks[0].pid)
            here = len(ranks)
            for _ in range(1 if first else count - 1):
                ranks.append(EnclosedRank(**vars(start_rank(start, enter))))
            for refused in filter(None, (rank.refused() for rank in ranks[here:])):
                raise NotPermitted(refused)
    except BaseException:
        spares.end(ranks)
        raise
    return ranks
