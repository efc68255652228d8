# ---
# jupyter:
#   dlearn:
#     ids: [MP1]
#     minutes: 0.2
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # Send and receive: what does "blocking" wait for?
#
# **Goals.** You will be able to say what a blocking send waits for; repair a deadlock of two sends; say of which
# messages an all-reduce is made.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 30 minutes.
#
# All communication between ranks is built from two calls: one rank *sends* a tensor, another *receives* it. Both exist
# in two forms. `send` and `recv` **block**: they return when they are done. `isend` and `irecv` return at once with a
# `work`, and `work.wait()` blocks.
#
# When is a send done: when the data has left the sender, or when the receiver has it? This decides whether programs
# hang.

# %%
import time

import torch
import torch.distributed as dist

from dlearn import Cluster, draw, explain, lessons, messages


def hello():
    message = torch.zeros(4)
    if dist.get_rank() == 0:
        message += 7
        dist.send(message, dst=1)
    else:
        dist.recv(message, src=0)
    return message.tolist()


run = Cluster(2).run(hello)
print("rank 1 has", run.results[1])
explain(run.trace)

# %% [markdown]
# There is one message, and both of its ends were recorded: it is *observed*. The receiver provides a buffer of the
# right size, and `recv` writes into it.
#
# ## A late receiver
#
# Rank 0 begins to send 4 bytes. Then both ranks meet in a barrier, so the send has begun. Rank 1 sleeps for 0.3 seconds
# and then receives. Four bytes would fit into any buffer on the path.
#
# **Predict first:** how long does rank 0's `wait` take? In the picture, look at the bar of rank 0's send. The hatched
# part is waiting. How much of the bar is hatched?

# %%
my_wait = lessons.predict("send_and_receive.wait", None, choices=("less than 0.1 s", "about 0.3 s"))
[message] = messages(run.trace)


def late_receiver():
    number = torch.zeros(1)
    start = time.monotonic()
    if dist.get_rank() == 0:
        work = dist.isend(number, dst=1)
        begun = time.monotonic()
        dist.barrier()
        work.wait()
        return {"isend returned after": begun - start, "wait returned after": time.monotonic() - start}
    dist.barrier()
    time.sleep(0.3)
    dist.recv(number, src=0)


run = Cluster(2).run(late_receiver)
for what, seconds in run.results[0].items():
    print(f"{what} {seconds * 1000:.1f} ms")
axes = draw.timeline(run.trace)

# %% [markdown]
# Gloo's send is a **rendezvous**: it is done when the receiver has taken the data, however small the message is.
# `isend` only begins the send, and `wait` waits for its end. (MPI differs: it sends small messages at once, *eagerly*.
# The lesson [mpi](mpi.ipynb) finds the limit.)

# %% tags=["MP1", "check"]
[send] = run.trace.where(op="send").events
[barrier], [recv] = (run.trace.where(op=op, rank=1).events for op in ("barrier", "recv"))
assert (message.src, message.dst, message.payload_bytes, message.how) == (0, 1, 16, "observed")
assert run.results[0]["wait returned after"] >= 0.3  # the sleep lies in between,
assert recv.start_ns - barrier.end_ns >= 0.3e9  # and behind the barrier
assert send.start_ns < recv.start_ns < send.end_ns
my_wait and my_wait.against("about 0.3 s")

# %% [markdown]
# ## Both send first
#
# Two ranks want to swap a number. Each sends its own, then receives the other's. **Predict first:** what happens?

# %%
my_swap = lessons.predict("send_and_receive.both send first", None, choices=("they swap", "an error", "a deadlock"))


def swap():
    mine, yours = torch.tensor([dist.get_rank()]), torch.tensor([-1])
    other = 1 - dist.get_rank()
    dist.send(mine, dst=other)
    dist.recv(yours, src=other)
    return yours.item()


stuck = Cluster(2).run(swap, timeout=3, check=False)
print(stuck.error)

