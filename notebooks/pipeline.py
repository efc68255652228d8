# ---
# jupyter:
#   dlearn:
#     ids: [Q14]
#     minutes: 0.3
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Pipeline parallel: what does the order of the work change?
#
# **Goals.** You will be able to predict what crosses each cut; tell GPipe from 1F1B by order, memory and bubble.
#
# **Before this:** [model_parallel](model_parallel.ipynb). **Takes** about 35 minutes.
#
# A model in three stages, one on each rank. While one stage computes, the others would wait; so the batch is cut into
# *micro-batches* that follow each other through the stages. **How many bytes cross each cut for a micro-batch? Does
# their number m matter? And what does the schedule 1F1B do better than GPipe?**
#
# We use torch's own pipelining, with a span around each piece of work: `F2` is the forward pass of micro-batch 2 in one
# stage, `B2` its backward pass. For the pictures a piece also sleeps: three ranks on two cores cannot compute at once,
# but they can sleep at once. So their *shape* is that of a pipeline with equal stages; their milliseconds mean nothing.

# %%
import time
from collections import Counter
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, messages, play, span
from dlearn.analysis import traffic

STAGES, WIDTH, BATCH = 3, 64, 48


class Stage(PipelineStage):
    """Torch's, with spans; it sleeps for `work_s` in a forward pass, and twice as long in a backward pass."""

    work_s = 0.0
    most_kept = 0

    def forward_one_chunk(self, number, *args, **kwargs):
        with span(f"F{number}"):
            time.sleep(self.work_s)
            output = super().forward_one_chunk(number, *args, **kwargs)
        self.most_kept = max(self.most_kept, len(self.fwd_cache))  # torch's own list of what backward passes will need
        return output

    def backward_one_chunk(self, number, *args, **kwargs):
        with span(f"B{number}"):
            time.sleep(2 * self.work_s)
            super().backward_one_chunk(number, *args, **kwargs)


# %% [markdown]
# Each stage is a layer of 64 × 64. Rank 0 gives the inputs to its `step`, the last rank the targets. All else is up to
# the schedule.


