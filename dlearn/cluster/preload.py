"""What the fork server imports before it forks ranks: everything that a training cell would otherwise wait for.

`torch._dynamo` is the surprise: constructing a DDP model imports it, 4 s in every fresh process.
"""

import gc
import os
import sys
from contextlib import suppress
from multiprocessing import spawn
from pickle import UnpicklingError
from types import TracebackType

# More ranks than cores, each with a thread per core, is slow for everybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cloudpickle  # noqa: F401
import torch
import torch._dynamo
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

import dlearn.cluster.rank
from dlearn.errors import SetupError

with suppress(SetupError):  # A torch that does not fit: each rank says so, where it is told to the user.
    import dlearn.recorder
    from dlearn.hooks.c10d import collectives

    # Once here instead of once in every rank.
    collectives.self_test()

# The last: at the server's end it goes first, and nothing goes after it.
import dlearn.cluster.server_end  # noqa: F401


def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does; but for a rank that was interrupted, or lost its notebook, while it was told what it is."""
    innermost = traceback
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    half_told = innermost is not None and innermost.tb_frame.f_code is spawn._main.__code__
    if not (half_told and isinstance(error, EOFError | UnpicklingError)):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = tell

# What is loaded stays: without this, a rank's first garbage collection would copy all of it into its own memory.
gc.freeze()
