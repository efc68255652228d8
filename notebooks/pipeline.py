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
# **Goals.** You will be able to predict what crosses each stage boundary; compare GPipe and 1F1B by order, memory and
# bubble.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 35 minutes.
#
# A model has three stages, one on each rank; each is a layer of 64 × 64. So that the stages need not wait for each
# other, the batch is cut into *micro-batches* that follow each other through the stages. **How many bytes cross each
# stage boundary for a micro-batch? Does their number m matter? And what does the schedule 1F1B do better than GPipe?**
#
# Here is torch's own pipelining. Each piece of work is recorded as a span: `F2` is the forward pass of micro-batch 2 in
# one stage, `B2` its backward pass. For the pictures each piece also sleeps, because three ranks on two cores can sleep
# at the same time, but not compute. So the *shape* is that of equal stages; the milliseconds mean nothing.

# %%
import time
from collections import Counter
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

from dlearn import Cluster, draw, lessons, messages, play, span

STAGES, WIDTH, BATCH = 3, 64, 48


def layers(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data():
    torch.manual_seed(99)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


# %%
def train(schedule, m, work_s=0.0):
    """Make two steps; return the last gradients, and the most micro-batches that were kept at the same time.

    A stage sleeps for `work_s` in a forward pass, and twice as long in a backward pass.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    stage, kept = PipelineStage(layers(rank), rank, n, torch.device("cpu")), []

    def at_work(module, inputs, output):
        kept.append(1 + len(stage.fwd_cache))  # with this one; torch's own cache for the backward passes
        time.sleep(work_s)
        output.register_hook(lambda gradient: time.sleep(2 * work_s))

    stage.submod.register_forward_hook(at_work)
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
    return [parameter.grad for parameter in stage.submod.parameters()], max(kept)


# %% [markdown]
# ## What crosses a stage boundary
#
# A batch of 48 and m = 6 give micro-batches of 8; between two layers each example is 64 numbers of 4 bytes. Rank 0
# passes the inputs to its `step`, the last rank the targets. What does rank 0 send to rank 1 in one step, and what
# comes back? **Predict first:** if m is 12 instead of 6, how many times as many bytes does a step send?

# %%
my_times = lessons.predict("pipeline.bytes with twice as many micro-batches", None)


def crossing(run):
    """How often each message was sent in the second step."""
    return Counter((each.src, each.dst, each.what) for each in messages(run.trace.within("step 1")))


with Cluster(STAGES) as cluster:
    gpipe = {m: cluster.run(train, ScheduleGPipe, m) for m in (1, 3, 6, 12)}
    one_each = {m: cluster.run(train, Schedule1F1B, m) for m in (3, 6, 12)}
for (src, dst, what), times in sorted(crossing(gpipe[6]).items()):
    print(f"rank {src} -> rank {dst}: {times} times {what}")
sent = {}
for m, run in gpipe.items():
    step = messages(run.trace.within("step 1"))
    sent[m] = (len(step), sum(each.payload_bytes for each in step))
    print(f"m = {m:2}: {sent[m][0]:2} messages, {sent[m][1]:,} B")
my_times and my_times.against(sent[12][1] / sent[6][1])

# %% [markdown]
# Each micro-batch sends 2,048 bytes forward, the output of the stage, and 2,048 bytes back, its gradient, which has the
# same shape. Parameters and their gradients do not travel: each stage keeps its own.
#
# Each micro-batch sends **B/m · width · 4 bytes** forward across each stage boundary, and the same number back. That
# makes 4 · m messages, but always 49,152 bytes: the whole batch crosses two boundaries, forward and back.

# %% tags=["Q14", "check"]
step = messages(gpipe[6].trace.within("step 1"))
assert {each.payload_bytes for each in step} == {BATCH // 6 * WIDTH * 4} == {2_048}
assert Counter((each.src, each.dst) for each in step) == {(0, 1): 6, (1, 0): 6, (1, 2): 6, (2, 1): 6}
assert sent == {m: (4 * m, 2 * 2 * BATCH * WIDTH * 4) for m in (1, 3, 6, 12)}
assert sent[6][1] == 49_152

# %% [markdown]
# ## The same work in another order
#
# GPipe does all forward passes, then all backward passes. **1F1B** ("one forward, one backward") starts backward passes
# as soon as it can, and from then on alternates. Does it send other messages? Are its gradients those of the whole
# model? In the picture a lane is hatched where its rank waits: this is the pipeline's *bubble*. Is its share smaller in
# the lower half? How many forward passes (pale) does rank 0 make before its first backward pass?


# %%
def order_of(run):
    """For each rank the names of its pieces of work in the second step, in their order."""
    works = run.trace.within("step 1").where(kind="span")
    return [[each.name for each in works.where(rank=rank).events] for rank in run.trace.ranks]


for name, run in (("GPipe", gpipe[6]), ("1F1B", one_each[6])):
    for rank, works in enumerate(order_of(run)):
        print(f"{name:5} rank {rank}:", *works)
napping = {name: cluster.run(train, kind, 6, 0.05) for name, kind in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B))}
draw.pipeline({name: run.trace.within("step 1") for name, run in napping.items()})

# %% [markdown]
# Each rank does the same twelve pieces in another order, and every message and every byte is the same. In 1F1B the last
# rank alternates from the start; an earlier rank first does one more forward pass for each stage that follows it.
# Except for rounding, the gradients are those of the undivided model with the whole batch. Both schedules add in the
# *same* order, so their gradients are equal in every bit.

# %% tags=["Q14", "check"]
forwards, backwards = ([f"{way}{number}" for number in range(6)] for way in "FB")
assert crossing(gpipe[6]) == crossing(one_each[6])
assert order_of(gpipe[6]) == [forwards + backwards] * 3
assert order_of(one_each[6])[2] == [each for pair in zip(forwards, backwards, strict=True) for each in pair]
assert [works.index("B0") for works in order_of(one_each[6])] == [3, 2, 1]

whole = nn.Sequential(*(layers(rank) for rank in range(STAGES)))
inputs, targets = data()
mse_loss(whole(inputs), targets).backward()
expected = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])


def gradients(run):
    return torch.cat([each.flatten() for rank in range(STAGES) for each in run.results[rank][0]])


for run in (*gpipe.values(), *one_each.values()):
    torch.testing.assert_close(gradients(run), expected, rtol=0, atol=1e-6)
assert all(torch.equal(gradients(gpipe[m]), gradients(run)) for m, run in one_each.items())

# %% [markdown]
# ## What must be kept
#
# Between F2 and B2 a stage keeps the activations of micro-batch 2, because autograd needs them. **Predict first:** in
# 1F1B with 12 micro-batches, of how many does rank 0 keep the activations at the same time? In the player, step through
# 1F1B and look at what each rank keeps.

# %%
my_kept = lessons.predict("pipeline.kept by rank 0", None)


def most_kept(works):
    """Counted from the order: a forward pass adds a micro-batch, a backward pass frees one."""
    kept = [0]
    for work in works:
        kept.append(kept[-1] + (1 if work.startswith("F") else -1))
    return max(kept)


for m in (3, 6, 12):
    counts = [[most_kept(works) for works in order_of(runs[m])] for runs in (gpipe, one_each)]
    print(f"m = {m:2}: GPipe keeps {counts[0]}, 1F1B {counts[1]} on ranks 0, 1, 2")
if my_kept:
    print(my_kept.against(most_kept(order_of(one_each[12])[0])))
play.player(napping["1F1B"].trace.within("step 1"), title="One step of 1F1B: three stages, six micro-batches")

# %% [markdown]
# This is the difference between the schedules. GPipe keeps all **m** micro-batches on every rank. With n stages 1F1B
# keeps at most **n - rank**, here 3, 2 and 1, however many micro-batches there are. Torch's cache agrees.

# %% tags=["Q14", "check"]
for m, run in gpipe.items():
    assert [most_kept(works) for works in order_of(run)] == [m, m, m]
for run in one_each.values():
    assert [most_kept(works) for works in order_of(run)] == [3, 2, 1]
for run in (*gpipe.values(), *one_each.values()):
    assert [kept for _, kept in run.results.values()] == [most_kept(works) for works in order_of(run)]

# %% [markdown]
# ## The bubble
#
# How large is the bubble in theory? Take the recorded order, let F take 1, B take 2, and
# messages no time. A piece begins when its rank has finished the piece before, and the neighbour has finished the same
# micro-batch. **Predict first:** which schedule ends sooner?

# %%
my_sooner = lessons.predict("pipeline.done sooner", None, choices=("GPipe", "1F1B", "neither"))


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
# Neither: both take (m + n - 1) · 3, and of that **(n - 1)/(m + n - 1)** is bubble. With m = 1 (stages without a
# pipeline) each of three ranks is idle for 2/3 of the time, with m = 6 for 1/4, to which the picture adds what messages
# take, and with m = 12 for 1/7. So many micro-batches are better.
# GPipe must keep all of them, 1F1B only a few: 1F1B saves memory, but no time. (From which batch size on DDP sends
# less: [model_parallel](model_parallel.ipynb).)

# %% tags=["check"]
assert all(bubble == Fraction(STAGES - 1, m + STAGES - 1) for (_, m), bubble in bubbles.items())
assert all(length(order_of(run)) == 3 * (m + STAGES - 1) for runs in (gpipe, one_each) for m, run in runs.items())
my_sooner and my_sooner.against("neither")

# %% [markdown]
# ## Exercises
#
# 1. In which order does a stage do its pieces of work in 1F1B, with n stages and m micro-batches? Return their names
#    (`["F0", "F1", ...]`) instead of `None`, and run the cell. It is compared with three and with four real ranks.
# 2. Now write 1F1B with sends and receives. The docstring says what it must do.

# %%
TRIED = {(3, 6): one_each[6], (3, 12): one_each[12], (4, 8): Cluster(4).run(train, Schedule1F1B, 8)}


def of_each(order):
    """Call `order(stage, n, m)` for every stage of the three runs."""
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


# %% tags=["exercise"]
def my_pipeline(forward, backward, length, micro_batches):
    """Be stage r of a pipeline on rank r. `forward(i, x)` returns the y of micro-batch i, `backward(i, gradient)` the
    gradient of its x. The first stage's x and the last stage's gradient are None. Send each y to the next stage and
    each gradient to the previous one (float64, `length` numbers), in the order 1F1B: never keep more micro-batches than
    there are stages from this one to the end.
    """
    return  # replace this by your schedule


lessons.check("one_f_one_b", my_pipeline, student="")  # your name: it chooses the data
