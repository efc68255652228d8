"""The machine: system, Python, cores, memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from dlearn.doctor.finding import Finding

OLDEST_PYTHON = (3, 11)

RANK_MB = {"forkserver": 17, "spawn": 151}
"""A rank's own memory before the program's data, by how it is started; measured (README, What it costs)."""

SMALL_SHARED_MEMORY = 64 * 2**20
"""What docker gives by default."""


def system(name: str = platform.system(), release: str = platform.release()) -> Finding:
    found = f"{name} {release}, {platform.machine()}"
    if name == "Linux":
        return Finding("system", "ok", found)
    if name == "Darwin":
        return Finding("system", "warning", f"{found}: dlearn was never run there", "report to us what does not work")
    return Finding("system", "warning", f"{found}: dlearn was never run there", "use Linux; on Windows, WSL2")


def python(version: tuple[int, int] = sys.version_info[:2], path: str = sys.executable) -> Finding:
    found = f"{'.'.join(map(str, version))}, {path}"
    if version >= OLDEST_PYTHON:
        return Finding("Python", "ok", found)
    return Finding("Python", "missing", found, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")


def usable_cores() -> int | None:
    """Those that this process may run on, where the system tells, else all; None where it tells nothing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cores(usable: int | None = None) -> Finding:
    usable = usable or usable_cores()
    if usable is None:
        return Finding("cores", "not known", "this system does not tell")
    found = f"{usable} usable: with more ranks than that, every time is also the scheduler's"
    if usable == 1:
        return Finding("cores", "warning", found, "trust bytes, not times; or give this machine a second core")
    return Finding("cores", "ok", found)


def memory(
    meminfo: Path = Path("/proc/meminfo"),
    limits: Path = Path("/sys/fs/cgroup"),
    start: str = "forkserver" if sys.platform == "linux" else "spawn",
) -> Finding:
    """What is available, under the container's limit if there is one, and for how many ranks that is."""
    sizes = [size for size in (_available_bytes(meminfo), _left_in_container_bytes(limits)) if size is not None]
    if not sizes:
        return Finding("memory", "not known", "this system does not tell")
    ranks = min(sizes) // (RANK_MB[start] * 10**6)
    found = f"{min(sizes) / 2**30:.1f} GiB available: {ranks:,} ranks of {RANK_MB[start]} MB, less your models and data"
    if ranks < 4:
        return Finding("memory", "warning", found, "close other programs, or use fewer ranks")
    return Finding("memory", "ok", found)


def _available_bytes(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container_bytes(limits: Path) -> int | None:
    try:
        most, used = ((limits / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(most) - int(used)) if most.isdigit() else None


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """For a DataLoader's workers and for tensors that processes of one host share."""
    try:
        size = shutil.disk_usage(folder)
    except OSError:
        return Finding("shared memory", "not known", f"no {folder} here")
    found = f"{size.free / 2**20:,.0f} of {size.total / 2**20:,.0f} MiB free in {folder}"
    if size.free <= SMALL_SHARED_MEMORY:
        remedy = "DataLoader workers may fail: in docker, --shm-size=1g; or num_workers=0"
        return Finding("shared memory", "warning", found, remedy)
    return Finding("shared memory", "ok", found)
