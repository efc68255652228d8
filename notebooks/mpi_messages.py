# ---
# jupyter:
#   dlearn:
#     ids: [MP1, MP2, MP7, Q13]
#     minutes: 0.5
#     needs: [mpi]
#     peak_mb: 600
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The messages of an MPI program
#
# **Goals.** You will be able to record a Python MPI program; find the eager limit; say which program hangs above it.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 35 minutes.
#
# MPI programs send from rank to rank, as torch does: but how do I *see* what they send? And is a `Send` of MPI
# done when a `send` of torch is? Here are real ranks of a real MPI job, started from a cell by
# `backend="mpi"` (`pip install mpi4py mpich`; nothing is compiled). The programs are mpi4py's, as they are.
#
# ## Whom does a wildcard take?
#
# Rank 0 takes what comes, from `ANY_SOURCE` and with `ANY_TAG`. **Predict first:** the program does not say
# from whom each message is. Can a trace say it?

# %%
from dlearn import Cluster, draw, explain, lessons, messages, operations, play


def report():
    from mpi4py import MPI

    comm, status = MPI.COMM_WORLD, MPI.Status()
    if comm.rank > 0:
        comm.send({"rank": comm.rank}, dest=0, tag=10)  # an object: mpi4py pickles it
        comm.Send(bytearray(1000 * comm.rank), dest=0, tag=20)  # a buffer, as it is
        return None
    came = []
    for _ in range(comm.size - 1):
        comm.recv(source=MPI.ANY_SOURCE, tag=10, status=status)
        first = status.Get_source(), status.Get_tag()
        comm.Recv(bytearray(5000), source=first[0], tag=MPI.ANY_TAG, status=status)
        came += [first, (status.Get_source(), status.Get_tag())]
    return came


run = Cluster(3, backend="mpi", init=False).run(report)
print("rank 0 has seen (source, tag):", *run.results[0])

# %% [markdown]
# Look at the receiving end of each arrow. Which rank does it come from, with which tag, and how large is it?
# (The object's bytes are those of its pickle.)

# %%
axes = draw.sequence(run.trace)

# %% tags=["Q13", "check"]
observed = messages(run.trace)
assert {message.how for message in observed} == {"observed"}
sizes = [(m.src, m.dst, m.payload_bytes) for m in observed if "object" not in m.what]
assert sorted(sizes) == [(1, 0, 1000), (2, 0, 2000)]

# What MPI told the program, and the trace's receives: the same sources and tags, in the same order.
receives = run.trace.where(op="recv", rank=0).events
assert [(call.peer, call.tag) for call in receives] == run.results[0]

# %% [markdown]
# One by one, in the order of *sending* (arrow keys). Rank 0 took them in the order printed above: is it the same?

# %%
play.player(run.trace)

# %% [markdown]
# A receive from any source knows its source only when the message has arrived, from MPI's `Status`. The trace takes it
# from there, too. Which worker came first may differ from run to run; that each one's messages come in the order of
# their sending is promised by MPI.
#
# ## What does "blocking" wait for?
#
# In torch's gloo a `send` returns when the receiver has taken the data, however small (lesson
# *send_and_receive*). MPI promises less: `Send` returns when the buffer may be used *again*. **Predict first:**
# rank 1 receives late. When does rank 0's `Send` return, of 1,000 B, and of 1,000,000 B?

# %%
import time
from functools import partial


def late_receiver(sizes, late):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for size in sizes:
        data = bytearray(size)
        comm.Barrier()
        if comm.rank == 0:
            comm.Send(data, dest=1)
        else:
            time.sleep(late)
            comm.Recv(data, source=0)


run = Cluster(2, backend="mpi", init=False).run(late_receiver, [1_000, 1_000_000], 0.1)

# %% [markdown]
# Look at rank 0's two sends, and at the arrows. One is over at once, the other is a long thin bar: what does thin
# mean?

# %%
axes = draw.timeline(run.trace.where(kind="p2p"))

# %%
small, large = run.trace.where(op="send").events
small_recv, large_recv = run.trace.where(op="recv").events
for name, call in (("1,000 B", small), ("1,000,000 B", large)):
    print(f"Send of {name} returned after {(call.end_ns - call.start_ns) / 1e6:.2f} ms")

# %% tags=["MP1", "check"]
assert small.end_ns < small_recv.start_ns  # done before its receive was called
assert large.end_ns > large_recv.start_ns  # waited for the receiver

# %% [markdown]
# The small message went out at once, *eagerly*: MPI keeps it somewhere until it is asked for. The large one
# waited (*rendezvous*), as gloo's always does.
#
# ## Where is the limit?
#
# No page of a manual has to be believed: we look for it. A `Send` that returned while the receiver still slept
# was eager; that is a proof. (One that did not might have been held up by a busy machine: so each size has up
# to three tries.) Halving the interval 20 times finds the byte.


