# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 600
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A cut cable: who notices, when, and what is lost?
#
# **Goals.** You will be able to tell a cut cable from a rank that never came; say what a short cut costs, and why more
# than its own time; go on from a checkpoint, and say what it must hold.
#
# **Before this:** [slow_network](slow_network.ipynb), [museum_of_hangs](museum_of_hangs.ipynb). **Takes** about 20
# minutes.
#
# Three ranks train. Then one cable breaks: nothing that rank 0 sends comes to rank 1 any more, and nothing from rank 1
# to rank 0. All else works. You will cut it for a second, and for good, and go on from a checkpoint. (It needs
# namespaces: Linux only, no root; `dlearn doctor` says whether this machine permits them.)
#
# A step's gradients go round gloo's ring, from each rank to the one before it: 0 → 2, 2 → 1, 1 → 0.
#
# **Predict first,** for a cable that comes back after one second: does the training end with an error? With other
# parameters? And how much longer does it take: less than a second, one second, or more?

# %%
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dlearn
from dlearn import Cluster, draw, lessons
from dlearn.lessons import digits, models

my_guess = lessons.predict("cut_cable.seconds that the cut step takes longer", None)
STEPS, EVERY = 30, 8  # a checkpoint after steps 8, 16 and 24
CUT_AT = 12
FOLDER = Path(tempfile.mkdtemp())
NETWORK = "20 Mbit/s, 1 ms"

# %% [markdown]
# The job, as anybody writes it: DDP, an optimizer with momentum, a checkpoint of both every 8 steps.


# %%
def train(name, first=0, warm=False):
    """The parameters after all steps, as one number for each tensor, and when each step was over."""
    rank = dist.get_rank()
    images, labels = (part[:25] for part in digits.shard(rank, dist.get_world_size()))
    torch.manual_seed(0)
    model = models.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = DistributedDataParallel(model)
    if warm:
        cross_entropy(parallel(images), labels).backward()  # DDP has chosen its buckets
    if first:
        saved = torch.load(FOLDER / f"{name}-{first}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    over = []
    for step in range(first, STEPS):
        with dlearn.span(f"step {step}"):
            optimizer.zero_grad()
            cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        over.append(time.time())
        done = step + 1
        if rank == 0 and done % EVERY == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / f"{name}-{done}.pt")
        if rank == 0 and done == CUT_AT:
            (FOLDER / f"{name}.cut").touch()  # tells the notebook to cut the cable
    return [float(each.detach().double().sum()) for each in model.parameters()], over


whole, over = Cluster(3, network=NETWORK).run(train, "whole", timeout=60).results[0]
print(f"{STEPS} steps in {over[-1] - over[0]:.2f} s")

# %% [markdown]
# ## A cable that comes back
#
# The notebook waits until step 12 is done, cuts, and heals a second later. Nobody tells the ranks.


# %%
def cut(network, name, seconds):
    """Cut the way between ranks 0 and 1 after step CUT_AT; heal it after so many seconds, or never."""
    while not (FOLDER / f"{name}.cut").exists():
        time.sleep(0.005)
    network.cut(0, 1)
    if seconds is not None:
        time.sleep(seconds)
        network.heal()


with Cluster(3, network=NETWORK) as cluster:
    cutting = threading.Thread(target=cut, args=(cluster.network, "healed", 1.0))
    cutting.start()
    healed = cluster.run(train, "healed", timeout=60, check=False)  # an error would stand in healed.error
    cutting.join()
    carried = cluster.network.carried()
after, ended = healed.results[0]
*usual, longest = sorted(later - earlier for earlier, later in pairwise(ended))
longer = longest - median(usual)
again = sum(pair.again for pair in carried.pairs)
print(f"error: {healed.error}; other parameters: {after != whole}; TCP sent {again:,} B again")
print(f"the longest step took {longest:.2f} s, {longer:.2f} s longer than the others")
print(my_guess.against(longer, tolerance=0.2) if my_guess else "")
draw.steps(healed.trace)

# %% [markdown]
# No error, and the parameters are the same to the last bit: TCP keeps what was not acknowledged and sends it again. But
# it does not know when the link is back. It tries after 0.2 s or so, and each time waits twice as long: 0.4, 0.8, 1.6
# s. So a second without a link costs more than a second. All three ranks stood still in that step, also rank 2, whose
# links were whole: it waits in the ring for the piece that rank 1 would have received from rank 0.

# %% tags=["check"]
assert (healed.error, after) == (None, whole)
assert again > 0
assert longer > 1.0

# %% [markdown]
# ## A cable that stays cut
#
# **Predict first:** who notices, and after how long? gloo waits for 30 minutes by default. Here the run may take 6
# seconds. How many steps are lost, with a checkpoint every 8?

# %%
my_lost_steps = lessons.predict("cut_cable.lost steps", None)
with Cluster(3, network=NETWORK) as cluster:
    cutting = threading.Thread(target=cut, args=(cluster.network, "broken", None))
    cutting.start()
    broken = cluster.run(train, "broken", timeout=6, check=False)
    cutting.join()
print(broken.error)

# %% [markdown]
# No rank noticed by itself. All three have called the all-reduce and none has died: that tells a cut link from a rank
# that never came (the [museum of hangs](museum_of_hangs.ipynb) has those). Which way is cut, only the switch knows; on
# a real cluster you would now ask the network. Without `timeout=` they would stand here for gloo's half an hour.

# %%
stuck = broken.trace.spans[-1]
draw.timeline(broken.trace.within(stuck))

# %% tags=["check"]
assert dist.distributed_c10d.default_pg_timeout.total_seconds() == 30 * 60
assert "all ranks called it, and it does not end" in str(broken.error)
assert "The way between ranks 0 and 1 is cut." in str(broken.error)

# %% [markdown]
# ## Go on from the checkpoint
#
# Lost is what was not saved: the steps since the last checkpoint. Fresh ranks on a whole network go on from there.

# %%
saved = max(int(path.stem.partition("-")[2]) for path in FOLDER.glob("broken-*.pt"))
lost = int(stuck.removeprefix("step ")) - saved
resumed, _ = Cluster(3, network=NETWORK).run(train, "broken", saved, timeout=60).results[0]
apart = max(abs(one - other) for one, other in zip(resumed, whole, strict=True))
print(my_lost_steps.against(lost) if my_lost_steps else f"stuck in {stuck}; {lost} steps lost")
print(f"sums of parameters after step {STEPS} differ by at most {apart:.1e}")

# %% [markdown]
# The result is not lost, except for its last digits. Why these? The checkpoint has all that the next step needs, the
# parameters and the optimizer's momentum. But a fresh DDP model takes its first step with buckets in the order of
# registration, and all others in the order in which gradients came. So in that step a number stands in another chunk of
# the ring, three ranks are added in another order, and a float rounds differently. To check it: one backward pass whose
# gradients are not used, before the checkpoint is loaded.

# %%
warmed, _ = Cluster(3, network=NETWORK).run(train, "broken", saved, True, timeout=60).results[0]
print(f"with DDP's buckets chosen before: equal to the last bit: {warmed == whole}")

# %% tags=["check"]
assert CUT_AT - saved <= lost < EVERY
assert resumed != whole
assert apart < 1e-3
assert warmed == whole

# %% [markdown]
# ## Exercises
#
# 1. Leave the optimizer out of the checkpoint. Is there an error? What differs, and from which step on?
# 2. Cut the way between 1 and 2 instead, and heal after 3 s. Predict from TCP's waiting how long the step takes.
# 3. `cluster.network.slow(1, "1 Mbit/s")` breaks nothing. Which rank does `draw.steps` name now, and is it to blame?
