"""Waiting for what a test asks for: up to a minute, as a busy machine takes long, and no longer than it takes."""

import time
from collections.abc import Callable


def comes_true(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
