"""Waiting for what a test asks for: up to a minute, as a busy machine takes long, and no longer than it takes.

And a port for a job of a test's own."""

import socket
import time
from collections.abc import Callable, Iterable

import psutil


def comes_true(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(pids: Iterable[int]) -> bool:
    return comes_true(lambda: not any(map(lives, pids)))


def free_port() -> str:
    """A port at which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
