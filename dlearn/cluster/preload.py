"""What the fork server imports before it forks ranks: everything that a training cell would otherwise wait for.

`torch._dynamo` is the surprise: constructing a DDP model imports it, 4 s in every fresh process.
"""

import atexit
import gc
import os
import sys
import warnings
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
from dlearn.cluster import descendants
from dlearn.errors import SetupError

with suppress(SetupError):  # A torch that does not fit: each rank says so, where it is told to the user.
    import dlearn.recorder  # noqa: F401
    from dlearn.hooks.c10d import collectives

    # Once here instead of once in every rank.
    collectives.self_test()

# What ranks leave behind that are gone comes here; multiprocessing's server sees it off, and is surprised.
descendants.adopt()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does; but for a rank that was interrupted, or lost its notebook, while it was told what it is."""
    innermost = traceback
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    half_told = innermost is not None and innermost.tb_frame.f_code is spawn._main.__code__
    if not (half_told and isinstance(error, EOFError | UnpicklingError)):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = tell

# The server has nothing to tidy up when it ends. (triton, which torch 2.15 brings, would list there what it leaks.)
atexit.register(os._exit, 0)

# What is loaded stays: without this, a rank's first garbage collection would copy all of it into its own memory.
gc.freeze()
