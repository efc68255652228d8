"""Process groups that are not what their members take them for.

torch names a new group by a count. Where not every rank calls new_group for every group, two groups
have one name and meet in one store: whom a member connects to is chance.
"""

from collections import defaultdict

import msgspec

from dlearn.join.matching import join_groups
from dlearn.join.selection import once
from dlearn.join.wire import peers_by_group
from dlearn.trace import Trace

Ranks = tuple[int, ...]


class GroupClash(msgspec.Struct, frozen=True):
    """Groups of one name that met in one store, by their `members`, the ranks that made them.

    In `crossed` the connection of the first rank goes to the second, no member of its group.
    """

    name: str
    members: tuple[Ranks, ...]
    crossed: tuple[tuple[int, int], ...]


@once
def group_clashes(trace: Trace) -> tuple[GroupClash, ...]:
    """Find groups that share a name and the word in their store, and have different members."""
    groups, peers = join_groups(trace.processes), peers_by_group(trace)
    made: dict[tuple[str, str], dict[Ranks, None]] = defaultdict(dict)
    crossed: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for process in trace.processes:
        for fact in process.groups.values():
            key, members = (fact.name, fact.made), groups[process.rank, fact.name].members
            if fact.made and fact.ranks:
                made[key][members] = None
                others = peers[process.rank, fact.name].difference(members)
                crossed[key] += [(process.rank, other) for other in sorted(others)]
    clashes = []
    for key, members_of in made.items():
        if len(members_of) > 1:
            clashes.append(GroupClash(key[0], tuple(members_of), tuple(crossed[key])))
    return tuple(clashes)
