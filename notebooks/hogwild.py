# ---
# jupyter:
#   dlearn:
#     ids: [PS6]
#     minutes: 0.6
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Hogwild: a server without a lock
#
# **Goals.** You will be able to measure the staleness of an update; say why it does little harm to sparse tables; lose
# an update on demand; say how stale a gradient can be if the lead of a worker is bounded.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 35 minutes.
#
# In *Hogwild!* (Niu et al., 2011) many threads write into one memory without a lock. Machines share no memory: a
# trainer pulls values, computes, and pushes an update, and meanwhile others push theirs. **How old are the values from
# which an update was computed? Is anything lost? And why does that hurt a sparse table less than a dense model?**

# %%
import math
import threading
import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from dlearn import Cluster, draw, lessons, messages, span

# %% [markdown]
# ## The server
#
# The server stores a table and a log. The log has an entry for each update: which trainer computed it, from which
# *version*, and which rows it touches. The version is the number of steps that the table has made.
#
# `push` applies an update at once, without a lock. `push_together` waits for one update from every trainer and then
# makes one step with all of them. Until then it delays its reply (`async_execution`: the function returns a Future).

# %%
ROWS, WIDTH, TRAINERS, STEPS, LR = 1000, 8, 3, 30, 0.1
board = {}  # what the server stores


def start(updates_per_step):
    board.update(table=torch.zeros(ROWS, WIDTH), log=[], per_step=updates_per_step)
    board.update(lock=threading.Lock(), waiting=[], future=torch.futures.Future())


def pull(rows):
    return len(board["log"]) // board["per_step"], board["table"][rows]


def push(trainer, version, rows, gradient):
    board["table"].index_add_(0, rows, gradient, alpha=-LR)
    board["log"].append((trainer, version, rows.tolist()))


@rpc.functions.async_execution
def push_together(*update):
    with board["lock"]:
        board["waiting"].append(update)
        future = board["future"]
        if len(board["waiting"]) == TRAINERS:
            for each in board["waiting"]:
                push(*each)
            board.update(waiting=[], future=torch.futures.Future())
            future.set_result(None)
    return future


def the_log():
    return board["log"]


# %% [markdown]
# ## The trainers
#
# Each of three trainers picks some rows, pulls them, and pushes a step towards its target. They compute for 2, 4 and 6
# ms: trainer 3 is the slow one. (`clone`, because torch sends a slice with the whole tensor that it was cut from.)
#
# The **staleness** of an update is the number of steps that the table made between its pull and its push. **Predict
# first:** how large can it be with `push_together`?

# %%
my_staleness = lessons.predict("hogwild.largest staleness with push_together", None)


def train(send, rows_touched, seed):
    rank = dist.get_rank()  # rank 0 is the server
    trainers = dist.new_group(list(range(1, TRAINERS + 1)), use_local_synchronization=True)
    if rank == 1:
        rpc.rpc_sync("ps", start, (TRAINERS if send is push_together else 1,))
    dist.barrier(trainers)
    random = torch.Generator().manual_seed(100 * seed + rank)
    for step in range(STEPS):
        with span(f"step {step}"):
            rows = torch.randperm(ROWS, generator=random)[:rows_touched].clone()
            version, values = rpc.rpc_sync("ps", pull, (rows,))
            time.sleep(0.002 * rank)  # computes
            rpc.rpc_sync("ps", send, (rank, version, rows, values - 1.0))  # towards 1, everywhere
    dist.barrier(trainers)
    return rpc.rpc_sync("ps", the_log)


WORKERS = ["ps", *(f"trainer{number}" for number in range(1, TRAINERS + 1))]
SPARSE, RUNS = 8, 5
DESIGNS = {
    "no lock, sparse": (push, SPARSE),
    "no lock, dense": (push, ROWS),
    "collected, sparse": (push_together, SPARSE),
}
runs = {name: [] for name in DESIGNS}
with Cluster(WORKERS, rpc=True) as cluster:
    for seed in range(RUNS):
        for name, (send, rows_touched) in DESIGNS.items():
            everyone = dict.fromkeys(WORKERS[1:], partial(train, send, rows_touched, seed))
            runs[name].append(cluster.run(everyone))
logs = {name: [run.results["trainer1"] for run in each] for name, each in runs.items()}


