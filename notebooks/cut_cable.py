# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 600
# ---

# %% [markdown]
# # A cut link: which rank notices, when, and what is lost?
#
# **Goals.** You will be able to tell a cut link from a rank that never called; say why a short cut costs more than its
# own time.
#
# **Before this:** [slow_network](slow_network.ipynb), [museum_of_hangs](museum_of_hangs.ipynb). **Takes** about 20
# minutes.
#
# Three ranks train. Then the link between ranks 0 and 1 breaks: no byte of one arrives at the other any more.
# Everything else works. You will cut the link for a second, then for good. (The lesson needs namespaces: Linux only, no
# root; `dlearn doctor` says whether this machine permits them.)
#
# The gradients travel round gloo's ring, from each rank to the one before it: 0 → 2, 2 → 1, 1 → 0. The job is an
# ordinary one: DDP, and an optimizer with momentum.

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

STEPS, CUT_AT = 30, 12
FOLDER = Path(tempfile.mkdtemp())
NETWORK = "20 Mbit/s, 1 ms"


# %%
def train(name):
    """Return the final parameters, as one number for each tensor, and the end time of each step."""
    rank = dist.get_rank()
    images, labels = (part[:25] for part in digits.shard(rank, dist.get_world_size()))
    torch.manual_seed(0)
    model = models.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = DistributedDataParallel(model)
    over = []
    for step in range(STEPS):
        with dlearn.span(f"step {step}"):
            optimizer.zero_grad()
            cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        over.append(time.time())
        if rank == 0 and step + 1 == CUT_AT:
            (FOLDER / f"{name}.cut").touch()  # asks the notebook to cut the link
    return [float(each.detach().double().sum()) for each in model.parameters()], over


whole, over = Cluster(3, network=NETWORK).run(train, "whole", timeout=60).results[0]
print(f"{STEPS} steps in {over[-1] - over[0]:.2f} s")

# %% [markdown]
# ## A link that comes back
#
# The notebook waits until step 12 is done, cuts the link, and restores it a second later. The ranks do not know.
# **Predict first:** how many seconds longer does the interrupted step take? (And does the training end with an error,
# or with different parameters?)

# %%
my_guess = lessons.predict("cut_cable.seconds that the cut step takes longer", None)


def cut(network, name, seconds):
    """Cut the link between ranks 0 and 1 after step CUT_AT; restore it after some seconds, or never."""
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
# There is no error, and the parameters are the same to the last bit: TCP keeps what was not acknowledged and sends it
# again. But TCP does not know when the link is back. It tries after about 0.2 s, and then waits twice as long each
# time: 0.4, 0.8, 1.6 s. So a second without a link costs more than a second. All three ranks wait in that step, even
# rank 2, whose links work: it waits for a chunk from rank 0, which first needs one from rank 1.

# %% tags=["check"]
assert (healed.error, after) == (None, whole)
assert again > 0
assert longer > 1.0

# %% [markdown]
# ## A link that stays cut
#
# By default gloo waits for 30 minutes. Here the run is ended after 6 seconds. What does its error say?

# %%
with Cluster(3, network=NETWORK) as cluster:
    cutting = threading.Thread(target=cut, args=(cluster.network, "broken", None))
    cutting.start()
    broken = cluster.run(train, "broken", timeout=6, check=False)
    cutting.join()
print(broken.error)

# %% [markdown]
# No rank noticed the cut by itself. All three have called the all-reduce and none has died. This distinguishes a cut
# link from a rank that never called (see [museum_of_hangs](museum_of_hangs.ipynb)). Only the switch knows which link is
# cut; on a real cluster you would now examine the network. Without `timeout=` the ranks would wait for half an hour.

# %%
stuck = broken.trace.spans[-1]
draw.timeline(broken.trace.within(stuck))

# %% tags=["check"]
assert dist.distributed_c10d.default_pg_timeout.total_seconds() == 30 * 60
assert "all ranks called it, and it does not end" in str(broken.error)
assert "The link between ranks 0 and 1 is cut." in str(broken.error)

# %% [markdown]
# ## Exercises
#
# 1. Cut the link between 1 and 2 instead, and restore it after 3 s. Predict the step's time from TCP's waiting.
# 2. `cluster.network.slow(1, "1 Mbit/s")` only slows a rank's link. Which rank does `draw.steps` name? Is it to blame?
# 3. The steps since the last checkpoint are lost. Which ones can go on, on which ranks? See
#    [mixed_precision_and_checkpoints](mixed_precision_and_checkpoints.ipynb).
