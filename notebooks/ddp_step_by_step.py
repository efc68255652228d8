# ---
# jupyter:
#   dlearn:
#     ids: [DM2, DD2, DD3, DD4, DD14, DD15, DD16, DD18, Q3, Q6, Q7]
#     minutes: 0.4
#     needs: []
#     peak_mb: 800
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # DDP, step by step
#
# **Goals.** You will be able to say what DDP's constructor and each step send; predict its buckets; say which hook
# fires when.
#
# **Before this:** [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about 75 minutes.
#
# `DistributedDataParallel` (DDP) is one line in a training script, and from then on several processes train one model.
# **What does that line send, when, and why in such pieces? And how does it get in between at all?** Here we take a
# training step apart.
#
# ## Two lines
#
# First, training in one process. Nothing here knows of any other. (`span` gives each step a name, no more.)

# %%
import difflib
import inspect
import warnings
import zlib
from functools import partial
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, operations, play, span
from dlearn.analysis import bucket_times, compare, overlap, reconcile, traffic
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
# **Predict first:** to train on several ranks, which lines change?


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

assert len(changed) == 2 + 2
for ours, theirs, local in zip(run.results[0], run.results[1], one.results[0], strict=True):
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, local, rtol=0, atol=1e-6)

# %% [markdown]
# ## Where it gets in between
#
# So DDP must intercept something. The trace has each call of a collective, and the line of *your* program in which it
# happened. **Predict first:** behind which of your lines does DDP send? Is `optimizer.step()` one of them?

# %%
source, first_line = inspect.getsourcelines(train)
behind = []
for call in run.trace.where(kind="collective", rank=0).events:
    line = source[int(call.site.split(":")[1]) - first_line].strip().split("(")[0]
    told = (line, call.phase, call.op, call.inputs[0].payload_bytes)
    behind.append(told)
    print(f"{line:36} {call.phase:9} {call.op:11} {told[3]:9,} B  {call.role}")

# %% [markdown]
# Three: the constructor, the call of the model, `backward()`. The optimizer sends nothing, for by then each rank has
# the same gradients, and does the same with them.
#
# (DDP's module calls yours, so it is there before each forward pass; and it has hung a hook on each parameter, which
# autograd calls. At the end of this lesson you see that hook among all others.)

# %%
phases = {phase: {line for line, its, *_ in behind if its == phase} for _, phase, *_ in behind}
assert phases == {
    "setup": {"model = DistributedDataParallel"},
    "forward": {"loss = cross_entropy"},
    "backward": {"loss.backward"},
}

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

# %%
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
# values, but checksums of them, if asked.) So nobody needs to average again, and the learning rate is that of one big
# batch.

# %%
assert mean.results == {0: 1.5, 1: 1.5}
assert sorted(sent) == sorted(zlib.crc32(torch.tensor([half]).numpy().tobytes()) for half in (0.5, 1.0))

# %% [markdown]
# ## Does the batch size matter?
#
# **Predict first:** each rank has 1 image in a batch, or 64. How many bytes does it send in a step?

# %%
small, large = Cluster(2).run(train, 1), Cluster(2).run(train, 64)
told = compare(small.trace, large.trace, names=("B = 1", "B = 64"))
told

# %% [markdown]
# The same, call by call. Autograd adds up the gradients of all images of a batch in one `.grad` for each parameter,
# before anything is sent.

# %%
assert told.total.added_bytes == told.total.added_messages == 0
assert all(each.a == each.b for each in told.by_kind.values())
for each in (small, run, large):
    assert [traffic(each.trace.within("step 3")).bytes_from(rank=rank) for rank in (0, 1)] == [111_960] * 2

# %% [markdown]
# ## When is a gradient ready?
#
# The backward pass begins at the loss and ends at the first layer. So the last layer's gradient is ready long before
# the first layer's, and could travel. How long? For that, a deeper model: eight linear layers, 0.5 M parameters.
#
# In the picture, look at where the curve begins and ends, and whether it is a step or a slope. A thin line is one
# backward pass on one rank, the thick one is the median.


# %%
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)])

    def forward(self, x):
        return self.layers(x)


def waits(state, bucket):
    """A communication hook that does not return before its all-reduce is over."""
    data = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(data)
    done = torch.futures.Future()
    done.set_result(data)
    return done


