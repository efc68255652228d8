# ---
# jupyter:
#   dlearn:
#     ids: [MP3, MP4, MP5, SA7]
#     minutes: 0.5
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Synchronous or asynchronous?
#
# **Goals.** You will be able to compare five kinds of SGD (BSP, ASP, local steps) by bytes, staleness and copies of the
# model.
#
# **Before this:** [parameter_server](parameter_server.ipynb), [sum_or_average](sum_or_average.ipynb). **Takes** about
# 40 minutes.
#
# Three workers have the images and train one model. They may wait for each other or not, and there may be a server or
# not. **Which rank sends what to which? How old is the model from which a gradient was computed? What does that do to
# the loss?** Here you run all variants on one task, and count.

# %%
import inspect
from collections import Counter
from functools import partial

import matplotlib.pyplot as plt
import torch

from dlearn import Cluster, analysis, draw, lessons, messages, play
from dlearn.lessons import charts, sgd

STEPS, RUNS, SLOW_MS = 40, 3, 5
TRAINERS = ["worker1", "worker2", "worker3"]
N, P = len(TRAINERS), 8 * sgd.P  # bytes of the parameters, and of a gradient, in float64
GRADIENTS = N * STEPS  # of batches of 25 images, in each of the runs


def apart(a, b):
    return (a - b).abs().max().item()


print(f"{sgd.P:,} parameters, P = {P:,} B; {GRADIENTS} gradients a run")

# %% [markdown]
# All train the same small network on the digits. A batch takes worker 1 about 5 ms, worker 2 about 10, worker 3 about
# 15: worker 3 is the **straggler**. Every variant applies a gradient with one third of the learning rate, so equal
# numbers of images move the model equally far.
#
# ## Synchronous, without a server
#
# Every rank has a model, and all ranks average their gradients. If every rank waits for all others in every step, this
# is called **BSP** (bulk synchronous parallel).
#
# ## Synchronous, with a server
#
# The server sends the parameters to all workers, gathers all gradients (each with its loss), and takes a step. `keeper`
# is the part of the model that the server stores. **Predict first:** which of the two sends more bytes in all?

# %%
WAYS = ("all-reduce", "server", "both the same")
my_more = lessons.predict("synchronous_or_asynchronous.more bytes", None, choices=WAYS)
print(inspect.getsource(sgd.all_reduced), inspect.getsource(sgd.gather_and_step), sep="\n")
runs = {}
with Cluster(TRAINERS) as cluster:
    runs["all-reduce"] = [cluster.run(sgd.all_reduced, STEPS, SLOW_MS) for _ in range(RUNS)]
with Cluster(["server", *TRAINERS]) as cluster:
    whole = partial(sgd.gathered, STEPS, slow_ms=SLOW_MS)
    runs["server, synchronous"] = [cluster.run(whole) for _ in range(RUNS)]
    bare = cluster.run(sgd.gathered, STEPS, sgd.BareList)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(3, 4))
draw.traffic(runs["all-reduce"][0].trace, ax=left)
draw.traffic(runs["server, synchronous"][0].trace, ax=right)
right.set_title("With a server: one row,\none column, and one cell", loc="left", fontsize=11.5, fontweight="bold")
plt.show()


# %% [markdown]
# In the ring every rank sends the same number of bytes, 4/3 · P per gradient. With a server it is 2 P per gradient: in
# the server's row, in its column, and in one more cell. (Gloo's broadcast is a tree: the server sends to two workers,
# and one of them forwards the parameters to the third.) Both results are those of *one* device with the three batches
# as one. With a hundred workers, the server's link transports about fifty times as much as that of a rank in the ring.
#
# ## Does the server need a whole model?
#
# The run `bare` above used a keeper without a network, a loss or an optimizer. Does it train as well?

# %%
print(inspect.getsource(sgd.BareList))


def sent(run, kind):
    """Payload bytes in spans of this name, by (sender, receiver)."""
    return analysis.traffic(run.trace.within(kind))


expected = sgd.alone(STEPS, N)
print(f"a bare list against a whole model: {apart(bare.results['server'].numbers, expected):.0e} apart")

# %% tags=["MP3", "MP5", "SA7", "check"]
for run in runs["all-reduce"]:
    assert all(apart(run.results[name].numbers, expected) < 1e-6 for name in TRAINERS)
    assert sent(run, "gradients").total_bytes == STEPS * 2 * (N - 1) * P
for run in runs["server, synchronous"]:
    assert apart(run.results["server"].numbers, expected) < 1e-6
    assert sent(run, "parameters").total_bytes == STEPS * N * (P + 8)  # and a version
    assert sent(run, "gradients").bytes_to(rank=0) == STEPS * N * (P + 16)  # and the loss, and that version
    assert sent(run, "parameters").payload_bytes[1, 3] == STEPS * (P + 8)  # passed on
