# ---
# jupyter:
#   dlearn:
#     ids: [MP4]
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 700
# ---

# %% [markdown]
# # Stragglers: what does one slow worker cost?
#
# **Goals.** You will be able to predict the pace of synchronous, bounded and asynchronous training with one slow
# worker; tell a worker that is slow for good from one that is slow for a while; say what each pays for its speed.
#
# **Before this:** [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb),
# [slow_network](slow_network.ipynb). **Takes** about 25 minutes.
#
# A server keeps the parameters, and three workers send it gradients. One of them, the **straggler**, computes 20
# times as slowly as the others (as where a GPU is missing): `cluster.network.straggler("worker3", 20)` stops its
# process for 19 ms after each ms that it has computed. So all that it computes takes 20 times as long, whatever it
# is; while it waits for others it loses nothing. (It needs namespaces: Linux only, no root; `dlearn doctor` says
# whether this machine permits them.)
#
# When does the server let a worker go on?
#
# - **synchronous** (BSP): when all have sent the gradient of this step
# - **bounded staleness** (SSP, stale synchronous parallel): when it is at most so many steps ahead of the slowest
# - **asynchronous** (ASP): at once
#
# All three are one rule with another bound: 0, some, and none. Here is the server: it answers a worker when the rule
# permits it.

# %%
import time

import torch
import torch.distributed as dist

from dlearn import Cluster, analysis, draw, lessons, operations
from dlearn.lessons import charts, sgd

WORKERS = ["worker1", "worker2", "worker3"]
N, FACTOR, COMPUTE = len(WORKERS), 20, 0.004  # s of a core for each gradient
RATE, LATENCY = 100e6, 0.001
BOUND = {"synchronous": 0, "bounded, 4": 4, "asynchronous": 10**9}


def serve(updates, bound):
    """When each gradient came, in s, of which worker, its loss and its staleness."""
    numbers, done, waiting, log = sgd.first_numbers(), [0] * N, list(range(N)), []
    began = time.perf_counter()
    handed_out = 0
    while True:
        ready = [w for w in waiting if done[w] - min(done) <= bound]
        for w in ready:
            waiting.remove(w)
            if handed_out < updates:
                dist.send(torch.cat([numbers, sgd.as_row(len(log))]), w + 1)
                handed_out += 1
        if len(log) == handed_out == updates:
            break
        note = torch.empty(sgd.P + 2, dtype=torch.float64)
        w = dist.recv(note) - 1  # of any worker
        numbers -= sgd.LR / N * note[: sgd.P]
        told = sgd.heard(w + 1, note, len(log))
        log.append((time.perf_counter() - began, w, told.loss, told.staleness))
        done[w] += 1
        waiting.append(w)
    for w in range(N):
        dist.send(torch.cat([numbers, sgd.as_row(sgd.STOP)]), w + 1)
    return log


# %% [markdown]
# And a worker: it computes a gradient until it has used 4 ms of a core, as if its batch were larger.


# %%
def work(rank):
    learner, page = sgd.Learner(rank - 1, N), torch.empty(sgd.P + 1, dtype=torch.float64)
    while True:
        dist.recv(page, src=0)
        if page[sgd.P] == sgd.STOP:
            return
        began = time.thread_time()
        note = sgd.answer(learner, page)
        while time.thread_time() - began < COMPUTE:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        dist.send(note, 0)


def train(updates, bound):
    sgd.Learner(0, N).learn(sgd.first_numbers())  # the first time takes longer
    dist.barrier()
    return serve(updates, bound) if dist.get_rank() == 0 else work(dist.get_rank())


network = f"{RATE / 1e6:g} Mbit/s, {LATENCY * 1e3:g} ms"


def over(bound):
    """A run of 90 updates, with a worker 3 that computes FACTOR times as slowly."""
    with Cluster(["server", *WORKERS], network=network, record=False) as cluster:
        cluster.network.straggler("worker3", FACTOR)
        return cluster.run(train, 90, bound, timeout=60)


# %% [markdown]
# **Predict first:** how many gradients a second does each of the three make, in the long run? A gradient takes 4 ms
# of computing, 80 ms on the straggler; parameters and gradient (19 kB each) take about 7 ms on their ways.

