"""Bytes on the wire: what this process has written into each of its TCP connections.

Linux reports the counters of a process's own sockets without root (`TCP_INFO`). Watched are the
connections that appear while a process group is made, but not those of its store. Connections that
appear later, to this machine or to a rank's host, belong to no known group. Sockets are read by
their number: a copy would stay open, and gloo's peers learn from a closing socket that a rank has
gone.
"""

import ctypes
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set

from dlearn.events.event import NO_GROUP, RPC, UNKNOWN_GROUP, NotMeasured, Socket
from dlearn.events.this_host import sockets_of, status_of
from dlearn.hooks import Emit
from dlearn.hooks.network.clock import innermost
from dlearn.hooks.patches import guarded

STILL_SECONDS = 0.0005  # Counters that have not moved for so long stand still.
RPC_STILL_SECONDS = 0.005  # RPC's threads answer one by one, when they get Python's lock.
PATIENCE_SECONDS = 0.25  # How long `settle` waits for that.
RPC_PATIENCE_SECONDS = 1.0
"""The same, until every call has its reply: on a busy machine the other worker has to wait for a core."""
_OPEN_CALLS = "agent.client_active_calls", "agent.server_active_calls"
"""The metrics of torch's agent that count calls without a reply: to others, and of others."""

# struct tcp_info in <linux/tcp.h>: bytes received, not yet sent, sent, and those sent again after a loss.
_COUNTS = struct.Struct("=128x Q 8x I 52x Q Q")

_rpc_inodes: set[int] = set()  # RPC's connections, for a later recording of this process.


