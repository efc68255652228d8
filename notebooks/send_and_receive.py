# ---
# jupyter:
#   dlearn:
#     ids: [MP1, DM1]
#     minutes: 0.3
#     needs: []
#     peak_mb: 1100
# ---

# %% [markdown]
# # Send and receive: what does "blocking" wait for?
#
# **Goals.** You will be able to say what a blocking send waits for; cure a send/send deadlock; build an all-reduce
# from sends.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 30 minutes.
#
# Everything that ranks do together is made of two calls: one rank *sends* a tensor, another *receives* it.
# Both exist in two forms. `send` and `recv` **block**: they return when they are done. `isend` and `irecv`
# return at once with a `work`, and `work.wait()` blocks.
#
# But done with what? A send could be done when the data has left this process, or when the other one has
# it. That decides whether a program runs or hangs.

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
# One message, and this time both of its ends were seen (*observed*). The receiver brings a buffer of the
# right size: `recv` writes into it.

# %% tags=["check"]
[message] = messages(run.trace)

assert run.results[1] == [7.0, 7.0, 7.0, 7.0]
assert (message.src, message.dst, message.payload_bytes, message.how) == (0, 1, 16, "observed")

# %% [markdown]
# ## A late receiver
#
# Rank 0 begins to send 4 bytes. Then both ranks meet in a barrier, so it has surely begun. Then rank 1
# sleeps for 0.3 seconds, and only then it receives.
#
# **Predict first:** how long does rank 0's `wait` take? Four bytes would fit into any buffer on the way ...


# %%
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

# %% [markdown]
# In the picture, look at the bar of rank 0's send. Thin means waiting: how much of the bar is it? And
# when does rank 1 receive?

# %%
axes = draw.timeline(run.trace)

# %% [markdown]
# Gloo's send is a **rendezvous**: it is done when the receiver has taken the data, however small it is.
# `isend` only hands the job over; `wait` pays. (MPI is different: small messages go out at once, *eagerly*,
# into a buffer of the receiver.)

# %% tags=["MP1", "check"]
[send] = run.trace.where(op="send").events
[recv] = run.trace.where(op="recv").events

assert run.results[0]["wait returned after"] >= 0.3  # the sleep lies in between
assert send.start_ns < recv.start_ns < send.end_ns

# %% [markdown]
# ## Both send first
#
# Two ranks want to swap a number. Each sends its own, then receives the other's. **Predict first:** what
# happens?


# %%
def swap():
    mine, yours = torch.tensor([dist.get_rank()]), torch.tensor([-1])
    other = 1 - dist.get_rank()
    dist.send(mine, dst=other)
    dist.recv(yours, src=other)
    return yours.item()


run = Cluster(2).run(swap, timeout=3, check=False)
print(run.error)

# %% [markdown]
# Each rank waits until the other receives, and neither comes to its `recv`: a *deadlock*. In the trace, two
# sends have begun and none has ended.

# %% tags=["MP1", "check"]
assert run.error is not None
assert run.results == {}
calls = run.trace.where(kind="p2p").events
assert [call.op for call in calls] == ["send", "send"]
assert all(call.end_ns is None for call in calls)
assert "rank 0 and rank 1 wait for each other" in run.error.what

# %% [markdown]
# ## The cure
#
# Begin the send, receive, and only then wait for the send. (Or let one rank receive first; with more than
# two ranks that is harder to get right.)


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

# %% [markdown]
# In the picture, look for the crossing: both messages are on their way at the same time, each sent before
# the other has come.

# %%
axes = draw.timeline(run.trace)

# %% tags=["check"]
first, second = messages(run.trace)

assert run.results == {0: 1, 1: 0}
assert {(message.src, message.dst) for message in (first, second)} == {(0, 1), (1, 0)}
assert first.sent_ns < second.received_ns
assert second.sent_ns < first.received_ns

# %% [markdown]
# ## Tags
#
# Rank 0 begins two sends to rank 1, with the tags 1 and 2. Rank 1 asks for tag 2 first. **Predict first:**
# which number does it get first?


# %%
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
print("first, second:", run.results[1])

# %% tags=["check"]
assert run.results[1] == (20, 10)

