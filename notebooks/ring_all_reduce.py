# ---
# jupyter:
#   dlearn:
#     ids: [DD7, DM1, DM2, DM3, Q1]
#     minutes: 0.2
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # The ring all-reduce, chunk by chunk
#
# **Goals.** You will be able to follow each chunk through a ring; derive 2 (n-1)/n; write a ring whose result and
# traffic are both right.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 50 minutes.
#
# Four ranks have four parts (*chunks*) of data each, and every rank needs the sums. In a *ring*, each rank sends to one
# neighbour only. **Which chunk travels in which step, in which direction, and how many bytes does each rank send?** You
# watch a ring, then write your own. (`dist.send(tensor, dst)` sends and `dist.recv(tensor, src)` receives into a
# tensor. Both wait until the other rank takes part; `isend` returns at once, and its `wait()` waits.)

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
from dlearn.lessons import digits, models

# %% [markdown]
# ## Watch
#
# `dlearn.collectives.ring` is an all-reduce in readable Python. The four ranks begin with 1, 10, 100 and 1000 in all of
# their four chunks. So each sum shows which ranks it contains: 1110 contains ranks 1, 2 and 3.
#
# In one step, every rank sends one chunk. **Predict first:** after how many steps does every rank have 1111 everywhere?
# Write a number without quotes instead of `None`.
#
# Then look at the film of the run. Columns are chunks, rows are ranks. A cell is the stronger the more ranks' numbers
# it contains, and gold once it is complete. **When does each rank have exactly one gold cell?**

# %%
my_steps = lessons.predict("ring.steps", None)
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
    chunk = message.offset_bytes // (4 * CHUNK)  # which chunk the message contains; a number has 4 bytes
    sent.setdefault(message.step, {})[message.src] = (chunk, message.dst, message.payload_bytes)

for step in sorted(sent):
    sends = ", ".join(f"{src} to {dst}: chunk {chunk}" for src, (chunk, dst, _) in sorted(sent[step].items()))
    print(f"step {step}:  {sends}")
my_steps and my_steps.against(len(sent))

# %%
film = draw.film(run.trace)

# %%
state = [[10**rank] * N for rank in range(N)]  # state[rank][chunk]: these messages once more, by hand


def show(title):
    print(f"{title:16}", "   ".join(" ".join(f"{value:>4}" for value in chunks) for chunks in state))


print(" " * 16, "   ".join(f"{f'rank {rank}':<19}" for rank in range(N)))
show("before")
for step in sorted(sent):
    arriving = {(dst, chunk): state[src][chunk] for src, (chunk, dst, _) in sent[step].items()}
    for (rank, chunk), value in arriving.items():
        state[rank][chunk] = state[rank][chunk] + value if step < N - 1 else value
    show(f"step {step}: {'added' if step < N - 1 else 'replaced'}")

# %% [markdown]
# Every rank sends to the same neighbour each time. In the first three steps an arriving chunk is *added* to the
# receiver's own. In the last three it *replaces* it. Follow chunk 0: it starts at rank 3, and grows at each rank it
# visits. After three steps each rank has *one* complete sum, that of its own chunk. This half alone is a
# **reduce-scatter**. The other half passes the complete sums round. It is an **all-gather**. In each of 2 (n-1) = 6
# steps a rank sends one n-th of its S bytes, in all 2 (n-1)/n · S = 1.5 S.
#
# Go through the 24 messages with the arrow keys (the player counts their rounds). Bands show which ranks' numbers a
# chunk in a rank's box contains; a complete one is gold. On which rank is a chunk first complete?

# %%
player = play.player(run.trace)
player

# %% tags=["check"]
S = N * CHUNK * 4
assert run.results == {rank: [1111.0] for rank in range(N)}
assert state == [[1111] * N for _ in range(N)]
assert sorted(sent) == list(range(2 * (N - 1)))
assert all(len(step) == N for step in sent.values())
assert all(size == S / N for step in sent.values() for _, _, size in step.values())
assert all(traffic(run.trace).bytes_from(rank=rank) == 2 * (N - 1) / N * S for rank in range(N))
complete = [number for number, step in enumerate(player.walk.steps, 1) if "the whole sum" in step.sentence]
assert len(player.walk.steps) == 2 * (N - 1) * N
assert "halfway each piece is whole on one rank" in film.get_title("left")
assert len(complete) == (N - 1) * N + N  # each chunk is completed once, and then sent N - 1 times

