# ---
# jupyter:
#   dlearn:
#     ids: [PS6]
#     minutes: 0.4
#     needs: []
#     peak_mb: 700
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Hogwild: a server without a lock
#
# **Goals.** You will be able to measure the staleness of an update; say why sparse tables bear it; lose an update on
# demand.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 25 minutes.
#
# *Hogwild!* (Niu et al., 2011) trains with many threads that write into one memory, and none of them takes a lock.
# Across machines there is no such memory: a trainer pulls values, computes, and pushes an update, and meanwhile the
# others have pushed theirs. **How old are the values that an update was computed from? And why does that hurt a
# large, sparse table less than a dense model?**

# %%
import math
import threading
import time
from collections import Counter
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from dlearn import Cluster, draw, lessons, messages, play, span

# %% [markdown]
# ## The server
#
# It holds a table, and keeps a log: for each update, who computed it, from which *version*, and which rows it
# touches. A version counts the steps that the table has made.
#
# `push` steps at once, with no lock at all. `push_together` waits for one update of every trainer and then makes one
# step of all of them; until then it holds back its reply (`async_execution`: the function returns a Future).

# %%
ROWS, WIDTH, TRAINERS, STEPS, LR = 1000, 8, 3, 30, 0.1
board = {}  # what the server holds


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
# Each of three trainers picks some rows, pulls them, and pushes a step towards its target. Their computing takes 2, 4
# and 6 ms: trainer 3 is the slow one. (Why `clone`? torch sends a small slice with the whole tensor that it was cut
# from.)
#
# **Predict first:** an update's *staleness* is the number of steps that the table made between its pull and its push.
# What is it at most with three trainers? Whose is the largest? And what is it with `push_together`?

