# ---
# jupyter:
#   dlearn:
#     ids: [DD3, DD14, DD15, Q6]
#     minutes: 0.4
#     needs: []
#     peak_mb: 800
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # DDP, step by step: two lines, and what they send
#
# **Goals.** You will be able to turn a training script into a data parallel one; say what DDP's constructor sends and
# what it averages; predict its buckets.
#
# **Before this:** [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about 40 minutes.
#
# `DistributedDataParallel` (DDP) is one line in a training script, and from then on several processes train one model.
# **What does that line send, when, and why in such pieces?** (How bytes depend on the batch size and the optimizer:
# [ring_all_reduce](ring_all_reduce.ipynb). When sending overlaps with computing: [ddp_overlap](ddp_overlap.ipynb). How
# DDP gets in between, and what its options cost: [ddp_hooks](ddp_hooks.ipynb).)
#
# ## Two lines
#
# First, training in one process. (`span` gives each step a name in the trace, no more.)

# %%
import difflib
import inspect
import zlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, operations, play, span
from dlearn.analysis import bucket_times, reconcile, traffic
from dlearn.lessons import digits, models


def train(batch_size):
    images, labels = digits.shard(0, 1)  # all images, shuffled
    torch.manual_seed(0)
    model = models.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


alone = train

# %% [markdown]
# **Predict first:** to train on several ranks (their number is the *world size*), which lines change?


# %%
def train(batch_size):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())  # my share
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


before, after = (inspect.getsource(each).splitlines() for each in (alone, train))
changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
print(*changed, sep="\n")

# %% [markdown]
# One for the data, one for the model. (A script of its own has a third, `init_process_group`, and imports; the cluster
# has done that.) `loss.backward()` and `optimizer.step()` stay as they are, and so does the result: two ranks with 16
# images each end where one process with those 32 images ends.

# %%
run = Cluster(2).run(train, 16)
one = Cluster(1).run(alone, 32)

# %% tags=["DD15", "check"]
assert len(changed) == 2 + 2
for ours, theirs, local in zip(run.results[0], run.results[1], one.results[0], strict=True):
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, local, rtol=0, atol=1e-6)

# %% [markdown]
# ## Before the first step
#
# Here each rank begins with other weights, and the constructor is all that runs. **Predict first:** do they stay
# different? What is sent?


# %%
def crc(tensors):
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


def construct():
    torch.manual_seed(dist.get_rank())
    model = models.ConvNet()
    own = crc(model.parameters())
    DistributedDataParallel(model)
    return own, crc(model.parameters())


built = Cluster(2).run(construct)
for rank in (0, 1):
    print(f"rank {rank}: checksum of its weights before {built.results[rank][0]:10}, after {built.results[rank][1]:10}")
for operation in operations(built.trace):
    (given,) = operation.ends[0].inputs
    print(f"{operation.op}: {given.dtype}{list(given.shape)}, {given.payload_bytes:,} B: {operation.what}")

# %% [markdown]
# Rank 0's model wins. Three calls: have all the same number of parameters (`all_gather` of one number)? Are they of
# the same shapes (sizes and strides)? Then rank 0 sends all of them, as large as a step's gradients. A picture that
# begins with the first step hides that. So does DDP's own docstring: "Parameters are never broadcast between
# processes". True of the steps, not of the constructor: 111,960 B.

# %% tags=["DD14", "check"]
setup = operations(built.trace)
(mine, same), (theirs, now) = built.results[0], built.results[1]
assert mine != theirs
assert mine == same == now
assert [each.op for each in setup] == ["all_gather", "broadcast", "broadcast"]
sizes = 2 * sum(parameter.dim() for parameter in models.ConvNet().parameters())
assert [each.ends[0].inputs[0].shape for each in setup] == [(1,), (sizes,), (27_990,)]
assert traffic(built.trace).payload_bytes == {(0, 1): 8 + 224 + 111_960, (1, 0): 8}
assert operations(built.trace.where(op="all_reduce")) == ()

