"""What the README's reader has: a script for torchrun that knows nothing of dlearn. Its rank 1 is killed in step 5."""

import os
import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
for step in range(10):
    if step == 5 and dist.get_rank() == 1:
        time.sleep(4)  # a slow batch: by now rank 0 waits for this one's gradients
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 64)).sum().backward()
