# ---
# jupyter:
#   dlearn:
#     ids: [Q8, T5, T6, T7, T8, T9]
#     minutes: 0.6
#     needs: []
#     peak_mb: 900
# ---

# %% [markdown]
# # ZeRO and FSDP2: what is cut, what does it send, and when is that hidden?
#
# **Goals.** You will be able to write the three stages of ZeRO; predict the messages of `fully_shard` in a step, with
# mixed precision, with micro-batches and on two hosts; say when its gathers are hidden behind computing.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb), [collectives](collectives.ipynb). **Takes** about 40
# minutes.
#
# Under DDP every rank stores all parameters, all gradients and the optimizer's whole state: with Adam four times the
# model. *Sharding* cuts them into n parts; each rank keeps one, its *shard*. ZeRO's stage 1 cuts the optimizer's state,
# stage 2 also the gradients, stage 3 also the parameters. Torch's `fully_shard` (FSDP2) is stage 3. **What does each
# send, and what does it save?** The model has three layers of 64 × 64 weights, P bytes. The backend `dlearn_ring`
# records every message ([ring_all_reduce](ring_all_reduce.ipynb)).

# %%
from collections import Counter
from contextlib import nullcontext
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dlearn import Cluster, analysis, draw, lessons, messages, operations, play, span
from dlearn.lessons import charts

N, LAYERS, WIDTH, IMAGES = 4, 3, 64, 16
P = LAYERS * WIDTH * WIDTH * 4


def start():
    torch.manual_seed(0)  # the weights are equal on all ranks, images and targets are not
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    torch.manual_seed(1 + dist.get_rank())
    return weights, torch.randn(IMAGES, WIDTH), torch.rand(IMAGES, WIDTH)


def gathered(shard):
    dist.all_gather_single(whole := torch.empty(N * len(shard), WIDTH), shard)
    return whole


