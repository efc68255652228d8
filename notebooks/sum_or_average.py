# ---
# jupyter:
#   dlearn:
#     ids: [SA1, SA2, SA3, SA4, SA5, SA6]
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Sum or average?
#
# **Goals.** You will be able to say which run on one device a distributed run is equal to; choose the reduction and the
# learning rate to match.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 40 minutes.
#
# Some texts on distributed training *sum* the gradients of the workers. PyTorch *averages* them. DDP's documentation
# said that with M workers "the gradient will be M times smaller", and a forum answer says that the learning rate must
# be M times larger. **Which is right?** Each of them matches some run on a single device. The question is which run.
# (Today's docstring adds "if the loss is summed (NOT averaged as usual)". At the end of this lesson you know why.)
#
# The examples that all ranks together use in one step are its **global batch**. Each cell here trains on real ranks,
# and then looks for the run on **one** device that ends with the same parameters, to within 1e-6.

# %%
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, lessons
from dlearn.lessons import charts, digits

EXAMPLES, BATCH, LR = 128, 32, 0.1
images, labels = (part[:EXAMPLES] for part in digits.load())
images = images.flatten(1).double()  # float64, so that a difference is not rounding


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def apart(a, b):
    return (a - b).abs().max().item()


# %% [markdown]
# ## How many updates is an epoch?
#
# With 128 examples and batches of 32, one device makes 4 updates. **Predict first:** how many updates does an epoch
# take on two devices, if each has batches of 32?

# %%
my_updates = lessons.predict("sum_or_average.updates", None)


def epoch(batch, lr=LR, reduction="mean", hook=None):
    """One epoch on this rank's share of the examples, every n-th one, in batches of `batch`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(new_model())
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in zip(images[rank::n].split(batch), labels[rank::n].split(batch), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    return flat(model)


def updates(run):
    """Counted in the trace: the optimizer's steps on rank 0."""
    return sum(each.phase == "optimizer" for each in run.trace.where(kind="stretch", rank=0).events)