def train_deep(hook):
    model = DistributedDataParallel(Deep(), bucket_cap_mb=0.5)
    model.register_comm_hook(dist.group.WORLD, hook)  # allreduce_hook does what DDP does without one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(256, 256)
    for step in range(12):
        with span(f"step {step}"):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()


deep = Cluster(2).run(train_deep, allreduce_hook)

# %%
curves = {}
for bucket in bucket_times(deep.trace).items:
    if bucket.backward >= 2:  # with the buckets as they stay
        own = curves.setdefault((bucket.rank, bucket.backward), [])
        own += [((at - bucket.begins_ns) / 1e6, name) for name, at in bucket.ready]
elements = {name: parameter.numel() / 1000 for name, parameter in Deep().named_parameters()}
shares = [[100 * ms / curve[-1][0] for ms, _ in curve] for curve in curves.values()]
counted = torch.tensor([elements[name] for _, name in next(iter(curves.values()))]).cumsum(0)
_, axes = plt.subplots(figsize=(9, 3.2), dpi=110, layout="constrained")
for share in shares:
    axes.plot(share, counted, color="#9aa5b8", linewidth=0.7, drawstyle="steps-post")
middle = [median(each) for each in zip(*shares, strict=True)]
axes.plot(middle, counted, color="#222222", linewidth=2.2, drawstyle="steps-post")
axes.set_title("Gradients become ready all along the backward pass", loc="left", fontsize=12, fontweight="bold")
axes.set_xlabel("% of the time from the start of the pass to its last gradient")
axes.set_ylabel("thousand gradients ready")
axes.set_xlim(0, 101)
axes.set_ylim(0, None)
axes.spines[["top", "right"]].set_visible(False)
lasts = sorted(curve[-1][0] for curve in curves.values())
print(f"last gradient after {median(lasts):.1f} ms ({lasts[0]:.1f} to {lasts[-1]:.1f} ms, {len(lasts)} passes)")

# %% [markdown]
# A slope: the gradients come one layer after the other. What is done with each *when it is ready* is hidden behind the
# computation of the others. The times differ from pass to pass. The order does not: from the last layer to the first.

# %%
(order,) = {tuple(name for _, name in curve) for curve in curves.values()}
assert [name.split(".")[1] for name in order[::2]] == list("76543210")
assert len(curves) == 2 * 10

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
    wire = sum(pair.predicted_bytes for pair in reconcile(ran.trace).parts[2].pairs if pair.src == 0)
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

# %%
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

# %%
bucket_times(run.trace)

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

# %%
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
# ## Overlap, with and without
#
# Back to the eight layers, in four buckets. Below is one step as DDP does it: the quickest of ten, with the least of
# what else this machine has to do. Look at the ticks (gradients) above the first all-reduce of each rank: do more of
# them come while it is under way?


# %%
def quickest(trace):
    """The step that was done first after its begin; the first two have other buckets."""
    steps = [trace.within(f"step {step}") for step in range(2, 12)]
    return min(steps, key=lambda step: step.events[-1].start_ns - step.events[0].start_ns)


axes = draw.timeline(quickest(deep.trace))

# %% [markdown]
# And now the same with `waits` as the communication hook. It does what the other does, but does not return before
# its all-reduce is over. **Predict first:** what happens between two buckets now?

# %%
held = Cluster(2).run(train_deep, waits)
axes = draw.timeline(quickest(held.trace))


# %% [markdown]
# The backward pass stands still while a bucket travels. Nothing is hidden. Both send the same bytes in the same
# calls; in one the computing goes on, in the other it does not:


# %%
def meanwhile(trace):
    """Gradients of that step that became ready on rank 0 while one of its all-reduces was under way."""
    step = quickest(trace)
    calls = step.where(op="all_reduce", rank=0).events
    ready = [event.start_ns for event in step.where(kind="gradient", rank=0).events]
    assert len(calls) == 4
    assert calls[0].start_ns < ready[-1]
    return sum(any(call.start_ns < at < call.end_ns for call in calls) for at in ready)


print("as DDP does it:", meanwhile(deep.trace), "gradients became ready while something was under way")
print("with waiting:  ", meanwhile(held.trace))
print(compare(deep.trace, held.trace, names=("DDP", "waits")).sentence)

