"""dlearn: who sent what to whom, and how many bytes was it?

Names are loaded when first used, so that `Trace.load` works on a machine without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlearn.version import __version__ as __version__

__all__ = [
    "Cluster",
    "DlearnError",
    "Event",
    "Message",
    "Operation",
    "Trace",
    "analysis",
    "collectives",
    "draw",
    "explain",
    "export",
    "lessons",
    "messages",
    "network",
    "operations",
    "play",
    "record",
    "span",
]
__dir__ = __all__.copy  # What Tab offers.

_HOMES = {
    "Cluster": "dlearn.cluster",
    "DlearnError": "dlearn.errors",
    "Event": "dlearn.events.event",
    "Message": "dlearn.join.tables.message_table",
    "Operation": "dlearn.join.tables.operation_table",
    "Trace": "dlearn.trace",
    "explain": "dlearn.analysis",
    "messages": "dlearn.analysis",
    "operations": "dlearn.analysis",
    "record": "dlearn.recorder",
    "span": "dlearn.recorder",
}
_MODULES = {"analysis", "collectives", "draw", "export", "lessons", "network", "play"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"dlearn.{name}")
    else:
        raise AttributeError(f"module 'dlearn' has no attribute {name!r}")
    if name == "Cluster":
        # Torch loads in the background from now on, so that the first run need not wait for it.
        import_module("dlearn.cluster.fork_server").warm_up()
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from dlearn import analysis, collectives, draw, export, lessons, network, play
    from dlearn.analysis import explain, messages, operations
    from dlearn.cluster import Cluster
    from dlearn.errors import DlearnError
    from dlearn.events.event import Event
    from dlearn.join.tables.message_table import Message
    from dlearn.join.tables.operation_table import Operation
    from dlearn.recorder import record, span
    from dlearn.trace import Trace