def scattered(gradient):
    dist.reduce_scatter_single(shard := torch.empty(len(gradient) // N, WIDTH), gradient)
    return shard / N


# %% [markdown]
# ## By hand
#
# Here is one program for all stages; at stage 0 nothing is cut. This rank's optimizer updates `own`; `whole` are all
# weights, which stage 3 does not keep. What do stages 1, 2 and 3 change?


# %%
def forward_and_backward(stage, own, whole, x, target):
    """Return the last y, and the gradient of each layer's weight: a shard of it from stage 2 on."""
    ys, gradients = [x], [None] * LAYERS
    for i in range(LAYERS):
        weight = gathered(own[i]) if stage == 3 else whole[i]
        ys.append((ys[i] @ weight.T).tanh())
    down = 2 * (ys[-1] - target) / target.numel()  # the gradient of the last y
    for i in reversed(range(LAYERS)):
        weight = gathered(own[i]) if stage == 3 else whole[i]
        inside = down * (1 - ys[i + 1] ** 2)
        gradients[i], down = inside.T @ ys[i], inside @ weight
        if stage >= 2:
            gradients[i] = scattered(gradients[i])
    return ys[-1], gradients


def update(stage, own, whole, gradients, adam):
    """Take a step of the optimizer; return the new weights of all layers."""
    for i in range(LAYERS):
        if stage == 0:
            dist.all_reduce(gradients[i].div_(N))
        own[i].grad = scattered(gradients[i]) if stage == 1 else gradients[i]
    adam.step()
    return [gathered(shard) for shard in own] if stage in (1, 2) else whole


# %%
def by_hand(stage):
    """Take three steps; return the losses, and what this rank keeps after the last backward pass, in P."""
    whole, x, target = start()
    own = whole if stage == 0 else [weight.chunk(N)[dist.get_rank()].clone() for weight in whole]
    whole = None if stage == 3 else whole
    adam, losses = torch.optim.Adam(own, lr=0.01), []
    for step in range(3):
        with span(f"step {step}"):
            y, gradients = forward_and_backward(stage, own, whole, x, target)
            losses.append(nn.functional.mse_loss(y, target).item())
            moments = [each for state in adam.state.values() for each in state.values() if each.dim()]
            kept = [4 * sum(each.numel() for each in part) / P for part in (whole or own, gradients, moments)]
            whole = update(stage, own, whole, gradients, adam)
    return losses, kept


# %% [markdown]
# The textbook counts an all-gather and a reduce-scatter as (n-1)/n · P for each rank, an all-reduce as both: DDP sends
# 2 (n-1)/n · P. **Predict first:** how many times (n-1)/n · P does a rank send in a step of ZeRO-3?

# %%
my_guess = lessons.predict("fsdp2.ZeRO-3, in (n-1)/n P", None)


def sent(run, unit=(N - 1) * P, between=lambda src, dst: True):
    """Return what all ranks send in the last step, by operation, in (n-1) P: for each of n ranks (n-1)/n P."""
    total = Counter()
    for message in messages(run.trace.within("step 2")):
        total[message.op] += message.payload_bytes * between(message.src, message.dst)
    return {op: size / unit for op, size in total.items() if size}


ring = Cluster(N, backend="dlearn_ring", sources=["memory"])  # the same ranks for the whole lesson
hand = {name: ring.run(by_hand, stage) for stage, name in enumerate(["not cut", "ZeRO-1", "ZeRO-2", "ZeRO-3"])}
for name, run in hand.items():
    print(f"{name}: sends {sent(run)}; losses {[round(loss, 4) for loss in run.results[0][0]]}")
kept = [run.results[0][1] for run in hand.values()]
names = [f"{name}: sends {sum(sent(run).values()):g} (n-1)/n P" for name, run in hand.items()]
parts = [charts.Part(kind, each) for kind, *each in zip(("weights", "gradients", "Adam's state"), *kept, strict=True)]
title = "ZeRO-3 sends 3 (n-1)/n P instead of 2, and keeps 1 P instead of 4 P"
axes = charts.bars(names, parts, stacked=True, title=title, y="kept after backward, in P", text="{:g} P".format)
my_guess and my_guess.against(sum(sent(hand["ZeRO-3"]).values()))

# %% [markdown]
# All four compute the same losses. Stage 1 replaces the all-reduce of gradients by its two halves: a reduce-scatter of
# the gradients, and a gather of the new parameters. Stage 2 scatters each gradient as soon as it is there. Stage 3
# gathers each layer twice, forward and backward, but no new parameters: **3 instead of 2**.

# %% tags=["T5", "check"]
REDUCE, GATHER, SCATTER = "all_reduce", "all_gather_single", "reduce_scatter_single"
twice = {SCATTER: 1, GATHER: 1}
assert [*map(sent, hand.values())] == [{REDUCE: 2}, twice, twice, {GATHER: 2, SCATTER: 1}]
assert kept == [[1, 1, 2], [1, 1, 2 / 4], [1, 1 / 4, 2 / 4], [1 / 4, 1 / 4, 2 / 4]]

# %% [markdown]
# ## Torch's own
#
# `fully_shard` makes each layer a unit that hooks gather and free. Does it send our ZeRO-3's messages? In the timeline
# the numbers are layers. In which order are they gathered? Which gathers precede the first gradients (green)?


# %%
def train(way, shape=(N,), parts=1, synced="all", **options):
    """Take three steps of DDP or FSDP; return the losses."""
    weights, x, target = start()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in weights))
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in () if way == "only the root" else model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=way != "kept", **options)
        fully_shard(model, mesh=mesh, **options)  # the root: what no layer has
    adam, losses = torch.optim.Adam(model.parameters(), lr=0.01), [0.0] * 3
    for step in range(3):
        with span(f"step {step}"):
            adam.zero_grad()
            for number, (inputs, wanted) in enumerate(zip(x.chunk(parts), target.chunk(parts), strict=True)):
                sync = synced == "all" or (synced == "last" and number == parts - 1)
                if way != "DDP":
                    model.set_requires_gradient_sync(sync)
                with model.no_sync() if way == "DDP" and not sync else nullcontext():
                    loss = nn.functional.mse_loss(model(inputs), wanted) / parts
                    loss.backward()
                losses[step] += loss.item()
            adam.step()
    return losses


# %%
runs = {way: ring.run(train, way) for way in ("DDP", "FSDP", "kept", "only the root")}
steps = {way: run.trace.within("step 2") for way, run in runs.items()}
order = [f"{each.op.removesuffix('_single')} {each.ends[0].module}" for each in operations(steps["FSDP"])]
edge = attrgetter("op", "src", "dst", "payload_bytes")
ours, torchs = (Counter(map(edge, messages(run.trace.within("step 2")))) for run in (hand["ZeRO-3"], runs["FSDP"]))
print("the same messages:", ours == torchs, order)
charts.retitle(draw.timeline(steps["FSDP"]), "Layers 0, 1, 2, 2, 1 are gathered before the first gradients, then 0")