# %% [markdown]
# ## Sum or mean?
#
# The gradient of this weight is 1 on rank 0 and 2 on rank 1. **Predict first:** what is in `.grad` after
# `backward()`? And who divides, before or after the sending?


# %%
def one_and_two():
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
    return model.module.weight.grad.item()


mean = Cluster(2, checksums=True).run(one_and_two)
sent = [call.checksum for call in mean.trace.where(op="all_reduce").events]
print(mean.results)

# %% [markdown]
# DDP *averages*: 1.5, on both. It divides first: what went into the all-reduce was 0.5 and 1.0. (The trace holds no
# values, but checksums of them, if asked.) So you need not average again, and the learning rate is that of one big
# batch.

# %% tags=["DD14", "check"]
assert mean.results == {0: 1.5, 1: 1.5}
assert sorted(sent) == sorted(zlib.crc32(torch.tensor([half]).numpy().tobytes()) for half in (0.5, 1.0))

# %% [markdown]
# ## Naive: each by itself, or all at once
#
# You could write DDP's backward part yourself, after `loss.backward()`: reduce each gradient by itself, or put all
# into one tensor and reduce that. DDP does neither: it gathers them in *buckets*. **Predict first:** which way sends
# more bytes, which more messages, and which can begin before the backward pass is over?


# %%
def each_by_itself(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)


