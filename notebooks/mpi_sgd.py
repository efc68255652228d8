# ---
# jupyter:
#   dlearn:
#     ids: [MP3, MP6]
#     minutes: 0.4
#     needs: [mpi]
#     peak_mb: 800
# ---

# %% [markdown]
# # SGD on MPI: does a server need a handshake?
#
# **Goals.** You will be able to say what a handshake protects; write a server over MPI that needs none.
#
# **Before this:** [mpi_messages](mpi_messages.ipynb),
# [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb). **Takes** about 25 minutes.
#
# A classic program: over MPI, a server takes gradients from `ANY_SOURCE`, layer by layer. Before a worker may send, it
# says HELLO, and waits until the server answers READY: so the server listens to one worker at a time. **What does the
# handshake cost, and what happens without it?** You run it on real MPI ranks, started from this notebook.
#
# It is written in PyTorch: the same functions run on gloo and on MPI. (You need the extra `mpi`: `pip install
# mpi4py mpich`; there is nothing to compile. Without it the lesson ends at its first run, and says so.)

# %%
import inspect
from collections import Counter

import matplotlib.pyplot as plt

from dlearn import Cluster, analysis, lessons, messages, play
from dlearn.lessons import handshake, sgd
from dlearn.lessons.handshake import BYE, GRAD, HELLO, PARAMS, READY, mixed

NAMES = ["server", "worker1", "worker2"]
WORKERS, P = 2, 8 * sgd.P  # bytes of a gradient: 2,400 numbers in float64
TAGS = {HELLO: "HELLO", READY: "READY", PARAMS: "PARAMS", BYE: "BYE"} | {
    GRAD + layer: f"GRAD, layer {layer}" for layer in range(3)
}


def run_on_mpi(job, *args, **kwargs):
    with Cluster(NAMES, backend="mpi") as cluster:
        return cluster.run(job, *args, timeout=60, **kwargs)


def apart(a, b):
    return (a - b).abs().max().item()


# %% [markdown]
# ## The family, on MPI
#
# The members of [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb), now on MPI. **Predict first:** are
# the parameters the same as on gloo, to the last bit?

# %% tags=["MP3"]
STEPS = 20
everyone, two = sgd.alone(STEPS, 3), sgd.alone(STEPS, WORKERS)
MEMBERS = {
    "all-reduce": (sgd.all_reduced, (), everyone),
    "server with a model": (sgd.gathered, (), two),
    "server with a bare list": (sgd.gathered, (sgd.BareList,), two),
    "local, k = 1": (sgd.local, (1,), everyone),
}

with Cluster(NAMES, backend="mpi") as mpi, Cluster(NAMES) as gloo:
    for name, (job, args, on_one_device) in MEMBERS.items():
        on_mpi, on_gloo = (cluster.run(job, STEPS, *args).results["server"].numbers for cluster in (mpi, gloo))
        far = apart(on_mpi, on_gloo), apart(on_mpi, on_one_device)
        print(f"{name:24} MPI is {far[0]:.0e} from gloo, {far[1]:.0e} from one device")
        assert max(far) < 1e-6
    free = [mpi.run(sgd.asynchronous, 60) for _ in range(3)]

# %% [markdown]
# The same training; the last bits may differ, since MPI adds in an order of its own. What MPI's library sends inside a
# collective it does not tell, so of these there are no traffic matrices. Sends are seen, and each receive from any
# source knows in the end whose message it was. The asynchronous server is made of those:

# %%
shares = [Counter(each.worker for each in run.results["server"].updates) for run in free]
print("updates by worker 1 and 2:", *(f"{share[1]} and {share[2]}" for share in shares), sep="\n    ")

# %% tags=["check"]
for run, share in zip(free, shares, strict=True):
    traffic = analysis.traffic(run.trace)
    assert traffic.unexplained == 0
    assert [traffic.bytes_from(rank=rank) for rank in (1, 2)] == [share[rank] * (P + 16) for rank in (1, 2)]
    assert traffic.bytes_from(rank=0) == (60 + WORKERS) * (P + 8)

# %% [markdown]
# ## The handshake
#
# That server takes a gradient in *one* message, so nothing can get mixed. Programs that receive layer by layer need
# more care. Here are both sides of the one with the handshake:

# %%
print(inspect.getsource(handshake.with_handshake))
print(inspect.getsource(handshake.serve_one_at_a_time))
print(inspect.getsource(handshake.from_anyone))

# %% [markdown]
# **Predict first:** two workers, 10 updates each. How many messages have each tag?

# %%
EACH = 10
UPDATES = WORKERS * EACH
run = run_on_mpi(handshake.with_handshake, EACH)
tags = Counter(each.tag for each in run.trace.where(op="send").events)
for tag, name in TAGS.items():
    print(f"{name:13} {tags[tag]}")

