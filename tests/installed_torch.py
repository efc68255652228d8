"""What the installed torch has, asked of torch itself: some names are new, and gloo learned some operations late."""

import inspect
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, _dump_fr_trace_json

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Read and not imported: importing it compiles TorchScript, and warns of it.
SCRIPTED_OPTIMIZERS = (
    "_script_local_optimizer_step" in Path(dist.__file__).with_name("optim").joinpath("optimizer.py").read_text()
)
"""Whether RPC's optimizer makes its step by TorchScript, as it does up to torch 2.13, or else by Python."""


def on_two_ranks(call: Callable[[ProcessGroupGloo], torch.Tensor]) -> torch.Tensor | None:
    """What `call` gives on rank 0 of two over gloo, which are threads here; None where gloo refuses."""
    store, timeout = HashStore(), timedelta(seconds=30)
    with ThreadPoolExecutor(2) as ranks:
        given = [ranks.submit(lambda rank: call(ProcessGroupGloo(store, rank, 2, timeout)), rank) for rank in (0, 1)]
    return None if isinstance(given[0].exception(), RuntimeError) else given[0].result()


@cache
def gloo_sends_lists_to_all() -> bool:
    """Whether gloo carries out `dist.all_to_all`: since torch 2.12. (`all_to_all_single` it always has.)"""

    def exchange(gloo: ProcessGroupGloo) -> torch.Tensor:
        gloo.alltoall(got := [torch.zeros(1), torch.zeros(1)], [torch.ones(1), torch.ones(1)]).wait()
        return got[1]

    return on_two_ranks(exchange) is not None


@cache
def gloo_finds_maxima_in_reduce_scatter() -> bool:
    """It adds up, whatever is asked for, in torch 2.8."""

    def maximum(gloo: ProcessGroupGloo) -> torch.Tensor:
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.MAX
        gloo.reduce_scatter([got := torch.zeros(1)], [[torch.ones(1), torch.ones(1)]], options).wait()
        return got

    found = on_two_ranks(maximum)
    return found is not None and found.item() == 1.0


@cache
def gloo_takes_complex_numbers() -> bool:
    """Since torch 2.9."""

    def broadcast(gloo: ProcessGroupGloo) -> torch.Tensor:
        gloo.broadcast([got := torch.zeros(1, dtype=torch.complex64)], dist.BroadcastOptions()).wait()
        return got

    return on_two_ranks(broadcast) is not None


@cache
def flight_recorder_knows_gloo() -> bool:
    """Whether it counts the calls of a group of gloo; from that a recording that begins late has their numbers."""
    gloo = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=10))
    gloo.allreduce([torch.zeros(1)]).wait()
    return "entries" in json.loads(_dump_fr_trace_json())


def own_words(printed: str) -> str:
    """What a program printed by itself. Up to torch 2.10 gloo prints a line for each group, too."""
    return re.sub(r"(\[.+\] +)?\[Gloo\] Rank \d+ is connected to .*\n", "", printed)


def gathers_objects_in_one_tensor() -> bool:
    """Whether `all_gather_object` and the like send by all_gather_single, and no longer by all_gather."""
    return "all_gather_single(" in inspect.getsource(dist.all_gather_object)