assert meanwhile(held.trace) == 0
assert compare(deep.trace, held.trace).total.added_bytes == 0

# %% [markdown]
# What does that gain? Three rounds of each, in turn. (These are times of two processes on a busy machine: look at the
# spread before you believe a difference. The DDP paper found 26.8% for ResNet50 with gloo, on GPUs, where computing
# and sending do not share the cores.)

# %%
shares, steps_ms = {"DDP": [], "waits": []}, {"DDP": [], "waits": []}
with Cluster(2) as cluster:
    for _ in range(3):
        for name, hook in (("DDP", allreduce_hook), ("waits", waits)):
            trace = cluster.run(train_deep, hook).trace
            found = overlap(trace).steps[2:]
            shares[name] += [share.hidden for step in found for share in step.shares if share.hidden is not None]
            spans = trace.where(kind="span", rank=0).events
            steps_ms[name] += [(each.end_ns - each.start_ns) / 1e6 for each in spans[2:]]
for name in shares:
    low, middle, high = min(shares[name]), median(shares[name]), max(shares[name])
    print(f"{name:6} hidden: {middle:4.0%} ({low:.0%} to {high:.0%}) of the communication time", end="; ")
    ordered = sorted(steps_ms[name])
    print(f"a step: {median(ordered):.1f} ms ({ordered[0]:.1f} to {ordered[-1]:.1f}, {len(ordered)} steps)")
axes = draw.breakdown(deep.trace)

# %% [markdown]
# ## Buffers
#
# A `BatchNorm` layer has parameters, and *buffers*, too: the running mean and variance, and a counter. They have no
# gradient. **Predict first:** does DDP send them? When, and to whom? How many bytes is that with 12 channels?


# %%
class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 8 * 8, 10)

    def forward(self, images):
        return self.fc(self.norm(self.conv(images)).relu().flatten(1))


def train_norm(**options):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(WithNorm(), **options)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            cross_entropy(model(images[:16]), labels[:16]).backward()
    return model.module.norm.running_mean


norm = Cluster(2).run(train_norm)
for operation in operations(norm.trace.within("step 2")):
    (given,) = operation.ends[0].inputs
    told = f"{operation.op} in {operation.ends[0].phase}, {given.dtype}{list(given.shape)}, {given.payload_bytes:,} B"
    print(f"{told}: {operation.what}")
print("running mean of channel 0:", [round(each[0].item(), 6) for each in norm.results.values()])

# %% [markdown]
# In each forward pass rank 0 sends its buffers to all others: 96 B of means and variances, 8 B for the counter (of
# another type, so it travels by itself). They are not averaged. And then the forward pass updates them from the
# rank's own batch: after a step they differ again. Rank 0's count; save the model there.

# %%
shown = [each for each in operations(norm.trace.within("step 2")) if each.op == "broadcast"]
assert [each.ends[0].inputs[0].payload_bytes for each in shown] == [4 * (12 + 12), 8]
assert traffic(norm.trace.within("step 2").where(op="broadcast")).payload_bytes == {(0, 1): 96 + 8}
assert not torch.equal(norm.results[0], norm.results[1])

# %% [markdown]
# ## The knobs, one by one
#
# Each line below changes one option of DDP. `find_unused_parameters=True` is for models in which a forward pass does
# not use all parameters; there, the model gets a layer of 6 parameters that is never used. **Predict first:** which
# option changes the bytes of a step, which only the number of calls, which neither?


# %%
class WithSpare(WithNorm):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


def train_with(make=WithNorm, **options):
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 calls broadcast_buffers deprecated
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(make(), **options)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            cross_entropy(model(images[:16]), labels[:16]).backward()


KNOBS = {
    "all as they are": {},
    "forward_sync_buffers=False": {"forward_sync_buffers": False},
    "broadcast_buffers=False": {"broadcast_buffers": False},
    "bucket_cap_mb=0": {"bucket_cap_mb": 0},
    "gradient_as_bucket_view=True": {"gradient_as_bucket_view": True},
    "find_unused_parameters=True": {"find_unused_parameters": True, "make": WithSpare},
}
costs = {}
print(f"{'rank 0 sends, in bytes':32} constructor  step 0  step 1  step 2  calls in step 2")
with Cluster(2) as cluster:
    runs = {knob: cluster.run(partial(train_with, **options)) for knob, options in KNOBS.items()}
