"""What a process knows of the host that it runs on, and of the processes there."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kernel_id(namespace: str) -> str:
    """Return a name of the kernel's boot and the namespace: "pid", "net" or "time"."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    return socket.gethostname()


def status_of(process: int | str) -> list[str]:
    """Return Linux's facts of a process: its state, its parent, ... OSError if it has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger, where that is known."""
    with suppress(OSError):
        return status_of(pid)[0] in "Tt"
    return False


def scheduled_ns(process: int | str) -> tuple[int, int]:
    """Return how long threads of a process have run, and were ready to run; zeros if not known."""
    ran_ns = ready_ns = 0
    # Linux, Documentation/scheduler/sched-stats.
    for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # It has ended.
            ran, ready, _ = map(int, thread.read_text().split())
            ran_ns, ready_ns = ran_ns + ran, ready_ns + ready
    return ran_ns, ready_ns


def sockets_of(process: int | str) -> Iterator[tuple[int, int]]:
    """Yield number and inode of each socket; OSError if the process has ended, or may open none."""
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(OSError):  # Closed meanwhile, as that of the listing itself.
            kind, _, inode = os.readlink(f"/proc/{process}/fd/{name}").partition(":")
            if kind == "socket":
                yield int(name), int(inode.strip("[]"))