# %% [markdown]
# ## Left, not right
#
# The chunks go from rank r to rank r-1, to the *left*, because the all-reduce of gloo (the library that torch uses on
# CPUs) turns in this direction. Python cannot see gloo's messages, but Linux counts the bytes of each connection. The
# code below predicts the bytes between every pair of ranks for a ring to the left, and compares.

# %%
SIZES = [8, 1_000, 2**20, 25 * 2**20]  # bytes


def all_reduces():
    for size in SIZES:
        dist.barrier()
        with span(f"{size:,} B"):
            dist.all_reduce(torch.ones(size // 4))


run = Cluster(N, measure="phase").run(all_reduces)
wire = reconcile(run.trace)
for size in SIZES:
    part = run.trace.within(f"{size:,} B").where(op="all_reduce")
    pairs = sorted({(message.src, message.dst) for message in messages(part)})
    print(f"{size:>12,} B: ", ", ".join(f"{src} to {dst}" for src, dst in pairs))
print()
print(wire.sentence)

# %% [markdown]
# The prediction holds at every size, to the byte. (On the wire are the payload and gloo's headers, 144 B for each
# message. The *residue* is Linux's count minus the prediction.) A ring to the right would have used other connections.
# With 8 bytes, both numbers are in one of the four chunks, and gloo sends nothing for the other three: 12 messages
# instead of 48.

# %% tags=["DM1", "Q1", "check"]
left = {(rank, (rank - 1) % N) for rank in range(N)}
for size, count in zip(SIZES, (12, 48, 48, 168), strict=True):
    part = run.trace.within(f"{size:,} B").where(op="all_reduce")
    assert {(message.src, message.dst) for message in messages(part)} == left
    assert len(messages(part)) == count

assert wire.not_measured or wire.exact

# %% [markdown]
# ## What changes the traffic of a training job?
#
# DDP (`DistributedDataParallel`) averages gradients with this ring, several in one tensor (a *bucket*). For P
# parameters of 4 bytes, each of three ranks sends 2 (n-1)/n · 4P = 4/3 · 4P bytes in a step. **Predict first:** which
# of these changes that: batches of 64 images instead of 1, Adam instead of SGD, or half precision
# (`fp16_compress_hook`)?

# %%
my_change = lessons.predict("ring.what changes the traffic", None, choices=("64 images", "Adam", "fp16 hook"))


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


RUNS = {"1 image, SGD": {}, "64 images": {"batch_size": 64}, "Adam": {"adam": True}, "fp16 hook": {"fp16": True}}
per_step = {}
for name, changes in RUNS.items():
    run = Cluster(3).run(partial(train, **changes))
    step = traffic(run.trace.within("step 2"))
    per_step[name] = [step.bytes_from(rank=rank) for rank in range(3)]
    print(f"{name:14} {per_step[name]}")
changed = [name for name, sizes in per_step.items() if sizes != per_step["1 image, SGD"]]
sent_in_all = {n: traffic(Cluster(n).run(train).trace.within("step 2")).total_bytes for n in (2, 4, 8)}
for n, size in sent_in_all.items():
    print(f"{n} ranks: {size / n:9,.0f} B from each, on average")
my_change and my_change.against(", ".join(changed))

# %% [markdown]
# Only the hook: it sends each number in 2 bytes instead of 4. The optimizer runs after the gradients have arrived.
#
# With more ranks each rank sends hardly more, and never twice the parameters. That is a reason why DDP scales. Whether
# a step on 8 ranks takes as long as on 2, one machine with two cores cannot tell.

# %% tags=["DD7", "DM2", "DM3", "check"]
P = sum(parameter.numel() for parameter in models.ConvNet().parameters())
full = 2 * (3 - 1) / 3 * 4 * P

assert per_step["1 image, SGD"] == per_step["64 images"] == per_step["Adam"] == [full] * 3
assert per_step["fp16 hook"] == [full / 2] * 3
assert all(size == 2 * (n - 1) * 4 * P for n, size in sent_in_all.items())

# %% [markdown]
# ## Training on the glass ring
#
# The readable ring is also a torch backend: `Cluster(3, backend="dlearn_ring")`. The same `train` function now sends
# its gradients in steps that you can see. In the picture, each bar is one bucket's all-reduce on one rank. The arrow
# from it stands for all its chunks. **Think first:** how many?

# %%
glass = Cluster(3, backend="dlearn_ring").run(train, 16)
gloo = Cluster(3).run(train, 16)

pairs = zip(glass.results[0][1], gloo.results[0][1], strict=True)
print("largest difference to gloo's parameters:", max((a - b).abs().max().item() for a, b in pairs))
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
# Four: 2 (n-1). The parameters are equal in every bit: this ring cuts and adds as gloo does.
#
# ## Write your own
#
# `my_ring(tensor)` gets a tensor whose length is a multiple of n, and changes it in place to the sum over all ranks, in
# either direction. One `swap` per step is enough. `tensor.chunk(n)` gives views: to change one changes the tensor.
# `lessons.check` runs it on 2, 3 and 4 ranks. It grades the result *and* the traffic: which rank sends to which, how
# many bytes, and, by checksums, whether every message brings new data.


# %%
def swap(chunk, like, to, by):
    """Send `chunk` to one neighbour while receiving a tensor as large as `like` from the other."""
    received = torch.empty_like(like)
    sending = dist.isend(chunk, to)
    dist.recv(received, by)
    sending.wait()
    return received


# %% tags=["exercise"]
def my_ring(tensor):
    return  # replace this by your ring


lessons.check("ring", my_ring, student="")  # your name: it chooses the data

# %% [markdown]
# ## Rings that look right
#
# Of these three wrong rings, `whole_tensors` gives the right sum. The other two send the right number of bytes between
# the right ranks, but add nothing: one sends zeros, the other its own chunk again and again. Byte counts cannot show
# that; checksums can. **Predict first:** each rank has 9,600 B. With three ranks, a ring of chunks sends 12,800 B from
# each rank. How many bytes does the first ring send from each rank?

# %%
my_bytes_sent = lessons.predict("ring.whole tensors", None)


def whole_tensors(data):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = data.clone(), data.clone()
    for _ in range(n - 1):
        passing = swap(passing, passing, to=(rank + 1) % n, by=(rank - 1) % n)
        total += passing
    data.copy_(total)


def as_many_bytes(choose, data):
    rank, n = dist.get_rank(), dist.get_world_size()
    sent = choose(data.chunk(n)[rank])
    for _ in range(2 * (n - 1)):
        swap(sent, sent, to=(rank + 1) % n, by=(rank - 1) % n)


zeros, its_own = partial(as_many_bytes, torch.zeros_like), partial(as_many_bytes, torch.clone)
whole, nothing, stale = (lessons.check("ring", wrong) for wrong in (whole_tensors, zeros, its_own))
print(whole, nothing, stale, sep="\n\n")
of_whole = Cluster(3).run(whole_tensors, torch.ones(9_600 // 8, dtype=torch.float64))
my_bytes_sent and my_bytes_sent.against(traffic(of_whole.trace).bytes_from(rank=0))

# %% [markdown]
# The first ring passes on whole tensors: (n-1) · S from each rank. A ring of chunks sends as much with two ranks, but
# with n ranks the first ring sends n/2 times as much.

# %% tags=["check"]
assert "each rank sends 19,200 B instead of 12,800 B" in whole.finding
assert whole.tried == (2, 3)  # with two ranks it is right
assert "B of zeros" in nothing.finding
assert "stale" in stale.finding

# %% [markdown]
# ## Exercise
#
# Eight ranks have 1 GB of gradients each. How many bytes does each send in a ring? How many would pass through rank 0,
# in and out, if the others sent it their gradients and it sent back the sum? Write two numbers.
#
# Next: [museum_of_hangs](museum_of_hangs.ipynb).

# %% tags=["exercise"]
my_bytes = {"each rank": None, "through rank 0": None}
lessons.answer("ring_all_reduce.ring_and_star", my_bytes)

# %% tags=["answer"]
n, size = 8, 10**9
right = {"each rank": 2 * (n - 1) / n * size, "through rank 0": 2 * (n - 1) * size}
assert lessons.answer("ring_all_reduce.ring_and_star", right).right
