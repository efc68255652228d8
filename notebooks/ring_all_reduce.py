# ---
# jupyter:
#   dlearn:
#     ids: [DM1, DM2, DM3]
#     minutes: 0.2
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # The ring all-reduce, chunk by chunk
#
# **Goals.** You will be able to follow each chunk through a ring; derive 2 (n-1)/n; write a ring that passes by its
# result and by its traffic.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 35 minutes.
#
# Four ranks have four numbers each, and every rank needs the four sums. In a *ring*, each rank only ever sends
# to one neighbour. **Which chunk travels when, which way round, and how many bytes is it?** Here you watch one,
# then you write your own, and its traffic is graded.

# %%
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, messages, play, span
from dlearn.analysis import reconcile, traffic
from dlearn.collectives import ring
from dlearn.course.catalogue import EXERCISES
from dlearn.lessons import digits, models

# %% [markdown]
# ## Six steps
#
# `dlearn.collectives.ring` is an all-reduce in readable Python. Rank r begins with 1, 10, 100 or 1000 in all of
# its four chunks, so that a number shows whose shares are in it: 1110 has those of ranks 1, 2 and 3.
#
# **Predict first:** in how many steps does every rank have 1111 everywhere? Write your number instead of `None`: it is
# kept in a file beside this notebook, and compared below.

# %%
my_steps = lessons.predict("ring.steps", None)
my_steps

# %%
N = 4
CHUNK = 300  # numbers in a chunk


def watched():
    rank = dist.get_rank()
    data = torch.full((N * CHUNK,), float(10**rank))
    ring.all_reduce(data)
    return data.unique().tolist()


run = Cluster(N).run(watched)
sent = {}
for message in messages(run.trace):
    chunk = message.offset_bytes // (4 * CHUNK)  # which part of the whole it carries; a number has 4 bytes
    sent.setdefault(message.step, {})[message.src] = (chunk, message.dst, message.payload_bytes)

for step in sorted(sent):
    told = ", ".join(f"{src} gives {dst} chunk {chunk}" for src, (chunk, dst, _) in sorted(sent[step].items()))
    print(f"step {step}: {told}")
if my_steps:
    print(my_steps.against(len(sent)))

# %% [markdown]
# Every rank sends one chunk in every step, always to the same neighbour. What happens to the numbers? The cell
# below replays the recorded messages: in the first three steps a chunk that comes is *added*, in the last three
# it *replaces* what was there.
#
# Follow one chunk: chunk 0 starts at rank 3, and grows with each rank it visits.

# %%
held = [[10**rank] * N for rank in range(N)]  # held[rank][chunk]


def show(title):
    print(f"{title:16}", "   ".join(" ".join(f"{value:>4}" for value in chunks) for chunks in held))


print(" " * 16, "   ".join(f"{f'rank {rank}':<19}" for rank in range(N)))
show("at first")
for step in sorted(sent):
    coming = {(dst, chunk): held[src][chunk] for src, (chunk, dst, _) in sent[step].items()}
    for (rank, chunk), value in coming.items():
        held[rank][chunk] = held[rank][chunk] + value if step < N - 1 else value
    show(f"step {step}: {'added' if step < N - 1 else 'replaced'}")

# %% [markdown]
# After three steps each rank has *one* complete sum, and it is that of its own number: that half alone is a
# **reduce-scatter**. The other half hands the complete sums round: an **all-gather**.
#
# 2 (n-1) = 6 steps, and in each of them a rank sends one n-th of the data: 2 (n-1)/n · S = 1.5 S.

# %% tags=["check"]
S = N * CHUNK * 4
assert run.results == {rank: [1111.0] for rank in range(N)}
assert held == [[1111] * N for _ in range(N)]
assert sorted(sent) == list(range(2 * (N - 1)))
assert all(len(step) == N for step in sent.values())
assert all(size == S / N for step in sent.values() for _, _, size in step.values())
assert all(traffic(run.trace).bytes_from(rank=rank) == 2 * (N - 1) / N * S for rank in range(N))

# %% [markdown]
# In the picture, read one row after the other: which way do the arrows go? (The one that
# leaves the picture at one side and comes in at the other closes the ring.)

# %%
axes = draw.sequence(run.trace)

# %% [markdown]
# Now go through it, step by step, with the arrow keys. In each box are the four chunks of a rank, and in each of them a
# colour for each rank whose share it holds so far. Follow one chunk: on which rank is it complete, and after how many
# steps?

# %%
player = play.player(run.trace)
player

# %% tags=["check"]
complete = [number for number, step in enumerate(player.walk.steps, 1) if "the whole sum" in step.sentence]
assert len(player.walk.steps) == 2 * (N - 1) * N
assert len(complete) == (N - 1) * N + N  # each chunk is completed once, and then sent N - 1 times

