# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # A race by hand: make an update stale, then bound it
#
# **Goals.** You will be able to make an asynchronous server lose an update, on demand and again; measure how stale a
# gradient is; bound the lead of a worker, and say how stale a gradient can still be, over all orders.
#
# **Before this:** [parameter_server](parameter_server.ipynb), [hogwild](hogwild.ipynb). **Takes** about 20 minutes.
#
# A race is a mistake that comes when it likes. With `hold=True` each call waits at a gate until you let it through,
# so that you choose who is first.
#
# ## An update that is lost
#
# A server keeps a number, 10. Two trainers read it, add one, and write it back. **Predict first:** what does the
# server have in the end, if the calls come in the order a, a, b, b? And in the order a, b, a, b?

# %%
import torch.distributed as dist
import torch.distributed.rpc as rpc

from dlearn import Cluster, draw, lessons

my_guess = lessons.predict("race_by_hand.what the server has", None)  # {"aabb": ..., "abab": ...}
WEIGHT = [10]


def read():
    return WEIGHT[0]


def write(value):
    WEIGHT[0] = value


def read_and_write():
    if rpc.get_worker_info().name != "server":
        seen = rpc.rpc_sync("server", read)
        rpc.rpc_sync("server", write, (seen + 1,))
    dist.barrier()
    return rpc.rpc_sync("server", read)


def in_order(order, job, hold=True):
    """Let calls through in this order, each when the answer to the one before has come."""
    run = Cluster(["server", "a", "b"], rpc=True, hold=hold).run(job)
    for name in order:
        run.release(name)
        while name not in {call.rank for call in run.waiting}:
            pass  # Its next call waits: so this one is answered.
    return run


# %%
found, schedules = {}, {}
for order in ("aabb", "abab"):
    run = in_order(order, read_and_write)
    schedules[order] = run.schedule
    found[order] = run.free().join(60).results["server"]
    print(f"{order}: the server has {found[order]}")
my_guess and my_guess.against(found)

# %% [markdown]
# In the second, both have read 10 before one of them wrote. No error, no warning, and one update is gone. Without the
# gate that depends on luck. With the schedule it happens each time, and is a test:

# %%
again = Cluster(["server", "a", "b"], rpc=True, hold=schedules["abab"]).run(read_and_write).join(60)
print(f"once more: the server has {again.results['server']}")
draw.sequence(again.trace.where(rank=["server", "a", "b"]))

# %% tags=["check"]
assert found == {"aabb": 12, "abab": 11}
assert again.results["server"] == 11

# %% [markdown]
# ## A gradient that is stale
#
# If each trainer sends a gradient, which the server *adds*, no update is lost. But that gradient was computed from old
# parameters. The server numbers its versions; the **staleness** of a gradient is the number of updates that others
# made between its read and its push. **Predict first:** two trainers, two updates each. What is the largest staleness
# that an order can make?

# %%
my_largest = lessons.predict("race_by_hand.largest staleness of two updates each", None)
STATE = {"version": 0, "staleness": []}


def fetch():
    return STATE["version"]


def push(seen):
    STATE["staleness"].append(STATE["version"] - seen)
    STATE["version"] += 1


def told():
    return STATE["staleness"]


def two_updates():
    if rpc.get_worker_info().name != "server":
        for _ in range(2):
            seen = rpc.rpc_sync("server", fetch)
            rpc.rpc_sync("server", push, (seen,))
    dist.barrier()
    return rpc.rpc_sync("server", told)


stale = {}
for order in ("aaaabbbb", "ababbaba", "abbbbaaa"):
    stale[order] = in_order(order, two_updates).free().join(60).results["server"]
    print(f"{order}: staleness {stale[order]}")
my_largest and my_largest.against(max(map(max, stale.values())))

# %% [markdown]
# In the third order a reads, b does all of its work, and then a pushes a gradient from two versions ago. If b made
# more updates in between, the gradient would be staler still: nothing bounds it.

# %% tags=["check"]
assert stale["aaaabbbb"] == [0, 0, 0, 0]
assert max(stale["ababbaba"]) == 1
assert stale["abbbbaaa"] == [0, 0, 2, 0]

# %% [markdown]
# ## Bounded
#
# Stale synchronous parallel (SSP) bounds the **lead**: a worker that is `BOUND` updates ahead of the slowest may not
# read again. The server's `fetch` waits until it may. **Predict first:** bound 1, and the same order, abbbbaaa. Which
# call of b does not return?

# %%
import time

BOUND = 1
DONE = {"a": 0, "b": 0}


def fetch_bounded(name):
    while DONE[name] - min(DONE.values()) >= BOUND:
        time.sleep(0.001)
    return STATE["version"]


def push_bounded(name, seen):
    push(seen)
    DONE[name] += 1


def two_bounded_updates():
    name = rpc.get_worker_info().name
    if name != "server":
        for _ in range(2):
            seen = rpc.rpc_sync("server", fetch_bounded, (name,))
            rpc.rpc_sync("server", push_bounded, (name, seen))
    dist.barrier()
    return rpc.rpc_sync("server", told)


run = in_order("abb", two_bounded_updates)  # a has read, b has read and pushed
run.release("b")  # b wants to read again
at_the_gate = {call.rank for call in run.waiting}
inside = run.hang
print(inside)
run.release("a")  # a pushes: now b may go on
bounded = run.free().join(60).results["server"]
print(f"staleness {bounded}")

# %% [markdown]
# b's second read waits inside the server, until a has pushed.

# %% tags=["check"]
assert at_the_gate == {"server", "a"}  # and b is inside of its read
assert "b waits for server in rpc_sync fetch_bounded()" in inside
assert bounded[:2] == [0, 1]

# %% [markdown]
# ## Lead and staleness are two quantities
#
# That was one order. How stale can a gradient be in *any* order? Real ranks would take days; the rule is small enough
# to try every order in plain Python. A worker reads (if its lead permits it), then pushes, then reads again.
# **Predict first:** two workers, bounds of 1, 2 and 3. Is the largest staleness equal to the bound?

# %%
my_stalest = lessons.predict("race_by_hand.stalest with bound 3", None)


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
    """The largest lead and the largest staleness of a push, over all orders of `2 * bound + 2` updates each."""
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
# The lead never passes the bound B. The staleness does: a worker reads when it is B - 1 ahead of the slowest, and each
# of the others may then make up to 2B - 1 updates before it pushes: those that it lacks, and then a lead of its own.
# So a gradient is up to **(2B - 1)(n - 1)** updates stale. Only for B = 1 and two workers is that B.

# %% tags=["check"]
assert stalest == {(n, bound): (2 * bound - 1) * (n - 1) for n in (2, 3) for bound in (1, 2, 3)}
assert all(extremes(n, bound)[0] == bound for n, bound in stalest)
assert max(bounded) <= stalest[2, BOUND]

# %% [markdown]
# ## Exercise
#
# Four workers, bound 4: how stale can a gradient be? Write your number instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("race_by_hand.four_workers", my_answer)

# %% tags=["answer"]
assert lessons.answer("race_by_hand.four_workers", (2 * 4 - 1) * (4 - 1)).right
assert extremes(4, 2)[1] == (2 * 2 - 1) * (4 - 1)  # the formula holds for four workers, too

# %% [markdown]
# ## More
#
# 1. Bound 2: lead two real trainers through an order in which a gradient is three updates stale.
# 2. Write the first job with a lock on the server, held from read to write. Which orders are still possible?
# 3. Take `run.schedule` of the lost update into a pytest function that fails as long as the update is lost.
