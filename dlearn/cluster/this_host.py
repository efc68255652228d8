"""What a process knows of the host that it runs on."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kernel_id(namespace: str) -> str:
    """Return a name of the kernel's boot and the namespace of pids ("pid") or addresses ("net")."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    return socket.gethostname()