# %%
my_guess = lessons.predict("hogwild.largest staleness with push_together", None)


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
    """Of each update: steps between its pull and its own. An update's place in the log is its version."""
    return [place // per_step - version for place, (_, version, _) in enumerate(log)]


def spread(values, form="{:.2f}"):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


PER_STEP = {name: TRAINERS if send is push_together else 1 for name, (send, _) in DESIGNS.items()}
stale = {name: [staleness(log, PER_STEP[name]) for log in each] for name, each in logs.items()}
for name in DESIGNS:
    means = [sum(each) / len(each) for each in stale[name]]
    print(f"{name:17}  mean staleness {spread(means)}, largest {max(map(max, stale[name]))}  ({RUNS} runs)")
    for trainer in range(1, TRAINERS + 1) if PER_STEP[name] == 1 else ():
        mine = [
            [value for value, (who, *_) in zip(values, log, strict=True) if who == trainer]
            for values, log in zip(stale[name], logs[name], strict=True)
        ]
        print(f"{'':17}  trainer {trainer}: {spread([sum(each) / len(each) for each in mine])}")

# %% [markdown]
# These numbers are different each time. The slower a trainer computes, the more others get in between, as a rule; and
# there is no upper limit but the number of updates, because nothing makes a fast trainer wait. With `push_together`
# it is always 0.
#
# In the picture, look at the left end of each: how many updates were computed from the newest values? Bars are means,
# the thin lines reach from the least to the most of the runs.

# %%
if my_guess:
    print(my_guess.against(max(max(values) for values in stale["collected, sparse"])))
most = max(max(values) for name in DESIGNS for values in stale[name])
figure, all_axes = plt.subplots(1, 2, figsize=(7, 2.9), sharey=True, layout="constrained")
for axes, name in zip(all_axes, ("no lock, sparse", "collected, sparse"), strict=True):
    shares = [[100 * Counter(values)[k] / len(values) for values in stale[name]] for k in range(most + 1)]
    means = [sum(each) / RUNS for each in shares]
    reach = [[m - min(each), max(each) - m] for m, each in zip(means, shares, strict=True)]
    axes.bar(range(most + 1), means, color="#CC79A7", edgecolor="#222222", linewidth=0.6)
    for value in range(most + 1):
        if means[value]:
            axes.errorbar(value, means[value], [[each] for each in reach[value]], color="#222222", capsize=3)
    axes.set_title({1: "Updates at once", TRAINERS: "Collected first"}[PER_STEP[name]], loc="left")
    axes.set_xlabel("staleness, in steps")
    axes.set_xticks(range(0, most + 1, 1 + most // 15))
    axes.spines[["top", "right"]].set_visible(False)
label = all_axes[0].set_ylabel("% of the updates")

# %% [markdown]
# Whatever the times are: every update that was pushed is in the log once, without a lock some are stale, and collecting
# first leaves no staleness.

# %% tags=["PS6", "check"]
for name, each in runs.items():
    for run, log, values in zip(each, logs[name], stale[name], strict=True):
        asked = [message for message in messages(run.trace) if message.what.startswith("push")]
        assert len(log) == TRAINERS * STEPS == len(asked)
        assert Counter(who for who, *_ in log) == dict.fromkeys(range(1, TRAINERS + 1), STEPS)
        assert (max(values) > 0) == (PER_STEP[name] == 1)

# %% [markdown]
# ## What it costs to wait
#
# Without staleness there is waiting. **Predict first:** who waits for whom, and for how long? In the picture of one
# step of the collecting server, look at where the replies leave: the server holds the early ones back until the last
# update is there.

# %%
axes = draw.timeline(runs["collected, sparse"][-1].trace.within("step 20"))

# %% [markdown]
# Message by message: who sends the last update, and what leaves the server right after it? (Control messages can be
# hidden.)

# %%
play.player(runs["collected, sparse"][-1].trace.within("step 20"))


# %%
def waiting_ms(run, trainer):
    """How long this trainer was in its pushes, on average."""
    inside = [
        (end.end_ns - end.start_ns) / 1e6
        for message in messages(run.trace)
        if message.what.startswith("push") and message.src == trainer
        for end in message.operation.ends
        if end.rank == trainer
    ]
    return sum(inside) / len(inside)


for name in ("no lock, sparse", "collected, sparse"):
    told = [
        f"trainer {trainer} {spread([waiting_ms(run, trainer) for run in runs[name]], '{:.1f}')}"
        for trainer in range(1, TRAINERS + 1)
    ]
    print(f"ms in a push, {name}: {'; '.join(told)}")

# %% [markdown]
# ## Why sparse tables bear it
#
# A stale update does harm where a step in between has changed *the rows that it was computed from*. **Predict
# first:** an update touches 8 of 1,000 rows. Of all pairs of an update and a step in between, what share has a row in
# common? And if every update touches all rows?


# %%
def shared_rows(log):
    """Of all pairs of an update and one in between its pull and its push, in %: those with a row in common."""
    pairs = [
        bool({*rows} & {*other}) for place, (_, version, rows) in enumerate(log) for _, _, other in log[version:place]
    ]
    return 100 * sum(pairs) / len(pairs), len(pairs)


collisions = {name: [shared_rows(log) for log in logs[name]] for name in ("no lock, sparse", "no lock, dense")}
by_chance = 100 * (1 - math.comb(ROWS - SPARSE, SPARSE) / math.comb(ROWS, SPARSE))
for name, each in collisions.items():
    print(f"{name}: {spread([share for share, _ in each], '{:.1f}')} % of {spread([n for _, n in each], '{}')} pairs")
print(f"two times {SPARSE} of {ROWS} rows, picked by chance: {by_chance:.1f} %")

# %% [markdown]
# Dense updates always collide. Sparse ones mostly pass each other, so a stale update is nearly as good as a fresh
# one: 6.2 % by chance, and the larger the table, the fewer. (Real tables have favourite rows, which collide more
# often.) Hogwild! assumes that two updates rarely touch the same row. Across machines this makes stale reads harmless;
# it does not protect against torn writes.

# %% tags=["PS6", "check"]
assert all(share == 100 for share, _ in collisions["no lock, dense"])
assert round(by_chance, 1) == 6.2
# Two pairs are uncorrelated, even with an update in common: the standard deviation is that of a binomial distribution.
for share, pairs in collisions["no lock, sparse"]:
    assert abs(share - by_chance) < 5 * math.sqrt(by_chance * (100 - by_chance) / pairs)

# %% [markdown]
# ## An update that is lost, by hand
#
# `push` *adds* on the server, so nothing is lost, however stale. What if a trainer writes back the new value instead?
# Two trainers, one step of 1 each. With `hold=True` each call waits at a gate, and you choose the order: both read
# before one of them sends (more of this in [race_by_hand](race_by_hand.ipynb)). **Predict first:** what is in the table
# if both write to row 0? If they write to rows 0 and 1? And if both add to row 0?

# %%
my_guess_by_hand = {"written, one row": None, "written, two rows": None, "added, one row": None}
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
    """Let calls through, each when the answer to the one before has come."""
    held = Cluster(WORKERS[:3], rpc=True, hold=True).run(one_step, *args)
    for name in ("trainer1", "trainer2") * 2:
        held.release(name)
        while name not in {call.rank for call in held.waiting}:
            pass  # Its next call waits: so this one is answered.
    return held.schedule, held.free().join(60).results["ps"]


# %%
found = {}
for name, args in {
    "written, one row": (False, (0, 0)),
    "written, two rows": (False, (0, 1)),
    "added, one row": (True, (0, 0)),
}.items():
    schedule, found[name] = both_read_first(*args)
    print(f"{name:18} {found[name]}", my_guess_by_hand[name] or "")

# %% [markdown]
# One row, written: both trainers are done, no error, and one step of two is gone. In two rows nothing is lost, in the
# same order: that is the sparse table. And who adds loses nothing. With the schedule the lost update is a test:

# %%
schedule, _ = both_read_first(False, (0, 0))
again = Cluster(WORKERS[:3], rpc=True, hold=schedule).run(one_step, False, (0, 0)).join(60)

# %% tags=["check"]
assert found == {"written, one row": [1, 0], "written, two rows": [1, 1], "added, one row": [2, 0]}
assert again.results["ps"] == found["written, one row"]

# %% [markdown]
# ## Exercise
#
# Trainer 3 shall compute for 60 ms instead of 6. What becomes of its mean staleness, and of the others' wait with
# `push_together`? Guess, change `time.sleep`, and run everything again. Then: 8 of 100,000 rows, picked by chance:
# what share of pairs has a row in common, in per cent, to three digits after the point?

# %% tags=["exercise"]
share_in_percent = None
lessons.answer("hogwild.rows_in_common", share_in_percent)

# %% tags=["answer"]
right = 100 * (1 - math.comb(100_000 - 8, 8) / math.comb(100_000, 8))
assert lessons.answer("hogwild.rows_in_common", right).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
