"""A network of a process's own, without root: a user and a network namespace, with one TUN in it.

What the process sends through the TUN comes out of a descriptor, packet by packet, in the switch. No
tool (`ip`, `tc`) is needed. Run as a program, this file tries it.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

DEVICE = "net0"
TRY_SECONDS = 10.0
NEW_MOUNTS, _NEW_USER, _NEW_NET = 0x20000, 0x10000000, 0x40000000
_MS_BIND = 4096
_SETS_TUN, _TUN_OF_PACKETS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
_GETS_FLAGS, _SETS_FLAGS, _SETS_ADDRESS, _SETS_NETMASK, _SETS_MTU = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922
_UP = 1
_TCP = {
    "ipv4/tcp_congestion_control": "reno",  # As textbooks have it. A machine's own may be bbr, which paces by guesses.
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
}
_RECEIVES = 4_000_000
_UBUNTU = "a recent Ubuntu needs sysctl kernel.apparmor_restrict_unprivileged_userns=0"


class NetworkNamespace(NamedTuple):
    """One rank's address in a network: its number, how many there are, the largest packet and window in bytes."""

    rank: int
    ranks: int
    mtu: int
    window: int


class NotPermitted(Exception):
    """An error: this machine permits no network of a process's own. Its text says why."""


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def enter(own: NetworkNamespace) -> int:
    """Move this process, which has one thread, into a new network. Return its TUN. Or NotPermitted."""
    unshare()
    tun = _open_tun()
    _give_address(own)
    bring_up(DEVICE.encode(), b"lo")
    room = max(_RECEIVES, 2 * own.window)
    windows = {"ipv4/tcp_wmem": f"4096 {own.window} {own.window}", "ipv4/tcp_rmem": f"4096 {room} {room}"}
    for name, value in (_TCP | windows).items():
        with suppress(OSError):  # A container's may be read-only: then TCP does as that machine has it.
            Path("/proc/sys/net", name).write_text(value)
    name_hosts({address(rank): f"rank{rank}" for rank in range(own.ranks)} | {"127.0.0.1": "localhost"})
    return tun


def _give_address(own: NetworkNamespace) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        fcntl.ioctl(channel, _SETS_ADDRESS, _request(address(own.rank)))
        fcntl.ioctl(channel, _SETS_NETMASK, _request("255.255.255.0"))
        fcntl.ioctl(channel, _SETS_MTU, struct.pack("16si20x", DEVICE.encode(), own.mtu))


def bring_up(*devices: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for name in devices:
            flags = struct.unpack("16sh", fcntl.ioctl(channel, _GETS_FLAGS, struct.pack("16sh", name, 0)))[1]
            fcntl.ioctl(channel, _SETS_FLAGS, struct.pack("16sh", name, flags | _UP))


def unshare() -> None:
    """Give this process a network with nothing in it: a user may make a user namespace, and in that all others."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_NET | NEW_MOUNTS):
        error = ctypes.get_errno()
        why = f"{os.strerror(error)}); a container needs --security-opt seccomp=unconfined"
        if error == errno.ENOSPC:  # Of its meanings, the one that counts.
            limit = Path("/proc/sys/user/max_user_namespaces").read_text().strip()
            why = f"their limit is {limit}); sysctl user.max_user_namespaces sets it"
        raise NotPermitted(f"user namespaces are not permitted here ({why}")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        raise NotPermitted(f"user namespaces have no rights here ({error.strerror}); {_UBUNTU}") from None


def _open_tun() -> int:
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun, _SETS_TUN, struct.pack("16sH22x", DEVICE.encode(), _TUN_OF_PACKETS))
    except OSError as error:
        remedies = {errno.EACCES: "its administrator can permit it by chmod 666 /dev/net/tun", errno.EPERM: _UBUNTU}
        remedy = remedies.get(error.errno or 0, "a container needs --device /dev/net/tun")
        raise NotPermitted(f"/dev/net/tun cannot be used here ({error.strerror}); {remedy}") from None
    return tun


def _request(of_address: str) -> bytes:
    """Return a struct ifreq that sets one of the device's addresses."""
    return struct.pack("16sHH4s8x", DEVICE.encode(), socket.AF_INET, 0, socket.inet_aton(of_address))


def name_hosts(names: dict[str, str]) -> None:
    """Have this process find a name for each address without a name server: by an /etc/hosts of its own."""
    with tempfile.NamedTemporaryFile("w", prefix="dlearn-hosts-") as hosts:
        # The store of torch has its addresses in IPv6.
        hosts.writelines(f"{form}{ip} {name}\n" for ip, name in names.items() for form in ("", "::ffff:"))
        hosts.flush()
        ctypes.CDLL(None).mount(hosts.name.encode(), b"/etc/hosts", None, _MS_BIND, None)


def refusal(how: str = "enter") -> str:
    """Return why no process may `enter` a network here, or `unshare` one; "" if one may."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    command = [sys.executable, "-I", "-S", __file__, how]
    return subprocess.run(command, stdout=-1, stderr=-2, text=True, timeout=TRY_SECONDS).stdout.strip()


if __name__ == "__main__":
    try:
        unshare() if sys.argv[1] == "unshare" else enter(NetworkNamespace(0, 1, 1500, 4_000_000))
    except NotPermitted as refused:
        print(refused)