# %%
my_guess = lessons.predict("stragglers.pace", None)  # {"synchronous": ..., "bounded, 4": ..., "asynchronous": ...}
runs = {name: over(bound) for name, bound in BOUND.items()}
(slowed,) = runs["synchronous"].network.stragglers
print(f"the straggler's computing took {slowed.reached:.2f} times as long")

transfers = 2 * (2 * LATENCY + sgd.P * 8 * 8 / RATE)  # there and back; gloo asks before it sends
slow, fast = FACTOR * COMPUTE + transfers, COMPUTE + transfers
limit = {"synchronous": N / slow, "bounded, 4": N / slow, "asynchronous": (N - 1) / fast + 1 / slow}
pace = {name: len(run.results["server"]) / run.results["server"][-1][0] for name, run in runs.items()}
for name in BOUND:
    print(f"{name:13} {pace[name]:4.0f} gradients a second, at most {limit[name]:.0f}")
my_guess and my_guess.against(pace, tolerance=0.25)

# %% [markdown]
# Now the speeds differ, as they could not on loopback with equal workers. The limits are those of a machine with a
# core for each worker, and of a server that costs nothing. Look at the picture: gradients, over the time at which
# they came.

# %%
series = {}
for name, run in runs.items():
    at = [when for when, *_ in run.results["server"]]
    series[name] = charts.Series(at[::6], list(range(1, len(at) + 1))[::6])
more = pace["asynchronous"] / pace["synchronous"]
charts.lines(
    series,
    title=f"With a straggler of {FACTOR}, asynchronous training is {more:.1f} times as fast",
    x="s since the beginning",
    y="gradients in the model",
)

# %% tags=["check"]
assert 0.9 * FACTOR < slowed.reached < 1.1 * FACTOR
assert pace["synchronous"] <= limit["synchronous"]
assert pace["asynchronous"] > 1.3 * pace["synchronous"]

# %% [markdown]
# Does the bound help? Its line begins as steeply as the asynchronous one: the fast workers may be four steps ahead.
# Then they are, and wait for the straggler like everyone in the synchronous run: **a worker that is slow for good
# sets the pace, whatever the bound**. Count whose gradients came, and how far apart the workers were:


# %%
def lead(log):
    """The most steps that any worker was ahead of another."""
    done, most = [0] * N, 0
    for _, w, _, _ in log:
        done[w] += 1
        most = max(most, max(done) - min(done))
    return most


shares = {}
for name, run in runs.items():
    log = run.results["server"]
    shares[name] = [sum(w == each for _, w, _, _ in log) for each in range(N)]
    print(f"{name:13} gradients by worker 1, 2, 3: {shares[name]}; at most {lead(log)} ahead")

# %% tags=["check"]
assert shares["synchronous"] == [30, 30, 30]
assert lead(runs["synchronous"].results["server"]) == 1
assert lead(runs["bounded, 4"].results["server"]) <= BOUND["bounded, 4"] + 1
assert lead(runs["asynchronous"].results["server"]) > BOUND["bounded, 4"] + 1
assert shares["asynchronous"][2] < min(shares["asynchronous"][:2])

# %% [markdown]
# What a bound is for is the other kind: a worker that is slow **for a while** (a page fault, a backup, another user).
# Let each worker in turn take 100 ms more for one gradient of eight. No worker is slower than another in the long
# run.
#
# **Predict first:** which of the three is the slowest now, and does the bound of 4 help?


# %%
def hiccups(updates, bound):
    """As before, but gradient 0, 8, 16 ... of worker 1, 3, 11 ... of worker 2, and so on, take 100 ms more."""
    rank, turn = dist.get_rank(), {"gradients": 0}
    answer = sgd.answer

    def slow_answer(learner, page):
        if (turn["gradients"] + 3 * rank) % 8 == 0:
            time.sleep(0.1)
        turn["gradients"] += 1
        return answer(learner, page)

    sgd.answer = slow_answer
    try:
        return train(updates, bound)
    finally:
        sgd.answer = answer


passing = {}
for name, bound in BOUND.items():
    passing[name] = Cluster(["server", *WORKERS], network=network, record=False).run(hiccups, 90, bound, timeout=60)
