# ---
# jupyter:
#   dlearn:
#     ids: [T21, T22, T23, T24]
#     minutes: 0.6
#     needs: []
#     peak_mb: 1400
# ---

# %% [markdown]
# # Mixed precision and checkpoints: which bits are summed, and which are saved?
#
# **Goals.** You will be able to say in which number format a job sends and sums its gradients; predict what a sum of
# many numbers loses in bfloat16; continue a job that lost a rank, on fewer ranks.
#
# **Before this:** [fsdp2](fsdp2.ipynb). **Takes** about 40 minutes.
#
# *Mixed precision* computes in numbers of 16 bits, and keeps what must not lose digits in 32. bfloat16 has the range of
# float32 and 8 significant bits, two to three decimal digits. **Which of both crosses the wire, and where are gradients
# summed?** Later a rank dies, and you ask which of the job's bits were saved.
#
# ## What is reduced in what?
#
# The model has three layers of 64 × 64 weights: P = 49,152 bytes in float32. Five programs train it on four ranks.
# **Predict first:** `autocast` computes the layers in bfloat16. In which format does DDP send the gradients?

# %%
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, messages, span
from dlearn.lessons import charts

my_format = lessons.predict("mixed.autocast sends", None, choices=("float32", "bfloat16"))
N, LAYERS, WIDTH, IMAGES = 4, 3, 64, 32
P = LAYERS * WIDTH * WIDTH * 4


# %%
def start(width=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(LAYERS)))


def batch(step, width=WIDTH):
    """Return this rank's part of a step's images and targets: the same batch on any number of ranks."""
    torch.manual_seed(100 + step)
    whole = torch.randn(IMAGES, width), torch.rand(IMAGES, width)
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in whole]


def one_step(way):
    model, (x, y) = start(), batch(0)
    if way.startswith("FSDP"):
        reduce_dtype = torch.float32 if way == "FSDP, sums in float32" else None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        if way == "DDP, bfloat16 model":
            model, x, y = model.bfloat16(), x.bfloat16(), y.bfloat16()
        model = DistributedDataParallel(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "DDP, autocast"):
        with span("step"):
            mse_loss(model(x), y).backward()


# %%
WAYS = ("DDP", "DDP, autocast", "DDP, bfloat16 model", "FSDP, bfloat16", "FSDP, sums in float32")
ring, formats = Cluster(N, backend="dlearn_ring"), {}
for way in WAYS:
    sent = Counter()
    for message in messages(ring.run(one_step, way).trace.within("step")):
        call = message.operation.ends[0]  # as one rank has called it
        sent[call.op, call.inputs[0].dtype] += message.payload_bytes
    formats[way] = {what: size / ((N - 1) * P) for what, size in sent.items()}
    print(f"{way}, in (n-1)/n P from each rank: {formats[way]}")
my_format and my_format.against(next(dtype for _, dtype in formats["DDP, autocast"]))
dtypes = {"float32": [], "bfloat16": []}
for sent in formats.values():
    for dtype, values in dtypes.items():
        values.append(sum(size for (_, other), size in sent.items() if other == dtype))
axes = charts.bars(
    WAYS,
    [charts.Part(dtype, values) for dtype, values in dtypes.items()],
    stacked=True,
    title="Autocast sends what float32 sends; bfloat16 weights, or a policy, send less",
    y="sent by a rank, in (n-1)/n P",
    text="{:g}".format,
)

# %% [markdown]
# Autocast casts a layer's inputs and weights while it computes. The parameters stay float32, so their gradients are
# float32, and so is what DDP sends: autocast saves **no byte**. Gradients have the format of their parameters, so a
# model that *is* bfloat16 sends half; it also keeps its weights in 8 bits, and small updates are rounded away. FSDP's
# policy separates both: weights are float32 in the shards, are gathered as bfloat16, and gradients are reduced in
# `reduce_dtype`. Without it they are summed in bfloat16, too.

# %% tags=["T21", "check"]
GATHER, SCATTER = "all_gather_single", "reduce_scatter_single"
assert formats["DDP"] == formats["DDP, autocast"] == {("all_reduce", "float32"): 2}
assert formats["DDP, bfloat16 model"] == {("all_reduce", "bfloat16"): 1}
assert formats["FSDP, bfloat16"] == {(GATHER, "bfloat16"): 1, (SCATTER, "bfloat16"): 0.5}
assert formats["FSDP, sums in float32"] == {(GATHER, "bfloat16"): 1, (SCATTER, "float32"): 1}
assert P == 49_152

# %% [markdown]
# ## Sums of many ranks
#
# A ring adds one rank after the other, and after each addition the sum is sent on, rounded. In bfloat16, 256 + 1 is
# 256: the next number is 258. **Predict first:** 1,024 ranks all-reduce a gradient of 1.0 in bfloat16, in a ring. What
# is the sum?

