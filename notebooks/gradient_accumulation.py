# ---
# jupyter:
#   dlearn:
#     ids: [DD6, Q5]
#     minutes: 0.3
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # Gradient accumulation: what does `no_sync` save?
#
# **Goals.** You will be able to place `no_sync` so that it saves traffic; scale the loss of micro-batches; handle a
# short last group correctly.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 35 minutes.
#
# A batch that does not fit in memory can be processed in parts: compute the gradients of several *micro-batches* one
# after the other, let them add up in `.grad`, and let the optimizer step once. DDP would send the gradients after each
# part, although only their sum is needed. `no_sync()` prevents that. **How many bytes does it save? Which pass must it
# enclose? And what happens if it encloses one micro-batch too many?**

# %%
import zlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, operations, play, span
from dlearn.analysis import compare, mismatches, traffic
from dlearn.lessons import digits, models

MICRO_BATCHES = 24


def train(n, size=16):
    """Each step has n micro-batches of `size` images; the ranks share their gradients in the last one."""
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
# Without `no_sync` each of two ranks sends all gradients, 111,960 bytes, in each micro-batch. **Predict first:** with 8
# micro-batches in a step, how many bytes does a rank send per micro-batch, on average?

# %%
my_average = lessons.predict("accumulation.bytes of a micro-batch", None)


def sent_by(run, names):
    """Bytes that rank 0 sends in each of these spans."""
    return [traffic(run.trace.within(name)).bytes_from(rank=0) for name in names]


NAMES = [f"micro-batch {number}" for number in range(MICRO_BATCHES)]
runs, sent = {}, {}
for n in (1, 2, 4, 8):
    runs[n] = Cluster(2).run(train, n)
    sent[n] = sent_by(runs[n], NAMES)
for n, sizes in sent.items():
    print(f"n = {n}, the last eight: {sizes[-8:]}, on average {sum(sizes[-8:]) / 8:,.0f} B")
my_average and my_average.against(sum(sent[8][-8:]) / 8)

# %% [markdown]
# Exactly one n-th. A micro-batch inside `no_sync` sends nothing. The last one sends as much as DDP sends without
# `no_sync`, because the gradients of all n have been added up to *one* sum, as large as the parameters.
#
# The picture shows one step with n = 4. Ticks are gradients that became ready. How many groups of ticks are there, and
# after which group is something sent? In the player the buckets fill four times.

# %%
axes = draw.timeline(runs[4].trace.within("step 3"))
play.player(runs[4].trace.within("step 3"))

