"""Two hosts on one machine: network namespaces joined by a cable, each with a name, and one with another clock.

The clock is a real one of the kernel's (time namespaces): it is ahead by `AHEAD_SECONDS`, exactly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

AHEAD_SECONDS = 777
ADDRESSES = {"nodeA": "10.77.0.1", "nodeB": "10.77.0.2"}
_CLOCK = ["--time", "--monotonic", str(AHEAD_SECONDS), "--boottime", str(AHEAD_SECONDS)]


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {' and '.join(missing)} here"
    for command in (["ip", "netns", "list"], ["unshare", "--net", "--uts", *_CLOCK, "--fork", "true"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode:
            return f"namespaces are not permitted here: {done.stderr.strip() or ' '.join(command)}"
    return ""


@dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    interface: str

    def start(self, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Run a command on this host."""
        clock = _CLOCK if self.name == "nodeB" else []
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *clock, "--fork", "--kill-child"]
        set_name = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*there, *set_name, *command],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,  # type: ignore[call-overload]
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    own = os.getpid()
    hosts = tuple(Host(name, f"dlearn{own}{name[-1]}", f"v{own}{name[-1]}") for name in ADDRESSES)
    a, b = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        cable = ["type", "veth", "peer", "name", b.interface, "netns", b.namespace]
        _ip("link", "add", a.interface, "netns", a.namespace, *cable)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{ADDRESSES[host.name]}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield a, b
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
