# ---
# jupyter:
#   dlearn:
#     ids: [DD12]
#     minutes: 0.5
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Compressed gradients: how many bytes, and at what price?
#
# **Goals.** You will be able to write a communication hook; predict the bytes of fp16, PowerSGD and top-k; compare a
# difference in the loss with the spread of the seeds.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 40 minutes.
#
# A gradient takes 4 bytes for each parameter. With 2 bytes per number the traffic is half, and other methods send far
# less. **How many bytes does each method send, and what happens to the loss?** (For optimizers and buffers see
# [ring_all_reduce](ring_all_reduce.ipynb) and [ddp_hooks](ddp_hooks.ipynb).)
#
# A *communication hook* replaces DDP's all-reduce. When a bucket of gradients is full, DDP calls your function with the
# `bucket`, and expects a future of its average. Here are two hooks from torch:

# %%
from functools import partial
from math import isclose
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, analysis, lessons, operations, span
from dlearn.lessons import charts, digits, models

START = 2  # PowerSGD leaves the first two steps alone, while DDP still makes its buckets


def power(rank):
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START), powerSGD_hook


HOOKS = {
    "plain": lambda: None,
    "fp16": lambda: (None, fp16_compress_hook),
    **{f"PowerSGD {rank}": partial(power, rank) for rank in (1, 2, 4)},
}

# %% [markdown]
# `fp16` sends 2 bytes for each number. PowerSGD treats each gradient as a matrix of n rows and m columns. It sends two
# thin matrices instead, P (n × r) and Q (r × m), whose product approximates the gradient. You choose their rank r.
#
# **Predict first:** the model has three linear layers with 26,122 parameters, 104,488 bytes, in one bucket. In how many
# all-reduces does PowerSGD send the gradients?

# %%
my_calls = lessons.predict("compression.calls of PowerSGD", None)


def hooked(name, seed=0):
    torch.manual_seed(seed)
    model = DistributedDataParallel(models.MLP())  # one bucket, because its cap is 25 MB
    if HOOKS[name]() is not None:
        model.register_comm_hook(*HOOKS[name]())
    return model


def a_few_steps():
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    for name in HOOKS:
        model = hooked(name)
        for step in range(START + 2):
            with span(f"{name}, step {step}"):
                cross_entropy(model(images[:25]), labels[:25]).backward()


def sizes(name):
    """Bytes that a rank passes to each all-reduce of the last step."""
    reduced = operations(run.trace.within(f"{name}, step {START + 1}"))
    return [sum(tensor.payload_bytes for tensor in each.ends[0].inputs) for each in reduced]


run = Cluster(2).run(a_few_steps)
for name in HOOKS:
    print(f"{name:10} {sum(sizes(name)):>9,} B in {len(sizes(name))} all-reduces: {sizes(name)}")
my_calls and my_calls.against(len(sizes("PowerSGD 1")))

# %% [markdown]
# fp16 sends half. PowerSGD makes three all-reduces instead of one. The first has the uncompressed gradients
# (the biases, and each matrix that would not shrink to less than half), the second all P, the third all Q. In the
# picture, which part does not shrink with the rank?


# %%
def formula(rank):
    whole = p = q = 0
    for parameter in models.MLP().parameters():
        n, m = len(parameter), parameter[0].numel()
        if 2 * (n + m) * rank < n * m:
            p, q = p + n * rank, q + m * rank
        else:
            whole += n * m
    return [4 * whole, 4 * p, 4 * q]


P = sum(4 * each.numel() for each in models.MLP().parameters())
thin = {name: sizes(name) if name.startswith("Power") else [0, 0, 0] for name in HOOKS}
kinds = ["a number for each", "left as they are", "P", "Q"]
heights = [[0 if sum(thin[name]) else sizes(name)[0], *thin[name]] for name in HOOKS]
share = {name: f"{sum(sizes(name)) / P:.0%}" for name in HOOKS}
axes = charts.bars(
    list(HOOKS),
    [
        charts.Part(kind, [size / 1000 for size in column])
        for kind, column in zip(kinds, zip(*heights, strict=True), strict=True)
    ],
    stacked=True,
    title=f"fp16 sends {share['fp16']} of the bytes, PowerSGD of rank 1 sends {share['PowerSGD 1']}"
    f" and of rank 4 {share['PowerSGD 4']}",
    y="all-reduced in one step, kB",
    text=lambda value: f"{1000 * value:,.0f} B",
)
_ = axes.set_ylim(0, 1.14 * P / 1000)  # room for the number on the highest bar