assert apart(expected, sgd.first_numbers()) > 0.1
for run in runs["all-reduce"]:
    assert all(torch.equal(run.results[name].numbers, run.results["worker1"].numbers) for name in TRAINERS)

assert apart(bare.results["server"].numbers, expected) < 1e-6
by_kind = sent(bare, "parameters")
assert by_kind.bytes_to(rank=0) == P  # worker 1 fills the list, once
my_more and my_more.against("server")

# %% [markdown]
# A server adds numbers without knowing what they mean. So one parameter server program can serve any model, and its
# list can be cut anywhere and spread over several servers.
#
# ## Asynchronous
#
# Now no worker waits (**ASP**, asynchronous parallel; with a bound on the lead of the fastest it is **SSP**, stale
# synchronous parallel: see [hogwild](hogwild.ipynb) and [stragglers](stragglers.ipynb)). The server receives a gradient
# from any worker (`recv` without a source), applies it at once, and replies to that worker alone. With the parameters
# it sends their *version*, the number of updates so far. The worker returns the version with its gradient. So the
# server knows how many updates it has made in between: the gradient's **staleness**.
#
# Hogwild goes further. Over RPC, several threads of the server handle the calls, and `push` writes into the parameters
# without a lock. *Local SGD* is the opposite: it has no server and sends nothing for k = 5 steps; then all ranks
# average their parameters (*parameter averaging*). **Predict first:** how stale is a gradient at the asynchronous
# server on average, with three workers?

# %%
my_mean = lessons.predict("synchronous_or_asynchronous.mean staleness", None)
for part in (sgd.serve, sgd.pull, sgd.push, sgd.local):
    print(inspect.getsource(part))
K = 5
with Cluster(["server", *TRAINERS]) as cluster:
    runs["server, asynchronous"] = [cluster.run(sgd.asynchronous, GRADIENTS, SLOW_MS) for _ in range(RUNS)]
with Cluster(["server", *TRAINERS], rpc=True) as cluster:
    everyone = dict.fromkeys(TRAINERS, partial(sgd.hogwild, GRADIENTS, SLOW_MS))
    runs["no lock, over RPC"] = [cluster.run(everyone) for _ in range(RUNS)]
with Cluster(TRAINERS) as cluster:
    runs[f"local, k = {K}"] = [cluster.run(sgd.local, STEPS, K, SLOW_MS) for _ in range(RUNS)]


def updates(run):
    """All gradients of a run, in the order in which they were applied."""
    logs = [told.updates for told in run.results.values() if told.updates]  # the server's, or one of each worker
    return [each for step in zip(*logs, strict=True) for each in step]


def spread(values, form="{:.2f}"):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


# %%
stale = {name: [[each.staleness for each in updates(run)] for run in each_run] for name, each_run in runs.items()}
for name, each_run in runs.items():
    shares = [Counter(each.worker for each in updates(run)) for run in each_run]
    by_worker = ", ".join(spread([share[worker] for share in shares], "{}") for worker in (1, 2, 3))
    means = spread([sum(each) / len(each) for each in stale[name]])
    print(f"{name:21} updates by worker 1, 2, 3: {by_worker:30} mean staleness {means}")


def mean_staleness(run, worker):
    mine = [each.staleness for each in updates(run) if each.worker == worker]
    return sum(mine) / len(mine)


for worker in (1, 2, 3):
    means = [mean_staleness(run, worker) for run in runs["server, asynchronous"]]
    print(f"server, asynchronous: the gradients of worker {worker} have a mean staleness of {spread(means)}")
threads = [run.results["worker1"].threads for run in runs["no lock, over RPC"]]
print(f"no lock, over RPC: {spread(threads, '{}')} threads of the server have written into the parameters")
of_first = stale["server, asynchronous"][0]
if my_mean:
    print(my_mean.against(sum(of_first) / len(of_first), tolerance=0.02))
play.player(runs["server, asynchronous"][0].trace)


# %% [markdown]
# "a to b" means the smallest and the largest value over the runs. How many updates a worker makes differs from run to
# run; usually the fast worker makes more. The mean staleness of the asynchronous server was 1.98 in every run. Each
# worker always has one gradient under way, and each update makes the gradients of the two others older by one. Summed
# over a run of U updates, staleness is (n - 1) U - n (n - 1)/2. Worker speed changes only *whose* gradients are stale.
# (Hogwild's staleness is never higher: its workers pull in a second call after their push, and updates between the two
# make no gradient older. In local SGD, staleness is the number of steps since the models were last equal.) The player
# shows the first 300 messages of the asynchronous server. Which worker gets new parameters while another computes with
# old ones?

