# ---
# jupyter:
#   dlearn:
#     ids: [DD3, DD10, DD14, DD15, Q6]
#     minutes: 0.4
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # DDP, step by step: two lines, and what they send
#
# **Goals.** You will be able to make a training script data parallel; say what DDP's constructor sends and whether DDP
# sums or averages; predict its buckets.
#
# **Before this:** [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about 40 minutes.
#
# `DistributedDataParallel` (DDP) is one line in a training script. With it, several processes train one model. **What
# does that line send, when, and why in pieces?** (Other lessons show how the bytes depend on the batch size and the
# optimizer: [ring_all_reduce](ring_all_reduce.ipynb); when sending overlaps with computing:
# [ddp_overlap](ddp_overlap.ipynb); how DDP hooks into autograd, and what its options cost:
# [ddp_hooks](ddp_hooks.ipynb).)
#
# ## Two lines
#
# First, here is training in one process. (`span` only gives each step a name in the trace.)

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
# To train on several ranks (their number is the *world size*), two lines change:


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
run = Cluster(2).run(train, 16)
one = Cluster(1).run(alone, 32)

# %% [markdown]
# One line is for the data, one for the model. (A script also needs imports and `init_process_group`, which the cluster
# has done here.) `loss.backward()` and `optimizer.step()` do not change. Neither does the result: two ranks with 16
# images each end with the same parameters as one process with those 32 images.

# %% tags=["DD15", "check"]
assert len(changed) == 2 + 2
for ours, theirs, local in zip(run.results[0], run.results[1], one.results[0], strict=True):
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, local, rtol=0, atol=1e-6)

# %% [markdown]
# ## Before the first step
#
# The ranks begin with different weights; only the constructor runs. **Predict first:** which weights does rank 1 have
# afterwards?

# %%
WEIGHTS = ("its own", "those of rank 0", "the mean of both")
my_weights = lessons.predict("ddp.weights after the constructor", None, choices=WEIGHTS)


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
# All ranks get the weights of rank 0. The constructor makes three calls. The `all_gather` checks that all ranks have
# the same number of parameters. The first `broadcast` checks that the shapes agree (sizes and strides). The second
# sends rank 0's parameters: 111,960 B, as much as a step's gradients. DDP's docstring says "Parameters are never
# broadcast between processes". That is true for the steps, but not for the constructor.

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
my_weights and my_weights.against("those of rank 0")

# %% [markdown]
# ## Sum or mean?
#
# The gradient of this weight is 1 on rank 0 and 2 on rank 1. **Predict first:** what is in `.grad` after `backward()`?

# %%
my_grad = lessons.predict("ddp.grad of 1 and 2", None)


def one_and_two():
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
    return model.module.weight.grad.item()


mean = Cluster(2, checksums=True).run(one_and_two)
sent = [call.checksum for call in mean.trace.where(op="all_reduce").events]
print(mean.results)
my_grad and my_grad.against(mean.results[0])

# %% [markdown]
# DDP *averages*: both ranks have 1.5. It divides before it sends, so 0.5 and 1.0 went into the all-reduce. (The trace
# contains no values, but with `checksums=True` it contains their checksums.) So you need not average again, and you use
# the learning rate of one big batch.

# %% tags=["DD14", "check"]
assert mean.results == {0: 1.5, 1: 1.5}
assert sorted(sent) == sorted(zlib.crc32(torch.tensor([half]).numpy().tobytes()) for half in (0.5, 1.0))

# %% [markdown]
# ## By hand: each gradient by itself, or all at once
#
# You could do DDP's work yourself, after `loss.backward()`: all-reduce each gradient by itself, or copy all gradients
# into one tensor and all-reduce that. DDP collects them in *buckets* instead. **Predict first:** which of the three
# sends the most bytes of gradients?

# %%
my_most = lessons.predict("ddp.most bytes", None, choices=("each by itself", "all at once", "DDP", "all the same"))


def each_by_itself(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)


