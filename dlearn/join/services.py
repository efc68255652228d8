"""Calls of a service in another process, of any Source: each an operation with a request and its reply."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from dlearn.trace.message import Group, Message, Operation, bytes_of
from dlearn.trace.source import ServiceCall, Source, in_use
from dlearn.trace.trace import Trace


def service_operations(trace: Trace) -> Iterator[Operation]:
    """Each call as an operation of its caller and the rank that was asked, as far as its Source knows that."""
    for source in in_use.values():
        kinds = tuple(kind.columns for kind in source.kinds if issubclass(kind.columns, ServiceCall))
        calls = trace.of(*kinds)
        if calls:
            yield from _of_source(source, calls, trace)


def _of_source(source: Source, calls: list[ServiceCall], trace: Trace) -> Iterator[Operation]:
    hosts = source.hosts(trace.whole) if source.hosts is not None else {}
    groups: dict[tuple[int, int | None], Group] = {}
    for call in calls:
        host = hosts.get((call.rank, call.number))
        members = (call.rank,) if host in (None, call.rank) else (call.rank, host)
        group = groups.setdefault((call.rank, host), Group(source.name, source.name, members, default=False))
        yield Operation(
            op=call.op,
            group=group,
            seq=call.seq,
            ends=(call,),
            sender=call.rank,
            receiver=host,
            payload_bytes=bytes_of(call.tensors),
        )


def messages_of_call(operation: Operation, call: ServiceCall) -> list[Message]:
    """The request and, once it has come, the reply; nothing where it is not known who was asked."""
    src, dst = operation.sender, operation.receiver
    if src is None or dst is None:
        return []
    request = Message(
        src=src,
        dst=dst,
        op=operation.op,
        payload_bytes=operation.payload_bytes,
        how="observed",
        operation=operation,
        sent_ns=call.start_ns,
        tensors=call.tensors,
    )
    if call.one_way or call.end_ns is None or call.failed:
        return [request]
    reply = replace(
        request,
        src=dst,
        dst=src,
        payload_bytes=bytes_of(call.outputs),
        sent_ns=None,
        received_ns=call.end_ns,
        step=1,
        control=not call.outputs,
        tensors=call.outputs,
    )
    return [request, reply]