# %%
def layers(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data():
    torch.manual_seed(99)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def train(schedule, m, work_s=0.0):
    """Two steps; returns the gradients of the last, and of how many micro-batches something was kept at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = Stage(layers(rank), rank, n, torch.device("cpu"))
    stage.work_s = work_s
    pipeline = schedule(stage, n_microbatches=m, loss_fn=mse_loss)
    inputs, targets = data()
    for step in range(2):
        stage.submod.zero_grad()
        with span(f"step {step}"):
            if rank == 0:
                pipeline.step(inputs)
            elif rank == n - 1:
                pipeline.step(target=targets)
            else:
                pipeline.step()
    return [parameter.grad for parameter in stage.submod.parameters()], stage.most_kept


# %% [markdown]
# ## What crosses a cut
#
# A batch of 48 and m = 6 make micro-batches of 8; between two layers each example is 64 numbers of 4 bytes. **Predict
# first:** what goes from rank 0 to rank 1 in one step, and what comes back? Do parameters travel?


# %%
def crossing(run):
    """How often each message was sent in the second step."""
    return Counter((each.src, each.dst, each.what) for each in messages(run.trace.within("step 1")))


with Cluster(STAGES) as cluster:
    gpipe = {m: cluster.run(train, ScheduleGPipe, m) for m in (1, 3, 6, 12)}
    one_each = {m: cluster.run(train, Schedule1F1B, m) for m in (3, 6, 12)}
for (src, dst, what), times in sorted(crossing(gpipe[6]).items()):
    print(f"rank {src} -> rank {dst}: {times} times {what}")

# %% [markdown]
# For each micro-batch 2,048 bytes forward, the output of the stage, and 2,048 bytes back, its gradient, which has the
# same shape. No parameter and no gradient of a parameter: each stage keeps its own.
#
# Each micro-batch sends **B/m · width · 4 bytes** forward across each stage boundary, and the same number back.

# %% tags=["Q14", "check"]
step = messages(gpipe[6].trace.within("step 1"))
assert {each.payload_bytes for each in step} == {BATCH // 6 * WIDTH * 4} == {2_048}
assert Counter((each.src, each.dst) for each in step) == {(0, 1): 6, (1, 0): 6, (1, 2): 6, (2, 1): 6}

# %% [markdown]
# The *first* step sends more. How does rank 1 know what shape it will receive?

# %%
first = list(messages(gpipe[6].trace.within("step 0")))
early = first[: len(first) - len(step)]
for each in early:
    print(f"rank {each.src} -> rank {each.dst}: {each.what}, {each.payload_bytes} B")

# %% [markdown]
# Twelve messages, once. Before them one number goes down the stages and comes back: does every stage know its shapes
# already? It does not. So each stage tells the next one what it will send, and on the way back what the gradients will
# be like: the length of a pickle, and the pickle.

# %% tags=["check"]
assert len(early) == 12
assert [(each.src, each.dst) for each in early[:4]] == [(0, 1), (1, 2), (2, 1), (1, 0)]
assert [each.payload_bytes for each in early[:4]] == [4] * 4
assert [each.payload_bytes for each in early[4::2]] == [8] * 4
assert {each.payload_bytes for each in first[12:]} == {2_048}

# %% [markdown]
# ## Does m matter?
#
# **Predict first:** with 1, 3, 6 and 12 micro-batches, how many messages does a step have, and how many bytes?

# %%
sent = {}
for m, run in gpipe.items():
    step = messages(run.trace.within("step 1"))
    sent[m] = (len(step), sum(each.payload_bytes for each in step))
    print(f"m = {m:2}: {sent[m][0]:2} messages, {sent[m][1]:,} B")

# %% [markdown]
# 4 · m messages, and always 49,152 bytes: the batch crosses two cuts, there and back, whole or in slices.

# %% tags=["check"]
assert sent == {m: (4 * m, 2 * 2 * BATCH * WIDTH * 4) for m in (1, 3, 6, 12)}

# %% [markdown]
# ## Another order of the same work
#
# GPipe does all forward passes, then all backward passes. **1F1B** ("one forward, one backward") begins with backward
# passes as soon as it can, and from then on does one of each in turn. **Predict first:** does it send other messages?


# %%
def order_of(run):
    """For each rank the names of its pieces of work in the second step, in their order."""
    works = run.trace.within("step 1").where(kind="span")
    return [[each.name for each in works.where(rank=rank).events] for rank in run.trace.ranks]


for name, run in (("GPipe", gpipe[6]), ("1F1B", one_each[6])):
    for rank, works in enumerate(order_of(run)):
        print(f"{name:5} rank {rank}:", *works)

# %% [markdown]
# Each rank does the same twelve pieces, in another order, and every message and every byte is the same. In 1F1B the
# last rank takes strict turns; a rank before it first does one more forward pass for each stage that follows.

# %% tags=["Q14", "check"]
forwards, backwards = ([f"{way}{number}" for number in range(6)] for way in "FB")
assert crossing(gpipe[6]) == crossing(one_each[6])
assert order_of(gpipe[6]) == [forwards + backwards] * 3
assert order_of(one_each[6])[2] == [each for pair in zip(forwards, backwards, strict=True) for each in pair]
assert [works.index("B0") for works in order_of(one_each[6])] == [3, 2, 1]

# %% [markdown]
# When do they do it? Both once more, now with sleeping as work. Look at the gaps of each rank: are they less in the
# lower picture? And how many F of rank 0 stand before its first B?

# %%
napping = {name: cluster.run(train, kind, 6, 0.05) for name, kind in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B))}
for name, run in napping.items():
    axes = draw.timeline(run.trace.within("step 1").where(kind="span"))
    begun = order_of(run)[0].index("B0")
    axes.set_title(f"{name}: rank 0 begins {begun} forward passes before B0", loc="left", fontsize=12, weight="bold")

# %% [markdown]
# ## What must be kept
#
# Between F2 and B2 a stage keeps the activations of micro-batch 2; autograd needs them. Step through 1F1B and look at
# what each rank keeps. What is the most, for each of the ranks?

# %%
play.player(napping["1F1B"].trace.within("step 1"), title="One step of 1F1B: three stages, six micro-batches")


# %%
def most_kept(works):
    """Counted from the order: a forward pass adds a micro-batch, a backward pass frees one."""
    kept = [0]
    for work in works:
        kept.append(kept[-1] + (1 if work.startswith("F") else -1))
    return max(kept)


for m in (3, 6, 12):
    counts = [[most_kept(works) for works in order_of(runs[m])] for runs in (gpipe, one_each)]
    print(f"m = {m:2}: GPipe keeps {counts[0]}, 1F1B {counts[1]} on ranks 0, 1, 2")

# %% [markdown]
# That is the difference. GPipe keeps all **m** on every rank. With n stages 1F1B keeps at most **n - rank**, here 3, 2
# and 1, however many micro-batches there are. Torch's own list of what it keeps says the same.

# %% tags=["check"]
for m, run in gpipe.items():
    assert [most_kept(works) for works in order_of(run)] == [m, m, m]
for run in one_each.values():
    assert [most_kept(works) for works in order_of(run)] == [3, 2, 1]
for run in (*gpipe.values(), *one_each.values()):
    assert [kept for _, kept in run.results.values()] == [most_kept(works) for works in order_of(run)]

# %% [markdown]
# ## The bubble
#
# The gaps are called the *bubble*. How large is it, if nothing but the order costs time? We take the order that was
# seen, let F take 1 and B take 2, and messages nothing: a piece begins when its rank has done the one before, and the
# neighbour has done the same micro-batch. **Predict first:** which schedule is done sooner?


# %%
def length(order):
    """How long a step in this order takes, where F takes 1 and B takes 2."""
    done, free, waiting = {}, [0] * len(order), [list(works) for works in order]
    while any(waiting):
        for rank, works in enumerate(waiting):
            before = rank + (-1 if works and works[0].startswith("F") else 1)
            if works and (before not in range(len(order)) or (before, works[0]) in done):
                work = works.pop(0)
                start = max(free[rank], done.get((before, work), 0))
                done[rank, work] = free[rank] = start + (1 if work.startswith("F") else 2)
    return max(free)


bubbles = {}
for name, runs in (("GPipe", gpipe), ("1F1B", one_each)):
    for m, run in runs.items():
        total = length(order_of(run))
        bubbles[name, m] = Fraction(total - 3 * m, total)
        print(
            f"{name:5} m = {m:2}: a step takes {total:2}, each rank works {3 * m:2}, the bubble is {bubbles[name, m]}"
        )

# %% [markdown]
# Neither: both take (m + n - 1) · 3, and of that **(n - 1)/(m + n - 1)** is bubble. With m = 1, which is the model cut
# up without a pipeline, each of three ranks does nothing for 2/3 of the time; with m = 12 for 1/7. So one wants many
# micro-batches. With GPipe each of them must be kept; with 1F1B not. That is why 1F1B is used: not less waiting, less
# memory.

# %% tags=["check"]
assert all(bubble == Fraction(STAGES - 1, m + STAGES - 1) for (_, m), bubble in bubbles.items())
assert all(length(order_of(run)) == 3 * (m + STAGES - 1) for runs in (gpipe, one_each) for m, run in runs.items())

# %% [markdown]
# ## Is it the same model?
#
# The three layers in one piece, and the whole batch at once. **Predict first:** are the gradients equal in every bit?
# Between the two schedules? (By default torch divides the sum over micro-batches by m; the loss is a mean.)

# %%
whole = nn.Sequential(*(layers(rank) for rank in range(STAGES)))
inputs, targets = data()
mse_loss(whole(inputs), targets).backward()


def gradients(run):
    return torch.cat([each.flatten() for rank in range(STAGES) for each in run.results[rank][0]])


expected = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
for m, run in gpipe.items():
    off = (gradients(run) - expected).abs().max().item()
    print(f"m = {m:2}: off by at most {off:.0e} from the whole model's")

# %% [markdown]
# Equal but for rounding, as sums are made in another order. Both schedules make them in the *same* order, B0 to the
# last: equal in every bit.

# %% tags=["check"]
for run in (*gpipe.values(), *one_each.values()):
    torch.testing.assert_close(gradients(run), expected, rtol=0, atol=1e-6)
assert all(torch.equal(gradients(gpipe[m]), gradients(run)) for m, run in one_each.items())

# %% [markdown]
# ## Or DDP?
#
# The same three layers, the same batch, on three ranks with DDP: gradients of 12,480 parameters, and not activations.
# **Predict first:** which of the two sends less?


# %%
def train_ddp():
    rank, n = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(*(layers(stage) for stage in range(n))))
    inputs, targets = (each.chunk(n)[rank] for each in data())
    for step in range(3):
        with span(f"step {step}"):
            mse_loss(model(inputs), targets).backward()


ddp = traffic(Cluster(STAGES).run(train_ddp).trace.within("step 2")).total_bytes
print(f"DDP {ddp:,} B in a step, the pipeline {sent[6][1]:,} B")

# %% [markdown]
# Over n ranks a ring sends 2 (n - 1) times the parameters, a pipeline 2 (n - 1) times the activations at a cut. So the
# pipeline sends less exactly where **B · width is less than the number of parameters**, here 3,072 against 12,480. A
# larger batch costs DDP no byte more; the pipeline's bytes grow with it.

# %% tags=["check"]
parameters = sum(parameter.numel() for parameter in whole.parameters())
assert (parameters, BATCH * WIDTH) == (12_480, 3_072)
assert ddp == 2 * (STAGES - 1) * 4 * parameters == 199_680
assert sent[6][1] == 2 * (STAGES - 1) * 4 * BATCH * WIDTH

# %% [markdown]
# ## Exercise
#
# Write 1F1B yourself: which pieces of work does a stage of n do, in which order, for m micro-batches? Return their
# names (`["F0", "F1", ...]`) instead of `None`, and run the cell. It is compared with real ranks: three, and four.

# %%
TRIED = {(3, 6): one_each[6], (3, 12): one_each[12], (4, 8): Cluster(4).run(train, Schedule1F1B, 8)}


def of_each(order):
    """What `order(stage, n, m)` returns for every stage of the three runs."""
    return {f"stage {rank} of {n}, m = {m}": order(rank, n, m) for n, m in TRIED for rank in range(n)}


seen = of_each(lambda rank, n, m: order_of(TRIED[n, m])[rank])


# %% tags=["exercise"]
def my_order(stage, n, m):
    return None


lessons.answer("pipeline.order_of_1f1b", of_each(my_order), measured=seen)


# %% tags=["answer"]
def right_order(stage, n, m):
    ahead = n - stage - 1  # forward passes before the first pair of one forward, one backward
    works = [f"F{number}" for number in range(ahead)]
    for number in range(m):
        works += [f"F{number + ahead}"] * (number + ahead < m) + [f"B{number}"]
    return works


assert lessons.answer("pipeline.order_of_1f1b", of_each(right_order), measured=seen).right
