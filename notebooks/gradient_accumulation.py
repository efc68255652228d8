# ---
# jupyter:
#   dlearn:
#     ids: [DD6, Q5]
#     minutes: 0.3
#     needs: []
#     peak_mb: 600
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gradient accumulation: what does `no_sync` save?
#
# **Goals.** You will be able to place `no_sync` so that it saves traffic; scale the loss of micro-batches; treat a
# short last group right.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 35 minutes.
#
# A batch that does not fit in memory can be processed in parts: compute the gradients of some *micro-batches* one after
# the other, let them add up in `.grad`, and let the optimizer step once. But DDP would send the gradients after each
# part, and only their sum is needed. `no_sync()` prevents that. **How many bytes does it save, exactly? Which pass must
# it be around? And what if it is around one too many?**

# %%
import zlib
from contextlib import nullcontext
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, operations, play, span
from dlearn.analysis import compare, mismatches, traffic
from dlearn.lessons import digits, models

MICRO_BATCHES = 24


def train(n, size=16):
    """Each step has n micro-batches of `size` images; in the last of them the ranks share their gradients."""
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(MICRO_BATCHES // n):
        with span(f"step {step}"):
            for number in range(step * n, (step + 1) * n):
                part = slice(number * size, (number + 1) * size)
                last = number == (step + 1) * n - 1
                with span(f"micro-batch {number}"), nullcontext() if last else model.no_sync():
                    loss = cross_entropy(model(images[part]), labels[part]) / n
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


# %% [markdown]
# ## One n-th
#
# Without `no_sync` each of two ranks sends 111,960 bytes in each micro-batch: all gradients. **Predict first:** with
# 2, 4 and 8 micro-batches in a step, how many bytes is that for a micro-batch, on average? Exactly, or about?


# %%
def sent_by(run, names):
    """What rank 0 sends in each of these spans."""
    return [traffic(run.trace.within(name)).bytes_from(rank=0) for name in names]


NAMES = [f"micro-batch {number}" for number in range(MICRO_BATCHES)]
runs, sent = {}, {}
for n in (1, 2, 4, 8):
    runs[n] = Cluster(2).run(train, n)
    sent[n] = sent_by(runs[n], NAMES)
for n, sizes in sent.items():
    print(f"n = {n}, the last eight: {sizes[-8:]}, on average {sum(sizes[-8:]) / 8:,.0f} B")

# %% [markdown]
# Exactly one n-th. A micro-batch inside `no_sync` sends nothing, the last sends as much as ever: by then the gradients
# of all n are *one* sum, and that is as large as the parameters.

# %% tags=["DD6", "check"]
full = 4 * sum(parameter.numel() for parameter in models.ConvNet().parameters())
assert full == 111_960
for n, sizes in sent.items():
    assert sizes[-8:] == ([0] * (n - 1) + [full]) * (8 // n)
    assert sum(sizes[-8:]) / 8 == full / n
    assert all(torch.equal(a, b) for a, b in zip(runs[n].results[0], runs[n].results[1], strict=True))

# %% [markdown]
# In the picture is one step with n = 4. Ticks are gradients that became ready. How many groups of them are there, and
# after which is something sent?

# %%
axes = draw.timeline(runs[4].trace.within("step 3"))

# %% [markdown]
# The same step by step: the buckets fill four times. After which of them does the first message leave?

# %%
play.player(runs[4].trace.within("step 3"))

# %% tags=["check"]
step = runs[4].trace.within("step 3")
for rank in (0, 1):
    ready = step.where(kind="gradient", rank=rank).events
    calls = step.where(op="all_reduce", rank=rank).events
    assert len(ready) == 4 * 6
    assert len(calls) == 3
    assert calls[0].start_ns > ready[3 * 6 - 1].start_ns

# %% [markdown]
# Does it save time, too? That depends on what sending costs, here and now. Left the bytes, which are exact; right the
# time, which is not: a dot is the median of five runs, its line leaves out the quickest and the slowest tenth. (The
# more ranks and the slower the network, the more there is to save; here they are two processes on one machine.)

# %%
took = {n: [] for n in sent}
with Cluster(2) as cluster:
    for _ in range(5):
        for n in took:
            spans = cluster.run(train, n).trace.where(kind="span", rank=0).events
            steps = [each for each in spans if each.name.startswith("step")]
            took[n] += [(each.end_ns - each.start_ns) / 1e6 / n for each in steps[1:]]

_, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9), dpi=110, layout="constrained")
for place, n in enumerate(took):
    size = sum(sent[n][-8:]) / 8
    left.bar(place, size / 1000, width=0.6, color="#0072B2")
    left.annotate(f"{size:,.0f} B", (place, size / 1000), ha="center", va="bottom", fontsize=9)
    ordered = sorted(took[n])
    low, high = (ordered[int(len(ordered) * share)] for share in (0.1, 0.9))
    right.plot([place, place], [low, high], color="#222222", linewidth=1)
    right.plot(place, median(ordered), "o", color="#222222")
    text = f"{median(ordered):.1f} ms"
    right.annotate(text, (place, median(ordered)), (7, 0), textcoords="offset points", va="center", fontsize=9)
