"""Start real ranks on this machine, run a function on them, bring back results, output, errors and the trace."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlearn.cluster.cluster import Cluster
    from dlearn.cluster.run import Run

__all__ = ["Cluster", "Run"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: the process that ranks are forked from needs neither."""
    if name not in __all__:
        raise AttributeError(f"module 'dlearn.cluster' has no attribute {name!r}")
    return getattr(import_module(f"dlearn.cluster.{name.lower()}"), name)