# %%
def is_eager(ranks, size):
    """Whether a Send of that size returned before its receive was posted, by the trace's own times."""
    for _ in range(3):
        trace = ranks.run(late_receiver, [size], 0.02).trace
        [send], [recv] = trace.where(op="send").events, trace.where(op="recv").events
        if send.end_ns < recv.start_ns:
            return True
    return False


with Cluster(2, backend="mpi", init=False) as ranks:
    eager, waits = 1, 1 << 20
    assert is_eager(ranks, eager)
    assert not is_eager(ranks, waits)
    while waits - eager > 1:
        middle = (eager + waits) // 2
        if is_eager(ranks, middle):
            eager = middle
        else:
            waits = middle
print(f"On this machine a Send of {eager:,} B is eager; one of {waits:,} B waits for its receiver.")

# %% [markdown]
# That number belongs to this MPI (MPICH from pip), its settings and the way between these two ranks: on another
# machine it is another. A program must not count on it. Here is why.
#
# ## Both send first
#
# Two ranks swap their data, each with `Send` first. **Predict first:** does it hang?


# %%
def swap(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    other = 1 - comm.rank
    comm.Send(mine, dest=other)
    comm.Recv(yours, source=other)


below = Cluster(2, backend="mpi", init=False).run(swap, eager, timeout=20)
print(f"{eager:,} B: {len(messages(below.trace))} messages")
above = Cluster(2, backend="mpi", init=False).run(swap, waits, timeout=3, check=False)
print(f"{waits:,} B: {above.error.what}")

# %% tags=["check"]
assert len(messages(below.trace)) == 2
assert above.results == {}
assert "rank 0 and rank 1 wait for each other: rank 0 in send" in above.error.what

# %% [markdown]
# One byte more, and a program that has worked for years stands still. It was wrong before: MPI never promised
# to keep the message. `Ssend` never does: a program that works with it works at every size.
#
# ## Two cures
#
# `Sendrecv` does both at once. Or `Isend`: it begins and returns a request; after `Wait` the buffer is yours
# again. **Predict first:** the second exchange, with `Isend`: does its order of calls matter?


# %%
def swap_well(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    other = 1 - comm.rank
    comm.Sendrecv(mine, other, recvbuf=yours, source=other)
    sending = comm.Isend(mine, dest=other)
    comm.Recv(yours, source=other)
    sending.Wait()


run = Cluster(2, backend="mpi", init=False).run(swap_well, 1_000_000)
axes = draw.timeline(run.trace)

# %% [markdown]
# The bar of an `Isend` goes from its call to the end of its `Wait`: the receive lies inside it, so none of the
# two had to be first.

# %% tags=["check"]
assert [(m.src, m.dst, m.payload_bytes) for m in messages(run.trace)].count((0, 1, 1_000_000)) == 2
assert [(m.src, m.dst, m.payload_bytes) for m in messages(run.trace)].count((1, 0, 1_000_000)) == 2
for rank in (0, 1):
    blocking, begun = run.trace.where(op="send", rank=rank).events
    received = run.trace.where(op="recv", rank=rank).events[1]
    assert (blocking.ended_by, begun.ended_by) == ("return", "wait")
    assert begun.start_ns < received.start_ns < received.end_ns < begun.end_ns

# %% [markdown]
# ## Collectives: who gives, who gets?
#
# In a collective all ranks of a communicator take part. Each of these moves blocks of 400 B. **Predict
# first:** for n ranks, how much does rank 0 give, and how much does it get? And the others?


# %%
def all_of_them():
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    root, block, blocks = comm.rank == 0, np.zeros(100, "f"), np.zeros(100 * comm.size, "f")
    comm.Barrier()
    comm.Bcast(block)
    comm.Scatter(blocks if root else None, block)
    comm.Gather(block, blocks if root else None)
    comm.Allgather(block, blocks)
    comm.Alltoall(blocks.copy(), blocks)
    comm.Reduce(block.copy(), block if root else None)
    comm.Allreduce(block.copy(), block)
    comm.Reduce_scatter_block(blocks, block)


def gives_and_gets(call):
    return tuple(sum(tensor.payload_bytes for tensor in side) for side in (call.inputs, call.outputs))


runs = {n: Cluster(n, backend="mpi", init=False).run(all_of_them) for n in (2, 3, 4)}
table = {n: {each.op: [gives_and_gets(end) for end in each.ends] for each in operations(runs[n].trace)} for n in runs}

print("                gives -> gets, in blocks")
print("                rank 0 of 2, 3, 4              any other rank")
for op in table[2]:
    first, other = (
        [f"{ends[r][0] // 400}->{ends[r][1] // 400}" for ends in (table[n][op] for n in runs)] for r in (0, 1)
    )
    print(f"{op:15} {'   '.join(first):30} {'   '.join(other)}")

# %% tags=["MP2", "check"]
for n, found in table.items():
    b, w = 400, 400 * n  # a block, and one for each rank
    others = n - 1
    assert found["barrier"] == [(0, 0)] * n
    assert found["broadcast"] == [(b, 0)] + [(0, b)] * others
    assert found["scatter"] == [(w, b)] + [(0, b)] * others
    assert found["gather"] == [(b, w)] + [(b, 0)] * others
    assert found["all_gather"] == [(b, w)] * n
    assert found["all_to_all"] == [(w, w)] * n
    assert found["reduce"] == [(b, b)] + [(b, 0)] * others
    assert found["all_reduce"] == [(b, b)] * n
    assert found["reduce_scatter"] == [(w, b)] * n

# %% [markdown]
# This is what the program hands over and gets back. **Which messages MPI sends for it is not seen**: its library
# chooses an algorithm, by size and number of ranks, and does not tell. So the trace has no arrows for it, and
# says so. (Gloo's algorithms are fixed, and the kernel's counters confirm them: lesson *collectives*.)

# %%
print(messages(runs[3].trace))

# %% tags=["check"]
assert len(messages(runs[3].trace)) == 0
assert {reason for _, reason in messages(runs[3].trace).unexplained} == {"MPI's library chooses how, and does not say"}

# %% [markdown]
# ## PyTorch over MPI
#
# `init_process_group("mpi")` says: build PyTorch from source. That took one author four days. But a process
# group can be written in Python, over mpi4py: `backend="mpi"` has one, so DDP runs over MPI in one cell.
# **Predict first:** are its gradients those of gloo?

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)))
    torch.manual_seed(1 + dist.get_rank())  # other data on each rank
    model(torch.randn(8, 20)).square().mean().backward()
    return dist.get_backend(), [parameter.grad for parameter in model.parameters()]