# %% [markdown]
# The messages are those of our ZeRO-3, to the byte. Only their order differs: in the backward pass `fully_shard`
# gathers the next layer *before* it sends gradients (*prefetch*), so that the layer is there when it is needed.
#
# With `reshard_after_forward=False` ("kept") a layer stays gathered until its backward pass. A common mistake wraps
# **only the root**, `fully_shard(model)`, without an error. What do both send? How much is gathered (pale blue)?

# %%
held = {way: analysis.rank_memory(steps[way]) for way in steps}
for way, step in steps.items():
    most = f"at most {held[way].most(0, 'gathered') / P:.2f} P gathered"
    charts.retitle(draw.memory(step), f"{way}: sends {sum(sent(runs[way]).values()):g} (n-1)/n P, holds {most}")

# %% tags=["T5", "T6", "check"]
assert ours == torchs
assert order[:5] == [f"all_gather {layer}" for layer in (0, 1, 2, 2, 1)]
assert [each.op for each in operations(steps["only the root"])] == [GATHER, SCATTER]
assert order[5:] == ["reduce_scatter 2", "all_gather 0", "reduce_scatter 1", "reduce_scatter 0"]
assert [*map(sent, runs.values())] == [{REDUCE: 2}, {GATHER: 2, SCATTER: 1}, twice, twice]
for rank in range(N):
    assert [held[way].most(rank, "gathered") for way in steps] == [0, P / 3, P, P]
    losses = [run.results[rank] for run in runs.values()] + [run.results[rank][0] for run in hand.values()]
    assert torch.allclose(torch.tensor(losses), torch.tensor(losses[0]), atol=1e-6)

# %% [markdown]
# Both send 2 instead of 3, and both hold the whole model at its peak. The trace shows the mistake: one all-gather in a
# step, not one for each layer. (Not measured: by torch's source, the buffer of a prefetched gather comes on top.)
#
# ## Numbers of 16 bits, micro-batches, and gloo
#
# **Mixed precision**: layers compute with bfloat16, 2 bytes a number; gradients are summed in float32. **Two
# micro-batches**: DDP's `no_sync()` saves the first all-reduce, FSDP has `set_requires_gradient_sync(False)`. Code that
# looks for `no_sync` finds none and saves *nothing* ("all"); if True is never set again, there is no error ("never").
# **Predict first:** with two micro-batches, how many times (n-1)/n · P do FSDP's ranks send if only the last one syncs?

# %%
my_sync = lessons.predict("fsdp2.two micro-batches, in (n-1)/n P", None)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
more = {f"FSDP, {synced}": ring.run(train, "FSDP", (N,), 2, synced) for synced in ("all", "last", "never")}
more["DDP, last"] = ring.run(train, "DDP", (N,), 2, "last")
more["FSDP, bfloat16"] = ring.run(train, "FSDP", mp_policy=half)
more |= {f"{way} on gloo": Cluster(N).run(train, way) for way in ("DDP", "FSDP")}
for name, run in more.items():
    print(f"{name}: sends {sent(run)}; losses {[round(loss, 4) for loss in run.results[0]]}")
my_sync and my_sync.against(sum(sent(more["FSDP, last"]).values()))

# %% [markdown]
# With bfloat16 the **gathers halve and the reduce-scatters do not**. Each micro-batch gathers all layers twice; only a
# reduce-scatter is saved: 5 instead of 6, where DDP sends 2. (Not measured: by torch's source, whole gradients are kept
# until then, not 1/n.) "Never" sends no gradient and **learns nothing**: each step has the same loss. On gloo FSDP
# sends 4, twice what DDP does: gloo's reduce-scatter costs a whole all-reduce.

# %% tags=["Q8", "T7", "T8", "check"]
assert sent(more["FSDP, bfloat16"]) == {GATHER: 1, SCATTER: 1}
assert sent(more["DDP, last"]) == sent(more["DDP on gloo"]) == {REDUCE: 2}
of_syncs = [sent(more[f"FSDP, {synced}"]) for synced in ("all", "last", "never")]
assert of_syncs == [{GATHER: 4, SCATTER: 2}, {GATHER: 4, SCATTER: 1}, {GATHER: 4}]
assert len(set(more["FSDP, never"].results[0])) == 1
assert sent(more["FSDP on gloo"]) == {GATHER: 2, SCATTER: 2}