# %%
def staleness(log, per_step):
    """Steps between each update's pull and its push. An update's index in the log is its version."""
    return [place // per_step - version for place, (_, version, _) in enumerate(log)]


def spread(values, form="{:.2f}"):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


PER_STEP = {name: TRAINERS if send is push_together else 1 for name, (send, _) in DESIGNS.items()}
stale = {name: [staleness(log, PER_STEP[name]) for log in each] for name, each in logs.items()}
for name in DESIGNS:
    means = [sum(each) / len(each) for each in stale[name]]
    print(f"{name:17}  mean staleness {spread(means)}, largest {max(map(max, stale[name]))}  ({RUNS} runs)")
my_staleness and my_staleness.against(max(map(max, stale["collected, sparse"])))

# %% [markdown]
# Without a lock the numbers differ from run to run, and only the number of updates limits them, because no fast trainer
# waits. With `push_together` the staleness is always 0.

# %% tags=["PS6", "check"]
for name, each in runs.items():
    for run, log, values in zip(each, logs[name], stale[name], strict=True):
        asked = [message for message in messages(run.trace) if message.what.startswith("push")]
        assert len(log) == TRAINERS * STEPS == len(asked)
        assert Counter(who for who, *_ in log) == dict.fromkeys(range(1, TRAINERS + 1), STEPS)
        assert (max(values) > 0) == (PER_STEP[name] == 1)
        assert min(values) >= 0

# %% [markdown]
# Every update that was pushed is in the log once. The price of no staleness is waiting. The picture shows one step of
# `push_together`. Look at where the replies leave: the server delays the early ones until the last update has arrived.

# %%
axes = draw.timeline(runs["collected, sparse"][-1].trace.within("step 20"))

# %% [markdown]
# ## Why staleness does little harm to sparse tables
#
# A stale update does harm only if a step in between has changed *the rows from which it was computed*. If every update
# touches all rows, that is always so. **Predict first:** each update touches 8 of 1,000 rows. Of all pairs of an update
# and a step in between, how many per cent have a row in common?


# %%
my_share = lessons.predict("hogwild.pairs with a row in common", None)


def shared_rows(log):
    """Per cent of pairs (an update, one between its pull and push) with a row in common; and the number of pairs."""
    pairs = [
        bool({*rows} & {*other}) for place, (_, version, rows) in enumerate(log) for _, _, other in log[version:place]
    ]
    return 100 * sum(pairs) / len(pairs), len(pairs)


collisions = {name: [shared_rows(log) for log in logs[name]] for name in ("no lock, sparse", "no lock, dense")}
by_chance = 100 * (1 - math.comb(ROWS - SPARSE, SPARSE) / math.comb(ROWS, SPARSE))
for name, each in collisions.items():
    print(f"{name}: {spread([share for share, _ in each], '{:.1f}')} % of {spread([n for _, n in each], '{}')} pairs")
print(f"two times {SPARSE} of {ROWS} rows, picked by chance: {by_chance:.1f} %")
my_share and my_share.against(round(by_chance, 1), tolerance=0.2)

# %% [markdown]
# Dense updates always collide. Of the sparse ones, 6.2 % collide by chance, and fewer in a larger table, so a stale
# update is nearly as good as a fresh one. (Real tables have popular rows, which collide more often.) Hogwild! assumes
# that two updates rarely touch the same row. Across machines this makes stale reads harmless, but does not prevent torn
# writes.

# %% tags=["PS6", "check"]
assert all(share == 100 for share, _ in collisions["no lock, dense"])
assert round(by_chance, 1) == 6.2
# Two pairs are uncorrelated, even with an update in common: the standard deviation is that of a binomial distribution.
for share, pairs in collisions["no lock, sparse"]:
    assert abs(share - by_chance) < 5 * math.sqrt(by_chance * (100 - by_chance) / pairs)
assert any(share for share, _ in collisions["no lock, sparse"])  # of so many pairs, never by chance

# %% [markdown]
# ## Losing an update on purpose
#
# `push` *adds* on the server, so no update is lost, however stale it is. What if a trainer writes back the new value
# instead? Two trainers make one step of 1 each. Normally you see a race only by luck. With `hold=True` each call waits
# at a gate, and you choose the order. Here both trainers read before either of them writes. In the picture, both
# replies of `look` arrive before the first `write`.


# %%
WEIGHTS = [0, 0]


def look(row):
    return WEIGHTS[row]


def write(row, value):
    WEIGHTS[row] = value


def add(row, change):
    WEIGHTS[row] += change


def all_weights():
    return WEIGHTS


def one_step(adds, rows):
    if rank := dist.get_rank():
        row = rows[rank - 1]
        seen = rpc.rpc_sync("ps", look, (row,))
        rpc.rpc_sync("ps", *((add, (row, 1)) if adds else (write, (row, seen + 1))))
    dist.barrier()
    return rpc.rpc_sync("ps", all_weights)


def both_read_first(*args):
    """Let calls through one by one, each after the reply to the previous one."""
    held = Cluster(WORKERS[:3], rpc=True, hold=True).run(one_step, *args)
    for name in ("trainer1", "trainer2") * 2:
        held.release(name)
        while name not in {call.rank for call in held.waiting}:
            pass  # Its next call waits: so this one is answered.
    return held.schedule, held.free().join(60).results["ps"]


# %%
JOBS = {"written, one row": (False, (0, 0)), "written, two rows": (False, (0, 1)), "added, one row": (True, (0, 0))}
found = {name: both_read_first(*args)[1] for name, args in JOBS.items()}
print(found)

schedule, _ = both_read_first(False, (0, 0))
again = Cluster(WORKERS[:3], rpc=True, hold=schedule).run(one_step, False, (0, 0)).join(60)
draw.sequence(again.trace.where(rank=WORKERS[:3]))

# %% [markdown]
# If both write the same row, both trainers end without an error, and one of the two steps is lost. With two different
# rows (as in a sparse table) the same order loses nothing. Neither does a server that adds. With this schedule the
# update is lost every time, so you can use it as a test.

# %% tags=["check"]
assert found == {"written, one row": [1, 0], "written, two rows": [1, 1], "added, one row": [2, 0]}
assert again.results["ps"] == found["written, one row"]

# %% [markdown]
# ## Bounded: lead and staleness are two quantities
#
# Stale synchronous parallel (SSP) bounds the **lead**: a worker that is B updates ahead of the slowest may not read
# again. ([stragglers](stragglers.ipynb) measures what that costs.) How stale can a gradient become? The rule is simple
# enough to try every order in plain Python: a worker reads (if its lead permits it), then pushes, then reads again.
# **Predict first:** with two workers and a bound of 3, what is the largest staleness?

# %%
my_stalest = lessons.predict("hogwild.stalest with bound 3", None)


def next_states(state, bound, updates):
    """All that may happen next. Of each worker: pushes, and the staleness of what it has read (None: it reads next)."""
    slowest = min(pushes for pushes, _ in state)
    for worker, (pushes, age) in enumerate(state):
        if age is not None:  # it pushes: what the others hold grows older by one
            older = [(done, held if held is None else held + 1) for done, held in state]
            yield (*older[:worker], (pushes + 1, None), *older[worker + 1 :])
        elif pushes < updates and pushes - slowest < bound:
            yield (*state[:worker], (pushes, 0), *state[worker + 1 :])


def extremes(workers, bound):
    """Return the largest lead and the largest staleness over all orders of `2 * bound + 2` updates a worker."""
    waiting = [((0, None),) * workers]
    seen = set(waiting)
    while waiting:
        for state in next_states(waiting.pop(), bound, 2 * bound + 2):
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    pushes = [[done for done, _ in state] for state in seen]
    ages = [max(age or 0 for _, age in state) for state in seen]
    return max(max(each) - min(each) for each in pushes), max(ages)


stalest = {}
for workers in (2, 3):
    for bound in (1, 2, 3):
        lead, stalest[workers, bound] = extremes(workers, bound)
        print(f"{workers} workers, bound {bound}: lead {lead}, staleness up to {stalest[workers, bound]}")
my_stalest and my_stalest.against(stalest[2, 3])

# %% [markdown]
# The lead never exceeds the bound B, but the staleness does. Suppose a worker reads when it is B - 1 ahead. Before it
# pushes, each other worker may make up to 2B - 1 updates: first it catches up, then it gets ahead. So a gradient is up
# to **(2B - 1)(n - 1)** updates stale. Only for B = 1 and two workers does that equal B.

# %% tags=["check"]
assert stalest == {(n, bound): (2 * bound - 1) * (n - 1) for n in (2, 3) for bound in (1, 2, 3)}
assert all(extremes(n, bound)[0] == bound for n, bound in stalest)

# %% [markdown]
# ## Exercises
#
# 1. Updates touch 8 of 100,000 rows each, picked at random. How many per cent of all pairs have a row in common? Give
#    three digits after the decimal point.
# 2. With four workers and a bound of 4, how stale can a gradient be?
#
# Not graded: write `one_step` with a lock on the server, held from read to write. Which orders are still possible?

# %% tags=["exercise"]
share_in_percent = None
lessons.answer("hogwild.rows_in_common", share_in_percent)

# %% tags=["answer"]
right = 100 * (1 - math.comb(100_000 - 8, 8) / math.comb(100_000, 8))
assert lessons.answer("hogwild.rows_in_common", right).right

# %% tags=["exercise"]
my_stalest_of_four = None
lessons.answer("hogwild.four_workers", my_stalest_of_four)

# %% tags=["answer"]
assert lessons.answer("hogwild.four_workers", (2 * 4 - 1) * (4 - 1)).right
assert extremes(4, 2)[1] == (2 * 2 - 1) * (4 - 1)  # the formula holds for four workers, too