# %% [markdown]
# A receive takes the message that carries its tag; between the same two ranks and with the same tag, first
# come, first served. What would have happened with the blocking `send` in rank 0?
#
# ## What an all-reduce is made of
#
# Now you can build one. Each of n ranks cuts its data into n chunks. For n-1 steps, each rank passes one
# chunk to its left neighbour, rank r-1, and adds the chunk that comes from the right: then each rank has
# one finished sum. For another n-1 steps the finished chunks go round.
#
# Is this what gloo does? Rounding tells: (a + b) + c and a + (b + c) differ in their last bits. **Predict
# first:** will our ring's sums equal gloo's to the last bit? And those of a ring that turns to the right?


# %%
def ring_all_reduce(to, source, chunks):
    """Sum the chunks over all ranks, in place. They stand in the order in which this rank passes them on."""
    for step in range(len(chunks) - 1):  # pass on a sum, add mine to the next
        spare = torch.empty_like(chunks[step + 1])
        sending = dist.isend(chunks[step], dst=to)
        dist.recv(spare, src=source)
        chunks[step + 1] += spare
        sending.wait()
    for step in range(-1, len(chunks) - 2):  # pass on what is finished
        sending = dist.isend(chunks[step], dst=to)
        dist.recv(chunks[step + 1], src=source)
        sending.wait()


def differences(numbers, direction):
    """How many sums of our ring differ from gloo's. `direction` -1: each rank sends to rank r-1."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ours = torch.randn(numbers)
    gloos = ours.clone()
    pieces = ours.split(numbers // n)
    chunks = [pieces[(rank - direction * (1 + step)) % n] for step in range(n)]
    ring_all_reduce((rank + direction) % n, (rank - direction) % n, chunks)
    dist.all_reduce(gloos)
    return (ours != gloos).sum().item()


def compare(direction, sizes):
    torch.manual_seed(dist.get_rank())
    return [differences(numbers, direction) for numbers in sizes]


SIZES = [8, 1_000, 2**18, 7 * 2**20]  # numbers of 4 bytes: 32 B, 4 kB, 1 MiB, 28 MiB
to_the_left = Cluster(4).run(compare, -1, SIZES)
to_the_right = Cluster(4).run(compare, +1, SIZES)
print("numbers that were summed:           ", SIZES)
print("sums that differ, ring to the left: ", to_the_left.results[0])
print("sums that differ, ring to the right:", to_the_right.results[0])

# %% [markdown]
# To the left, our ring made of sends and receives agrees with gloo in every bit, from 32 bytes to 28 MiB.
# To the right, many sums differ. So gloo's all-reduce is a ring at all these sizes, and it turns towards
# rank r-1. (Eight numbers alone would prove little: their sums can agree by chance.)

# %% tags=["DM1", "check"]
assert all(found == [0, 0, 0, 0] for found in to_the_left.results.values())
assert all(count > 0 for count in to_the_right.results[0][1:])

# %% [markdown]
# Here is our ring with three ranks and 12 numbers, so a chunk has 16 bytes. Whom does each rank send to,
# and how many times?

# %%
run = Cluster(3).run(compare, -1, [12])
axes = draw.sequence(run.trace.where(kind="p2p"))

# %% [markdown]
# Four times, 2 (n-1), always to the rank before it. Gloo cuts each chunk in two, so that one half travels
# while the other is added up: twice as many messages of half the size.

# %% tags=["check"]
ours = messages(run.trace.where(kind="p2p"))
gloos = messages(run.trace.where(op="all_reduce"))

assert run.results == {0: [0], 1: [0], 2: [0]}
assert [message.payload_bytes for message in ours] == [16] * 4 * 3
assert {(message.src, message.dst) for message in [*ours, *gloos]} == {(1, 0), (2, 1), (0, 2)}
assert [message.payload_bytes for message in gloos] == [8] * 8 * 3

# %% [markdown]
# ## Exercise
#
# The ranks pass a token round, using `send` and `recv` only (no `isend`): rank 0 sends its tensor to rank 1, each rank
# adds its own tensor to what comes and passes the sum on, and rank 0 gets the whole sum back into `tensor`. Which rank
# must not begin with a `recv`? Fill in the function and run the cell: it is tried on 2, 3 and 4 ranks, and graded by
# its result and by its calls.


# %% tags=["exercise"]
def pass_round(tensor):
    return  # replace this by your sends and receives


lessons.check("token", pass_round)