# %% tags=["check"]
layers = {GRAD + layer: UPDATES for layer in range(3)}
assert tags == {HELLO: 2 * UPDATES, READY: 2 * UPDATES, PARAMS: UPDATES, BYE: WORKERS, **layers}

# %% [markdown]
# Two HELLOs and two READYs for each update: one pair to get the parameters, one to deliver the gradient. Here is one
# update of each worker, as the server lived it: its sends when it sent, its receives when they were done. The bands are
# the times in which one worker has the server. Look at what is inside a band: whose messages?


# %%
def as_the_server_saw(run):
    """(worker, to the server?, tag) of each message, in the order of the server's own calls."""
    ends = [(message, next(end for end in message.operation.ends if end.rank == 0)) for message in messages(run.trace)]
    ends.sort(key=lambda pair: pair[1].start_ns if pair[0].src == 0 else pair[1].end_ns)
    return [(max(message.src, message.dst), message.dst == 0, end.tag) for message, end in ends]


COLORS = {1: "#0072B2", 2: "#D55E00"}


def sequence(seen, axes):
    at = {0: 0, 1: -1, 2: 1}
    for place, (worker, to_server, tag) in enumerate(seen):
        if tag == READY:
            until = next(later for later in range(place + 1, len(seen)) if seen[later][2] in (PARAMS, GRAD + 2))
            axes.axhspan(place - 0.45, until + 0.45, color=COLORS[worker], alpha=0.13, linewidth=0)
        ends = [(at[worker], place), (0, place)]
        start, end = ends if to_server else reversed(ends)
        axes.annotate(
            "", end, start, arrowprops={"arrowstyle": "-|>", "color": COLORS[worker], "shrinkA": 0, "shrinkB": 0}
        )
        axes.text(at[worker] / 2, place - 0.08, TAGS[tag], ha="center", va="bottom", fontsize=10)
    axes.vlines([-1, 0, 1], -1, len(seen) - 0.5, color="#222222", linewidth=0.8)
    for rank, x in at.items():
        axes.text(x, -1.2, NAMES[rank], ha="center", fontweight="bold", fontsize=10)
    axes.set(ylim=(len(seen) - 0.5, -2), xlim=(-1.15, 1.15))
    axes.axis("off")


one_each = run_on_mpi(handshake.with_handshake, 1)
seen = as_the_server_saw(one_each)
figure, axes = plt.subplots(figsize=(6.5, 6.5), layout="constrained")
sequence(seen, axes)

# %% [markdown]
# And in the order of sending, with a sentence and the bytes of each: who says HELLO while the other one is served?

# %%
play.player(one_each.trace, tags=TAGS)

# %% [markdown]
# From a READY to the end of what was promised, the other worker has to wait. Which one comes first differs from run to
# run; what holds in all:


# %% tags=["check"]
def alone_with_the_server(seen):
    """Behind each READY come the parameters, or three layers in order, of that worker only."""
    readies = [(place, worker) for place, (worker, _, tag) in enumerate(seen) if tag == READY]
    for place, worker in readies:
        params = seen[place + 1] == (worker, False, PARAMS)
        gradient = seen[place + 1 : place + 4] == [(worker, True, GRAD + layer) for layer in range(3)]
        yield params or gradient


assert len(seen) == WORKERS * (2 + 2 + 1 + 3 + 1) == 18
for each in (run, one_each):
    assert all(alone_with_the_server(as_the_server_saw(each)))

# %% [markdown]
# ## Without it
#
# The same server, the same `from_anyone`, and workers that send when they like. So that it happens in every run, worker
# 1 sends its first layer early and the others late, worker 2 the other way round. (As in real life: a backward pass
# makes the last layer's gradient first.) Each side notes a checksum of every layer.
#
# **Predict first:** what will the server make an update of? Will MPI complain?

# %% tags=["MP6"]
careless = run_on_mpi(handshake.interleaved)
whose = {
    checksum: NAMES[worker] for worker in (1, 2) for row in careless.results[NAMES[worker]].sent for checksum in row
}
for number, taken in enumerate(careless.results["server"].taken, start=1):
    print(
        f"update {number}:", ", ".join(f"layer {layer} of {whose[each]}" for layer, each in enumerate(taken.checksums))
    )


def all_sent(run):
    return [row for name in NAMES[1:] for row in run.results[name].sent]


assert mixed(careless.results["server"].taken, all_sent(careless)) == [0, 1]
assert [each.workers for each in careless.results["server"].taken] == [(1, 2, 2), (2, 1, 1)]

# %%
figure, axes = plt.subplots(figsize=(6.5, 2.6), layout="constrained")
sequence([each for each in as_the_server_saw(careless) if each[2] >= GRAD], axes)
line = axes.axhline(2.4, color="#707070", linestyle="--", linewidth=1)  # here is an update

