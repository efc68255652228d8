# ---
# jupyter:
#   dlearn:
#     ids: [DM2, Q11]
#     minutes: 0.2
#     needs: []
#     peak_mb: 600
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: who sends what to whom?
#
# Three processes train one model together: each sees other images, and all of them keep the same
# parameters. So they must talk. **Who sends what to whom, and how many bytes is it?** Here you start such a
# job from a notebook, on this machine, and look.
#
# The training function below is ordinary PyTorch. `DistributedDataParallel` (DDP) does the talking, and
# nothing in the function tells it to report anything; `span` only gives each step a name.

# %%
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, explain, messages, play, span
from dlearn.analysis import traffic
from dlearn.lessons import digits, models


def train(batch_size):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())  # 8x8 pixels, my share
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"step {step}"):
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


# %% [markdown]
# ## Run
#
# `Cluster(3).run(train, 16)` starts three processes (*ranks*), connects them, and calls `train(16)` in each
# of them. What they return, print and send is in `run`.
#
# **Predict first:** the model has 27,990 parameters of 4 bytes. In one step, how many bytes does each rank
# send? More than the 111,960 bytes of its gradients, as many, or fewer?

# %%
run = Cluster(3).run(train, 16)
explain(run.trace)

# %% [markdown]
# Each rank sends **149,280 bytes**: 4/3 of its gradients. They travel in three *buckets*, from the last
# layer to the first, each by one all-reduce. Gloo does that as a ring: each rank sends 2 · (n-1)/n of the
# data, with n = 3 ranks.
#
# *Derived* means: the program asked for `all_reduce`, which was seen; who sends which part to whom inside
# of it follows from gloo's algorithm.

# %%
parameters = sum(parameter.numel() for parameter in models.ConvNet().parameters())
sent = traffic(run.trace.within("step 2"))

assert parameters == 27_990
assert parameters * 4 == 111_960
assert all(sent.bytes_from(rank=rank) == 149_280 == 2 * 2 / 3 * 111_960 for rank in range(3))

# %% [markdown]
# ## Picture
#
# One lane for each rank, time goes to the right. Look for three things. There is one all-reduce for each
# bucket. The ticks on top are the moments at which a gradient is ready: the first all-reduce does not wait
# for the last tick, it begins *during* the backward pass. And the arrows all go the same way round. Which
# way?

# %%
axes = draw.timeline(run.trace.within("step 2"))

# %% [markdown]
# Rank 1 sends to rank 0, rank 2 to rank 1, rank 0 to rank 2: gloo's ring turns towards rank r-1, the
# reverse of most pictures in books. (The lesson `send_and_receive` proves the direction.)
#
# The same step, to go through at your own pace: press Forward, or the right arrow key. Below the picture stands what
# each rank holds: which gradients are ready, and whose parts have been added up in which piece of a bucket. Which rank
# has the first piece that is complete?

# %%
play.player(run.trace.within("step 2"))

# %%
step = run.trace.within("step 2")

for rank in range(3):
    reduces = step.where(op="all_reduce", rank=rank).events
    gradients = step.where(kind="gradient", rank=rank).events  # the moments at which they are ready
    assert len(reduces) == 3
    assert reduces[0].start_ns < gradients[-1].start_ns

assert {(message.src, message.dst) for message in messages(step)} == {(1, 0), (2, 1), (0, 2)}

# %% [markdown]
# ## Does the batch size change the traffic?
#
# That run had batches of 16 images on each rank. **Predict first:** with 1 image, and with 64, how many
# bytes will each rank send in a step?

# %%
small = traffic(Cluster(3).run(train, 1).trace.within("step 2"))
large = traffic(Cluster(3).run(train, 64).trace.within("step 2"))

print("bytes from each rank, B = 1: ", [small.bytes_from(rank=rank) for rank in range(3)])
print("bytes from each rank, B = 64:", [large.bytes_from(rank=rank) for rank in range(3)])

assert small.payload_bytes == large.payload_bytes == sent.payload_bytes

# %% [markdown]
# The same bytes. However many images there are, their gradients are added up in one `param.grad` for each
# parameter before anything is sent. A larger batch means more computation for the same communication.

# %% [markdown]
# ## And if something goes wrong?
#
# Below, rank 1 leaves out its last all-reduce: the others wait for it, and would go on waiting. **Predict
# first:** what will you see, and does this notebook survive it? (`check=False` keeps the error in
# `run.error` instead of raising it.)


# %%
def one_too_few():
    for number in range(3):
        if dist.get_rank() == 1 and number == 2:
            return
        dist.all_reduce(torch.ones(1000))


stuck = Cluster(3).run(one_too_few, timeout=4, check=False)
print(stuck.error)

assert "rank 0 and rank 2 wait for rank 1 in all_reduce #3" in stuck.error.what
assert "rank 1 never called it" in stuck.error.what

# %% [markdown]
# What had been recorded up to then is there. In the picture, look at the third all-reduce: who is in it,
# and what never came?

# %%
axes = draw.timeline(stuck.trace)

# %% [markdown]
# The waiting ranks are gone, and the next cell works as before.

# %%
again = Cluster(3).run(train, 16)

assert traffic(again.trace.within("step 2")).payload_bytes == sent.payload_bytes

# %% [markdown]
# ## Turn the knobs
#
# DDP is one way. Another is to cut a model in two: one rank has the first half, another the second, and over the cut
# go B · C · H · W numbers for a batch, and their gradients back. Two ranks train the same small model both ways;
# let a slider go, and they do it again. (With the keyboard: tab to a slider, then the arrow keys. Without a kernel
# you see the picture only.)
#
# **Predict first:** which bar moves with B? And from which B on does DDP send less?

# %%
from dlearn.lessons.knobs import knobs

turn = knobs(B=8)
turn

# %% [markdown]
# Only that of the cut model moves: DDP sends each of its 35,818 parameters' gradients once per rank, whatever B is,
# and the cut takes 16,384 bytes for each example. They meet between 17 and 18. (The lesson `model_parallel` works
# that out, and finds it.)

# %%
assert turn.bars.predicted == (2 * 35_818 * 4, 8 * 16_384)
assert all(measured >= predicted for measured, predicted in zip(turn.bars.measured, turn.bars.predicted, strict=True))
assert 17 < 2 * 35_818 * 4 / 16_384 < 18

# %% [markdown]
# ## Exercise
#
# With four ranks: how many bytes do all ranks *together* send in one step? Work it out, write your number
# instead of `None`, and run the cell.

# %%
my_answer = None

if my_answer is not None:
    four = traffic(Cluster(4).run(train, 16).trace.within("step 2"))
    assert my_answer == four.total_bytes, "no: each of n ranks sends 2 (n-1)/n of the gradients, on average"
    print("Right.")

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
