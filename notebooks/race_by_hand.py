# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A race by hand: make an update stale, then bound it
#
# **Goals.** You will be able to make an asynchronous server lose an update, on demand and again; measure how stale a
# gradient is; bound the staleness, and show that no order breaks the bound.
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

from dlearn import Cluster, draw

my_guess = {"aabb": None, "abab": None}
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
    print(f"{order}: the server has {found[order]}", my_guess[order] or "")

# %% [markdown]
# In the second, both have read 10 before one of them wrote. No error, no warning, and one update is gone. Without the
# gate it comes when it likes. With the schedule it comes each time, and is a test:

# %%
again = Cluster(["server", "a", "b"], rpc=True, hold=schedules["abab"]).run(read_and_write).join(60)
assert found == {"aabb": 12, "abab": 11}
assert again.results["server"] == 11
draw.sequence(again.trace.where(rank=["server", "a", "b"]))

# %% [markdown]
# ## A gradient that is stale
#
# Who sends what is to be *added*, and not what is to be written, loses nothing. But the gradient was computed from
# old parameters. The server numbers its versions; the staleness of an update is how many others came between its read
# and its write. **Predict first:** two trainers, two updates each. What is the largest staleness that an order can
# make?

# %%
my_guess_of_the_largest = None
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

# %% [markdown]
# In the third order a reads, b does all of its work, and then a pushes a gradient from two versions ago. With a
# longer run of b it would be as stale as you like: nothing bounds it.

# %%
assert stale["aaaabbbb"] == [0, 0, 0, 0]
assert max(stale["ababbaba"]) == 1
assert stale["abbbbaaa"] == [0, 0, 2, 0]

# %% [markdown]
# ## Bounded
#
# Stale synchronous parallel (SSP): nobody may be more than so many updates ahead of the slowest. The server's `fetch`
# waits until that holds. **Predict first:** bound 1, and the same order, abbbbaaa. Which call of b does not come
# back?

# %%
import time

my_guess_of_the_call = None
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
# b's second read waits inside the server, until a has pushed. So between a's read and its push at most one update of
# b can come, whatever the order.

# %%
assert at_the_gate == {"server", "a"}  # and b is inside of its read
assert "b waits for server in rpc_sync fetch_bounded()" in inside
assert bounded[:2] == [0, 1]
assert max(bounded) <= BOUND

# %% [markdown]
# ## Exercises
#
# 1. Bound 2, three trainers: what is the largest staleness now? Find an order that reaches it.
# 2. Write the first job with a lock on the server, held from read to write. Which orders are still possible?
# 3. Take `run.schedule` of the lost update into a pytest function that fails as long as the update is lost.
