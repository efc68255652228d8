"""Who asks the job's TCPStore for what: the traffic of a rendezvous. `dlearn.record(..., sources=["tcp_store"])`.

Seen: each request that Python makes of a TCPStore, through a PrefixStore or not, and those by which gloo's C++ finds
its peers. Sizes are those of keys and values. Not seen: what a TCPStore says to its server when it is made, requests
of other C++ (NCCL, RPC's agent), and how the store frames what it sends.
"""

import sys
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from dlearn.events.source import Emit, Kind, ServiceCall, Source, Undo, byte_strings
from dlearn.trace import Trace

ONE_WAY = ("set", "append", "multi_set", "queue_push")
REQUESTS = (*ONE_WAY, "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys", "multi_get", "queue_pop")


class StoreRequest(ServiceCall, tag="store request", frozen=True, kw_only=True):
    """A request of the store at `address`, made by "Python", "gloo" or "dlearn", the recorder itself. `about` is its
    keys, with all their prefixes; `tensors` are keys and values. `hosted`: this process listens at that address."""

    address: str
    by: str
    hosted: bool


def hosts(trace: Trace) -> dict[tuple[int, int], int]:
    """Find who hosts the store of each request: the rank that was seen to listen at its address."""
    requests = trace.of(StoreRequest)
    listening = {each.address: each.rank for each in requests if each.hosted}
    return {(each.rank, each.number): listening[each.address] for each in requests if each.address in listening}


def install(emit: Emit) -> Undo:
    """Wrap the methods of torch's stores, and give gloo a store that passes its requests on, until undone."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

    from dlearn.hooks.callers import caller
    from dlearn.hooks.network.clock import innermost
    from dlearn.hooks.network.sockets import listens
    from dlearn.hooks.patches import Patches, reported

    patches, listens_here = Patches(), cache(listens)
    prefixes: WeakKeyDictionary[Store, str] = WeakKeyDictionary()
    passing: WeakKeyDictionary[Store, Any] = WeakKeyDictionary()  # What gloo was given, as long as its group lives.

    def prefix_of(store: Store) -> str:
        return prefixes.get(store, "?/" if isinstance(store, PrefixStore) else "")

    def begins(op: str, by: str, store: Any, *args: Any, **_: Any) -> int | None:
        given = args[0] if args and isinstance(args[0], list) else args[:1]
        keys = [prefix_of(store) + key for key in given]
        store = innermost(store)
        if not isinstance(store, TCPStore):
            return None
        made_by = caller(sys._getframe())
        return emit.event(
            StoreRequest, op=f"store {op}", about=", ".join(keys), tensors=byte_strings([*keys, *args[1:]]),
            one_way=op in ONE_WAY, address=f"{store.host} {store.port}", hosted=listens_here(store.port),
            by=by if "dlearn/" not in "".join(keys) else "dlearn", phase=made_by.phase, site=made_by.site,
        )  # fmt: skip

    def watched(op: str, by: str, ask: Any) -> Any:
        request = reported(ask, emit, partial(begins, op, by))
        # Gloo asks the store that it was given, which passes it on. (Only a function becomes a method.)
        return lambda store, *args, **kwargs: request(getattr(store, "passes_to", store), *args, **kwargs)

    def prefixed(_: None, made: Store, prefix: str, store: Store) -> None:
        prefixes[made] = f"{prefix_of(store)}{prefix}/"

    def make_gloo(make: Any) -> Any:
        def __init__(self: Any, store: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(store, PrefixStore):
                passes = passing[store.underlying_store] = Passes()
                passes.passes_to, store = store, passes
            make(self, store, *args, **kwargs)

        return __init__

    asked = {op: watched(op, "gloo", Store.__dict__[op]) for op in REQUESTS if op in Store.__dict__}
    asked["has_extended_api"] = lambda self: self.passes_to.has_extended_api()
    Passes: Any = type("Passes", (Store,), asked)
    for op in asked.keys() & set(REQUESTS):
        patches.replace(Store, op, partial(watched, op, "Python"))
    patches.around(emit, PrefixStore, "__init__", after=prefixed)
    patches.replace(ProcessGroupGloo, "__init__", make_gloo)
    return patches.close


SOURCE = Source("tcp_store", install, (Kind(StoreRequest, label="store", color="#B07AA1"),), hosts)
