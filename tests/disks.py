"""A full disk, by the kernel's limit on the size of a file: it refuses what is written in the same way, or a part."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

ROOM = 20_000
"""Bytes that a file may have."""


@contextmanager
def full_disk(room: int = ROOM) -> Iterator[None]:
    """No file of this process gets larger than `room`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