time_title = f"Time: from {median(took[1]):.1f} to {median(took[8]):.1f} ms (medians)"
for axes, title in ((left, "Bytes fall to exactly 1/n"), (right, time_title)):
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xticks(range(4), [f"n = {n}" for n in took])
    axes.set_xlim(-0.5, 3.7)
    axes.spines[["top", "right"]].set_visible(False)
left.set_ylabel("kB for each micro-batch")
left.set_ylim(0, 128)
right.set_ylabel("ms for each micro-batch")
ends = right.set_ylim(0, None)

# %% [markdown]
# ## Around the forward or around the backward?
#
# `loss.backward()` is what sends. So `no_sync` must be around the backward pass? **Predict first**, for each of the
# four: how many bytes does a step send?


# %%
def train_inside(*inside):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            with model.no_sync() if "forward" in inside else nullcontext():
                loss = cross_entropy(model(images[:16]), labels[:16])
            with model.no_sync() if "backward" in inside else nullcontext():
                loss.backward()
    return crc(parameter.grad for parameter in model.parameters())


def crc(tensors):
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


decides = {}
for inside in ((), ("backward",), ("forward",), ("forward", "backward")):
    ran = Cluster(2).run(train_inside, *inside)
    same = len(set(ran.results.values())) == 1
    decides[inside] = (sent_by(ran, ["step 2"])[0], same)
for inside, (size, same) in decides.items():
    told = f"inside no_sync: {' and '.join(inside) or 'nothing'}"
    print(f"{told:36} {size:9,} B in a step; gradients are {'the same' if same else 'DIFFERENT'} on the ranks")

# %% [markdown]
# **The forward decides.** At its end DDP prepares its reducer for the backward pass that comes, or does not; the
# backward pass does what was prepared. Around the backward only, `no_sync` has no effect, and all bytes are sent.
# Around the forward only, it has its full effect, also on a backward pass that is outside: nothing is sent, without
# a warning. So put both inside, as `train` does.

# %% tags=["Q5", "check"]
assert decides[()] == decides["backward",] == (full, True)
assert decides["forward",] == decides["forward", "backward"] == (0, False)

# %% [markdown]
# ## Nothing at all?
#
# Look at the *first* micro-batches of n = 4, and not at the last:

# %%
print(sent[4][:8])
early = operations(runs[4].trace.within("micro-batch 4"))
for operation in early:
    print(f"{operation.op}, {operation.ends[0].inputs[0].payload_bytes} B: {operation.what}")

# %% [markdown]
# 40 bytes *inside* `no_sync`, once. After the first backward pass that sends, DDP rebuilds its buckets; it does so in
# the next forward pass, whichever that is (lesson `ddp_step_by_step`).
#
# And buffers? Here is a model with a `BatchNorm` of 12 channels (104 bytes of buffers, which rank 0 sends in each
# forward pass). **Predict first:** with n = 4, in how many of four micro-batches are they sent?


# %%
def train_norm(n):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    net = nn.Sequential(nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.Flatten(), nn.Linear(12 * 36, 10))
    model = DistributedDataParallel(net)
    for number in range(12):
        last = (number + 1) % n == 0
        with span(f"micro-batch {number}"), nullcontext() if last else model.no_sync():
            cross_entropy(model(images[:16]), labels[:16]).backward()


norm = {n: Cluster(2).run(train_norm, n) for n in (1, 4)}
buffers = {
    n: [traffic(run.trace.within(name).where(op="broadcast")).bytes_from(rank=0) for name in NAMES[8:12]]
    for n, run in norm.items()
}
print(buffers)

# %% [markdown]
# In the first only. After a forward pass inside `no_sync` they are not sent before the next one: 1/n, here, too.

# %% tags=["check"]
assert sent[4][:8] == [0, 0, 0, full, 40, 0, 0, full]
assert [each.what for each in early] == ["DDP agrees on the rebuilt buckets"] * 2
assert buffers == {1: [104, 104, 104, 104], 4: [104, 0, 0, 0]}

# %% [markdown]
# ## Is it the big batch?
#
# Four micro-batches of 16 images, or one batch of 64: the same images. **Predict first:** are the gradients the same?
# In every bit? And what is the `/ n` in `train` for?


# %%
def gradients(sizes, weights):
    """Of one step, with a micro-batch of each size, whose loss counts with this weight."""
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet())
    begin = 0
    for place, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        part = slice(begin, begin + size)
        begin += size
        with nullcontext() if place == len(sizes) - 1 else model.no_sync():
            (weight * cross_entropy(model(images[part]), labels[part])).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