pace_of_passing = {n: len(r.results["server"]) / r.results["server"][-1][0] for n, r in passing.items()}
charts.bars(
    list(BOUND),
    [
        charts.Part("one worker slow for good", list(pace.values())),
        charts.Part("each slow for a while", list(pace_of_passing.values())),
    ],
    title="A bound helps where slowness passes",
    y="gradients a second",
    text="{:.0f}".format,
)

# %% [markdown]
# Synchronous training waits for each pause of each worker: three workers, three times the pauses. With a bound, the
# others go on meanwhile, and the late one has its turn to wait later.

# %%
for_good, for_a_while = (each["bounded, 4"] / each["synchronous"] for each in (pace, pace_of_passing))
print(f"the bound of 4 makes it {for_good:.2f} times as fast for good, {for_a_while:.2f} times for a while")

# %% tags=["check"]
assert lead(passing["synchronous"].results["server"]) == 1 < lead(passing["bounded, 4"].results["server"])

# %% [markdown]
# ## What does speed cost?
#
# Nothing is free: gradients are stale. **Predict first:** how stale is the straggler's gradient in the asynchronous
# run, if the two others go on meanwhile? And what does it do to the loss?

# %%
stale = {name: [s for _, w, _, s in run.results["server"] if w == N - 1] for name, run in runs.items()}
for name, run in runs.items():
    last = [loss for _, _, loss, _ in run.results["server"][-15:]]
    mean = sum(stale[name]) / len(stale[name])
    print(f"{name:13} the straggler's gradients: staleness {mean:.1f}; last 15 losses {sum(last) / 15:.2f}")

losses = {}
for name, run in runs.items():
    log = run.results["server"]
    means = [sum(loss for _, _, loss, _ in log[i : i + 9]) / 9 for i in range(0, 90, 9)]
    losses[name] = charts.Series([log[i + 8][0] for i in range(0, 90, 9)], means)
charts.lines(
    losses, title="Loss over time: here a stale gradient is nearly as good", x="s since the beginning", y="loss"
)

# %% tags=["check"]
mean_stale = {name: sum(each) / len(each) for name, each in stale.items()}
assert mean_stale["synchronous"] <= N - 1  # of this server: it takes the gradients of one step one by one
assert mean_stale["asynchronous"] > mean_stale["synchronous"]
for log in (run.results["server"] for run in runs.values()):
    first, last = (sum(loss for _, _, loss, _ in part) / 9 for part in (log[:9], log[-9:]))
    assert last < first  # it learns

# %% [markdown]
# On this task the stale gradient is nearly as good, and asynchronous training is the winner. On larger models it
# often is not: the loss per update suffers, and with it the time to a loss. Large jobs today are synchronous all the
# same, and find stragglers, and replace them. To find one, the record is enough: who comes last to each collective?


# %%
def step():
    for _ in range(10):
        began = time.thread_time()
        while time.thread_time() - began < COMPUTE:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        dist.all_reduce(torch.ones(1000))


with Cluster(3, network=network) as cluster:
    cluster.network.straggler(2, FACTOR)
    found = cluster.run(step).trace
draw.timeline(found)

# %% [markdown]
# A thin bar is a rank that waits for the last one to come, and an arrow marks who that was: mostly rank 2. (Once all
# have come, the call is slow on all ranks, too: rank 2 is stopped a little after it has computed, and owes a part of
# its time there.) So **add up how late each one comes**, after the first:

# %%
late_ns = dict.fromkeys(found.ranks, 0)
for one in operations(found):
    for end in one.ends:
        late_ns[end.rank] += end.start_ns - min(each.start_ns for each in one.ends)
print({rank: f"{ns / 1e6:.0f} ms late in all" for rank, ns in late_ns.items()})

# %% tags=["check"]
assert max(late_ns, key=late_ns.get) == 2
wire = analysis.reconcile(found)
assert wire.exact or wire.not_measured

# %% [markdown]
# ## Exercises
#
# 1. A straggler of 2 instead of 20: predict the three paces from the limits, then run.
# 2. Seven workers and one straggler: what does synchronous training lose now, in gradients a second?
# 3. Backup workers: the server takes the first two gradients of a step and throws the third away. What is the pace, and
#    what is lost?
