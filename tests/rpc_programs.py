"""Programs of different kinds, in which torch's C++ sends all it can send by itself."""

import contextlib
import gc
import threading
import warnings

import rpc_jobs
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

WORKERS = ("ps", "trainer1", "trainer2")


class Counter:
    def __init__(self):
        self.value = torch.zeros(4)

    def add(self, amount):
        self.value += amount
        return self.value

    @rpc.functions.async_execution
    def add_later(self, amount):
        future = torch.futures.Future()
        future.set_result(self.value + amount)
        return future


def double(x):
    return x * 2


def fail(text):
    raise ValueError(text)


def through(other, x):
    """Called on one worker, asks the next."""
    return rpc.rpc_sync(other, double, (x,)) + 1


def value_of(rref):
    return rref.to_here()


def hold(rref):
    """Keep a copy of somebody else's reference for a moment."""
    copies = [rref for _ in range(2)]
    return len(copies)


@rpc.functions.async_execution
def later(other, x):
    return rpc.rpc_async(other, double, (x,)).then(lambda future: future.wait() + 1)


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Of TorchScript, which RPC still takes.
    scripted = torch.jit.script(add_one)


def every_way_to_call():
    x = torch.ones(4)
    for _ in range(4):
        rpc.rpc_sync("ps", double, (x,))
        rpc.rpc_async("trainer2", double, (x,)).wait()
        rpc.rpc_sync("ps", torch.add, (x, 1))
        rpc.remote("ps", torch.add, (x, 1)).to_here()
        rpc.rpc_sync("ps", scripted, (x,))
        rpc.remote("trainer2", scripted, (x,)).to_here()
        rpc.rpc_sync("trainer1", double, (x,))
        rpc.rpc_sync("ps", later, ("trainer2", x))
        rpc.rpc_sync("trainer2", through, ("ps", x))
        with contextlib.suppress(ValueError):
            rpc.rpc_sync("ps", fail, ("no",))
        counter = rpc.remote("ps", Counter)
        counter.rpc_sync().add(x)
        counter.rpc_async().add(x).wait()
        counter.remote().add(x).to_here()
        counter.rpc_sync().add_later(x)


def references_from_hand_to_hand():
    for _ in range(8):
        counter = rpc.remote("ps", Counter)
        rpc.rpc_sync("trainer2", hold, (counter,))
        rpc.rpc_sync("ps", hold, (counter,))
        rpc.rpc_sync("trainer2", value_of, (rpc.remote("ps", torch.add, (torch.ones(2), 1)),))
        mine = rpc.RRef(torch.ones(3))
        rpc.rpc_sync("ps", value_of, (mine,))
        rpc.rpc_sync("trainer2", value_of, (mine,))


def references_that_end_at_any_time():
    """Copies are deleted while other messages are under way, by other threads."""

    def work(seed):
        kept = []
        for i in range(12):
            kept.append(rpc.remote("ps" if (seed + i) % 2 else "trainer2", Counter))
            rpc.rpc_async("ps", hold, (kept[-1],)).wait()
            if i % 3 == seed % 3:
                kept.clear()
                gc.collect()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def nested_in_contexts():
    """Three workers in a row, forward and backward."""
    first, second = rpc.remote("ps", rpc_jobs.Net), rpc.remote("trainer2", nn.Linear, (16, 4))
    for _ in range(5):
        with dist_autograd.context() as context:
            x = torch.randn(2, 3, 16, 16, requires_grad=True)
            hidden = first.remote().forward(x)
            out = second.rpc_sync().forward(hidden.to_here())
            more = rpc.rpc_sync("ps", torch.add, (out, 1))
            dist_autograd.backward(context, [more.sum()])


def sparse_embeddings():
    table = rpc.remote("ps", nn.EmbeddingBag, (1000, 8), {"sparse": True})
    indices, offsets = torch.arange(16), torch.arange(0, 16, 4)
    for _ in range(5):
        with dist_autograd.context() as context:
            out = table.rpc_sync().forward(indices, offsets)
            dist_autograd.backward(context, [out.sum()])
    values = torch.sparse_coo_tensor(torch.arange(4)[None], torch.ones(4, 8), (1000, 8))
    for _ in range(5):
        rpc.rpc_sync("ps", double, (values,))
        rpc.rpc_sync("trainer2", torch.add, (torch.ones(4, requires_grad=True), 1))


PROGRAMS = {
    "parameter server": {"trainer1": rpc_jobs.train, "trainer2": rpc_jobs.train},
    "every way to call": {"trainer1": every_way_to_call},
    "references from hand to hand": {"trainer1": references_from_hand_to_hand},
    "references that end at any time": {"trainer1": references_that_end_at_any_time},
    "nested in contexts": {"trainer1": nested_in_contexts},
    "sparse embeddings": {"trainer1": sparse_embeddings},
}