# %% [markdown]
# The biases, because vectors are never compressed. The three parts travel one after the other, because Q is computed
# from the sum of P. So compression costs latency: three rounds instead of one. (With two buckets, PowerSGD on gloo
# hangs or aborts: see [museum_of_hangs](museum_of_hangs.ipynb). This model's gradients are in one bucket.)

# %% tags=["DD12", "check"]
assert sizes("plain") == [P] == [104_488]
assert sizes("fp16") == [P / 2]
assert all(sizes(f"PowerSGD {rank}") == formula(rank) for rank in (1, 2, 4))
last = {name: run.trace.within(f"{name}, step {START + 1}") for name in HOOKS}
first, then, at_last = operations(last["PowerSGD 1"])
assert {each.bucket.index for each in operations(last["plain"])} == {0}
assert at_last.start_ns > then.last_arrival_ns  # no rank sends Q before every rank has given its P

# %% [markdown]
# ## A hook of your own
#
# A hook is a function of `state` (any object) and the bucket. `fp16_by_hand` does what torch's hook does: convert to
# half precision, divide by n, sum, and copy back. `top_k` sends only the k largest numbers, with their positions. The
# ranks pick different positions, so the picks cannot be summed on the way; an all-gather brings all picks to every
# rank. The rest is dropped here.


# %%
def fp16_by_hand(state, bucket):
    small = bucket.buffer().half() / dist.get_world_size()  # divide first: a sum could be too large for float16
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def top_k(state, bucket):
    n = dist.get_world_size()
    gradient = bucket.buffer()
    places = gradient.abs().topk(max(1, int(state["share"] * len(gradient)))).indices
    mine = torch.stack([places.int(), gradient[places].view(torch.int32)])  # 4 bytes for each place and each number
    all_picks = [torch.empty_like(mine) for _ in range(n)]
    future = dist.all_gather(all_picks, mine, async_op=True).get_future()

    def average(_):
        total = torch.zeros_like(gradient)
        for where, numbers in all_picks:
            total.index_add_(0, where.long(), numbers.view(torch.float32) / n)
        return bucket.buffer().copy_(total)

    return future.then(average)


HOOKS |= {
    "fp16 by hand": lambda: (None, fp16_by_hand),
    "all, by top_k": lambda: ({"share": 1.0}, top_k),
    "top 1%": lambda: ({"share": 0.01}, top_k),
}

# %% [markdown]
# Is the average still that of plain DDP? **Predict first:** how many bytes does a rank send with `top 1%`? (That is 261
# of 26,122 numbers.)

# %%
my_bytes = lessons.predict("compression.bytes of top 1%", None)


def check(name):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    model = hooked(name)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            cross_entropy(model(images[:25]), labels[:25]).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


with Cluster(2) as pair:
    checked = {name: pair.run(check, name) for name in ("plain", "fp16", "fp16 by hand", "all, by top_k", "top 1%")}

plain = checked["plain"].results[0]
for name, each in checked.items():
    step = analysis.traffic(each.trace.within("step 2"))
    far = (each.results[0] - plain).norm() / plain.norm()
    print(f"{name:14} sent by a rank: {step.bytes_from(rank=0):>8,} B, away from plain: {far:.4f}")
by_hand = {name: analysis.traffic(each.trace.within("step 2")).bytes_from(rank=0) for name, each in checked.items()}
my_bytes and my_bytes.against(by_hand["top 1%"])

# %% [markdown]
# The results of `fp16_by_hand` and torch's hook agree in every bit. `top_k` with all numbers is right, but sends twice
# as much as DDP, because of the positions. With 1% it sends 2% of the bytes, but the rest is missing from the average.

# %% tags=["check"]
assert all(torch.equal(*each.results.values()) for each in checked.values())
assert torch.equal(checked["fp16 by hand"].results[0], checked["fp16"].results[0])
assert torch.allclose(checked["all, by top_k"].results[0], plain, atol=1e-7)
assert torch.allclose(checked["fp16"].results[0], plain, atol=1e-3)
assert by_hand["fp16 by hand"] == by_hand["fp16"] == P / 2
assert by_hand["all, by top_k"] == 2 * P
assert by_hand["top 1%"] == 261 * 8 == 2_088