# %% [markdown]
# ## One rank runs ahead
#
# Each step is a send and a receive, and here you may hold them: with `hold=True` each waits until you let it go on.
# **Predict first:** you let only rank 0's calls through. In which of its six steps does it stop?

# %%
held = Cluster(N, hold=True).run(watched)
held.release(0, 2)  # the send and the receive of its first step
held

# %%
print(held.ranks)
print(f"{len(held.waiting)} calls at the gate: of ranks", sorted({call.rank for call in held.waiting}))

# %% [markdown]
# In the first: its chunk is on the way, but what it is to add comes from rank 1, whose send waits at the gate. So
# no rank is ever more than a step ahead of the neighbour that feeds it. Let them all go, and the sum is the same:

# %% tags=["check"]
assert {call.rank for call in held.waiting} == {1, 2, 3}
assert held.ranks[0].startswith("in ")
assert held.free().join(60).results == run.results

# %% [markdown]
# ## Left, not right
#
# The arrows go from rank r to rank r-1, to the *left*, because gloo's own all-reduce turns this way. Its messages
# cannot be seen from Python, but the kernel counts the bytes of each connection. So we predict every pair of ranks with
# a ring to the left, and compare.
#
# **Predict first:** four ranks share 8 bytes, two numbers. Is that a ring, too?

# %%
SIZES = [8, 1_000, 2**20, 25 * 2**20]  # bytes


