# ---
# jupyter:
#   dlearn:
#     ids: [SA1, SA2, SA3, SA4, SA5, SA6, SA7]
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Sum or average?
#
# **Goals.** You will be able to say which run on one device a distributed run is equal to; choose reduction and
# learning rate accordingly.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 40 minutes.
#
# One text on distributed training *sums* the gradients of the workers. PyTorch *averages* them. The documentation of
# DDP said that with M workers "the gradient will be M times smaller", and a forum answer says that the learning rate
# must be M times larger. **Who is right?** All of them, for some run on a single device. The question is: which one?
# (Today's docstring adds "if the loss is summed (NOT averaged as usual)". At the end of this lesson you know why.)
#
# The examples of one step on all ranks together are its **global batch**. Each cell here trains on real ranks, and
# then looks for the run on **one** device that leads to the same parameters: equal to 1e-6, or it does not count.

# %%
from contextlib import nullcontext
from importlib.util import find_spec

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, analysis, draw, play
from dlearn.lessons import digits

EXAMPLES, BATCH, LR = 128, 32, 0.1
images, labels = (part[:EXAMPLES] for part in digits.load())
images = images.flatten(1).double()  # float64: what differs, differs for a reason


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
# 128 examples, batches of 32, one device: 4 updates. Now two devices. **Predict first:** how many updates does an
# epoch have if each device takes batches of 32? And if the 32 are divided, 16 for each?


# %%
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

# %% tags=["SA1", "check"]
assert (updates(one), updates(kept), updates(divided)) == (4, 2, 4)

# %% [markdown]
# ## Keep 32 per device, or divide it?
#
# Both are training; they are not the same training. Against one device with the same data in the same order:

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
# hold the same examples as one of n·N.) Whether you divide the batch is a decision about how you want to train, not
# about gradients.
#
# ## 1 and 2: is it 1.5, or 3?
#
# The gradients of two ranks are 1 and 2. What does DDP make of them, and what does a server that adds them up?


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

# %% [markdown]
# DDP divides by n *before* the all-reduce, and the all-reduce sums: what crosses the wire is 0.5 and 1, not 1 and 2.
# (That keeps half-precision sums from overflowing.) Can it be seen? Each rank notes a checksum of what it gives to a
# collective; two programs that give the same data have the same one:


# %%
def give(number):
    dist.all_reduce(torch.tensor([number * (dist.get_rank() + 1.0)]))


def checksums_given(run):
    reduces = run.trace.where(kind="collective", op="all_reduce").events
    return {event.rank: event.checksum for event in reduces}


halves, wholes = (checksums_given(Cluster(2, checksums=True).run(give, number)) for number in (0.5, 1.0))
print(f"DDP gives {checksums_given(run)}; 0.5 and 1 are {halves}, 1 and 2 are {wholes}")

# %% tags=["SA3", "check"]
assert checksums_given(run) == halves != wholes

# %% [markdown]
# ## Which run on one device is it?
#
# The loss of a batch is a *mean* over its examples, or a *sum*. The gradients of the ranks are *averaged*, or *summed*.
# Four combinations, each on two ranks with batches of 16; and DDP over gloo is not the only way, so each is run three
# times: with DDP (which sums where a communication hook has not divided), with DDP over MPI (the same function,
# in a real MPI job, if mpi4py is installed), and with a server, rank 0, which collects the gradients and sends the new
# parameters back.
#
# **Predict first**, for each: with which learning rate does *one* device, with batches of 32, get the same parameters?


# %%
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
    """Rank 0 holds the model and computes nothing; the other ranks hold nothing that lasts."""
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
of_mpi = Cluster(n, backend="mpi") if find_spec("mpi4py") else None
if of_mpi is None:
    print("DDP over MPI is left out: it needs the extra `mpi` (pip install mpi4py mpich).")
with Cluster(n) as ranks, of_mpi or nullcontext(), Cluster(n + 1) as with_one_more:
    for reduction in ("mean", "sum"):
        for combine in ("average", "sum"):
            found = {
                "DDP": ranks.run(with_ddp, reduction, combine, lr).results[0],
                "server": with_one_more.run(with_server, reduction, combine, lr).results[0],
            }
            if of_mpi:
                found["DDP over MPI"] = of_mpi.run(with_ddp, reduction, combine, lr).results[0]
            equal_to = [
                factor
                for factor in (1 / n, 1, n)
                if all(apart(alone(reduction, lr * factor), each) < 1e-6 for each in found.values())
            ]
            rows.append((reduction, combine, equal_to))
            print(f"{reduction:4} loss, gradients {combine:7} = one device, {reduction} loss, lr x {equal_to}")

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
# - "The gradient will be M times smaller" is true for a **sum** loss under DDP: the third line. With a mean loss it is
#   false.
# - A text that sums gradients means a sum loss, or has a learning rate that is n times smaller. Mix its recipe with
#   PyTorch's mean loss, and you train with n times the learning rate: the second line.
#
# ## Must the learning rate scale?
#
# Not for the same training: the table above has lr x 1 in it. It is another question if you *keep* 32 per device: n
# times fewer updates per epoch. The linear scaling rule (Goyal et al., 2017) says: n times the learning rate. Is one
# update with n·lr the same as n updates with lr? **Predict first:** exactly, nearly, or not at all?

