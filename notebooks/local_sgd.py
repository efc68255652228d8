# ---
# jupyter:
#   dlearn:
#     ids: [MP4]
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 700
# ---

# %% [markdown]
# # Local SGD: how rarely can ranks exchange?
#
# **Goals.** You will be able to write DiLoCo in twenty lines; predict its bytes from H, and its time over a slow
# network.
#
# **Before this:** [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb),
# [slow_network](slow_network.ipynb). **Takes** about 25 minutes.
#
# DDP averages gradients in each step. Between two sites, over the internet, that is too slow. With **local SGD**, each
# rank trains its own model for H steps, and then the ranks average their models. **DiLoCo** (Douillard and others,
# [2311.08105](https://arxiv.org/abs/2311.08105)) has two optimizers: an inner one (AdamW) on each rank, and an outer
# one (SGD with Nesterov momentum 0.9, rate 0.7), whose gradient is the average change of the ranks' models. **How many
# bytes and how much time does it take to reach a given loss?** (The lesson needs namespaces: Linux only, no root;
# `dlearn doctor` says whether this machine permits them.)

# %%
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dlearn import Cluster, analysis, lessons
from dlearn.lessons import charts, digits, models

RANKS, STEPS, BATCH = 3, 200, 25
RATE, LATENCY = 50e6, 0.002
P = 104_488  # bytes of the model's parameters


def diloco(h):
    """(step, s since the beginning, parameters) after every ten steps or more, where ranks agree on them."""
    torch.manual_seed(0)
    model = models.MLP()
    inner = torch.optim.AdamW(model.parameters(), lr=0.001)
    common = parameters_to_vector(model.parameters()).detach().clone().requires_grad_()
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    images, labels = digits.shard(dist.get_rank(), RANKS)
    seen, began = [(0, 0.0, common.detach().clone())], 0.0
    for step in range(1, STEPS + 1):
        part = slice(step * BATCH % len(images), step * BATCH % len(images) + BATCH)
        inner.zero_grad()
        cross_entropy(model(images[part]), labels[part]).backward()
        inner.step()
        if step % h == 0:
            moved = common.detach() - parameters_to_vector(model.parameters()).detach()
            dist.all_reduce(moved)
            common.grad = moved / RANKS
            outer.step()
            vector_to_parameters(common.detach().clone(), model.parameters())
            began = began or time.perf_counter()  # the first exchange, which connects, is not counted
            if step % 10 == 0:
                seen.append((step, time.perf_counter() - began, common.detach().clone()))
    return seen if dist.get_rank() == 0 else common.detach()


# %% [markdown]
# **Predict first:** an all-reduce in a ring of 3 ranks sends 2 · 2 · P bytes in all. How many MB does H = 20 send in
# 200 steps? (And which H reaches the lowest loss?) In the picture, each dot is ten steps or more. Choose a loss, and
# compare how many bytes each curve needs to reach it.

# %%
my_megabytes = lessons.predict("local_sgd.MB with H = 20", None)
HS = [1, 5, 20, 50]
network = f"{RATE / 1e6:g} Mbit/s, {LATENCY * 1e3:g} ms"
runs = {h: Cluster(RANKS, network=network).run(diloco, h, timeout=100) for h in HS}

everything = [torch.cat(parts) for parts in zip(*(digits.shard(rank, RANKS) for rank in range(RANKS)), strict=True)]


def loss(parameters):
    """Loss over all training images."""
    model = models.MLP()
    vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        return cross_entropy(model(everything[0]), everything[1]).item()


curves = {h: [(step, at, loss(numbers)) for step, at, numbers in run.results[0]] for h, run in runs.items()}
sent = {h: analysis.traffic(run.trace).total_bytes for h, run in runs.items()}
for h in HS:
    _, took, last = curves[h][-1]
    print(f"H = {h:2}: {sent[h] / 1e6:5.1f} MB, {took:5.2f} s, last loss {last:.2f}")
if my_megabytes:
    print(my_megabytes.against(sent[20] / 1e6, tolerance=0.05))