# %% tags=["MP4", "check"]
for name, each_run in runs.items():
    for run in each_run:
        log = updates(run)
        assert len(log) == GRADIENTS  # none is lost
        assert min(each.staleness for each in log) == 0
        if name in ("all-reduce", "server, synchronous"):
            assert all(each.staleness == 0 for each in log)
        if name not in ("server, asynchronous", "no lock, over RPC"):
            assert Counter(each.worker for each in log) == {1: STEPS, 2: STEPS, 3: STEPS}
in_all = (N - 1) * GRADIENTS - N * (N - 1) // 2
assert round(in_all / GRADIENTS, 3) == 1.975
assert all(sum(each) == in_all for each in stale["server, asynchronous"])
assert all(sum(each) <= in_all for each in stale["no lock, over RPC"])
since_equal = [step % K for step in range(STEPS) for _ in TRAINERS]
assert stale[f"local, k = {K}"] == [since_equal] * RUNS

for run in runs["server, asynchronous"]:
    assert sent(run, "gradients").total_bytes == GRADIENTS * (P + 16)  # gradient, loss, version
    assert sent(run, "parameters").total_bytes == (GRADIENTS + N) * (P + 8)  # at the end, "stop" to each worker
for run in runs["no lock, over RPC"]:
    for kind, count in (("gradients", GRADIENTS), ("parameters", GRADIENTS + N)):
        tensors = [tensor for message in messages(run.trace.within(kind)) for tensor in message.tensors]
        assert [tensor.payload_bytes for tensor in tensors] == [P] * count
for run in runs[f"local, k = {K}"]:
    assert sent(run, "average").total_bytes == STEPS / K * 2 * (N - 1) * P

# %% [markdown]
# ## The family, side by side
#
# How stale are the gradients of each variant, and how does its loss fall with the images seen? Bars
# and points are means of the runs; vertical lines reach from the smallest to the largest. (The two
# synchronous variants have one line: their losses are equal.) How much do the others differ?


# %%
def shares_of(name):
    """% of the gradients that are 0, 1, 2, 3, 4, and 5 or more versions old."""
    counts = Counter(min(one, 5) for each in stale[name] for one in each)
    return [100 * counts[age] / counts.total() for age in range(6)]


def smooth(run):
    """Average the losses of ten steps of each worker, or of as many gradients."""
    losses = torch.tensor([each.loss for each in updates(run)])
    return losses.reshape(-1, 5 * N).mean(dim=1)


def gradient_bytes(name):
    return [analysis.traffic(run.trace).total_bytes / GRADIENTS for run in runs[name]]


axes = charts.bars(
    [*"01234", "5+"],
    [charts.Part(name, shares_of(name)) for name in runs],
    title="Where all wait for all in each step, no gradient is stale",
    y="% of the gradients, by staleness",
)