def gloos():
    for size in SIZES:
        dist.barrier()
        with span(f"{size:,} B"):
            dist.all_reduce(torch.ones(size // 4))


run = Cluster(N, measure="phase").run(gloos)
wire = reconcile(run.trace)
for size in SIZES:
    part = run.trace.within(f"{size:,} B").where(op="all_reduce")
    pairs = sorted({(message.src, message.dst) for message in messages(part)})
    print(f"{size:>12,} B: ", ", ".join(f"{src} to {dst}" for src, dst in pairs))
print()
print(wire.sentence)

# %% [markdown]
# At every size, and to the byte (*residue* is what the prediction leaves over). Had the ring turned to the right, the
# bytes would have been on other connections. With 8 bytes, two of the four chunks are empty, and a message without data
# still travels.

# %% tags=["check"]
left = {(rank, (rank - 1) % N) for rank in range(N)}
for size in SIZES:
    part = run.trace.within(f"{size:,} B").where(op="all_reduce")
    assert {(message.src, message.dst) for message in messages(part)} == left

assert wire.not_measured or wire.exact

# %% [markdown]
# ## What changes the traffic of a training job?
#
# DDP sums gradients with exactly this. The model has P parameters of 4 bytes, so in a step of three ranks each sends
# 2 (n-1)/n · 4P = 4/3 · 4P bytes, if nothing else matters. **Predict first:** which of these change the number?
# Batches of 64 images instead of 1; Adam instead of SGD; gradients in half precision (`fp16_compress_hook`).

# %%
my_guess = {"64 images": None, "Adam": None, "fp16 hook": None}  # more, fewer, the same


def train(batch_size=1, adam=False, fp16=False):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    if fp16:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.01)
    for step in range(3):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    return loss.item(), [parameter.detach() for parameter in model.module.parameters()]


RUNS = {
    "1 image, SGD": {},
    "64 images": {"batch_size": 64},
    "Adam": {"adam": True},
    "fp16 hook": {"fp16": True},
}
per_step = {}
for name, changes in RUNS.items():
    run = Cluster(3).run(partial(train, **changes))
    step = traffic(run.trace.within("step 2"))
    per_step[name] = [step.bytes_from(rank=rank) for rank in range(3)]
    print(f"{name:14} {per_step[name]}", f"  you guessed: {my_guess[name]}" if name in my_guess else "")

# %% [markdown]
# Only the hook: half the bytes for each number. The images of a batch are summed into *one* gradient per parameter
# before anything is sent, and the optimizer works on what has arrived. The network matters by its number of
# parameters, not by its computation.

# %% tags=["check"]
P = sum(parameter.numel() for parameter in models.ConvNet().parameters())
full = 2 * (3 - 1) / 3 * 4 * P

assert per_step["1 image, SGD"] == per_step["64 images"] == per_step["Adam"] == [full] * 3
assert per_step["fp16 hook"] == [full / 2] * 3

# %% [markdown]
# ## Training on the glass ring
#
# The readable ring is also a backend of torch: `Cluster(3, backend="dlearn_ring")`. The same `train`, not a line
# changed, now sends its gradients step by step, where you can see them. **Predict first:** after training, how far are
# the parameters from those that gloo's ring gives?

# %%
glass = Cluster(3, backend="dlearn_ring").run(train, 16)
gloo = Cluster(3).run(train, 16)

pairs = zip(glass.results[0][1], gloo.results[0][1], strict=True)
print("largest difference:", max((a - b).abs().max().item() for a, b in pairs))

# %% [markdown]
# None, not in the last bit: it cuts the data where gloo cuts it and adds in the same order. (Floating-point sums
# depend on the order.)
#
# In the picture, each bar is one bucket's all-reduce, and the arrows are its chunks. How many leave each bar?

# %%
axes = draw.timeline(glass.trace.within("step 2"))

# %% tags=["check"]
assert all(torch.equal(a, b) for a, b in zip(glass.results[0][1], gloo.results[0][1], strict=True))
assert glass.results[0][0] == gloo.results[0][0]

step_of = {name: run.trace.within("step 2") for name, run in {"glass": glass, "gloo": gloo}.items()}
assert traffic(step_of["glass"]).payload_bytes == traffic(step_of["gloo"]).payload_bytes
assert len(messages(step_of["glass"])) == 3 * 3 * 4  # 3 buckets, 3 ranks, 2 (n-1) = 4 steps
assert {message.how for message in messages(step_of["glass"])} == {"observed"}
assert {message.how for message in messages(step_of["gloo"])} == {"derived"}

# %% [markdown]
# ## Write your own
#
# Now it is your turn. `my_ring(tensor)` gets a tensor whose length n divides, and leaves the sum of all ranks in it.
# Either direction will do. `lessons.check` runs it on 2, 3 and 4 ranks and grades the result *and* what crossed the
# wire, because a ring that sends far too much gives the right sum, too: who sends to whom, how many bytes, and, by
# checksums, whether every message brings something new. It answers with one finding and one hint.


# %%
def swap(chunk, like, to, by):
    """Send `chunk` to one neighbour while something of the size of `like` comes from the other."""
    came = torch.empty_like(like)
    sending = dist.isend(chunk, to)
    dist.recv(came, by)
    sending.wait()
    return came


# %% tags=["exercise"]
def my_ring(tensor):
    return  # replace this by your ring


lessons.check("ring", my_ring)

# %% [markdown]
# ## Rings that look right
#
# Three wrong rings. The first is right in its sum. **Predict first:** what will the grade say?


# %%
def whole_tensors(data):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = data.clone(), data.clone()
    for _ in range(n - 1):
        passing = swap(passing, passing, to=(rank + 1) % n, by=(rank - 1) % n)
        total += passing
    data.copy_(total)


whole = lessons.check("ring", whole_tensors)
whole

# %% [markdown]
# Each rank passes on everything: (n-1) · S. With two ranks that is the price of a ring, with four twice as much, with
# 32 sixteen times.
#
# The next one sends as many bytes as it should, between the right ranks, and yet it sends nothing: an empty buffer
# instead of the chunk. Bytes alone cannot show that; checksums can.


# %%
def zeros(data):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = data.chunk(n)
    for step in range(2 * (n - 1)):
        get = chunks[(rank - step - 1) % n]
        get += swap(torch.zeros_like(get), get, to=(rank + 1) % n, by=(rank - 1) % n)


def never_moves_on(data):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = data.chunk(n)
    for step in range(2 * (n - 1)):
        get = chunks[(rank - step - 1) % n]
        get += swap(chunks[rank], get, to=(rank + 1) % n, by=(rank - 1) % n)  # always its own chunk


nothing, stale = lessons.check("ring", zeros), lessons.check("ring", never_moves_on)
print(nothing, stale, sep="\n\n")

# %% tags=["check"]
assert "each rank sends 19,200 B instead of 12,800 B" in whole.finding
assert whole.tried == (2, 3)  # with two ranks it is right
assert "B of zeros" in nothing.finding
assert "stale" in stale.finding

# %% [markdown]
# ## And the others
#
# More exercises are graded in the same way. What does each ask?

# %%
for each in EXERCISES.values():
    print(f"{each.id}: {each.asks}\n")

# %% [markdown]
# ## Exercise
#
# Eight ranks, 1 GB of gradients: how many bytes does each rank send in a ring, and how many would go through rank 0 if
# the others sent to it and it answered? Work it out, write your two numbers instead of `None`, and run the cell.

# %% tags=["exercise"]
my_bytes = {"each rank": None, "through rank 0": None}
lessons.answer("ring_all_reduce.ring_and_star", my_bytes)

# %% tags=["answer"]
n, size = 8, 10**9
right = {"each rank": 2 * (n - 1) / n * size, "through rank 0": 2 * (n - 1) * size}
assert lessons.answer("ring_all_reduce.ring_and_star", right).right
