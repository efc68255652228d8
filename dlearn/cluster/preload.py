"""What the fork server imports before it forks ranks: everything that a training cell would otherwise wait for.

`torch._dynamo` is the surprise: constructing a DDP model imports it, 4 s in every fresh process.
"""

import os

# More ranks than cores, each with a thread per core, is slow for everybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cloudpickle  # noqa: E402, F401
import torch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401
import torch.nn.parallel  # noqa: E402, F401
import torch.optim  # noqa: E402, F401

import dlearn.cluster.rank  # noqa: E402, F401
import dlearn.recorder  # noqa: E402, F401