for knob, ran in runs.items():
    per_step = [traffic(ran.trace.within(f"step {step}")).bytes_from(rank=0) for step in range(3)]
    calls = len(operations(ran.trace.within("step 2")))
    costs[knob] = (traffic(ran.trace).bytes_from(rank=0) - sum(per_step), *per_step, calls)
    print(f"{knob:32} {costs[knob][0]:11,} {per_step[0]:7,} {per_step[1]:7,} {per_step[2]:7,} {calls:16}")

# %% [markdown]
# - `forward_sync_buffers=False`: the 104 bytes of buffers in each step go, the constructor still sends them once.
#   `broadcast_buffers=False`, its older name, leaves out that, too.
# - `bucket_cap_mb=0`: as many bytes, but 5 all-reduces instead of 1. (And step 1 says so to the other ranks: the sizes
#   of 5 buckets instead of 1 are 16 bytes more.)
# - `gradient_as_bucket_view=True`: nothing at all. See below.
# - `find_unused_parameters=True`: one call more, a map of the used parameters, 4 bytes for each of 7. The gradients of
#   the unused layer travel, too (24 bytes), though nobody has computed them. And the buckets are never rebuilt: nothing
#   more in step 1. What it costs besides is a walk over the graph in each forward pass, which no message shows.

# %%
P, buffers = 4 * (108 + 24 + 7_690), 4 * 24 + 8
tables = 4 * (5 + 1) + 4  # what step 1 sends for the new buckets
shapes = 8 + 8 * 2 * (4 + 1 + 1 + 2 + 1)
assert costs == {
    "all as they are": (shapes + P + buffers, P + buffers, P + buffers + tables, P + buffers, 3),
    "forward_sync_buffers=False": (shapes + P + buffers, P, P + tables, P, 1),
    "broadcast_buffers=False": (shapes + P, P, P + tables, P, 1),
    "bucket_cap_mb=0": (shapes + P + buffers, P + buffers, P + buffers + tables + 16, P + buffers, 2 + 5),
    "gradient_as_bucket_view=True": (shapes + P + buffers, P + buffers, P + buffers + tables, P + buffers, 3),
    "find_unused_parameters=True": (shapes + 8 * 2 * 3 + P + 24 + buffers, *[P + 24 + 28 + buffers] * 3, 4),
}

# %% [markdown]
# ## What is gradient_as_bucket_view?
#
# A gradient is computed into `.grad`, and copied into its bucket, and back. With `gradient_as_bucket_view=True`,
# `.grad` *is* a part of the bucket. A communication hook is given the buckets; so we can ask in which storage each
# bucket and each `.grad` lies. **Predict first:** with 16.8 MB of gradients, how many bytes are that, with and
# without?


# %%
def places(view):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=64, gradient_as_bucket_view=view)
    sizes = {}

    def look(state, bucket):
        storage = bucket.buffer().untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(dist.group.WORLD, look)
    for _ in range(3):
        sizes.clear()
        ddp(torch.ones(1, 1024)).mean().backward()
    for parameter in model.parameters():
        storage = parameter.grad.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


copied, viewed = Cluster(2).run(places, False), Cluster(2).run(places, True)
print(f"copied: {copied.results[0]:,} B of gradients and buckets; as views: {viewed.results[0]:,} B")
print(compare(copied.trace, viewed.trace, names=("copied", "as views")).sentence)

# %% [markdown]
# Half the memory for gradients, and not a byte less on the wire. (With Adam, that is parameters, gradients and two
# moments: 4 times the parameters, and not 5.)

# %%
assert copied.results == {0: 2 * 16_777_216, 1: 2 * 16_777_216}
assert viewed.results == {0: 16_777_216, 1: 16_777_216}
assert compare(copied.trace, viewed.trace).total.added_bytes == 0
assert compare(copied.trace, viewed.trace).total.added_messages == 0

# %% [markdown]
# ## What is a computation graph?
#
# And how does DDP know that a gradient is ready? While the forward pass computes, autograd notes for each result a
# *node*: how to get from its gradient to those of the inputs. The nodes point to each other, from the loss down to the
# parameters. Each path ends in an `AccumulateGrad`, which adds to a `.grad`.