# %% [markdown]
# Each rank waits until the other receives, and neither reaches its `recv`: a *deadlock*. In the trace, two sends have
# begun and none has ended.
#
# To repair it, begin the send, receive, and only then wait for the send. (Or let one rank receive first; with more than
# two ranks that is harder to get right.) In the picture, look for the two arrows that cross. Both messages travel at
# the same time: each is sent before the other arrives.


# %%
def swap_well():
    mine, yours = torch.tensor([dist.get_rank()]), torch.tensor([-1])
    other = 1 - dist.get_rank()
    sending = dist.isend(mine, dst=other)
    dist.recv(yours, src=other)
    sending.wait()  # before this, `mine` must not be changed: it may not have been read yet
    return yours.item()


run = Cluster(2).run(swap_well)
print(run.results)
axes = draw.timeline(run.trace)

# %% tags=["MP1", "check"]
assert stuck.results == {}
calls = stuck.trace.where(kind="p2p").events
assert [call.op for call in calls] == ["send", "send"]
assert all(call.end_ns is None for call in calls)
assert "rank 0 and rank 1 wait for each other" in stuck.error.what

first, second = messages(run.trace)
assert run.results == {0: 1, 1: 0}
assert {(message.src, message.dst) for message in (first, second)} == {(0, 1), (1, 0)}
assert first.sent_ns < second.received_ns
assert second.sent_ns < first.received_ns
my_swap and my_swap.against("a deadlock")

# %% [markdown]
# ## Tags
#
# Rank 0 begins two sends to rank 1: the number 10 with tag 1, then 20 with tag 2. Rank 1 asks for tag 2 first.
# **Predict first:** which number does it get first?

# %%
my_first = lessons.predict("send_and_receive.first number", None)


def by_tag():
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([10 * tag]), dst=1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
        return
    first, second = torch.tensor([0]), torch.tensor([0])
    dist.recv(first, src=0, tag=2)
    dist.recv(second, src=0, tag=1)
    return first.item(), second.item()


run = Cluster(2).run(by_tag)
print("first, second:", *run.results[1])
my_first and my_first.against(run.results[1][0])

# %% tags=["check"]
assert run.results[1] == (20, 10)

# %% [markdown]
# A receive takes the message that has its tag. Messages between the same two ranks with the same tag arrive in the
# order in which they were sent.
#
# ## What an all-reduce is made of
#
# An *all-reduce* leaves the sum of all ranks' tensors on every rank. It is built from such messages. Gloo cuts the data
# into n chunks, and each rank passes chunks to only one neighbour: a *ring*. To which rank does each send, and how
# often?


# %%
def add_up():
    dist.all_reduce(torch.ones(12))


run = Cluster(3).run(add_up)
axes = draw.sequence(run.trace)

# %% [markdown]
# Rank r sends eight messages to rank r-1. A ring needs 2 (n-1) = 4 messages of one chunk, and gloo cuts each chunk in
# two, so that one half travels while the other is added up.
#
# These arrows are *derived* from gloo's algorithm. [ring_all_reduce](ring_all_reduce.ipynb) shows that they are right:
# by the bytes that Linux counts, and by a ring in Python whose sums equal gloo's in every bit.

# %% tags=["check"]
assert {(m.src, m.dst) for m in messages(run.trace)} == {(1, 0), (2, 1), (0, 2)}
assert [m.payload_bytes for m in messages(run.trace)] == [8] * 8 * 3

# %% [markdown]
# ## Exercise
#
# The ranks pass a token round, with `send` and `recv` only (no `isend`). Rank 0 sends its tensor to rank 1; each rank
# adds its own tensor to what arrives and passes the sum on; rank 0 receives the whole sum into `tensor`. Which rank
# must not begin with a `recv`? Fill in the function and run the cell. The grader runs it on 2, 3 and 4 ranks, and
# checks its result and its calls.


# %% tags=["exercise"]
def pass_round(tensor):
    return  # replace this by your sends and receives


lessons.check("token", pass_round, student="")  # your name: it chooses the data
