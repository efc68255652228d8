"""Process groups as this process meets them: their names, members, and the numbers of their operations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _dump_fr_trace_json  # type: ignore[attr-defined]

from dlearn.hooks import Emit
from dlearn.trace.event import GroupFact


@dataclass
class Group:
    """A process group as this process sees it, with its counters."""

    name: str
    rank: int
    end_by_callback: bool
    on_gpu: bool
    """Whether its operations may run on a stream of a GPU. (Gloo's are on the host, whatever it sends.)"""
    collectives: Iterator[int]
    p2ps: Iterator[int]


class Groups:
    """Process groups by identity: after destroy and init a new group has the old name, and its numbers start anew."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._known: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()
        self._last: tuple[ref[ProcessGroup], Group] | None = None
        self._names: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        self._uses: dict[str, int] = {}

    def of_boxed(self, boxed: Any) -> Group:
        return self.of(ProcessGroup.unbox(boxed))

    def of(self, pg: ProcessGroup) -> Group:
        last = self._last
        if last is not None and last[0]() is pg:  # Most calls are made on the group of the call before.
            return last[1]
        known = self._known.get(pg)
        if known is None:
            known = self._known[pg] = self._meet(pg)
        self._last = ref(pg), known
        return known

    def name(self, pg: ProcessGroup) -> str:
        """The group's name in the trace: its own, and for a second group of that name a number with it."""
        outer = getattr(pg, "steps_of", None)
        if outer is not None:
            return f"{self.name(outer)} steps"
        known = self._names.get(pg)
        if known is None:
            times = self._uses[pg.group_name] = self._uses.get(pg.group_name, 0) + 1
            known = self._names[pg] = pg.group_name if times == 1 else f"{pg.group_name}~{times}"
        return known

    def _meet(self, pg: ProcessGroup) -> Group:
        fact = group_fact(pg, self.name)
        self._emit.fact(fact)
        # A recording that begins late, or on one rank earlier than on the others, numbers as the group itself does.
        done = _calls_made(pg)
        return Group(
            fact.name,
            fact.rank,
            end_by_callback=not fact.backend.startswith("nccl"),  # In torch 2.15 "nccl" is one that is named nccl2.
            on_gpu=fact.backend != "gloo",
            collectives=itertools.count(done + 1),
            p2ps=itertools.count(1),
        )


def group_fact(pg: ProcessGroup, name: Callable[[ProcessGroup], str]) -> GroupFact:
    """Name, backend and members of a process group, as far as torch knows them."""
    outer = getattr(pg, "steps_of", None)
    registered = dist.distributed_c10d._world.pg_group_ranks.get(outer or pg)
    return GroupFact(
        name=name(pg),
        backend=_backend_name(pg),
        rank=pg.rank(),
        size=pg.size(),
        ranks=tuple(registered) if registered else (),
        default=pg.group_desc == "default_pg",
        within=name(outer) if outer is not None else "",
    )


def _backend_name(pg: ProcessGroup) -> str:
    own = getattr(pg, "backend_name", None)  # Of a Python process group: ring, star, MPI.
    if own is not None:
        return str(own)
    for device in ("cuda", "cpu"):
        try:
            return str(pg._get_backend(torch.device(device)).name())
        except RuntimeError:
            continue  # This group has no backend for that device.
    return "unknown"


def _calls_made(pg: ProcessGroup) -> int:
    """Collectives that the group has made so far, as torch's flight recorder has numbered them.

    (The group's own sequence number counts sends and receives, too, and in these the ranks differ.)
    """
    try:
        if not pg._get_sequence_number_for_group():  # type: ignore[attr-defined]
            return 0
    except RuntimeError:
        return 0  # A backend without a counter.
    entries = json.loads(_dump_fr_trace_json()).get("entries", ())
    numbers = [each["collective_seq_id"] for each in entries if each["process_group"][0] == pg.group_name]
    return int(numbers[-1]) if numbers else 0