# %%
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 10, bias=False)

    def forward(self, x):
        self.h = self.one(x).relu()  # kept, so that hooks can be hung on it
        return self.two(self.h)


def tree(node, names, depth=0):
    whose = names.get(id(getattr(node, "variable", None)), "")
    lines = ["  " * depth + f"{node.name().split('::')[-1]} {whose}".rstrip()]
    return lines + [line for below, _ in node.next_functions if below for line in tree(below, names, depth + 1)]


model = Two()
loss = model(torch.randn(8, 64)).square().mean()
lines = tree(loss.grad_fn, {id(parameter): name for name, parameter in model.named_parameters()})
print(*lines, sep="\n")

assert [line.split()[-1] for line in lines if "AccumulateGrad" in line] == ["one.weight", "two.weight"]

# %% [markdown]
# ## What is a hook, and when does it fire?
#
# A function of yours that torch calls when it gets to some place. There are many kinds. Below we hang one of each kind
# on that model and let it make one step under DDP, with a bucket for each parameter. **Predict first:** does a
# parameter's hook fire before or after its gradient is in `.grad`? Has bucket 0 gone when the backward pass reaches
# `h`?

# %%
seen = []


def note(kind, what):
    """A hook of any kind: it notes that it was called, and changes nothing."""

    def hook(*_):
        seen.append((kind, what))

    return hook


def on_modules(model):
    for name in ("one", "two"):
        module = getattr(model, name)
        module.register_forward_pre_hook(note("module: before forward", name))
        module.register_forward_hook(note("module: after forward", name))
    model.two.register_full_backward_pre_hook(note("module: before backward", "two"))
    model.two.register_full_backward_hook(note("module: after backward", "two"))


