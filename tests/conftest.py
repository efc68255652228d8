"""What holds for every test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def leave_no_figures():
    """Pyplot keeps every figure that nobody closes, and a later test would find it."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