# %%
IMAGES = [(place + 0.5) * 5 * N * sgd.BATCH for place in range(STEPS // 5)]
last = {name: [smooth(run)[-1].item() for run in each_run] for name, each_run in runs.items()}
lines = {}
for name, each_run in runs.items():
    losses = torch.stack([smooth(run) for run in each_run])
    spreads = zip(losses.amin(dim=0).tolist(), losses.amax(dim=0).tolist(), strict=True)
    lines[name] = charts.Series(IMAGES, losses.mean(dim=0).tolist(), [*spreads])
axes = charts.lines(
    lines,
    title=f"All learn: the last losses are {spread([sum(each) / RUNS for each in last.values()])}",
    x="images seen",
    y="loss",
)
price_of = {name: gradient_bytes(name) for name in runs}
for name in runs:
    print(f"{name:21} last 15 losses: {spread(last[name]):14}  {spread(price_of[name], '{:,.0f}')} B a gradient")

# %% tags=["check"]
for name, each_run in runs.items():
    assert max(last[name]) < smooth(each_run[0])[0] / 2  # it learns
assert {*price_of["all-reduce"]} == {2 * (N - 1) / N * P}
assert {*price_of["server, synchronous"]} == {2 * P + 24}
assert {*price_of["server, asynchronous"]} == {2 * P + 24 + N * (P + 8) / GRADIENTS}
assert {*price_of[f"local, k = {K}"]} == {2 * (N - 1) / N * P / K}

# %% [markdown]
# All variants learn. The final losses are lowest where no gradient is stale. Gradients that are two versions old, and
# models that drift apart for five steps, cost a little. Three short runs cannot show how much: compare the spread
# of a line with the distance to the others.
#
# ## Which rank stores what?
#
# The messages show it. A rank that receives the parameters before each gradient need not keep them: it computes with a
# copy that the next message replaces. A rank that never receives parameters must keep them. **Predict first:** with an
# asynchronous server and three workers, how many copies of the model must not be lost?

# %%
my_copies = lessons.predict("synchronous_or_asynchronous.copies", None)
KINDS = ("parameters", "gradients", "average")


def sends(run):
    """Bytes a gradient that each rank sends, by kind."""
    kinds = [kind for kind in KINDS if kind in run.trace.whole.spans]
    return {kind: sent(run, kind) for kind in kinds}


def who(name):
    run = runs[name][0]
    found = sends(run)
    for rank in run.trace.ranks:
        own = not ("parameters" in found and found["parameters"].bytes_to(rank=rank) > P)
        told = [
            f"{kind} to {', '.join(run.trace.label(b) for a, b in sorted(each.payload_bytes) if a == rank)}"
            f" ({each.bytes_from(rank=rank) / 1e3:,.0f} kB)"
            for kind, each in found.items()
            if each.bytes_from(rank=rank) > P  # less is the calls of RPC
        ]
        yield run.trace.label(rank), own, "; ".join(told)


copies = {}
for name in runs:
    print(name)
    for label, own, told in who(name):
        print(f"   {label:8} {'keeps the parameters' if own else 'has them on loan':21} sends {told}")
    copies[name] = sum(own for _, own, _ in who(name))
my_copies and my_copies.against(copies["server, asynchronous"])

# %% [markdown]
# There are three copies that are equal to the last bit, three that drift apart for k steps, or a single one. With a
# server, the model survives the death of a worker, but not that of the server. The images never travel.
#
# ## Is there an epoch any more?
#
# An epoch is one pass over all images, and needs 60 gradients. When the asynchronous server has made 60 updates, has
# every image been used once?

# %%
EPOCH, shares = 1500 // sgd.BATCH, []
for number, run in enumerate(runs["server, asynchronous"], start=1):
    passes = Counter(each.worker for each in updates(run)[:EPOCH])
    seen = [min(1, passes[worker] / (EPOCH // N)) for worker in (1, 2, 3)]
    twice = [max(0, passes[worker] / (EPOCH // N) - 1) for worker in (1, 2, 3)]
    shares.append((1 - sum(seen) / N, sum(twice) / N))
    print(f"run {number}: not seen {shares[-1][0]:.0%} of the images, seen twice {shares[-1][1]:.0%}")

# %% tags=["MP4", "MP5", "check"]
assert copies == {name: 1 if "server" in name or "lock" in name else N for name in runs}
assert all(abs(unseen - twice) < 1e-9 for unseen, twice in shares)
for name in ("all-reduce", "server, synchronous", f"local, k = {K}"):
    assert Counter(each.worker for each in updates(runs[name][0])[:EPOCH]) == dict.fromkeys((1, 2, 3), EPOCH // N)

# %% [markdown]
# No. Each worker has its own epochs, but the training as a whole has only a number of updates. (The number of images
# not seen equals the number seen twice, because each update uses one batch.) To have epochs, a server has to distribute
# the batches, too. The loss that a worker sends belongs to its own batch and to old parameters. To plot "the" loss,
# average these losses, or evaluate the server's parameters.
#
# *Round-robin* is an asynchronous server that takes the workers in a fixed order. After the first round, each gradient
# is exactly n - 1 updates old, and the slowest worker again sets the pace.
#
# ## Exercise
#
# Three workers need 5, 10 and 15 ms for a gradient; the server takes no time. How many updates per second does
# round-robin make in the long run? How many does the server make if it takes each gradient as it comes? And with ten
# workers and 1,000 updates, taken as they come, what is the mean staleness?

# %% tags=["exercise"]
my_paces, my_mean_of_ten = {"in turn": None, "as they come": None}, None
print(lessons.answer("synchronous_or_asynchronous.updates_in_a_second", my_paces))
lessons.answer("synchronous_or_asynchronous.mean_staleness_of_ten", my_mean_of_ten)

# %% tags=["answer"]
paces = {"in turn": 3 * 1000 / 15, "as they come": 1000 / 5 + 1000 / 10 + 1000 / 15}
assert lessons.answer("synchronous_or_asynchronous.updates_in_a_second", paces).right
n, U = 10, 1000
of_ten = ((n - 1) * U - n * (n - 1) / 2) / U
assert lessons.answer("synchronous_or_asynchronous.mean_staleness_of_ten", of_ten).right