# %%
series = {
    f"H = {h}": charts.Series([max(step // h * 4 * P / 1e6, P / 1e6) for step, _, _ in each], [x for *_, x in each])
    for h, each in curves.items()
}
charts.lines(
    series,
    title=f"{STEPS} steps: {sent[1] / 1e6:.0f} MB with H = 1, {sent[50] / 1e6:.1f} MB with H = 50",
    x="MB sent in all (a beginning stands at 0.1)",
    y="loss",
    log="x",
    ticks=[(0.1, "0.1"), (1, "1"), (10, "10"), (80, "80")],
)

# %% tags=["check"]
for h, run in runs.items():
    assert sent[h] == STEPS // h * 2 * (RANKS - 1) * P
    assert torch.equal(run.results[1], run.results[2])
    assert torch.equal(run.results[1], run.results[0][-1][2])
    assert curves[h][-1][2] < 1  # it learns: it began at 2.3
assert curves[50][-1][2] < min(curves[1][-1][2], curves[5][-1][2])  # with a fiftieth of the bytes
assert 2.2 < curves[1][0][2] < 2.4

# %% [markdown]
# The bytes are exactly proportional to 1 / H. At the end all ranks have the same parameters, to the last bit. On this
# small task fewer exchanges even give a lower loss: the outer momentum is meant for steps that sum many inner ones, and
# with H = 1 and 5 it overshoots. That is not a general result. On large models, and if the ranks' data differ, a large
# H makes the loss worse.
#
# ## How long until a loss of 0.5?
#
# Over 50 Mbit/s with 2 ms, an exchange takes 2 · 2 · (latency + P / 3 / rate), about 30 ms. **Predict first:** how many
# seconds does the network take at least for 200 steps with H = 1, not counting the first exchange?

# %%
my_seconds = lessons.predict("local_sgd.seconds of the network with H = 1", None)
GOAL = 0.5
exchange = 2 * (RANKS - 1) * (LATENCY + P / RANKS * 8 / RATE)
until = {h: next(at for _, at, each in curves[h] if each < GOAL) for h in HS}
network_s = {h: (STEPS // h - 1) * exchange for h in HS}
took = {h: curves[h][-1][1] for h in HS}
share = {h: network_s[h] / took[h] for h in HS}
print("the network's share of the time:", {h: f"{each:.0%}" for h, each in share.items()})
if my_seconds:
    print(my_seconds.against(network_s[1], tolerance=0.1))
charts.bars(
    [f"H = {h}" for h in HS],
    [
        charts.Part("200 steps, at least (the network's bound)", list(network_s.values())),
        charts.Part("200 steps, measured", list(took.values())),
        charts.Part(f"until a loss of {GOAL}", list(until.values())),
    ],
    title=f"Over {network}, an exchange takes {exchange * 1e3:.0f} ms",
    y="s",
    text="{:.1f}".format,
)

# %% [markdown]
# The first bar is a lower bound, for the network alone. The measured time is longer, because the ranks also compute,
# and wait for a core and for each other. With fewer exchanges, the network's share of the time is smaller. It also
# depends on how fast your machine computes: find the H at which the share printed above becomes small. The messages are
# those of DDP's ring, but sent less often.

# %% tags=["check"]
for h in HS:
    assert took[h] >= network_s[h]  # the bound holds
assert took[1] > took[20]
assert until[1] > until[20]
assert share[1] > share[20]  # of H that are close to each other one run is not enough to say so
assert share[50] == min(share.values())

# %% [markdown]
# ## Exercises
#
# 1. Send the changes in 16 bits (`moved.half()`). With H = 20, what changes? (The paper of *Streaming DiLoCo* sends 4.)
# 2. Without the outer momentum (`momentum=0`, `lr=1`, no Nesterov) this is plain local SGD. Which H becomes worse?
# 3. Give the ranks different digits (rank 0 gets 0 to 3, and so on). What does H = 50 cost now?
# 4. Slow one rank (`cluster.network.straggler(1, 5)`). Which ranks wait for it, and how often, with H = 1 and H = 50?