over_mpi = Cluster(3, backend="mpi").run(train)
over_gloo = Cluster(3).run(train)
axes = draw.timeline(over_mpi.trace)

# %% [markdown]
# One bucket, one all-reduce of all gradients: DDP asks for the same. What is different below is the sums' order.

# %%
[(mpi, ours), (gloo, theirs)] = (each.results[0] for each in (over_mpi, over_gloo))
largest = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
print(f"{mpi} and {gloo}: the largest difference of two gradients is {largest:.1e}")
print(explain(over_mpi.trace).sentences[-2])

# %% tags=["MP7", "check"]
assert not dist.is_mpi_available()
assert (mpi, gloo) == ("mpi4py", "gloo")
assert all(torch.allclose(a, b, atol=1e-6, rtol=0) for a, b in zip(ours, theirs, strict=True))
gradients = [
    [each.payload_bytes for each in run.trace.where(op="all_reduce", rank=0).events[0].inputs]
    for run in (over_mpi, over_gloo)
]
assert gradients == [[785 * 4]] * 2  # 20 * 30 + 30 + 30 * 5 + 5 numbers

# %% [markdown]
# ## In a program of your own
#
# ```python
# import dlearn
#
# with dlearn.record("traces/mpi"):
#     from mpi4py import MPI
#
#     MPI.COMM_WORLD.send("hello", dest=1)
# ```
#
# started by `mpiexec -n 3 python -m mpi4py program.py`. What is taken from `MPI` inside the recording is seen;
# a `COMM_WORLD` that was imported by name before is not. Then `Trace.load("traces/mpi")`, anywhere, without MPI.
#
# ## Exercise
#
# Three ranks pass a message round, each with `Send` to the right, then `Recv` from the left, of `waits` bytes: a
# circle in which all wait. Change *one* rank's order, so that it works at every size, without `Isend` and
# `Sendrecv`. Run the cell to see whether it does.


# %% tags=["exercise"]
def pass_round(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Send(mine, dest=right)
    comm.Recv(yours, source=left)


def first_calls(run):
    """What each rank calls first if the run ends, else how it hangs."""
    calls = [run.trace.where(kind="p2p", rank=rank).events[:1] for rank in range(3)]
    return run.error.what if run.error else [call.op for each in calls for call in each]


run = Cluster(3, backend="mpi", init=False).run(pass_round, waits, timeout=4, check=False)
print(run.error.what if run.error else messages(run.trace))
lessons.answer("mpi_messages.pass_round", first_calls(run))


# %% tags=["answer"]
def rank_0_receives_first(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    send = partial(comm.Send, mine, dest=(comm.rank + 1) % comm.size)
    receive = partial(comm.Recv, yours, source=(comm.rank - 1) % comm.size)
    for act in (send, receive) if comm.rank else (receive, send):
        act()


cured = Cluster(3, backend="mpi", init=False).run(rank_0_receives_first, waits, timeout=20)
assert "wait in a circle" in run.error.what
assert {(m.src, m.dst) for m in messages(cured.trace)} == {(0, 1), (1, 2), (2, 0)}
assert lessons.answer("mpi_messages.pass_round", first_calls(cured)).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
