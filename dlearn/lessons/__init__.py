"""What lessons share: data, models, and the demo. Nothing else in dlearn needs this folder."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlearn.course import answer, check, grade, predict, report, stats

__all__ = ["answer", "check", "grade", "predict", "report", "stats"]


def __getattr__(name: str) -> object:
    """Load the course's functions, with torch, at first use: the demo needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dlearn.course"), name)


__dir__ = __all__.copy
