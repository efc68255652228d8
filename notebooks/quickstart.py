# ---
# jupyter:
#   dlearn:
#     ids: [DM2, Q11]
#     minutes: 0.4
#     needs: []
#     peak_mb: 1300
# ---

# %% [markdown]
# # Quickstart: who sends what to whom?
#
# **Goals.** You will be able to start real ranks from a cell; say who sends what to whom in an all-reduce; name the
# rank and the line that a hang waits for.
#
# **Before this:** basic PyTorch: a model, a loss, an optimizer. **Takes** about 25 minutes.
#
# ## 1. Watch
#
# Three Python processes, numbered 0, 1 and 2: their *ranks*. Each has six numbers of its own. After an *all-reduce*
# each has the sums over all three, and no rank is in the middle.
#
# **Predict first:** to whom does rank 0 send? Write one of the choices instead of `None`. It is kept in a file beside
# this notebook, and nowhere else. Then run the next cell, and press Play: which way round do they go?

# %%
import os

import torch
import torch.distributed as dist

from dlearn import Cluster, Trace, analysis, draw, explain, lessons, messages, play

my_way = lessons.predict("quickstart.way", None, choices=("to rank 1", "to rank 2", "to both"))
my_way


# %%
def add_up():
    mine = torch.full((6,), 1.0 + dist.get_rank())  # ones on rank 0, twos on rank 1, threes on rank 2
    dist.all_reduce(mine)
    return mine[0].item()


run = Cluster(3).run(add_up)
print(run.results)
wire = analysis.reconcile(run.trace)
print(wire.sentence)
if my_way:
    (dst,) = {message.dst for message in messages(run.trace) if message.src == 0}
    print(my_way.against(f"to rank {dst}"))
play.player(run.trace)

# %% [markdown]
# Rank 1 sends to rank 0, rank 2 to rank 1, rank 0 to rank 2: the ring turns to the left. Each box shows what its rank
# holds: a colour for each rank whose numbers have been added up in a part.
#
# *Derived*, the dashed lines, means: your program called `all_reduce`, which was seen; who sends which part to whom in
# it follows from gloo's algorithm. The sentence above the player compares that with the kernel's own counters
# (`analysis.reconcile`).

# %% tags=["Q11", "check"]
assert run.results == {0: 6.0, 1: 6.0, 2: 6.0}
assert wire.exact or wire.not_measured  # Linux has the counters
assert {(message.src, message.dst) for message in messages(run.trace)} == {(1, 0), (2, 1), (0, 2)}
processes = {process.header.pid for process in run.trace.processes}
assert len(processes | {os.getpid()}) == 4  # three real ones, and this kernel

# %% [markdown]
# ## 2. Break it
#
# Two all-reduces, and rank 1 goes wrong in one of two ways. **Predict first:** what happens if it leaves out the first
# one? And if it calls them the other way round: the sums should be 2 and 20; what comes out?


# %%
def sums(wrong):
    loss, accuracy = torch.tensor(1.0), torch.tensor(10.0)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        dist.all_reduce(accuracy)
    else:
        dist.all_reduce(accuracy)
        if wrong == "other way round":
            dist.all_reduce(loss)
    return loss.item(), accuracy.item()


stuck = Cluster(2).run(sums, "left out", timeout=2, check=False)  # check=False: the error stands in stuck.error
print(stuck.error.what)
swapped = Cluster(2).run(sums, "other way round")
print(swapped.results, *explain(swapped.trace).sentences[-2:], sep="\n")
axes = draw.timeline(stuck.trace)

# %% [markdown]
# Left out: rank 0 waits for ever, and you are told in which line, and for whom. (The first call of each has met the
# other's: the picture has one all-reduce that went through, and is wrong.) The other way round: **11 and 11, and no
# error.** Calls meet by their number and by nothing else. That the lines differ can be seen from outside, and is.

# %% tags=["check"]
assert "rank 0 waits for rank 1 in all_reduce #2" in stuck.error.what
assert swapped.results == {0: (11.0, 11.0), 1: (11.0, 11.0)}
assert len(analysis.mismatches(swapped.trace)) == 2

