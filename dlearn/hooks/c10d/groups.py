"""Process groups as this process meets them: their names, members, and the numbers of their operations.

torch gives a name again when a group was destroyed: each process counts those of a name. Counts may
differ between members, who also read one word in the group's own store: the first writes it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import ProcessGroup, _dump_fr_trace_json  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from dlearn.events.event import GroupFact
from dlearn.events.job_facts import DEFAULT, dimensions_of, group_name
from dlearn.hooks import Emit
from dlearn.hooks.network.clock import word_in


@dataclass
class OwnGroup:
    """A process group with its counters; its name is torch's own, of a second one with a number."""

    fact: GroupFact
    end_by_callback: bool
    on_gpu: bool  # Whether its operations may run on a stream of a GPU; gloo's are on the host.
    collectives: Iterator[int]
    p2ps: Iterator[int]


class Groups:
    """The process groups of this process, by identity."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._known: WeakKeyDictionary[ProcessGroup, OwnGroup] = WeakKeyDictionary()
        self._last: tuple[ref[ProcessGroup], OwnGroup] | None = None
        self._uses: Counter[str] = Counter()
        self.kept: list[ProcessGroup] = []
        """Groups that the program has destroyed, until the next is made."""

    def made(self, group: ProcessGroup, ranks: Iterable[int]) -> None:
        """Describe a group with these `ranks` at once: not every member calls anything on it."""
        self.kept.clear()
        if group not in self._known:
            self._known[group] = self._meet(group, ranks)

    def destroying(self, group: ProcessGroup | None) -> None:
        """Keep it a little longer than the program does, until the next is made; None: all groups.

        Where a DDP model holds the last reference and is deleted, torch waits for gloo's threads
        and keeps Python's lock: it hangs if one of them needs that. Where the last one is Python's,
        as this is, torch gives the lock back first. (With the default group goes the store's port.)
        """
        if group is None:
            self.kept.clear()
        else:
            self.kept.append(group)

    def in_mesh(self, mesh: DeviceMesh) -> None:
        """Describe groups again that a mesh has names for: torch names only those that it makes."""
        for index, name in enumerate(mesh.mesh_dim_names or ()):
            try:
                own = self.of(mesh.get_group(index))
            except (RuntimeError, IndexError):
                return  # A part of a mesh that is made without groups, or of other ranks.
            if name not in own.fact.dimensions:
                own.fact = replace(own.fact, dimensions=(*own.fact.dimensions, name))
                self._emit.fact(own.fact)

    def _numbered(self, name: str, between: str) -> str:
        """Return "1", and the second time "1~2"."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}{between}{self._uses[name]}"

    def of(self, pg: ProcessGroup) -> OwnGroup:
        """Return the group as it is known here, and describe it when it is new."""
        last = self._last
        if last is not None and last[0]() is pg:  # Most calls are made on the group of the call before.
            return last[1]
        known = self._known.get(pg)
        if known is None:
            outer = getattr(pg, "steps_of", None)
            registered = dist.distributed_c10d._world.pg_group_ranks.get(outer or pg)
            known = self._known[pg] = self._meet(pg, registered or ())
        self._last = ref(pg), known
        return known

    def _meet(self, pg: ProcessGroup, ranks: Iterable[int]) -> OwnGroup:
        outer = getattr(pg, "steps_of", None)
        within = self.of(outer).fact.name if outer is not None else ""
        about = pg.group_desc if outer is None else ""
        named = group_name(pg.group_name, about)
        name = f"{within} steps" if outer is not None else self._numbered(named, "~")
        _, store = dist.distributed_c10d._world.pg_map.get(outer or pg, (None, None))
        word = word_in(store, "dlearn/group")
        fact = GroupFact(
            name=name,
            backend=_backend_name(pg),
            rank=pg.rank(),
            size=pg.size(),
            ranks=tuple(ranks),
            default=pg.group_desc == DEFAULT,
            within=within,
            # A store that outlives a group tells the same word again.
            made=self._numbered(f"{word} steps" if outer is not None else word, " ") if word else "",
            dimensions=dimensions_of(about),
        )
        self._emit.fact(fact)
        # A recording that begins late, or on one rank earlier than on the others, numbers as the group itself does.
        done = _calls_made(pg)
        return OwnGroup(
            fact,
            end_by_callback=not fact.backend.startswith("nccl"),  # In torch 2.15 "nccl" is one that is named nccl2.
            on_gpu=fact.backend != "gloo",
            collectives=itertools.count(done + 1),
            p2ps=itertools.count(1),
        )


def _backend_name(pg: ProcessGroup) -> str:
    own = getattr(pg, "backend_name", None)  # Of a Python process group: ring, MPI.
    if own is not None:
        return str(own)
    for device in ("cuda", "cpu"):
        try:
            return str(pg._get_backend(torch.device(device)).name())
        except RuntimeError:
            continue  # This group has no backend for that device.
    return "unknown"


def _calls_made(pg: ProcessGroup) -> int:
    """Count the group's collectives by torch's flight recorder: its own number counts sends too."""
    try:
        if not pg._get_sequence_number_for_group():  # type: ignore[attr-defined]
            return 0
    except RuntimeError:
        return 0  # A backend without a counter.
    entries = json.loads(_dump_fr_trace_json()).get("entries", ())
    numbers = [entry["collective_seq_id"] for entry in entries if entry["process_group"][0] == pg.group_name]
    return int(numbers[-1]) if numbers else 0
