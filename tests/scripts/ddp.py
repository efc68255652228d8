"""A script that knows nothing of dlearn: DDP, and a few sends from the first rank to the last."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
for _ in range(50):
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), last)
    elif rank == last:
        dist.recv(torch.ones(1), 0)
print("rank", rank, "is done")
dist.destroy_process_group()