def all_at_once(gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def gradients_by(reduce=None, **options):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = models.ConvNet()
    outer = model if reduce else DistributedDataParallel(model, **options)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            cross_entropy(outer(images[:16]), labels[:16]).backward()
            if reduce:
                gradients = [parameter.grad for parameter in model.parameters()]
                reduce(gradients)
                for gradient in gradients:
                    gradient /= dist.get_world_size()
    return crc(parameter.grad for parameter in model.parameters())


# %%
WAYS = {
    "by hand, each by itself": {"reduce": each_by_itself},
    "by hand, all at once": {"reduce": all_at_once},
    "DDP, bucket_cap_mb=0": {"bucket_cap_mb": 0},
    "DDP, bucket_cap_mb=0.009": {"bucket_cap_mb": models.SMALL_BUCKETS},
    "DDP, bucket_cap_mb=25, the default": {},
}
facts, checksums = {}, set()
print(f"{'a step on rank 0':36} all-reduces    bytes  on the wire  begun before the last gradient was ready")
with Cluster(2) as cluster:
    runs = {way: cluster.run(partial(gradients_by, **options)) for way, options in WAYS.items()}
for way, ran in runs.items():
    step = ran.trace.within("step 2")
    calls = step.where(op="all_reduce", rank=0).events
    ready = [event.start_ns for event in step.where(kind="gradient", rank=0).events]
    early = sum(call.start_ns < max(ready, default=0) for call in calls)
    wire = sum(pair.predicted_bytes for pair in reconcile(step).whole.pairs if pair.src == 0)
    facts[way] = (len(calls), traffic(step).bytes_from(rank=0), wire, early)
    checksums |= set(ran.results.values())
    print(f"{way:36} {facts[way][0]:11} {facts[way][1]:8,} {facts[way][2]:12,} {facts[way][3]:5}")

# %% [markdown]
# The same bytes of gradients, and the same result in every bit. Framing is small, too: 576 bytes for each all-reduce.
# What differs is the *number* of calls, each of which costs time (lesson `trees_and_rings`), and the *begin*: all at
# once can only begin when the last gradient is there. Buckets are between the two: few calls, and an early begin.
#
# With the default of 25 MB this small model has a single bucket, and nothing begins early. 0 gives one for each
# parameter.

# %% tags=["DD3", "check"]
assert len(checksums) == 1
assert {way: fact[0] for way, fact in facts.items()} == dict(zip(WAYS, (6, 1, 6, 3, 1), strict=True))
assert all(fact[1] == 111_960 and fact[2] == 111_960 + 576 * fact[0] for fact in facts.values())
assert [fact[3] for fact in facts.values()] == [0, 0, 5, 2, 0]

# %% [markdown]
# ## The buckets, and why they change
#
# Now the first two steps of `train` from above. (Ranks in a `with` stay. These have trained once before, for the very
# first pass of a process takes long.) In the picture, below each bucket is a row for each rank; ticks are gradients, a
# bar is their all-reduce. Compare step 0 and step 1: what are the buckets, and in which order do the names come?

# %%
with Cluster(2) as cluster:
    cluster.run(train, 16)
    run = cluster.run(train, 16)
axes = draw.buckets(run.trace)
print(bucket_times(run.trace))

# %% [markdown]
# In step 0 there is one bucket, whatever `bucket_cap_mb` says, with the parameters as the model lists them: DDP does
# not know yet in which order the gradients come. It looks, and before the next forward pass it builds the buckets that
# stay, in the order of *coming*: the last layer first. A bucket is closed when it has reached the cap of 9,437 B. A
# gradient is never cut, which is why one has 101,160 B. (With `find_unused_parameters=True` the first buckets stay:
# there DDP starts with the reverse of the list, cut at the cap, and does not build again.)
#
# If you do not give `bucket_cap_mb`, the *first* bucket is closed at 1 MiB, so that sending starts early, and only the
# others at 25 MiB. The exercise at the end is about that.
#
# Ranks could disagree about that order. So rank 0 sends its own: two small broadcasts in the second forward pass.
#
# Go through step 1 with the arrow keys: gradients fill their bucket, and a full one travels while the next one fills.

# %%
play.player(run.trace.within("step 1"))

# %% tags=["DD3", "Q6", "check"]
first, rebuilt = bucket_times(run.trace).tables
assert [bucket.bytes for bucket in first] == [111_960]
assert first[0].parameters == tuple(name for name, _ in models.ConvNet().named_parameters())
assert [bucket.bytes for bucket in rebuilt] == [101_160, 10_368, 432]
assert int(models.SMALL_BUCKETS * 2**20) == 9_437
assert [name for bucket in rebuilt for name in bucket.parameters] == [name for name, _ in first[0].ready]
agreed = [each for each in operations(run.trace) if each.ends[0].phase == "forward"]
assert [each.what for each in agreed] == ["DDP agrees on the rebuilt buckets"] * 2
assert [each.ends[0].inputs[0].payload_bytes for each in agreed] == [4 * (6 + 1), 4 * 3]
assert all(each in operations(run.trace.within("step 1")) for each in agreed)

# %% [markdown]
# 28 bytes are the order of 6 parameters and the number of buckets, 12 how many parameters each of the 3 has. It
# happens once.
#
# ## Exercise
#
# A model has eight linear layers of 256 × 256 weights and 256 biases each. With three ranks and the default
# `bucket_cap_mb`, how many bytes does each rank send in the tenth step, and in how many all-reduces? Work it out,
# write your two numbers instead of `None`, and run the cell. (Three ranks cannot cut a bucket into equal chunks: a byte
# in 50,000 more or less is right, too.)
#
# Then write DDP's loop by hand (no DDP, one flat gradient) and let it be graded by what it sends:
# `lessons.check("ddp_by_hand", my_training)`.

# %% tags=["exercise"]
my_answer = {"bytes": None, "all-reduces": None}
lessons.answer("ddp_step_by_step.tenth_step", my_answer)


# %% tags=["answer"]
def ten_steps():
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    for step in range(10):
        with span(f"step {step}"):
            model(torch.ones(4, 256)).sum().backward()


tenth = Cluster(3).run(ten_steps).trace.within("step 9").where(op="all_reduce")
gradients, calls = 4 * 8 * (256 * 256 + 256), operations(tenth)
assert traffic(tenth).total_bytes == 2 * (3 - 1) * gradients  # of all three ranks
first = calls[0].ends[0].inputs[0].payload_bytes
assert 2**20 <= first < 2**20 + gradients / 8  # closed at 1 MiB, with the gradients that it then had
sizes = [traffic(tenth).bytes_from(rank=rank) for rank in range(3)]
for size in (2 * (3 - 1) / 3 * gradients, *sizes):
    right = {"bytes": size, "all-reduces": len(calls)}
    assert lessons.answer("ddp_step_by_step.tenth_step", right).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
