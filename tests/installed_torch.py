"""What the installed torch has: some names are new, and gloo learned some operations late."""

import json
import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from packaging.version import Version
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, _dump_fr_trace_json

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
gather_several = getattr(functional, "all_gather_single_coalesced", functional.all_gather_into_tensor_coalesced)
scatter_several = getattr(functional, "reduce_scatter_single_coalesced", functional.reduce_scatter_tensor_coalesced)

# Read and not imported: importing it compiles TorchScript, and warns of it.
SCRIPTED_OPTIMIZERS = (
    "_script_local_optimizer_step" in Path(dist.__file__).with_name("optim").joinpath("optimizer.py").read_text()
)
"""Whether RPC's optimizer makes its step by TorchScript, as it does up to torch 2.13, or else by Python."""


NEW_GLOO = Version(torch.__version__).release >= (2, 12)
"""Whether gloo is known to carry out `dist.all_to_all`, complex numbers and maxima in `reduce_scatter`: it learned
them one by one after torch 2.8. (`all_to_all_single` it always has.)"""


def flight_recorder_knows_gloo() -> bool:
    """Whether it counts the calls of a group of gloo; from that a recording that begins late has their numbers."""
    gloo = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=10))
    gloo.allreduce([torch.zeros(1)]).wait()
    return "entries" in json.loads(_dump_fr_trace_json())


def own_words(printed: str) -> str:
    """What a program printed by itself. Up to torch 2.10 gloo prints a line for each group, too."""
    return re.sub(r"(\[.+\] +)?\[Gloo\] Rank \d+ is connected to .*\n", "", printed)