def on_parameters(model):
    for name, parameter in model.named_parameters():
        parameter.register_hook(note("tensor", name))
        parameter.register_post_accumulate_grad_hook(note("after accumulation", name))
        accumulate = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        accumulate.register_hook(note("node: after", f"Acc. {name}"))
        yield accumulate  # autograd keeps it only while somebody holds it
    both = tuple(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(both, note("several: the first", "of both"), mode="any")
    torch.autograd.graph.register_multi_grad_hook(both, note("several: all", "both"), mode="all")


# %%
def on_h(h):
    h.register_hook(note("tensor", "h"))
    h.grad_fn.register_prehook(note("node: before", "ReLU"))
    h.grad_fn.register_hook(note("node: after", "ReLU"))


def on_buckets(state, bucket):
    note("DDP: a bucket is full", f"bucket {bucket.index()}")()
    return allreduce_hook(state, bucket)


def with_hooks():
    model = Two()
    on_modules(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0)
    ddp.register_comm_hook(dist.group.WORLD, on_buckets)
    held = list(on_parameters(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(note("optimizer: before step", "SGD"))
    optimizer.register_step_post_hook(note("optimizer: after step", "SGD"))
    for _ in range(2):  # in the second step, the buckets are those that stay
        seen.clear()
        loss = ddp(torch.randn(8, 64)).square().mean()
        on_h(model.h)
        loss.backward()
        optimizer.step()
    assert len(held) == 2
    return list(seen)


hooked = Cluster(2).run(with_hooks)
fired = hooked.results[0]

# %% [markdown]
# In the picture time goes to the right, one call of a hook after the other; a row is a kind. Look for
# `two.weight`: what comes before its bucket, and what after? (Acc. is its `AccumulateGrad`.)
#
# | row | hung on with |
# |---|---|
# | module: before, after forward | `Module.register_forward_pre_hook`, `register_forward_hook` |
# | module: before, after backward | `Module.register_full_backward_pre_hook`, `register_full_backward_hook` |
# | tensor; after accumulation | `Tensor.register_hook`; `Tensor.register_post_accumulate_grad_hook` |
# | several: the first; all | `torch.autograd.graph.register_multi_grad_hook`, mode "any"; "all" |
# | node: before, after | `Node.register_prehook`, `register_hook` (the node of a tensor is its `grad_fn`) |
# | DDP: a bucket is full | `DistributedDataParallel.register_comm_hook` |
# | optimizer: before, after step | `Optimizer.register_step_pre_hook`, `register_step_post_hook` |


# %%
def draw_hooks(fired):
    kinds = list(dict.fromkeys(kind for kind, _ in fired))
    _, axes = plt.subplots(figsize=(9, 4.6), dpi=110, layout="constrained")
    for place, (kind, what) in enumerate(fired, 1):
        row = kinds.index(kind)
        color = "#0072B2" if kind.startswith("DDP") else "#222222"
        axes.plot(place, row, "o", color=color, markersize=6)
        axes.annotate(what, (place, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    backward = [place for place, (kind, _) in enumerate(fired, 1) if not kind.startswith(("optimizer", "module: b"))]
    axes.axvspan(4.5, max(backward) + 0.5, color="#f0f0f0", zorder=0)
    axes.text(4.6, -0.75, "backward()", fontsize=9, va="center")
    axes.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axes.set_ylim(len(kinds) - 0.5, -1.2)
    axes.set_xlim(0.3, len(fired) + 3)
    axes.set_xticks(range(1, len(fired) + 1, 2))
    axes.set_xlabel("order of the calls on rank 0", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Bucket 0 goes before the backward pass gets to h", loc="left", fontsize=12, fontweight="bold")


draw_hooks(fired)

# %% [markdown]
# From left to right, of `two.weight`:
#
# 1. a *tensor* hook: its gradient is computed, and could still be changed; it is not yet in `.grad`;
# 2. *after accumulation*: now it is in `.grad`. (dlearn hangs this kind on parameters: the ticks in all pictures
#    here. It also uses those of the optimizer, and no communication hook.)
# 3. DDP's own hook, in C++ on the same `AccumulateGrad`, finds that bucket 0 is full, and hands it to the
#    *communication hook*: it goes;
# 4. the node's other hooks; then autograd goes on, to `h` and the first layer.
#
# Nobody in your program called any of these. That is what makes DDP non-intrusive.

# %%
order = {each: place for place, each in enumerate(fired)}
assert fired == hooked.results[1]
assert len(order) == len(fired)
for weight, bucket in (("two.weight", "bucket 0"), ("one.weight", "bucket 1")):
    kinds = [
        order["tensor", weight],
        order["after accumulation", weight],
        order["DDP: a bucket is full", bucket],
        order["node: after", f"Acc. {weight}"],
    ]
    assert kinds == sorted(kinds)
assert order["DDP: a bucket is full", "bucket 0"] < order["tensor", "h"] < order["node: before", "ReLU"]
assert order["node: before", "ReLU"] < order["node: after", "ReLU"] < order["tensor", "one.weight"]
assert order["several: the first", "of both"] < order["tensor", "h"] < order["several: all", "both"]
assert order["several: all", "both"] < order["after accumulation", "one.weight"]

weight = nn.Parameter(torch.ones(1))
there = []
weight.register_hook(lambda _: there.append(weight.grad is not None))
weight.register_post_accumulate_grad_hook(lambda _: there.append(weight.grad is not None))
weight.sum().backward()
assert there == [False, True]

# %% [markdown]
# ## Exercise
#
# `Deep` has eight linear layers of 256 × 256 numbers and 256 biases each. With three ranks and the default
# `bucket_cap_mb`, how many bytes does each rank send in the tenth step, and in how many all-reduces? Work it out,
# write your two numbers instead of `None`, and run the cell.


# %%
def ten_steps():
    model = DistributedDataParallel(Deep())
    for step in range(10):
        with span(f"step {step}"):
            model(torch.ones(4, 256)).sum().backward()


bytes_sent, all_reduces = None, None

tenth = Cluster(3).run(ten_steps).trace.within("step 9").where(op="all_reduce")
gradients = 4 * 8 * (256 * 256 + 256)
assert traffic(tenth).total_bytes == 2 * (3 - 1) * gradients  # of all three ranks
first = operations(tenth)[0].ends[0].inputs[0].payload_bytes
assert 2**20 <= first < 2**20 + gradients / 8  # closed at 1 MiB, with the gradients that it then had

if bytes_sent is not None:
    assert bytes_sent == 2 * (3 - 1) / 3 * gradients, "no: a ring; what share of the gradients is one chunk?"
    assert all_reduces == len(operations(tenth)), "no: how large is the first bucket if nobody gives a cap?"
    print("Right.")

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