# %% [markdown]
# ## The price: the loss
#
# Each hook trains six epochs on digits, with three seeds. **Predict first:** which line coincides with the plain one?

# %%
my_line = lessons.predict("compression.as good as plain", None, choices=("fp16", "PowerSGD 1", "top 1%"))


def train(name, seed):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    everything = [each[: digits.TRAINING_IMAGES] for each in digits.load()]
    model = hooked(name, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for epoch in range(7):
        if epoch:
            for batch in torch.randperm(len(images), generator=order).split(25):
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            losses.append(cross_entropy(model.module(everything[0]), everything[1]).item())
    return losses


def train_all(names):
    return {name: [train(name, seed) for seed in range(3)] for name in names}


TRAINED = ["plain", "fp16", "PowerSGD 1", "top 1%"]
losses = Cluster(2, record=False).run(train_all, TRAINED).results[0]

# %%
sent = {name: by_hand[name] if name in by_hand else sum(sizes(name)) for name in TRAINED}
curves = {name: list(zip(*runs, strict=True)) for name, runs in losses.items()}  # of each epoch, the three seeds
times = {name: median(curves[name][-1]) / median(curves["plain"][-1]) for name in TRAINED}
axes = charts.lines(
    {
        f"{name}: {sent[name]:,} B": charts.Series(
            range(7), [median(each) for each in at], [(min(each), max(each)) for each in at]
        )
        for name, at in curves.items()
    },
    title="; ".join(
        f"{name}: {sent[name] / P:.0%} of the bytes, {times[name]:.2f} times the loss" for name in TRAINED[1:]
    ),
    x="epochs",
    y="loss over all training images",
    notes=["Medians of three seeds; vertical lines: from the best seed to the worst."],
)
for name, at in curves.items():
    print(f"{name:10} ends with {median(at[-1]):.3f}, from {min(at[-1]):.3f} to {max(at[-1]):.3f}")

# %% [markdown]
# fp16 coincides with plain: its rounding is far smaller than the noise of a batch of 25 images. PowerSGD is a little
# worse. Top 1% is much worse (see the title), because a number that is never among the largest is never sent. *Error
# feedback* cures that: what was not sent is added to the next gradient. You write it in the exercise. (For each seed,
# fp16 ends within 5% of plain, and top 1% with more than twice the loss.)

# %% tags=["check"]
for name, runs in losses.items():
    assert all(run[-1] < 1 < 2 < run[0] for run in runs) or name == "top 1%"
assert all(abs(a[-1] / b[-1] - 1) < 0.05 for a, b in zip(losses["fp16"], losses["plain"], strict=True))
assert all(a[-1] > 2 * b[-1] for a, b in zip(losses["top 1%"], losses["plain"], strict=True))
my_line and my_line.against("fp16")

# %% [markdown]
# ## Exercises
#
# 1. In the all-gather of `top_k`, each rank sends (n-1) times 8 bytes per pick. In an all-reduce it sends 2 (n-1)/n · 4
#    bytes for each number. If ranks pick 10% of the numbers, with how many ranks do both send the same? Write your
#    number instead of `None`.
# 2. Write a top-k hook with error feedback. The docstring says what it must do.

# %% tags=["exercise"]
my_answer = None
lessons.answer("compression.as_dear_as_plain", my_answer)

# %% tags=["answer"]
costs = {n: ((n - 1) * 8 * 0.1, 2 * (n - 1) / n * 4) for n in range(2, 100)}
(same,) = [n for n, (picks, all_reduce) in costs.items() if isclose(picks, all_reduce)]
assert lessons.answer("compression.as_dear_as_plain", same).right


# %% tags=["exercise"]
def my_hook(state, bucket):
    """Add the gradient to what this rank has not sent yet; send the `state["k"]` numbers that are largest in absolute
    value, with their positions. The result is the mean over all ranks. Keep the unsent rest in `state`. Return a future
    of a tensor of the bucket's length.
    """
    future = torch.futures.Future()
    future.set_result(bucket.buffer())  # this rank's gradient, as it is: replace this by your hook
    return future


lessons.check("top_k_hook", my_hook, student="")  # your name: it chooses the data