# %% [markdown]
# ## 3. Turn a knob
#
# Now two ranks train a small model, in two ways. *Data parallel* (DDP): each has all of the model and a part of the
# images; they add up their gradients. *Model parallel*: each has half of the model, and for every image
# B · C · H · W numbers go over the cut, and as many come back. Let a slider go, and they train again.
#
# **Predict first:** which bar moves with B, the number of images in a batch?

# %%
from dlearn.lessons.knobs import knobs

turn = None if wire.not_measured else knobs(B=8)
turn or f"No sliders here: they show what the kernel counts. {wire.not_measured}"

# %% [markdown]
# Only that of the cut model: it takes 16,384 bytes for each image. DDP adds up the gradients of all images in one
# number for each of its 35,818 parameters before anything is sent, whatever B is. (Without a kernel you see the picture
# only. The lesson `model_parallel` finds where the bars meet.)

# %% tags=["DM2", "check"]
if turn:  # wherever its sliders stand
    B, C, H, W = (turn.sliders[name].value for name in "BCHW")
    assert turn.bars.predicted[1] == 2 * B * C * H * W * 4
    assert (C, H, W) != (8, 16, 16) or turn.bars.predicted == (2 * 35_818 * 4, B * 16_384)
    pairs = zip(turn.bars.measured, turn.bars.predicted, strict=True)
    assert all(predicted <= measured < predicted + 10_000 for measured, predicted in pairs)  # with framing

# %% [markdown]
# ## 4. Guess
#
# A *parameter server* holds a model. A trainer sends it images, gets the model's answers, sends the gradients of its
# loss back, and tells the server to make a step. That is one iteration. **Predict first:** how many messages is it?
# Write your number instead of `None`.

# %%
my_guess = lessons.predict("quickstart.messages of an iteration", None)


def serve(trainer):
    from dlearn.lessons import serving

    return serving.train(trainer)


with Cluster(["ps", "trainer"], rpc=True) as cluster:
    served = cluster.run({"trainer": serve}, 0).trace
one = analysis.iteration(served)
print(my_guess.against(len(one.messages)) if my_guess else f"It is {len(one.messages)}.")
play.player(served, messages=one.messages)

# %% [markdown]
# Four messages do what the program asked for. The other ten are replies and bookkeeping: reference counts for remote
# objects, and the end of the autograd context. (Tick *Hide control messages*. The lesson `parameter_server` explains
# every one.)

# %% tags=["check"]
assert (len(one.messages), sum(not message.control for message in one.messages)) == (14, 4)

# %% [markdown]
# ## 5. Your own script
#
# Nothing of your code was changed so far, and nothing has to be. Here is a script that knows nothing of dlearn, and is
# started as `torchrun` would start it.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(20):
    gradient = torch.ones(240_000)
    dist.all_reduce(gradient)
    dist.broadcast(gradient, src=step % 3)
dist.destroy_process_group()
"""
home = tempfile.TemporaryDirectory()  # until the notebook ends
folder = Path(home.name)
(folder / "train.py").write_text(SCRIPT)
command = "-m dlearn.cli run --nproc-per-node=3 --trace trace train.py"  # in a terminal: dlearn run ...
done = subprocess.run([sys.executable, *command.split()], cwd=folder, capture_output=True, text=True)
print(done.stderr)
play.strip(Trace.load(folder / "trace"))

# %% [markdown]
# That is the whole run to travel in: wheel, drag, arrow keys; click on a call, and it lights up on all ranks, with its
# line of code, its bytes, and the Python that selects it.
#
# **Your turn:** each rank hands 960,000 bytes to an all-reduce. How many bytes does it send? Click on one: you read
# what all three send together. Write your number instead of `None`.

# %% tags=["exercise"]
my_answer = None
lessons.answer("quickstart.bytes_of_a_rank", my_answer)

# %% tags=["answer"]
assert done.returncode == 0
sent = analysis.traffic(Trace.load(folder / "trace").where(op="all_reduce"))
assert lessons.answer("quickstart.bytes_of_a_rank", sent.bytes_from(rank=0) / 20).right

# %% [markdown]
# Next: [send_and_receive](send_and_receive.ipynb) shows what a collective is made of, and
# [ring_all_reduce](ring_all_reduce.ipynb) lets you write one.