# %% [markdown]
# Two updates, each of three arrows, both of them patchwork, and no error: each layer has a tag of its own, and fits.
# (Had all layers one tag, one of another size could come, which is easier to notice.) Does it happen by itself, and
# does the loss tell?

# %%
with Cluster(NAMES, backend="mpi") as mpi:
    by_itself = {
        take.__name__: [mpi.run(handshake.without_handshake, 30, take, 1, timeout=60) for _ in range(4)]
        for take in (handshake.from_anyone, handshake.from_one)
    }
    by_itself["with_handshake"] = [mpi.run(handshake.with_handshake, 30, 1, timeout=60) for _ in range(4)]


def spread(values, form="{}"):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


found = {
    name: [mixed(run.results["server"].taken, all_sent(run)) for run in each_run]
    for name, each_run in by_itself.items()
}
for name, each_run in by_itself.items():
    last = [sum(each.loss for each in run.results["server"].updates[-15:]) / 15 for run in each_run]
    print(f"{name:15} mixed: {spread([*map(len, found[name])])} of 60 updates; last losses {spread(last, '{:.2f}')}")

# %% [markdown]
# `from_anyone` without a handshake mixes now and then, or in no run at all: the worst kind of error, which no test
# finds reliably, and the loss does not show. Unless *you* are the network: with `hold=True` each send and receive waits
# at a gate until you let it through (more of this in [race_by_hand](race_by_hand.ipynb)). The same function, nothing
# slowed down, one gradient of each worker. **Predict first:** whose are the layers of the first update? And what is
# left for the second?

# %%
ORDER = "server, server, worker1, worker2"  # the parameters: two sends, and their receives
ORDER += ", worker1, server, worker2, worker2, server, worker2 and server"  # three layers, each taken at once
ORDER += ", server"  # the first layer of the second update: there is one

held = Cluster(NAMES, backend="mpi", hold=True).run(handshake.without_handshake, 1)
for names in ORDER.split(", "):
    for name in names.split(" and "):
        held.release(name)
    while name not in {call.rank for call in held.waiting}:
        pass  # Its next call waits: so this one is done.
held.waiting

# %% [markdown]
# Worker 1 stands at the gate with its second layer. The server has made an update of its first and two of worker 2's,
# and wants the second layer of the next one. The gate is opened for the rest; and with the schedule it comes again, to
# the last bit:

# %%
schedule = held.schedule
patchwork = held.free().join(60).results["server"]
again = Cluster(NAMES, backend="mpi", hold=schedule).run(handshake.without_handshake, 1).join(60).results["server"]
for number, each in enumerate(patchwork.taken, start=1):
    print(f"update {number}: layers of", ", ".join(NAMES[worker] for worker in each.workers))

# %% tags=["check"]
assert [each.workers for each in patchwork.taken] == [(1, 2, 2), (2, 1, 1)]
assert again.taken == patchwork.taken
assert again.numbers.equal(patchwork.numbers)

# %% [markdown]
# No update of the two is a worker's gradient, and now it is a test that fails each time. `from_one` is the third way,
# and it never mixes:

# %%
print(inspect.getsource(handshake.from_one))

# %% tags=["MP6"]
assert not any(found["from_one"] + found["with_handshake"])
safe = run_on_mpi(handshake.interleaved, handshake.from_one)  # the order that was fatal
assert mixed(safe.results["server"].taken, all_sent(safe)) == []

for run in by_itself["from_one"]:
    sends = Counter(each.tag for each in run.trace.where(op="send").events)
    assert sends == {PARAMS: 60, **{GRAD + layer: 60 for layer in range(3)}}
for run in by_itself["with_handshake"]:
    assert run.trace.where(op="send").events[0].tag == HELLO
    assert len(run.trace.where(op="send").events) == 60 * (4 + 4) + WORKERS

# %% [markdown]
# The first layer from any worker, the others from *that* worker: four messages an update instead of eight, and no
# layer can be another's, since MPI (and gloo) keep the messages of one sender apart from those of others, and in order.
# What the others have sent meanwhile waits. So the handshake is not needed for that. What it does give: no worker sends
# a layer before the server is there to take it, so nothing piles up.
#
# ## Exercise
#
# Ten workers, 5 updates each, four layers. How many messages are there with the handshake (BYE included), and how many
# the third way (without BYE)?

# %% tags=["exercise"]
my_messages = {"with the handshake": None, "the third way": None}
lessons.answer("mpi_sgd.ten_workers", my_messages)

# %% tags=["answer"]
parts = tags[HELLO] + tags[READY] + tags[PARAMS]  # of this run's 20 updates
handshakes, more = 50 * (parts + 4 * tags[GRAD]) // UPDATES, 50 * (tags[PARAMS] + 4 * tags[GRAD]) // UPDATES
right = {"with the handshake": handshakes + 10, "the third way": more}
assert lessons.answer("mpi_sgd.ten_workers", right).right
