"""What an event's end tells that its start could not: who the message came from, its tag, its size, its result."""

from __future__ import annotations

import msgspec

from dlearn.trace.event import Collective, End, Event, PointToPoint, RpcCall, RpcWindow
from dlearn.trace.mpi_facts import ANY_TAG, Probe
from dlearn.trace.source import ServiceCall, UnknownEvent

_set = msgspec.structs.force_setattr


def learn(event: Event, end: End) -> None:
    """Fill it into the event; what the start has said of peer and tag stays."""
    if isinstance(event, PointToPoint | Probe):
        if end.peer is not None and event.peer is None:
            _set(event, "peer", end.peer)
        if end.tag is not None and event.tag == ANY_TAG:
            _set(event, "tag", end.tag)
    if end.result is not None and isinstance(event, RpcCall | RpcWindow):
        _set(event, "result", end.result)
    if end.inputs and isinstance(event, Collective):
        _set(event, "inputs", end.inputs)
    if end.outputs and isinstance(event, Collective | PointToPoint | ServiceCall):
        _set(event, "tensors" if isinstance(event, PointToPoint) else "outputs", end.outputs)
    if isinstance(event, UnknownEvent):
        told = {name: getattr(end, name) for name in ("peer", "tag", "inputs", "outputs", "result")}
        event.columns.update({name: value for name, value in told.items() if value not in (None, ())})