one = Cluster(1).run(epoch, BATCH)
kept = Cluster(2).run(epoch, BATCH)
divided = Cluster(2).run(epoch, BATCH // 2)
for name, run in (("one device, 32", one), ("two devices, 32 each", kept), ("two devices, 16 each", divided)):
    print(f"{name:22s} {updates(run)} updates")
my_updates and my_updates.against(updates(kept))

# %% tags=["SA1", "check"]
assert (updates(one), updates(kept), updates(divided)) == (4, 2, 4)

# %% [markdown]
# ## Keep 32 per device, or divide it?
#
# Both runs train, but not in the same way. We compare them with one device that gets the same data in the same order:

# %%
of_64 = Cluster(1).run(epoch, 2 * BATCH)
print(f"16 each, against one device with 32: {apart(divided.results[0], one.results[0]):.0e} apart")
print(f"32 each, against one device with 32: {apart(kept.results[0], one.results[0]):.0e}")
print(f"32 each, against one device with 64: {apart(kept.results[0], of_64.results[0]):.0e}")

# %% tags=["SA2", "check"]
assert apart(divided.results[0], one.results[0]) < 1e-6
assert apart(kept.results[0], of_64.results[0]) < 1e-6
assert apart(kept.results[0], one.results[0]) > 1e-3
assert torch.equal(kept.results[0], kept.results[1])  # the ranks agree, bit by bit

# %% [markdown]
# *n devices with batches of N are one device with batches of n·N.* (Rank r takes every n-th example, so n batches of N
# hold the same examples as one of n·N.) So dividing the batch or not is a choice of batch size. It has nothing to do
# with how gradients are combined.
#
# ## 1 and 2: is it 1.5, or 3?
#
# The gradients of two ranks are 1 and 2. What is the result under DDP, and with a server that adds them? The trace
# holds a checksum of the data that each rank passes to a collective, so it shows what crossed the wire.


# %%
def gradients_1_and_2():
    weight = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(weight)
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()  # d(w·x)/dw = x
    summed = torch.tensor([dist.get_rank() + 1.0])
    dist.reduce(summed, dst=0)  # at a server: the sum
    return weight.weight.grad.item(), summed.item()


run = Cluster(2, checksums=True).run(gradients_1_and_2)
ddp, server = run.results[0]
print("DDP:", ddp, " summing server:", server)

# %% tags=["SA3", "check"]
assert (ddp, server) == (1.5, 3.0)
assert run.results[1][0] == 1.5
given = {event.rank: event.checksum for event in run.trace.where(kind="collective", op="all_reduce").events}
assert given == {rank: zlib.crc32(torch.tensor([half]).numpy().tobytes()) for rank, half in enumerate((0.5, 1.0))}

# %% [markdown]
# DDP divides by n *before* the all-reduce, and the all-reduce sums: 0.5 and 1 cross the wire, not 1 and 2. (That keeps
# half-precision sums from overflowing.)
#
# ## Which run on one device is it?
#
# The loss of a batch is a *mean* over its examples, or a *sum*. The gradients of the ranks are *averaged*, or *summed*.
# Each of the four combinations trains two workers with batches of 16, in two ways. One is DDP (with a communication
# hook that does not divide, it sums). The other is a server, rank 0, which collects gradients and sends parameters
# back.
#
# **Predict first:** take a sum loss under DDP, which averages. *One* device with batches of 32 gets the same parameters
# if its learning rate is different. How many times as large must it be?


# %%
my_factor = lessons.predict("sum_or_average.sum loss, averaged", None)


def add_up(_, bucket):  # a communication hook that forgets to divide
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def with_ddp(reduction, combine, lr):
    hook = None
    if combine == "sum":
        hook = add_up
    return epoch(BATCH // dist.get_world_size(), lr, reduction, hook)


# %%
def with_server(reduction, combine, lr):
    """Rank 0 keeps the model and computes no gradients; the other ranks keep nothing between steps."""
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    model = new_model()
    numbers = flat(model)
    for step in range(EXAMPLES // BATCH):
        dist.broadcast(numbers, src=0)
        gradient = torch.zeros_like(numbers)
        if rank:
            nn.utils.vector_to_parameters(numbers, model.parameters())
            x, y = (part[rank - 1 :: workers].split(BATCH // workers)[step] for part in (images, labels))
            model.zero_grad()
            cross_entropy(model(x), y, reduction=reduction).backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.reduce(gradient, dst=0)
        if rank == 0:
            numbers -= lr * (gradient / workers if combine == "average" else gradient)
    return numbers


def alone(reduction, lr, examples=EXAMPLES):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in zip(images[:examples].split(BATCH), labels[:examples].split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    return flat(model)


# %%
n, lr = 2, 0.01
rows = []
with Cluster(n) as ranks, Cluster(n + 1) as with_one_more:
    for reduction in ("mean", "sum"):
        for combine in ("average", "sum"):
            found = {
                "DDP": ranks.run(with_ddp, reduction, combine, lr).results[0],
                "server": with_one_more.run(with_server, reduction, combine, lr).results[0],
            }
            equal_to = [
                factor
                for factor in (1 / n, 1, n)
                if all(apart(alone(reduction, lr * factor), each) < 1e-6 for each in found.values())
            ]
            rows.append((reduction, combine, equal_to))
            print(f"{reduction:4} loss, gradients {combine:7} = one device, {reduction} loss, lr x {equal_to}")
my_factor and my_factor.against(rows[2][2][0])

# %% tags=["SA4", "check"]
assert rows == [
    ("mean", "average", [1]),
    ("mean", "sum", [n]),
    ("sum", "average", [1 / n]),
    ("sum", "sum", [1]),
]

# %% [markdown]
# So:
#
# - *mean loss, averaged gradients* (what PyTorch does by default) and *sum loss, summed gradients* are the **same** as
#   one device with the whole batch and the same learning rate.
# - "The gradient will be M times smaller" is true for a **sum** loss under DDP (third line), but not for a mean loss.
# - A text that sums gradients has a sum loss in mind, or an n times smaller learning rate. If you use its recipe with
#   PyTorch's mean loss, you train with n times the learning rate: the second line.
#
# ## Must the learning rate scale?
#
# Not if you want the same training: in the table above, the default needs lr x 1. But if you *keep* 32 per device, an
# epoch has n times fewer updates. The linear scaling rule (Goyal et al., 2017) then recommends n times the learning
# rate. Is one update with n·lr the same as n updates with lr?

# %%
far = {}
for small in (0.001, 0.01, 0.1):
    n_updates = Cluster(1).run(epoch, BATCH, small).results[0]  # 4 updates of 32
    scaled = Cluster(2).run(epoch, BATCH, 2 * small).results[0]  # 2 updates of 2 x 32
    plain = Cluster(2).run(epoch, BATCH, small).results[0]
    moved = (n_updates - flat(new_model())).norm()
    far[small] = (((scaled - n_updates).norm() / moved).item(), ((plain - n_updates).norm() / moved).item())
scaled, plain = ([100 * part for part in parts] for parts in zip(*far.values(), strict=True))
axes = charts.bars(
    [f"lr = {small}" for small in far],
    [charts.Part("half as many updates with 2 · lr", scaled), charts.Part("half as many with lr", plain)],
    title=f"With twice the learning rate half as many updates end {min(scaled):.2f}% to {max(scaled):.1f}% away",
    y="% of the distance moved",
    text="{:.3g}%".format,
)

# %% tags=["SA5", "check"]
# ten times the learning rate gives about ten times the error: it is of second order
assert 5 < far[0.01][0] / far[0.001][0] < 20
assert all(scaled < plain / 5 and 0.4 < plain < 0.6 for scaled, plain in far.values())

# %% [markdown]
# Nearly, while the learning rate is small. With n small steps, the second gradient is computed at a point that one
# large step never visits. The error grows with lr. It is largest early in training, when gradients change fastest; this
# is the reason for "warm-up".
#
# ## Average the gradients, or the parameters?
#
# Each rank could also step with its own gradient, and then all ranks could average their *parameters*. **Predict
# first:** with which optimizers does the result differ?

# %%
CHOICES = ("none of them", "Adam", "momentum and Adam", "all three")
my_optimizers = lessons.predict("sum_or_average.averaged parameters", None, choices=CHOICES)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=LR),
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def averaged(what, name):
    rank, n = dist.get_rank(), dist.get_world_size()
    model = new_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    for x, y in zip(images[rank::n].split(BATCH // n), labels[rank::n].split(BATCH // n), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if what == "gradients":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if what == "parameters":
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)
    return flat(model)


difference, ends = {}, {}
with Cluster(2) as ranks:
    for name in OPTIMIZERS:
        a, b = (ranks.run(averaged, what, name).results[0] for what in ("gradients", "parameters"))
        difference[name], ends[name] = apart(a, b), a
        print(f"{name:18s} {difference[name]:.0e} apart")

# %% tags=["SA6", "check"]
assert difference["SGD"] < 1e-6
assert difference["SGD, momentum 0.9"] < 1e-6
assert apart(ends["SGD"], ends["SGD, momentum 0.9"]) > 1e-3  # the momentum was on
assert difference["Adam"] > 1e-3
my_optimizers and my_optimizers.against("Adam")

# %% [markdown]
# With SGD the result is the same. With momentum **it is also the same**, although many texts deny it. The momentum
# buffer is a linear function of the gradients, so the mean of the ranks' buffers is the buffer of the mean gradient.
# (This needs averaging after *each* step. Ranks that take several steps in between compute gradients at different
# points, with any optimizer.) Adam divides by a root of squares, which is not linear, so each rank takes full-size
# steps along its own noise.
#
# ## Uneven batches
#
# The mean of the ranks' means is the mean over all examples only if all batches have the same size. A last batch of 2
# is no problem if every rank has 2. But what if one rank has 3 examples left, and the other 2?


# %%
def last_batch(cure):
    """One update from 5 examples on two ranks: 3 on rank 0, 2 on rank 1."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = images[:5][rank::n], labels[:5][rank::n]
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss = cross_entropy(model(x), y)
    if cure:
        count = torch.tensor([float(len(x))])
        dist.all_reduce(count)
        loss = loss * len(x) * n / count.item()  # weight each rank by its number of examples
    loss.backward()
    optimizer.step()
    return flat(model)


five_alone = alone("mean", LR, examples=5)
wrong, cured = (apart(Cluster(2).run(last_batch, cure).results[0], five_alone) for cure in (False, True))
print(f"mean of means: {wrong:.0e} off; weighed by the number of examples: {cured:.0e}")

# %% tags=["check"]
assert wrong > 1e-5
assert cured < 1e-6

# %% [markdown]
# Each of rank 1's two examples counts as much as one and a half of rank 0's. Usual remedies are `drop_last=True`, or
# `DistributedSampler`, which repeats some examples until the shares are even (these then count twice). Weighting as
# above is exact. If a rank has *no* batch left, the others hang: see [museum_of_hangs](museum_of_hangs.ipynb).
#
# ## Exercises
#
# 1. Run the first line of the table (mean loss, averaged gradients) on **three** ranks with batches of 32. Which check
#    fails first, and why? (128 is not a multiple of 3.)
# 2. With SGD, average the *parameters* only every second step. How far is the result from that of averaged gradients
#    after an epoch? Is it twice as far if you average every fourth step?
# 3. Average Adam's state (`exp_avg`, `exp_avg_sq`), too. Does it help?