# %%
far = {}
for small in (0.001, 0.01, 0.1):
    n_updates = Cluster(1).run(epoch, BATCH, small).results[0]  # 4 updates of 32
    scaled = Cluster(2).run(epoch, BATCH, 2 * small).results[0]  # 2 updates of 2 x 32
    plain = Cluster(2).run(epoch, BATCH, small).results[0]
    moved = (n_updates - flat(new_model())).norm()
    far[small] = (((scaled - n_updates).norm() / moved).item(), ((plain - n_updates).norm() / moved).item())
    print(f"lr {small:5}: 2 x lr is {far[small][0]:.2%} of the way off, the same lr {far[small][1]:.0%}")

# %% tags=["SA5", "check"]
# ten times the learning rate, about ten times the error: it is of second order
assert 5 < far[0.01][0] / far[0.001][0] < 20
assert all(scaled < plain / 5 for scaled, plain in far.values())

# %% [markdown]
# Nearly, while the learning rate is small: the second of the n gradients is taken at a point that one large step never
# visits. That error grows with lr, and early in training, when gradients change fastest, it is largest. Hence
# "warm-up".
#
# ## Average the gradients, or the parameters?
#
# Each rank could also step by itself, with its own gradient, and then all average their *parameters*. **Predict
# first:** with SGD, is it the same? With momentum? With Adam?

# %%
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


difference = {}
with Cluster(2) as ranks:
    for name in OPTIMIZERS:
        a, b = (ranks.run(averaged, what, name).results[0] for what in ("gradients", "parameters"))
        difference[name] = apart(a, b)
        print(f"{name:18s} {difference[name]:.0e} apart")

# %% tags=["SA6", "check"]
assert difference["SGD"] < 1e-6
assert difference["SGD, momentum 0.9"] < 1e-6
assert difference["Adam"] > 1e-3

# %% [markdown]
# With SGD, yes. With momentum, **yes, too**: many texts say no. The momentum buffer is a linear function of the
# gradients, so the mean of the ranks' buffers is the buffer of the mean gradient. (Average after *each* step: ranks
# that step several times in between take gradients at different points, with any optimizer.) Adam divides by the root
# of squares, which is not linear: each rank takes steps of full size along its own noise.
#
# ## Is DDP a parameter server?
#
# The results are the same, as the table says. The traffic is not. **Predict first:** three workers, gradients of P
# bytes. How many bytes does the server send and receive in a step? And a rank of DDP's ring?


# %%
def server_step():
    """One step with a server, its messages one by one: parameters out, gradients in."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = torch.zeros(P_ELEMENTS)
    for worker in range(1, n):
        if rank == 0:
            dist.send(numbers, dst=worker)
        elif rank == worker:
            dist.recv(numbers, src=0)
    for worker in range(1, n):
        if rank == 0:
            dist.recv(numbers, src=worker)
        elif rank == worker:
            dist.send(numbers, dst=0)


def ring_step():
    dist.all_reduce(torch.zeros(P_ELEMENTS))


P_ELEMENTS, workers = 3 * 40_000, 3
P = 4 * P_ELEMENTS
served = Cluster(["server", "worker 1", "worker 2", "worker 3"]).run(server_step)
ring = Cluster(workers).run(ring_step)
at_server, at_ring = analysis.traffic(served.trace), analysis.traffic(ring.trace)

for name, sent, ranks in (("server", at_server, 4), ("ring", at_ring, 3)):
    shown = [f"{sent.bytes_from(rank=rank):,} out, {sent.bytes_to(rank=rank):,} in" for rank in range(ranks)]
    print(f"{name}: " + "; ".join(shown))

# %% tags=["SA7", "check"]
assert at_server.bytes_from(rank=0) == at_server.bytes_to(rank=0) == workers * P
assert all(at_server.bytes_from(rank=rank) == P for rank in (1, 2, 3))
assert all(at_ring.bytes_from(rank=rank) == 2 * (workers - 1) * P // workers for rank in range(workers))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
draw.traffic(served.trace, ax=left)
draw.traffic(ring.trace, ax=right)
plt.show()

# %% [markdown]
# Step by step: how long does the last worker wait for its answer?

# %%
play.player(served.trace)

# %% [markdown]
# n·P each way at one place, against 2(n-1)/n·P at every rank. With a hundred workers the server's link transports
# fifty times what a rank of the ring does. What the server has instead: workers need not wait for each other (the
# lesson [hogwild](hogwild.ipynb)).
#
# ## Uneven batches
#
# The mean of means is the mean only if all batches have the same size. A last batch of 2 is no problem as long as every
# rank has 2. But if one rank has 3 examples left, and the other 2?


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
        loss = loss * len(x) * n / count.item()  # weigh each rank by its examples
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
# Each of rank 1's two examples counts as much as one and a half of rank 0's. The usual ways out: `drop_last=True`, or
# `DistributedSampler`, which repeats examples until the shares are even (then these count twice). Weighing as above is
# exact. And if a rank has *no* batch left, the others hang: that is an exhibit of the lesson
# [museum_of_hangs](museum_of_hangs.ipynb).
#
# ## Exercises
#
# 1. In the table, put `average` and a mean loss on **three** ranks with batches of 32. Which check fails first, and
#    why? (128 is not 3 times anything.)
# 2. Average the *parameters* with SGD only every second step. How far from the averaged gradients is it after an epoch?
#    Twice as far every fourth step?
# 3. Give Adam's state (`exp_avg`, `exp_avg_sq`) to the average, too. Does it help?
