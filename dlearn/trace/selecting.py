"""Parts of a trace: what `Trace.where`, `within` and `between` select by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

from dlearn.errors import TraceError
from dlearn.trace.event import Collective, Event, Span
from dlearn.trace.job_facts import AnyLine
from dlearn.trace.source import UnknownEvent, in_use

if TYPE_CHECKING:
    from dlearn.trace.trace import Trace

Key = tuple[int, int]
"""An event: its rank and its number there."""

PHASES = ("setup", "forward", "backward", "optimizer", "cleanup", "none")
KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyLine) if issubclass(kind, Event))
FAMILIES = tuple(dict.fromkeys(kind.split()[0] for kind in KINDS))
"""The kinds, with "rpc" for "rpc call", "rpc run" and the like."""


def kind_of(event: Event) -> str:
    return event.unknown if isinstance(event, UnknownEvent) else str(type(event).__struct_config__.tag)


def family_of(event: Event) -> str:
    return kind_of(event).split()[0]


def is_of(event: Event, kind: str) -> bool:
    """Whether it is of this kind, or of this family of kinds."""
    return kind in (kind_of(event), family_of(event))


def check_kind(kind: str | None, events: Iterable[Event]) -> None:
    """TraceError if it is none of dlearn's own kinds, of those of a Source in use here, nor of those of `events`."""
    if kind is None or kind in (*KINDS, *FAMILIES):
        return
    others = {kind.tag: None for source in in_use.values() for kind in source.kinds}
    others |= dict.fromkeys(name for event in events for name in (kind_of(event), family_of(event)))
    if kind not in others:
        known = ", ".join(dict.fromkeys((*KINDS, *FAMILIES, *others)))
        raise TraceError(f"there is no kind {kind!r} of events; the kinds are: {known}")


# Spans ----------------------------------------------------------------------------------------------------------------


def caused_within(whole: Trace, span: str) -> set[Key]:
    """What is inside spans of this name, and all that it caused on other ranks."""
    inside = _descendants(whole, span)
    for each in whole.matches:
        keys = {(end.rank, end.number) for end in each.ends}
        if not keys.isdisjoint(inside):
            inside |= keys
    _add_callees(whole, inside)
    return inside


def _descendants(whole: Trace, span: str) -> set[Key]:
    """A parent has a lower number than its children, so one pass finds them."""
    enclosing: set[Key] = set()
    inside: set[Key] = set()
    for event in sorted(whole.events, key=lambda event: event.number):
        key = (event.rank, event.number)
        if event.parent is not None and (event.rank, event.parent) in enclosing:
            inside.add(key)
            enclosing.add(key)
        if isinstance(event, Span) and event.name == span:
            enclosing.add(key)
    return inside


def _add_callees(whole: Trace, inside: set[Key]) -> None:
    """What the calls of RPC that are inside have set going on other ranks, and what that called in turn."""
    runs = {
        (each.call.rank, each.call.number): (each.run.rank, each.run.number)
        for each in whole.rpc.exchanges
        if each.call is not None and each.run is not None
    }
    new = {runs[call] for call in inside if call in runs} - inside
    while new:
        inside |= new
        for event in whole.events:
            if event.parent is not None and (event.rank, event.parent) in inside:
                inside.add((event.rank, event.number))
        new = {runs[call] for call in inside if call in runs} - inside


# Time -----------------------------------------------------------------------------------------------------------------


def begins_of_operations(whole: Trace) -> dict[Key, int]:
    """Of each end of an operation, when the first rank called it, also of its steps'; of an RPC's run and reply, when
    it was called."""
    begins: dict[Key, int] = {}
    collectives: set[Key] = set()
    # Collectives first: a step begins with the one that it is part of.
    for match in sorted(whole.matches, key=lambda match: not isinstance(match.ends[0], Collective)):
        keys = [(end.rank, end.number) for end in match.ends]
        outer = [(end.rank, end.parent) for end in match.ends if end.parent is not None]
        steps_of = next((begins[key] for key in outer if key in collectives), None)
        first_ns = min([end.start_ns for end in match.ends]) if steps_of is None else steps_of
        begins.update(dict.fromkeys(keys, first_ns))
        if isinstance(match.ends[0], Collective):
            collectives.update(keys)
    for each in whole.rpc.exchanges:
        for event in (each.run, each.reply, each.arrival):
            if event is not None and each.call is not None:
                begins[event.rank, event.number] = each.call.start_ns
    return begins