# %%
my_sum = lessons.predict("mixed.sum of 1,024 ones", None)


def ring_sum(tensors):
    """Add tensors as the ring does: chunk c begins on rank c-1 and goes to the left until rank c adds its own."""
    n, chunks = len(tensors), [tensor.chunk(len(tensors)) for tensor in tensors]
    sums = []
    for c in range(n):
        total = chunks[(c - 1) % n][c]
        for step in range(2, n + 1):
            total = total + chunks[(c - step) % n][c]  # rounded to the dtype
        sums.append(total)
    return torch.cat(sums)


def given(rank, dtype=torch.bfloat16):
    torch.manual_seed(rank)
    return torch.rand(4_096).to(dtype)  # all positive: gradients that agree


def real(dtype):
    dist.all_reduce(tensor := given(dist.get_rank(), dtype))
    return tensor


my_sum and my_sum.against(ring_sum([torch.ones(1_024).bfloat16()] * 1_024)[0].item())
summed = {n: Cluster(n).run(real, torch.bfloat16).results for n in (2, 4)}  # gloo's ring
same = {n: torch.equal(found[0], ring_sum([given(rank) for rank in range(n)])) for n, found in summed.items()}
print("real ranks have the numbers of `ring_sum`, bit by bit:", same)

# %% [markdown]
# `ring_sum` is the ring, bit by bit, so it can stand for rings that this machine cannot run: a **simulation** up to
# 1,024 ranks. The lower line sums in float32 and rounds once. From how many ranks on is a tenth of the sum lost?

# %%
RANKS = [2**k for k in range(1, 11)]


def exact_sum(n):
    return sum(given(rank).double() for rank in range(n))


errors = {"summed in bfloat16": [], "summed in float32, rounded once": []}
for n in RANKS:
    tensors, exact = [given(rank) for rank in range(n)], exact_sum(n)
    once = sum(tensor.float() for tensor in tensors).bfloat16()
    for name, total in zip(errors, (ring_sum(tensors), once), strict=True):
        errors[name].append(float(((total.double() - exact).abs() / exact).mean()))
apart = [float(((summed[n][0].double() - exact_sum(n)).abs() / exact_sum(n)).mean()) for n in summed]
measured = charts.Series([*summed], apart, between="", like="summed in bfloat16")
losing = [n for n, error in zip(RANKS, errors["summed in bfloat16"], strict=True) if error > 0.1]
lost = losing[0] if losing else RANKS[-1]
charts.lines(
    {name: charts.Series(RANKS, values, derived=True) for name, values in errors.items()} | {"real ranks": measured},
    title=f"Simulated: a bfloat16 ring of {lost:,} ranks loses {errors['summed in bfloat16'][RANKS.index(lost)]:.0%}"
    " of the sum; rounded once, no ring does",
    x="ranks",
    y="mean error, as a part of the sum",
    ticks=[(n, f"{n:,}") for n in RANKS],
    log="xy",
)

# %% [markdown]
# A sum in float32 costs twice the bytes in a ring. There is a third way: send bfloat16, add in float32, round once. You
# will write it. (Numbers that cancel each other lose less. Gradients that agree are the worst case, and the one that
# matters.)

# %% tags=["T22", "check"]
assert same == {2: True, 4: True}
assert all(torch.equal(found[0], each) for found in summed.values() for each in found.values())
assert torch.tensor(256.0).bfloat16() + 1 == 256
assert ring_sum([torch.ones(1_024).bfloat16()] * 1_024).unique().tolist() == [256]
assert lost == 1_024
assert errors["summed in bfloat16"][-1] > 0.4
assert max(errors["summed in float32, rounded once"]) < 2**-8

# %% [markdown]
# ## Save, lose a rank, go on
#
# Now the bits that have to survive. Four ranks train with FSDP and Adam. After step 4 each saves its shards by torch's
# *distributed checkpoint* (DCP). In step 7 rank 2 dies. Two new ranks load what four have saved, and go on.
#
# **Predict first:** how many of the ten steps are computed again?


# %%
my_again = lessons.predict("mixed.steps computed again", None)
FOLDER, STEPS, SAVED = Path(tempfile.mkdtemp()), 10, 5


def train(name, first=0, dies_in=None, width=WIDTH):
    """Train from step `first` on; return the loss of each step, over the whole batch."""
    model, losses = start(width), []
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(first, STEPS):
        if step == SAVED:
            model_state, adam_state = get_state_dict(model, adam)
            state = {"model": model_state, "adam": adam_state}
            with span("load" if first else "save"):
                (dcp.load if first else dcp.save)(state, checkpoint_id=FOLDER / name)
            set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"])
        x, y = batch(step, width)
        with span(f"step {step}"):
            adam.zero_grad()
            loss = mse_loss(model(x), y)
            if step == dies_in and dist.get_rank() == 2:
                os._exit(1)
            loss.backward()
            adam.step()
            dist.all_reduce(total := loss.detach())
        losses.append(total.item() / dist.get_world_size())
    return losses