def all_at_once(gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def gradients_by(reduce=None, make=models.ConvNet, **options):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = make()
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
print(f"{'a step on rank 0':36} all-reduces    bytes  on the wire  started before the last gradient was ready")
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
# All send the same number of gradient bytes, and the results agree in every bit. Framing adds 576 bytes for each
# all-reduce. There are two differences. One is the *number* of calls, because each call costs time (lesson
# [trees_and_rings](trees_and_rings.ipynb)). The other is the *start*: "all at once" cannot start before the last
# gradient is ready. Buckets are a compromise between few calls and an early start. With the default of 25 MB this small
# model has one bucket, and nothing starts early. With 0, each parameter has its own bucket.

# %% tags=["DD3", "check"]
assert len(checksums) == 1
assert {way: fact[0] for way, fact in facts.items()} == dict(zip(WAYS, (6, 1, 6, 3, 1), strict=True))
assert all(fact[1] == 111_960 and fact[2] == 111_960 + 576 * fact[0] for fact in facts.values())
assert [fact[3] for fact in facts.values()] == [0, 0, 5, 2, 0]
my_most and my_most.against("all the same")

# %% [markdown]
# ## The buckets, and why they change
#
# Here are the first two steps of `train` from above. (Inside a `with`, the ranks stay alive. They have trained once
# before, because the first pass of a process is slow.) In the picture, each bucket has a row for each rank. Ticks are
# gradients, and a bar is their all-reduce. Compare step 0 and step 1: which buckets are there, and in which order are
# the names? In the player, go through step 1 with the arrow keys: gradients fill a bucket, and a full bucket travels
# while the next one fills.

# %%
with Cluster(2) as cluster:
    cluster.run(train, 16)
    run = cluster.run(train, 16)
axes = draw.buckets(run.trace)
print(bucket_times(run.trace))
play.player(run.trace.within("step 1"))

# %% [markdown]
# In step 0 there is one bucket, whatever `bucket_cap_mb` says. It has the parameters in the order in which the model
# lists them, because DDP does not know yet in which order the gradients become ready. Before the next forward pass it
# builds the final buckets in the order it has seen: the last layer first. A bucket is closed when it has reached the
# cap of 9,437 B. A gradient is never cut, so one bucket has 101,160 B. (With `find_unused_parameters=True` the first
# buckets stay: DDP starts with the reverse of the list, cut at the cap, and does not build again.)
#
# If you do not give `bucket_cap_mb`, the *first* bucket is closed at 1 MiB, so that sending starts early; the others
# are closed at 25 MiB. Ranks could see different orders, so rank 0 sends its own in the second forward pass, in two
# small broadcasts: 28 bytes for the order of 6 parameters and the number of buckets, 12 for the sizes of 3 buckets.

# %% tags=["DD3", "DD10", "Q6", "check"]
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
# Has DDP *seen* this order, or does it only reverse the list? For this model both give the same. `Backwards` lists its
# last layer first:


# %% tags=["DD10"]
class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(64, 10), nn.Linear(64, 64)

    def forward(self, images):
        return self.last(self.first(images.flatten(1)).relu())


listed = [name for name, _ in Backwards().named_parameters()]
backwards = Cluster(2).run(partial(gradients_by, make=Backwards, bucket_cap_mb=models.SMALL_BUCKETS))
first, rebuilt = bucket_times(backwards.trace).tables
print("the list in reverse:", *listed[::-1])
print("the rebuilt buckets:", *(name for bucket in rebuilt for name in bucket.parameters))
came = [name for name, _ in first[0].ready]
assert [name for bucket in rebuilt for name in bucket.parameters] == came
assert came != listed[::-1]

# %% [markdown]
# ## Exercises
#
# A model has eight linear layers of 256 × 256 weights and 256 biases each. With three ranks and the default
# `bucket_cap_mb`, how many bytes does each rank send in the tenth step, and in how many all-reduces? Write your two
# numbers instead of `None`, and run the cell. (Three ranks cannot cut a bucket into equal chunks, so your number may
# differ by one byte in 50,000.)

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
assert 2**20 <= first < 2**20 + gradients / 8  # closed once it has reached 1 MiB
sizes = [traffic(tenth).bytes_from(rank=rank) for rank in range(3)]
for size in (2 * (3 - 1) / 3 * gradients, *sizes):
    right = {"bytes": size, "all-reduces": len(calls)}
    assert lessons.answer("ddp_step_by_step.tenth_step", right).right

# %% [markdown]
# Now write DDP's loop by hand. `my_training(model, batches, loss, optimizer)` trains each rank's model as one device
# would with the batches of all ranks together. The ranks begin with different models; all must use rank 0's. Take one
# step of the `optimizer` (an Adam on the model's parameters) for each of `batches`. The gradients of a step travel in
# one flat tensor. `loss(model, batch)` returns a tensor.


# %% tags=["exercise"]
def my_training(model, batches, loss, optimizer):
    return  # replace this by your loop


lessons.check("ddp_by_hand", my_training, student="")  # your name: it chooses the data
