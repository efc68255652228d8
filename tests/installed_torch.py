"""What the installed torch has, asked of torch itself: some names are new, and gloo learned some operations late."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@cache
def gloo_sends_lists_to_all() -> bool:
    """Whether gloo carries out `dist.all_to_all`; `all_to_all_single` it always has."""
    gloo = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=10))
    try:
        gloo.alltoall([torch.zeros(1)], [torch.zeros(1)]).wait()
    except RuntimeError:  # "Backend gloo does not support alltoall", up to torch 2.11.
        return False
    return True


def on_gloo(workloads: Iterable[Callable[[], object]]) -> list[Any]:
    """The cases of a test that runs each of `workloads.truth` on gloo."""
    import pytest  # Not above: ranks import this file, too.

    lacks = pytest.mark.skipif(not gloo_sends_lists_to_all(), reason="gloo of this torch has no all_to_all of lists")
    return [
        pytest.param(each, id=each.__name__, marks=[lacks] if each.__name__ == "lists_to_all" else [])
        for each in workloads
    ]


def gathers_objects_in_one_tensor() -> bool:
    """Whether `all_gather_object` and the like send by all_gather_single, and no longer by all_gather."""
    return "all_gather_single(" in inspect.getsource(dist.all_gather_object)