WAYS = {
    "16 + 16 + 16 + 16, each / 4": ([16] * 4, [1 / 4] * 4),
    "16 + 16 + 16 + 16, not divided": ([16] * 4, [1] * 4),
    "20 + 20 + 20 + 4, each / 4": ([20, 20, 20, 4], [1 / 4] * 4),
    "20 + 20 + 20 + 4, each times its share": ([20, 20, 20, 4], [20 / 64] * 3 + [4 / 64]),
}
with Cluster(2) as cluster:
    big = cluster.run(gradients, [64], [1]).results[0]
    found = {way: cluster.run(gradients, *parts).results[0] for way, parts in WAYS.items()}
for way, gradient in found.items():
    off, ratio = (gradient - big).abs().max().item(), (gradient.norm() / big.norm()).item()
    print(f"{way:40} off by at most {off:.0e}; length {ratio:.3f} of the big batch's")

# %% [markdown]
# Divided, it is the big batch but for rounding (sums are made in another order). Not divided, it is four times as long,
# as with four times the learning rate. And where the parts are not equal, dividing by their number is wrong, too: the
# mean of means is not the mean, and the four images count as much as twenty. Each loss counts with its share of the
# images.

# %% tags=["check"]
torch.testing.assert_close(found["16 + 16 + 16 + 16, each / 4"], big, rtol=0, atol=1e-6)
torch.testing.assert_close(found["16 + 16 + 16 + 16, not divided"], 4 * big, rtol=0, atol=1e-5)
torch.testing.assert_close(found["20 + 20 + 20 + 4, each times its share"], big, rtol=0, atol=1e-6)
assert (found["20 + 20 + 20 + 4, each / 4"] - big).abs().max() > 1e-3

# %% [markdown]
# ## The last one forgotten
#
# Ten micro-batches, n = 4: after 8 of them, two are left. The loop below makes the step for these two, too, as most
# do. But it shares gradients only after each fourth one. **Predict first:** is there an error, a hang? What do the two
# ranks have after this step, and after the next epoch?


# %%
def epochs(careful):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        for number in range(10):
            part = slice(number * 16, (number + 1) * 16)
            fourth, last = (number + 1) % 4 == 0, number == 9
            share = fourth or (last and careful)
            with nullcontext() if share else model.no_sync():
                cross_entropy(model(images[part]), labels[part]).backward()
            if fourth or last:
                gradients = crc(parameter.grad for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                seen.append((gradients, crc(model.parameters())))
    return seen


forgot, right = Cluster(2).run(epochs, False), Cluster(2).run(epochs, True)


def alike(run):
    """For each step: are the gradients the same on both ranks, and the parameters after it?"""
    pairs = zip(run.results[0], run.results[1], strict=True)
    return [tuple(a == b for a, b in zip(*each, strict=True)) for each in pairs]


for name, run in (("forgotten", forgot), ("right", right)):
    for step, (gradients, parameters) in enumerate(alike(run)):
        told = ["the same" if same else "DIFFERENT" for same in (gradients, parameters)]
        print(f"{name:9}  epoch {step // 3}, step {step % 3}: gradients {told[0]:9}  parameters {told[1]}")

# %% [markdown]
# No error, no hang. In the third step each rank goes its own way, with its own gradients, and from there on there are
# **two models**. The later steps share their gradients as they should, but DDP has sent the parameters once, at the
# beginning, and never compares them again. What a checkpoint of rank 0 holds is not what the gradients of rank 1 were
# computed for.
#
# The traffic tells: here it is beside the right one.

# %%
told = compare(right.trace, forgot.trace, names=("right", "forgotten"))
told

# %% [markdown]
# 223,920 bytes less each way: twice the gradients, once in each epoch. The cure is one condition more: share with each
# n-th micro-batch, *and with the last*. (And a checksum of the parameters, gathered now and then, would have told.)

# %% tags=["check"]
assert alike(right) == [(True, True)] * 6
assert alike(forgot) == [(True, True)] * 2 + [(False, False)] + [(True, False)] * 2 + [(False, False)]
assert told.total.added_bytes == -2 * 2 * full == -2 * 223_920
assert mismatches(forgot.trace) == ()

# %% [markdown]
# ## Exercise
#
# Four ranks, 100 million parameters in float32, 6,000 micro-batches in an epoch. How many bytes does each rank send in
# an epoch, with n = 8? Work it out, write your number instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("gradient_accumulation.an_epoch", my_answer)

# %% tags=["answer"]
steps, gradients = 6_000 // 8, 4 * 100_000_000
assert lessons.answer("gradient_accumulation.an_epoch", steps * 2 * (4 - 1) / 4 * gradients).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