# %% [markdown]
# ## Two hosts: HSDP
#
# Let ranks 0 and 1 be one host, ranks 2 and 3 another. *HSDP* shards inside a host and replicates over the hosts: a
# mesh of (2, 2). The picture shows its groups, the player its messages. Which of them leave a host?

# %%
compared = {"DDP": runs["DDP"], "FSDP": runs["FSDP"], "HSDP": ring.run(train, "FSDP", (2, 2))}
leaving = {way: sent(run, P, lambda src, dst: src // 2 != dst // 2) for way, run in compared.items()}
print("between the hosts, in P:", leaving)
axes = charts.retitle(draw.groups(compared["HSDP"].trace), "Only replicate groups cross the hosts: 0 and 2, 1 and 3")
play.player(compared["HSDP"].trace.within("step 2"), title="HSDP: only its all-reduces leave a host")

# %% [markdown]
# Two arrows of a ring of four cross: DDP sends 3 P between the hosts, FSDP 4.5 P. HSDP gathers and reduce-scatters
# inside a host. Then each rank all-reduces its half of the gradients with the one rank that has the same half: 2 P.
#
# ## When is it hidden?
#
# A gather is hidden while the layer before it computes. Forward, a layer of p weights takes 2 T p operations for T
# tokens (images) on a rank, and receives (n-1)/n · 2 p bytes in bfloat16. Both take equally long at **T = C / W ·
# (n-1)/n**, with C operations and W bytes a second. Backward, 4 T p operations have a gather and a reduce-scatter in
# float32 beside them, (n-1)/n · (2 + 4) p bytes: **1.5 times as many tokens**. The *prediction* for many H100 SXM (data
# sheet: C = 989 TFLOP/s; (n-1)/n taken as 1) is T = 2,198 forward over NVLink (450 GB/s each way), and 19,780 over a
# network of 400 Gbit/s (50 GB/s). ([Source](https://jax-ml.github.io/scaling-book/training/).)

# %% tags=["T9", "check"]
assert [*leaving.values()] == [{REDUCE: 3}, {GATHER: 3, SCATTER: 1.5}, {REDUCE: 2}]
assert (round(989e12 / 450e9), round(989e12 / 50e9)) == (2_198, 19_780)
forward = sent(more["FSDP, bfloat16"])[GATHER] / 2  # one of two gathers; backward also computes twice as much
assert (forward + sent(more["FSDP, bfloat16"])[SCATTER]) / forward / 2 == 1.5

# %% [markdown]
# ## Exercises
#
# 1. Eight ranks on gloo train P = 1 GB with FSDP (no padding). How many bytes do all ranks together send in a step?
# 2. Write ZeRO-1 and FSDP yourself. The docstrings say what each function must do.

# %% tags=["exercise"]
my_answer = None
lessons.answer("fsdp2.bytes_of_fsdp", my_answer)

# %% tags=["answer"]
assert lessons.answer("fsdp2.bytes_of_fsdp", sum(sent(more["FSDP on gloo"]).values()) * (8 - 1) * 10**9).right


# %% tags=["exercise"]
def my_optimizer(parameters, gradient_of, steps, rate, momentum):
    """ZeRO-1: SGD with momentum on the mean of all ranks' gradients, in place. `gradient_of(parameters, step)` is this
    rank's. Keep and return the momentum of this rank's 1/n of the parameters only. Send no more than an all-reduce.
    """
    return  # replace this by your loop


lessons.check("sharded_optimizer", my_optimizer, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_fsdp(shards, x, forward, backward):
    """Make a step of FSDP. `shards`: this rank's 1/n of the weights of 3 layers, each in one row. Gather those of one
    layer just before `forward(weights, x)`, which returns y, and `backward(weights, x, y, gradient)`, which returns the
    gradients of x and of the weights. Then free them: hold at most 2 tensors of a layer's size. The gradient of the
    last y is y itself. Return this rank's shards of the weights' gradients, each the mean over all ranks.
    """
    return  # replace this by your step


lessons.check("fsdp_by_hand", my_fsdp, student="")