class Sockets:
    """The TCP connections of this process's groups; none of them if they are not to be `measured`."""

    def __init__(self, emit: Emit, *, measured: bool = True) -> None:
        self._emit, self._measured = emit, measured
        self.connections: list[tuple[int, int]] = []
        """Number and inode of each socket: a later one with the same number has another inode."""
        self._known: set[int] = set()
        self._rpc = False
        self._busy_for_long = 0  # Waited for before in vain: such as the call that the program runs in.
        self._hosts: set[str] = set()  # Where other ranks are.
        self.ignored_ports: set[int] = set()
        """Of the stores: the program's, and the one through which the recorder itself talks."""
        # A handle that keeps Python's lock: the call takes a microsecond.
        self._getsockopt = ctypes.PyDLL(None).getsockopt if sys.platform == "linux" and measured else None

    def begin(self, groups: Sequence[str]) -> None:
        """Take existing connections for those of the only group, or of one of several `groups`."""
        if self._getsockopt is None:
            if self._measured:
                self._emit.fact(NotMeasured(reason=f"{sys.platform} tells no process about the bytes in its sockets"))
            return
        owner = UNKNOWN_GROUP if len(groups) > 1 else next(iter(groups), None)
        guarded(self._emit, "the counters of sockets", self.watch, owner)

    def making(self, store: Store | None, owner: str | None = NO_GROUP) -> None:
        """Note that a group, or RPC's agent, will be made that meets in this store.

        Connections that exist by now belong to `owner`; those of the store are never counted, also
        those that other ranks open later.
        """
        self.ignored_ports |= _ports_of([store])
        self.watch(owner)

    def sent_bytes(self) -> tuple[int | None, ...]:
        """Return the bytes written into each connection so far; None for one that is closed."""
        return tuple(self._counted(*connection)[0] for connection in self.connections)

    def received_bytes(self) -> tuple[int | None, ...]:
        """Return the bytes received through each connection so far; nothing without RPC."""
        watched = self.connections if self._rpc else ()
        return tuple(self._counted(*connection)[1] for connection in watched)

    def settle(self) -> bool:
        """Wait until the counters stand still, no call of RPC waits for its reply, and no thread of
        torch's for a core. Return False where that took too long: it is waited for once only."""
        quiet_seconds = RPC_STILL_SECONDS if self._rpc else STILL_SECONDS
        deadline = time.monotonic() + (RPC_PATIENCE_SECONDS if self._rpc else PATIENCE_SECONDS)
        before = self.sent_bytes()
        while time.monotonic() < deadline:
            time.sleep(quiet_seconds)
            now, busy = self.sent_bytes(), self._busy()
            if now == before and busy <= self._busy_for_long:
                self._busy_for_long = busy
                return True
            before = now
        self._busy_for_long = self._busy()
        return False

    def _busy(self) -> int:
        """Count RPC's open calls, and the threads of torch's that have work."""
        if not self._rpc:
            return 0
        busy = _threads_at_work()
        if _is_current_rpc_agent_set():
            metrics = _get_current_rpc_agent().get_metrics()
            busy += sum(int(metrics[name]) for name in _OPEN_CALLS)
        return busy

    def _counted(self, fd: int, inode: int) -> tuple[int | None, int | None]:
        """Return the bytes written and received; None if closed, or not counted by the kernel."""
        assert self._getsockopt is not None
        info, size = ctypes.create_string_buffer(_COUNTS.size), ctypes.c_uint32(_COUNTS.size)
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                where = fd, socket.IPPROTO_TCP, socket.TCP_INFO
                failed = self._getsockopt(*where, info, ctypes.byref(size))
                if not failed and size.value >= _COUNTS.size:
                    received, not_sent, sent, again = _COUNTS.unpack(info)
                    # What waits in the kernel for the receiver has been written, too.
                    return sent - again + not_sent, received
        return None, None

    def watch(self, group: str | None = NO_GROUP) -> bool:
        """Watch the connections that are new as this group's, or RPC's; with None they are not counted.

        Return whether there are any. (RPC's workers agree by connections that are not counted, before the agent.)
        """
        if self._getsockopt is None:
            return False
        is_new = False
        self.ignored_ports |= _ports_of(store for _, store in list(dist.distributed_c10d._world.pg_map.values()))
        for fd, inode in sorted(sockets_of("self")):
            ends = _ends(fd) if inode not in self._known else None
            if ends is None:
                continue
            self._known.add(inode)
            local, remote = ends
            if group == RPC:
                _rpc_inodes.add(inode)
            owner = RPC if inode in _rpc_inodes else group
            if owner is None or self.ignored_ports & {local[1], remote[1]}:
                continue
            if owner == NO_GROUP and remote[0] not in (local[0], *self._hosts):
                continue  # A connection of the program to a host without a rank.
            self._hosts.add(remote[0])
            if self._counted(fd, inode)[0] is None:
                reason = "this kernel's TCP_INFO does not count bytes (older than Linux 4.19)"
                self._emit.fact(NotMeasured(reason=reason))
                continue
            number = len(self.connections)
            self.connections.append((fd, inode))
            self._emit.fact(Socket(id=number, group=owner, local=_text(local), remote=_text(remote)))
            self._rpc = self._rpc or owner == RPC
            is_new = True
        return is_new


def _threads_at_work() -> int:
    """Count threads that have a core, or wait for one; without Python's, the program's own."""
    count, of_python = 0, {str(thread.native_id) for thread in threading.enumerate()}
    for thread in set(os.listdir("/proc/self/task")) - of_python:
        with suppress(OSError):  # It has ended meanwhile.
            state, *_ = status_of(f"self/task/{thread}")
            count += state == "R" and int(thread) != threading.get_native_id()
    return count


def listens(port: int) -> bool:
    """Return whether this process listens at this port; False where the system does not say."""
    if sys.platform != "linux":
        return False
    for fd, _ in sockets_of("self"):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and copy.getsockname()[1] == port:
                return True
    return False


def _ends(fd: int) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the addresses of both ends of a TCP connection; None for any other socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:  # It listens, or is closed.
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            return copy.getsockname()[:2], copy.getpeername()[:2]
    return None


def _text(address: tuple[str, int]) -> str:
    """Return "127.0.0.1 40000"; an IPv4 address mapped into IPv6 is the same at both ends."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    return f"{getattr(host, 'ipv4_mapped', None) or host} {address[1]}"


def _ports_of(stores: Iterable[Store | None]) -> set[int]:
    """Return the ports of the TCP stores among these."""
    return {store.port for store in map(innermost, stores) if isinstance(store, TCPStore)}
