"""What the README's reader has: a server and two trainers over RPC, started by the script itself."""

import argparse
import os
import tempfile

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

NAMES = ("ps", "trainer1", "trainer2")
total = torch.zeros(10)


def add(gradient: torch.Tensor) -> torch.Tensor:
    total.add_(gradient)
    return total


def work(rank: int, meet: str, epochs: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meet}")
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    if rank > 0:
        for _ in range(epochs):
            rpc.rpc_sync("ps", add, args=(torch.ones(10),))
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "meet"), parser.parse_args().epochs), nprocs=len(NAMES))
