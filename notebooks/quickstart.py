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
# **Goals.** You will be able to start real ranks from a cell; say which rank sends what to which in an all-reduce; read
# from a hang which rank waits, in which line, and for which rank.
#
# **Before this:** basic PyTorch: a model, a loss, an optimizer. **Takes** about 30 minutes.
#
# ## 1. Watch
#
# A *rank* is one process of a job, and has a number. Here are three ranks with six numbers each. An *all-reduce* is a
# call that all ranks make together. After it, every rank has the sums over all three. Torch leaves the work to *gloo*,
# a library that moves tensors between CPUs. (More words: [glossary](../docs/glossary.md).)
#
# **Predict first:** to which rank does rank 0 send? Write one of the choices instead of `None`, as `"to both"`. It is
# kept only in a file beside this notebook. Then run the code and press Play. (On the site, unfold the output.) Which
# way do the numbers travel?

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
# Each rank sends to the rank before it, and rank 0 to rank 2: a ring that turns to the left. No rank is in the middle.
# Each box shows the data of one rank. The bands of a part show whose numbers its sum already contains; it is
# gold once it has all.
#
# Dashed lines are *derived* messages: dlearn saw the call of `all_reduce`, and knows gloo's algorithm. The sentence
# above the player compares them with the byte counters of Linux. *Payload* is the numbers themselves, 96 B. On the wire
# gloo adds three headers of 48 B to each of the 24 messages: two that travel with it, and one that its receiver sends
# back. Residue 0: they explain every byte.

# %% tags=["Q11", "check"]
assert run.results == {0: 6.0, 1: 6.0, 2: 6.0}
assert wire.exact or wire.not_measured  # Linux has the counters
assert {(message.src, message.dst) for message in messages(run.trace)} == {(1, 0), (2, 1), (0, 2)}
processes = {process.header.pid for process in run.trace.processes}
assert len(processes | {os.getpid()}) == 4  # three ranks, and this kernel

# %% [markdown]
# ## 2. Break it
#
# Each rank calls two all-reduces. Rank 1 makes one of two mistakes: it leaves out the first call, or it calls them the
# other way round. The sums should be 2 and 20. **Predict first:** what happens in the second case?

# %%
my_swap = lessons.predict("quickstart.other way round", None, choices=("2 and 20", "an error", "a hang", "wrong sums"))


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


stuck = Cluster(2).run(sums, "left out", timeout=2, check=False)  # check=False: the error is in stuck.error
print(stuck.error.what)
swapped = Cluster(2).run(sums, "other way round", check=False)
print(swapped.error or swapped.results, *explain(swapped.trace).sentences[-2:], sep="\n")
if swapped.error:
    outcome = "a hang" if analysis.hangs(swapped.trace) else "an error"
else:
    outcome = "2 and 20" if swapped.results[0] == (2, 20) else "wrong sums"
if my_swap:
    print(my_swap.against(outcome))
axes = draw.timeline(stuck.trace)

# %% [markdown]
# If a call is left out, rank 0 waits for ever. The message names the rank it waits for, and the line: `In[4]:8` is line
# 8 of cell [4]. (Rank 1's only call met rank 0's first, so the picture has one complete all-reduce, with wrong sums.)
# If the calls are swapped, the result is **11 and 11, without an error.** Gloo matches calls by their order alone. The
# trace (what dlearn recorded) shows that the matched calls are in different lines.

# %% tags=["check"]
assert "rank 0 waits for rank 1 in all_reduce #2" in stuck.error.what
assert swapped.results == {0: (11.0, 11.0), 1: (11.0, 11.0)}
assert len(analysis.mismatches(swapped.trace)) == 2

# %% [markdown]
# ## 3. Change the batch
#
# Two ranks train a small model in two ways. *Data parallel*: each rank has the whole model and a part of the images,
# and they average their gradients. *DDP* (`DistributedDataParallel`) is torch's class for it. *Model parallel*: each
# rank has half of the model. B · C · H · W numbers cross the cut (B images of C channels, H high and W wide), and as
# many come back. **Think first:** which bar changes with B? Then move a slider, and the ranks train again.

# %%
from dlearn.lessons.knobs import knobs

turn = None if wire.not_measured else knobs(B=8)
turn or f"No sliders here: they show what the kernel counts. {wire.not_measured}"

# %% [markdown]
# Only the bar of model parallel: each image takes 16,384 bytes. DDP sends one number for each of its 35,818 parameters,
# whatever B is, because each rank adds up the gradients of its images before it sends them. (On the site are no
# sliders. [model_parallel](model_parallel.ipynb) finds where the bars meet.)

# %% tags=["DM2", "check"]
if turn:  # wherever its sliders stand
    B, C, H, W = (turn.sliders[name].value for name in "BCHW")
    assert turn.bars.predicted[1] == 2 * B * C * H * W * 4
    assert (C, H, W) != (8, 16, 16) or turn.bars.predicted == (2 * 35_818 * 4, B * 16_384)
    assert turn.bars.measured[0] == turn.bars.predicted[0] + 8 * 144  # framing, whatever B is
    pairs = zip(turn.bars.measured, turn.bars.predicted, strict=True)
    assert all(predicted <= measured < predicted + 10_000 for measured, predicted in pairs)  # with framing

# %% [markdown]
# ## 4. Guess
#
# A *parameter server* is a process that holds a model. A trainer sends it images, gets the model's outputs, sends the
# gradients of its loss back, and asks the server to take a step. All of this happens by calls over the network (RPC,
# remote procedure calls). That is one iteration. **Predict first:** how many messages does it take? Write your number.

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
# objects, and the end of the *autograd context*, which stores the gradients of a backward pass over several processes.
# (Tick *Hide control messages* to see the four. [parameter_server](parameter_server.ipynb) explains all fourteen.)

# %% tags=["check"]
assert (len(one.messages), sum(not message.control for message in one.messages)) == (14, 4)

# %% [markdown]
# ## 5. Your own script
#
# A script of your own needs no change. This one has no dlearn in it, and starts as by `torchrun` (about 10 seconds).

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
# This is the whole run. Use the wheel, drag, or the arrow keys to move in it. If you click on a call, it is highlighted
# on all ranks, with its line of code, its bytes, and the Python that selects it.
#
# **Your turn:** each rank passes 960,000 bytes to an all-reduce. How many bytes does it send? If you click on a call,
# you read how many bytes all three ranks send together. Write your number instead of `None`.

# %% tags=["exercise"]
my_answer = None
lessons.answer("quickstart.bytes_of_a_rank", my_answer)

# %% tags=["answer"]
assert done.returncode == 0
sent = analysis.traffic(Trace.load(folder / "trace").where(op="all_reduce"))
assert lessons.answer("quickstart.bytes_of_a_rank", sent.bytes_from(rank=0) / 20).right

# %% [markdown]
# Next: [ring_all_reduce](ring_all_reduce.ipynb), in which you write an all-reduce of your own. If you have a day, go on
# with [send_and_receive](send_and_receive.ipynb).
