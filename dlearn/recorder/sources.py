"""The Sources that a recording installs, in this order: dlearn's own, then those that the user has named.

A recorder for another library is one file of its own: see dlearn/events/source.py and docs/new-recorder.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlearn.events.event import (
    AutogradNode,
    AutogradRun,
    Bucket,
    Collective,
    Counters,
    Event,
    Gradient,
    PointToPoint,
    RpcArrival,
    RpcCall,
    RpcReply,
    RpcRun,
    RpcWindow,
    Span,
    Stretch,
)
from dlearn.events.mpi_facts import OtherMpiCall, Probe
from dlearn.events.source import Kind, Source, Undo, describe, find
from dlearn.hooks.c10d import collectives, group_watch
from dlearn.hooks.ddp import ddp
from dlearn.hooks.host import Host
from dlearn.hooks.mpi import mpi_hook
from dlearn.hooks.rpc import rpc_hook


def _kinds(*columns: type[Event]) -> tuple[Kind, ...]:
    return tuple(map(Kind, columns))


OWN = (
    Source("c10d", collectives.install, _kinds(Collective, PointToPoint)),
    Source("ddp", ddp.install, _kinds(Bucket, Gradient, Stretch)),
    Source("mpi", mpi_hook.install, _kinds(Probe, OtherMpiCall)),
    Source(
        "rpc",
        rpc_hook.install,
        _kinds(RpcCall, RpcRun, RpcReply, RpcArrival, RpcWindow, AutogradNode, AutogradRun),
    ),
    Source("sockets", group_watch.install, _kinds(Counters)),
    Source("steps", ddp.install_steps, _kinds(Span)),
)
"""Calls of torch and mpi4py. The colours of their operations are in draw/palette.py."""


def install(source: Source, host: Host) -> Undo:
    """Turn one Source on, until the returned function is called."""
    return source.install(host if source in OWN else _Announcing(host, source))


def wanted(names: Sequence[str]) -> tuple[Source, ...]:
    """Return dlearn's own Sources and these."""
    return (*OWN, *map(find, names))


class _Announcing:
    """The recording for an added Source: describes it in the file before its first event."""

    def __init__(self, host: Host, source: Source) -> None:
        self._host, self._source = host, source
        self._announced: Path | None = None

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        path = self._host.path
        if self._announced != path:  # A forked child has a file of its own.
            self._announced = path
            self._host.fact(describe(self._source))
        return self._host.event(kind, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)
