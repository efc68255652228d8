"""What holds for every test."""

import signal
import sys

import matplotlib
import pytest

matplotlib.use("agg")  # Pictures are drawn into memory: no window opens.

# A shell that puts these tests in the background has interrupts ignored, and whoever it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leave_no_figures():
    """Pyplot keeps every figure that nobody closes, and a later test would find it."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
