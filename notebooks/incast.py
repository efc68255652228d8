# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.4
#     needs: [network]
#     peak_mb: 700
# ---

# %% [markdown]
# # Incast: four trainers send to one server at the same time
#
# **Goals.** You will be able to compute from rates how long a push to a parameter server takes; tell a queue that
# overflows from a slow link by the switch's counts; name two cures, and what each one cures.
#
# **Before this:** [parameter_server](parameter_server.ipynb), [slow_network](slow_network.ipynb). **Takes** about 20
# minutes.
#
# Four trainers push a gradient of 1 MB each to a server. Every rank has a link of 40 Mbit/s, in each direction. All
# four gradients share **one** link, that of the server. **How long does a push take? And what if the switch has only 16
# kB of queue before the server's link?** (The lesson needs namespaces: Linux only, no root; `dlearn doctor` says
# whether this machine permits them.)
#
# The server receives from all four at the same time, and adds. With `in_turn` it receives from one after the other;
# gloo sends only when the receiver is ready. With two servers, each stores one half of the table.

# %%
import time
from statistics import median

import torch
import torch.distributed as dist

from dlearn import Cluster, analysis, lessons
from dlearn.lessons import charts

TRAINERS, NUMBERS, RATE = 4, 250_000, 40e6  # a number has 4 bytes; bit/s


def bound(servers):
    """Least seconds of a push: the bytes for one server, through its one link."""
    return TRAINERS * NUMBERS * 4 / servers * 8 / RATE


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


# %%
def over(servers, queue, in_turn=False):
    """A run over links of 40 Mbit/s whose queues have this much room."""
    network = f"40 Mbit/s, 1 ms, queue {queue}"
    return Cluster(servers + TRAINERS, network=network).run(push, servers, in_turn, timeout=60)


def seconds(run):
    return median(run.results[0][0])


def dropped(run):
    return sum(port.dropped for port in run.network.ports)


def again(run):
    """Bytes that TCP had to send again."""
    return sum(pair.again for pair in run.network.pairs)


# %% [markdown]
# ## One server
#
# First the queue is so long that no packet is dropped, then it has 16 kB. **Predict first:** how many seconds does a
# push take if nothing is lost?

# %%
my_seconds = lessons.predict("incast.seconds of a push", None)
roomy = over(1, "8 MB")
incast = over(1, "16 kB")
for name, run in (("nothing lost", roomy), ("room for 16 kB", incast)):
    print(f"{name:15} {seconds(run):.2f} s, the bound is {bound(1):.2f}")
drops = {port.name: port.dropped for port in incast.network.ports if port.dropped}
print(f"dropped: {drops}; sent again: {again(incast):,} B of {3 * TRAINERS * NUMBERS * 4:,}")
if my_seconds:
    print(my_seconds.against(seconds(roomy), tolerance=0.25))
incast.network

# %% [markdown]
# With a long queue the server's link is always busy, and the push takes as long as the model says. With 16 kB, four
# senders fill the queue at once and packets are dropped. Their senders slow down, or wait for a timer of about 0.2 s.
# Meanwhile the server's link is partly idle, so the push takes longer. In the table, only the port *to rank 0* has
# dropped packets; no link is slower than the others. This is incast: **packets are lost without a slow or broken
# link.**

# %% tags=["check"]
assert dropped(roomy) == 0
assert bound(1) <= seconds(roomy) < 1.25 * bound(1)
assert set(drops) == {"to rank 0"}
assert again(incast) > 0
assert seconds(incast) > seconds(roomy)

# %% [markdown]
# ## Two cures
#
# The queues keep their 16 kB. In the first cure the server receives from one trainer after the other. In the second
# there are two servers, each with half of the table and its own link, and all four trainers send to both. **Predict
# first:** with which cure are packets still dropped?

# %%
CHOICES = ("in turn", "two servers", "neither", "both")
my_dropped = lessons.predict("incast.still dropped", None, choices=CHOICES)
in_turn = over(1, "16 kB", in_turn=True)
halves = over(2, "16 kB")
both = over(2, "16 kB", in_turn=True)
ways = {"one server, room": roomy, "one, 16 kB": incast, "in turn": in_turn, "two servers": halves, "both": both}
for name, run in ways.items():
    print(f"{name:18} {seconds(run):.2f} s; {dropped(run):4} dropped")
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
# They cure two different things. **In turn** removes the losses, because a single sender cannot overload the server's
# link. But all 4 MB still share that link, so it cannot be faster than the bound. **Two servers** halve the bound,
# because each link transports half. But four trainers still send to each server at once, packets are still dropped, and
# waiting for timers takes most of the time that was gained (in some runs all of it). **Both** together are the fastest,
# but still above the new bound. The table has the same numbers in every variant.

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
my_dropped and my_dropped.against("two servers")

# %% [markdown]
# ## Exercises
#
# 1. Two servers receive in turn, but both begin with the same trainer. Which link is the bottleneck? Predict the time,
#    then run.
# 2. Eight trainers with 0.5 MB each send the same number of bytes. With 16 kB, are more or fewer packets lost?
# 3. In a ring all-reduce of five ranks, how many ranks send to the same rank at the same time? Can there be incast?
