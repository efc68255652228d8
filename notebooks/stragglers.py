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
# worker; say when a bound helps; say what speed costs in staleness.
#
# **Before this:** [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb),
# [slow_network](slow_network.ipynb). **Takes** about 25 minutes.
#
# A server keeps the parameters, and three workers send it gradients. One of them, the **straggler**, computes 20 times
# as slowly as the others (as if it had no GPU). `cluster.network.straggler("worker3", 20)` stops its process for 19 ms
# after each ms of computing, but not while it waits for others. (The lesson needs namespaces: Linux only, no root;
# `dlearn doctor` says whether this machine permits them.) **What pace does the job have?**
#
# When may a worker continue?
#
# - **synchronous** (BSP): when all workers have sent the gradient of this step
# - **bounded staleness** (SSP, stale synchronous parallel): when it is at most some steps ahead of the slowest
# - **asynchronous** (ASP): at once
#
# All three are one rule with different bounds: 0, some, and none. The server replies to a worker when the rule permits
# it. A worker repeats its computation until it has used 4 ms of a core, as if its batch were larger.

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
    """Return for each gradient: arrival in s, worker, loss and staleness."""
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
        w = dist.recv(note) - 1  # from any worker
        numbers -= sgd.LR / N * note[: sgd.P]
        told = sgd.heard(w + 1, note, len(log))
        log.append((time.perf_counter() - began, w, told.loss, told.staleness))
        done[w] += 1
        waiting.append(w)
    for w in range(N):
        dist.send(torch.cat([numbers, sgd.as_row(sgd.STOP)]), w + 1)
    return log


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
# **Predict first:** how many gradients per second does the synchronous run make in the long run? A gradient takes 4 ms
# of computing, and 80 ms on the straggler. Parameters and gradient (19 kB each) take about 7 ms on the network. The
# picture shows the number of gradients over the time at which they arrived.

# %%
my_pace = lessons.predict("stragglers.pace of the synchronous run", None)
runs = {name: over(bound) for name, bound in BOUND.items()}
(slowed,) = runs["synchronous"].network.stragglers
print(f"the straggler's computing took {slowed.reached:.2f} times as long")

transfers = 2 * (2 * LATENCY + sgd.P * 8 * 8 / RATE)  # in both directions; gloo sends a request first
slow, fast = FACTOR * COMPUTE + transfers, COMPUTE + transfers
limit = {"synchronous": N / slow, "bounded, 4": N / slow, "asynchronous": (N - 1) / fast + 1 / slow}
pace = {name: len(run.results["server"]) / run.results["server"][-1][0] for name, run in runs.items()}
for name in BOUND:
    print(f"{name:13} {pace[name]:4.0f} gradients a second, at most {limit[name]:.0f}")
if my_pace:
    print(my_pace.against(pace["synchronous"], tolerance=0.25))

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
# The limits assume a core for each worker, and a server that takes no time. Does the bound help? Its line begins as
# steeply as the asynchronous one, because the fast workers may be four steps ahead. Then they wait for the straggler,
# as in the synchronous run: **a worker that is always slow sets the pace, whatever the bound**. Now count the gradients
# of each worker, and how far apart the workers were:


# %%
def lead(log):
    """Return the most steps that any worker was ahead of another."""
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
# A bound helps if a worker is slow **for a while** (a page fault, a backup, another user). Now each worker takes 100 ms
# more for one of eight gradients, at different times. No worker is slower than another in the long run.
#
# **Predict first:** which of the three is the slowest now?

# %%
my_slowest = lessons.predict("stragglers.slowest with pauses", None, choices=tuple(BOUND))


def hiccups(updates, bound):
    """Work as before, but gradients 0, 8, 16 ... of worker 1, 3, 11 ... of worker 2, and so on, take 100 ms more."""
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
for_good, for_a_while = (each["bounded, 4"] / each["synchronous"] for each in (pace, pace_of_passing))
print(f"the bound of 4 makes it {for_good:.2f} times as fast for good, {for_a_while:.2f} times for a while")
if my_slowest:
    print(my_slowest.against(min(pace_of_passing, key=pace_of_passing.get)))
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
# Synchronous training waits for each pause of each worker, so three workers mean three times as many pauses. With a
# bound, the others continue during a pause.

# %% tags=["check"]
assert lead(passing["synchronous"].results["server"]) == 1 < lead(passing["bounded, 4"].results["server"])

# %% [markdown]
# ## What does speed cost?
#
# It costs staleness. **Predict first:** in the asynchronous run the two other workers do not wait. How stale is the
# straggler's gradient on average? (And what does that do to the loss?)

# %%
my_staleness = lessons.predict("stragglers.staleness of the straggler", None)
stale = {name: [s for _, w, _, s in run.results["server"] if w == N - 1] for name, run in runs.items()}
for name, run in runs.items():
    last = [loss for _, _, loss, _ in run.results["server"][-15:]]
    mean = sum(stale[name]) / len(stale[name])
    print(f"{name:13} the straggler's gradients: staleness {mean:.1f}; last 15 losses {sum(last) / 15:.2f}")
mean_stale = {name: sum(each) / len(each) for name, each in stale.items()}
if my_staleness:
    print(my_staleness.against(mean_stale["asynchronous"], tolerance=0.25))

losses = {}
for name, run in runs.items():
    log = run.results["server"]
    means = [sum(loss for _, _, loss, _ in log[i : i + 9]) / 9 for i in range(0, 90, 9)]
    losses[name] = charts.Series([log[i + 8][0] for i in range(0, 90, 9)], means)
charts.lines(
    losses, title="Loss over time: here a stale gradient is nearly as good", x="s since the beginning", y="loss"
)

# %% tags=["check"]
assert mean_stale["synchronous"] <= N - 1  # of this server: it takes the gradients of one step one by one
assert mean_stale["asynchronous"] > mean_stale["synchronous"]
for log in (run.results["server"] for run in runs.values()):
    first, last = (sum(loss for _, _, loss, _ in part) / 9 for part in (log[:9], log[-9:]))
    assert last < first  # it learns

# %% [markdown]
# On this task a stale gradient is nearly as good, and asynchronous training is the fastest. On larger models it often
# is not, because each update lowers the loss less. Large jobs today are synchronous; they find stragglers and replace
# them. A trace is enough to find one: which rank is the last to call each collective? In the picture, hatches are
# a rank's wait for the last one, and an arrow marks the last one: mostly rank 2. (After that the call is slow on all
# ranks, because rank 2 is stopped for a while after it has computed.) So **add up how late each rank calls**, after the
# first.


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
late_ns = dict.fromkeys(found.ranks, 0)
for one in operations(found):
    for end in one.ends:
        late_ns[end.rank] += end.start_ns - min(each.start_ns for each in one.ends)
print({rank: f"{ns / 1e6:.0f} ms late in all" for rank, ns in late_ns.items()})
draw.timeline(found)

# %% tags=["check"]
assert max(late_ns, key=late_ns.get) == 2
wire = analysis.reconcile(found)
assert wire.exact or wire.not_measured

# %% [markdown]
# ## Exercises
#
# 1. Slow the straggler by 2 instead of 20. Predict the three paces from the limits, then run it.
# 2. With seven workers and one straggler, how many gradients per second does synchronous training lose?
# 3. Backup workers: the server takes the first two gradients of a step and drops the third. How fast is that? What is
#    lost?