# %% tags=["DD6", "check"]
full = 4 * sum(parameter.numel() for parameter in models.ConvNet().parameters())
assert full == 111_960
for n, sizes in sent.items():
    assert sizes[-8:] == ([0] * (n - 1) + [full]) * (8 // n)
    assert sum(sizes[-8:]) / 8 == full / n
    assert all(torch.equal(a, b) for a, b in zip(runs[n].results[0], runs[n].results[1], strict=True))
step = runs[4].trace.within("step 3")
for rank in (0, 1):
    ready = step.where(kind="gradient", rank=rank).events
    calls = step.where(op="all_reduce", rank=rank).events
    assert len(ready) == 4 * 6
    assert len(calls) == 3
    assert calls[0].start_ns > ready[3 * 6 - 1].start_ns

# %% [markdown]
# ## Around the forward or around the backward?
#
# DDP sends during `loss.backward()`. **Predict first:** which pass has to be inside `no_sync` so that nothing is sent?

# %%
PASSES = ("the forward", "the backward", "either", "both")
my_pass = lessons.predict("accumulation.which pass", None, choices=PASSES)


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
    label = f"inside no_sync: {' and '.join(inside) or 'nothing'}"
    print(f"{label:36} {size:9,} B in a step; gradients are {'the same' if same else 'DIFFERENT'} on the ranks")

# %% [markdown]
# **The forward pass decides.** At its end, DDP prepares its reducer for the following backward pass, unless `no_sync`
# is active. Around the backward pass alone, `no_sync` has no effect. Around the forward pass alone it has its full
# effect: nothing is sent, and there is no warning. So put both inside, as `train` does.
#
# There is one exception to "nothing is sent". Look at the *first* micro-batches of n = 4:

# %%
print(sent[4][:8])
early = operations(runs[4].trace.within("micro-batch 4"))
for operation in early:
    print(f"{operation.op}, {operation.ends[0].inputs[0].payload_bytes} B: {operation.what}")

# %% [markdown]
# 40 bytes are sent *inside* `no_sync`, once: in the forward pass after the first backward pass that sends, DDP rebuilds
# its buckets (lesson [ddp_step_by_step](ddp_step_by_step.ipynb)).

# %% tags=["Q5", "check"]
assert decides[()] == decides["backward",] == (full, True)
assert decides["forward",] == decides["forward", "backward"] == (0, False)
assert sent[4][:8] == [0, 0, 0, full, 40, 0, 0, full]
assert [each.what for each in early] == ["DDP agrees on the rebuilt buckets"] * 2
my_pass and my_pass.against("the forward")

# %% [markdown]
# ## Is it the big batch?
#
# Four micro-batches of 16 images have the same images as one batch of 64. Are the gradients the same, in every bit? And
# why does `train` divide the loss by n?


# %%
def gradients(sizes, weights):
    """Gradients of one step, with a micro-batch of each size, whose loss has this weight."""
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
# Divided by n, the gradient is that of the big batch, except for rounding (the order of adding differs). Not divided,
# it is four times as long, as with four times the learning rate. If the parts are not equal, dividing by their number
# is wrong: the mean of means is not the mean, and four images count as much as twenty. Weight each loss by its share of
# the images.

# %% tags=["check"]
torch.testing.assert_close(found["16 + 16 + 16 + 16, each / 4"], big, rtol=0, atol=1e-6)
torch.testing.assert_close(found["16 + 16 + 16 + 16, not divided"], 4 * big, rtol=0, atol=1e-5)
torch.testing.assert_close(found["20 + 20 + 20 + 4, each times its share"], big, rtol=0, atol=1e-6)
assert (found["20 + 20 + 20 + 4, each / 4"] - big).abs().max() > 1e-3

# %% [markdown]
# ## Forgetting the last micro-batch
#
# With ten micro-batches and n = 4, two are left at the end. The loop below takes a step for these two, too, but it
# shares gradients only after every fourth micro-batch. **Predict first:** what happens?

# %%
FATES = ("an error", "a hang", "two different models", "nothing bad")
my_fate = lessons.predict("accumulation.last one forgotten", None, choices=FATES)


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


# %%
forgot, right = Cluster(2).run(epochs, False), Cluster(2).run(epochs, True)


def same_on_both(run):
    """For each step: are the gradients the same on both ranks, and the parameters after it?"""
    pairs = zip(run.results[0], run.results[1], strict=True)
    return [tuple(a == b for a, b in zip(*each, strict=True)) for each in pairs]


for name, run in (("forgotten", forgot), ("right", right)):
    for step, (gradients, parameters) in enumerate(same_on_both(run)):
        words = ["the same" if same else "DIFFERENT" for same in (gradients, parameters)]
        print(f"{name:9}  epoch {step // 3}, step {step % 3}: gradients {words[0]:9}  parameters {words[1]}")
difference = compare(right.trace, forgot.trace, names=("right", "forgotten"))
difference

# %% [markdown]
# There is no error and no hang. In the third step each rank uses its own gradients, and from then on there are **two
# models**. The later steps share their gradients, but DDP sends the parameters only once, in its constructor, and never
# compares them again. A checkpoint of rank 0 is then not the model for which rank 1 computed its gradients.
#
# The traffic shows it: in two epochs each rank sends 223,920 bytes less, the gradients once per epoch. The cure is one
# more condition: share after each n-th micro-batch *and after the last*. (A checksum of the parameters, gathered now
# and then, would also show it.)

# %% tags=["check"]
assert same_on_both(right) == [(True, True)] * 6
assert same_on_both(forgot) == [(True, True)] * 2 + [(False, False)] + [(True, False)] * 2 + [(False, False)]
assert difference.total.added_bytes == -2 * 2 * full == -2 * 223_920
assert mismatches(forgot.trace) == ()
my_fate and my_fate.against("two different models")

# %% [markdown]
# ## Exercises
#
# Four ranks train 100 million parameters in float32, with 6,000 micro-batches in an epoch. How many bytes does each
# rank send in an epoch, if n = 8? Write your number instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("gradient_accumulation.an_epoch", my_answer)

# %% tags=["answer"]
steps, gradients = 6_000 // 8, 4 * 100_000_000
assert lessons.answer("gradient_accumulation.an_epoch", steps * 2 * (4 - 1) / 4 * gradients).right

# %% [markdown]
# Now write the loop. `my_loop(ddp, batches, loss, every, rate)` takes one SGD step of `rate` after every `every` of the
# 5 micro-batches, and one after the rest. Each step is that of one device whose batch is the whole group. The gradients
# travel once for each group. `loss(ddp, batch)` is the mean over a micro-batch; all micro-batches have the same size.


# %% tags=["exercise"]
def my_loop(ddp, batches, loss, every, rate):
    return  # replace this by your loop


lessons.check("accumulation", my_loop, student="")  # your name: it chooses the data