whole = Cluster(4).run(train, "whole")
dead = Cluster(4).run(train, "dead", 0, 7, check=False)
resumed = {n: Cluster(n).run(train, "dead", SAVED) for n in (4, 2)}
print(dead.error)
ended = int(dead.trace.spans[-1].removeprefix("step "))
my_again and my_again.against(ended - SAVED)
draw.timeline(dead.trace.within(f"step {ended}"))

# %% [markdown]
# The error names the rank that died, the call in which the others wait for it, and its line. Steps 5 and 6 are computed
# again. Are the losses those of a run that nothing has disturbed?

# %%
for n, run in resumed.items():
    again = run.results[0]
    apart = max(abs(one - other) for one, other in zip(again, whole.results[0][SAVED:], strict=True))
    print(
        f"on {n} ranks, steps {SAVED} to {STEPS - 1}: {[round(loss, 4) for loss in again]}; at most {apart:.0e} apart"
    )
wide = Cluster(4).run(train, "wide", width=256)
sizes = {}
for name, run, width in (("whole", whole, WIDTH), ("wide", wide, 256)):
    parameters = LAYERS * width * width * 4
    files = [path.stat().st_size for path in sorted((FOLDER / name).glob("*.distcp"))]
    sizes[name] = (sum(files) / parameters, sum(each.payload_bytes for each in messages(run.trace.within("save"))))
    print(f"P = {parameters:,} B: {len(files)} files of {sizes[name][0]:.2f} P; ranks send {sizes[name][1]:,} B")

# %% [markdown]
# On four ranks the losses are equal to the last bit: parameters and Adam's two moments are all that a step needs. On
# two ranks each adds other images first, and the last digit may differ. A checkpoint has 3 P (and a few kB for each
# file): P of parameters, 2 P of moments; with bfloat16 weights alone, updates would be lost. Each rank writes its own
# shards. **No tensor crosses the wire**: what ranks send says who has which part, and does not grow with the model.

# %% tags=["T23", "check"]
assert "rank 2 died: it exited with code 1" in str(dead.error)
assert (ended, ended - SAVED) == (7, 2)
assert resumed[4].results[0] == whole.results[0][SAVED:]
assert max(abs(a - b) for a, b in zip(resumed[2].results[0], whole.results[0][SAVED:], strict=True)) < 1e-5
assert 3 <= sizes["wide"][0] < 3.1
assert abs(sizes["wide"][1] / sizes["whole"][1] - 1) < 0.1

# %% [markdown]
# ## How often, and is it hidden?
#
# While ranks save they do not compute. Save too often, and saving costs; too rarely, and each failure costs half an
# interval. With C seconds for a save and M seconds between failures the sum is least at an interval of **√(2 C M)**
# (Young, 1974). A *prediction*: Llama 3's 16,384 GPUs had 419 unexpected interruptions in 54 days ([The Llama 3 Herd of
# Models](https://arxiv.org/abs/2407.21783)). If a save blocked for 60 s, it would pay every 20 minutes, and 10% of the
# time would be lost. `dcp.async_save` copies the state first and writes while training goes on: then C is the copy's
# time only. (By its documentation; not measured here.)

# %%
failures_s, save_s = 54 * 86_400 / 419, 60
interval_s = (2 * save_s * failures_s) ** 0.5
lost_part = save_s / interval_s + interval_s / 2 / failures_s
print(
    f"a failure every {failures_s / 3600:.1f} h: save every {interval_s / 60:.1f} min, {lost_part:.1%} of the time lost"
)

# %% tags=["T24", "check"]
assert round(interval_s / 60) == 19
assert round(lost_part, 3) == 0.104

# %% [markdown]
# ## Exercises
#
# An all-reduce in half the bytes, rounded once; then a checkpoint by hand, that four ranks save, and two or three load.


# %% tags=["exercise"]
def my_all_reduce(tensor):
    """Replace the float32 tensor by the sum of all ranks' tensors. Send bfloat16, 2 (n-1)/n · N · 2 B from each rank,
    and add in float32. All ranks end with the same numbers; n divides their count.
    """
    half = tensor.bfloat16()
    dist.all_reduce(half)  # rounded after each addition: replace this
    tensor.copy_(half)


lessons.check("bfloat16_sum", my_all_reduce, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_save(mine, write):
    """Save a tensor; four ranks call this, each with its quarter. `write(name, tensor)` writes a file."""
    return  # replace this


def my_load(rank, readers, length, writers, read):
    """Return this rank's part of the whole tensor, of `length` numbers, that `writers` ranks have saved. First 2 ranks
    call this, then 3. `read(name, begin, end)` reads a part of a file. Read no more than needed, and send nothing.
    """
    return  # replace this


lessons.check("save_and_load", (my_save, my_load), student="")
