# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.4
#     needs: [network]
#     peak_mb: 700
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Incast: four trainers send to one server at the same time
#
# **Goals.** You will be able to say from rates alone what a push to a parameter server takes; tell a queue that runs
# over from a slow link by the switch's counts; name two cures, and say which of the two each one cures.
#
# **Before this:** [parameter_server](parameter_server.ipynb), [slow_network](slow_network.ipynb). **Takes** about 20
# minutes.
#
# Four trainers push a gradient of 1 MB each to a server. Every rank has a link of 40 Mbit/s, in each direction. The
# trainers' links are free; but all four gradients have to go through **one** link, that of the server. (It needs
# namespaces: Linux only, no root; `dlearn doctor` says whether this machine permits them.)
#
# **Predict first:** how long does it take, if nothing is lost? And what if the switch has only 16 kB of room for what
# waits before the server's link?

# %%
import time
from statistics import median

import torch
import torch.distributed as dist

from dlearn import Cluster, analysis, draw
from dlearn.lessons import charts

my_guess_s = {"nothing lost": None, "room for 16 kB": None}
TRAINERS, NUMBERS, RATE = 4, 250_000, 40e6  # a number has 4 bytes; bit/s


def bound(servers):
    """Seconds of a push: what comes to one server, through its one link."""
    return TRAINERS * NUMBERS * 4 / servers * 8 / RATE


# %% [markdown]
# The server receives from all four at the same time, and adds up. With `in_turn` it asks one after the other: gloo
# sends when the receiver has asked, and not before. With two servers each holds one half of the table.


# %%
def push(servers, in_turn=False, rounds=3):
    """Seconds of each push; and on a server its part of the table."""
    rank, part = dist.get_rank(), NUMBERS // servers
    taken = []
    for _ in range(rounds):
        table = torch.zeros(part)
        dist.barrier()
        start = time.perf_counter()
        if rank >= servers:
            gradient = torch.arange(NUMBERS).float() * (rank - servers + 1)  # trainer 1, 2, 3, 4
            sending = [dist.isend(half, server) for server, half in enumerate(gradient.split(part))]
            for each in sending:
                each.wait()
        elif in_turn:
            for turn in range(TRAINERS):
                came = torch.empty(part)
                dist.recv(came, servers + (rank + turn) % TRAINERS)  # two servers never ask the same trainer
                table += came
        else:
            came = [torch.empty(part) for _ in range(TRAINERS)]
            asked = [dist.irecv(each, servers + number) for number, each in enumerate(came)]
            for each in asked:
                each.wait()
            table = sum(came)
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return taken, table


# %% [markdown]
# Around it: a run over a network, and three numbers of it. The switch counts what it dropped, and what TCP sent again.


# %%
def over(servers, queue, in_turn=False):
    """A run over links of 40 Mbit/s whose queues have so much room."""
    network = f"40 Mbit/s, 1 ms, queue {queue}"
    return Cluster(servers + TRAINERS, network=network).run(push, servers, in_turn, timeout=60)


def seconds(run):
    return median(run.results[0][0])


def dropped(run):
    return sum(port.dropped for port in run.network.ports)


def again(run):
    """Bytes that TCP had to send once more."""
    return sum(pair.again for pair in run.network.pairs)


# %% [markdown]
# ## One server
#
# First with so much room that nothing is ever lost, then with 16 kB.

# %%
roomy = over(1, "8 MB")
incast = over(1, "16 kB")
for name, run in (("nothing lost", roomy), ("room for 16 kB", incast)):
    print(f"{name:15} {seconds(run):.2f} s, the bound is {bound(1):.2f}", my_guess_s[name] or "")
incast.network

# %% [markdown]
# With room enough the server's link is full, and the push takes what the model says. With 16 kB four senders fill the
# queue at once, packets are dropped, and their senders slow down, or wait for a timer of 0.2 s or so. Meanwhile the
# server's link is not full, and the push takes longer than the model says. Look at the table: only the port *to rank 0*
# has dropped anything; no link is slower than another, and none is cut. That is incast: **a loss without a slow or
# broken link.**

# %%
drops = {port.name: port.dropped for port in incast.network.ports if port.dropped}
print(f"dropped: {drops}; sent again: {again(incast):,} B of {3 * TRAINERS * NUMBERS * 4:,}")

# %% tags=["check"]
assert dropped(roomy) == 0
assert bound(1) <= seconds(roomy) < 1.25 * bound(1)
assert set(drops) == {"to rank 0"}
assert again(incast) > 0
assert seconds(incast) > seconds(roomy)

# %% [markdown]
# ## Two cures
#
# **Predict first:** the queues keep their 16 kB. What does a push take if the server asks one trainer after the other?
# And what with two servers, each with half of the table and a link of its own, all four trainers sending to both? Are
# packets still dropped? And both together?

# %%
my_guess_of_cures = {"in turn": None, "two servers": None, "both": None}
in_turn = over(1, "16 kB", in_turn=True)
halves = over(2, "16 kB")
both = over(2, "16 kB", in_turn=True)
ways = {"one server, room": roomy, "one, 16 kB": incast, "in turn": in_turn, "two servers": halves, "both": both}
for name, run in ways.items():
    print(f"{name:18} {seconds(run):.2f} s; {dropped(run):4} dropped", my_guess_of_cures.get(name) or "")
charts.bars(
    list(ways),
    [
        charts.Part("the bound", [bound(2 if run in (halves, both) else 1) for run in ways.values()]),
        charts.Part("measured", [seconds(run) for run in ways.values()]),
    ],
    title="4 x 1 MB: a second server pays where both ask in turn",
    y="s",
    text="{:.2f}".format,
)

# %% [markdown]
# They cure two different things. **In turn** removes the losses: one sender alone cannot send more than the server's
# link takes. But all 4 MB still go through that one link, so it cannot be faster than the bound. **Two servers** halve
# the bound, since each link takes half; but four trainers still send to each at once, packets are still dropped, and
# the waiting for timers eats most of what was gained (in some runs all of it). **Both** together are the quickest, if
# still above the new bound. And the table is the same in every variant:

# %% tags=["check"]
assert dropped(in_turn) == 0
assert bound(1) <= seconds(in_turn)
assert dropped(halves) > 0
assert dropped(both) == 0
assert bound(2) <= seconds(both) < min(bound(1), seconds(halves))
expected = torch.arange(NUMBERS).float() * (1 + 2 + 3 + 4)
assert analysis.traffic(incast.trace).payload_bytes == analysis.traffic(in_turn.trace).payload_bytes
for run in (roomy, incast, in_turn):
    assert torch.equal(run.results[0][1], expected)
for run in (halves, both):
    assert torch.equal(torch.cat([run.results[server][1] for server in range(2)]), expected)

# %% [markdown]
# The number of bytes did not tell these apart: who sends how much to whom is the same in turn and at the
# same time. It is *when* they send.

# %%
draw.traffic(incast.trace)

# %% [markdown]
# ## Exercises
#
# 1. Two servers in turn, but both begin with the same trainer: which link is full now? Predict the time, then run it.
# 2. Eight trainers with 0.5 MB each: the same bytes. Is the loss larger or smaller with 16 kB?
# 3. In a ring all-reduce of the same five ranks, how many send to one rank at the same time? Can there be incast?
