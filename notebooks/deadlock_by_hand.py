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
# # A deadlock by hand: lead ranks into it, and out again
#
# **Goals.** You will be able to hold a running job and let its calls through one by one; say of a program whether it
# can hang in any order, or only in some; lead it into the deadlock on purpose, and make that order a test.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb), [parameter_server](parameter_server.ipynb). **Takes**
# about 20 minutes.
#
# A job that hangs is a silent cell. Here you hold it: with `hold=True` each call waits at a gate before torch gets
# it, and goes on when you say so. Nothing times out meanwhile.
#
# ## In any order
#
# Both ranks send first. **Predict first:** you let rank 0's send through, and then rank 1's. Which calls wait at the
# gate after that?

# %%
import threading

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from dlearn import Cluster, draw, lessons

my_guess = lessons.predict("deadlock_by_hand.calls at the gate", None)


def both_send_first():
    me, tensor = dist.get_rank(), torch.ones(4)
    dist.send(tensor, 1 - me)
    dist.recv(tensor, 1 - me)


run = Cluster(2, hold=True).run(both_send_first)
run.waiting

# %%
run.release(0)
run.release(1)
at_the_gate = len(run.waiting)
print(my_guess.against(at_the_gate) if my_guess else f"{at_the_gate} calls wait at the gate")
print(run.hang)
draw.timeline(run.trace)

# %% [markdown]
# None: both ranks are inside of torch's `send`, which ends when the other side receives, and neither gets there.
# No call has timed out, and none has to: the trace already shows the cycle.

# %% tags=["check"]
assert at_the_gate == 0
assert "rank 0" in run.hang
assert "rank 1" in run.hang

# %% [markdown]
# Here no order helps, as each rank's first call is the wrong one. The program has to change: one of the two receives
# first. Then it ends in every order. Here are two of them:

# %%
run.end()


def one_receives_first():
    me, tensor = dist.get_rank(), torch.full((4,), float(dist.get_rank()))
    other = torch.empty(4)
    for act in (dist.send, dist.recv) if me == 0 else (dist.recv, dist.send):
        act(tensor if act is dist.send else other, 1 - me)
    return other[0].item()


for order in ((0, 1), (1, 0)):
    run = Cluster(2, hold=True).run(one_receives_first)
    for rank in order:
        run.release(rank)
    got = run.free().join(60).results
    print(f"first call of rank {order[0]} first: rank 0 has got {got[0]}, rank 1 {got[1]}")
    assert (got[0], got[1]) == (1.0, 0.0)

# %% [markdown]
# ## Only in some orders
#
# This is the one that passes all tests and hangs in the third week. A server has two locks, A and B. Worker a takes
# A and then B, worker b takes B and then A. **Predict first:** which of these orders hang: a, a, b, b? a, b, a, b? a,
# b, b, a? Write their number instead of `None`.

# %%
my_guess_of_the_order = lessons.predict("deadlock_by_hand.orders that hang", None)
LOCKS = {}  # of the server: A and B


def take(lock):
    LOCKS.setdefault(lock, threading.Lock()).acquire()


def give_back(lock):
    LOCKS[lock].release()


def work(first, second):
    """Both locks, in this order; then some work, and both back."""
    rpc.rpc_sync("server", take, (first,))
    rpc.rpc_sync("server", take, (second,))
    rpc.rpc_sync("server", give_back, (second,))
    rpc.rpc_sync("server", give_back, (first,))


def worker():
    """What each of the three does, by its name."""
    order = {"a": ("A", "B"), "b": ("B", "A")}.get(rpc.get_worker_info().name)
    if order is not None:
        work(*order)
    return "done"


def held(hold=True):
    return Cluster(["server", "a", "b"], rpc=True, hold=hold).run(worker)


run = held()
for name in "aaaabbbb":  # all of a's calls, then all of b's
    run.release(name)
print(run.free().join(60).results)


# %%
def answered(run, name):
    """Let the next call of this worker through, and wait for its answer: until the call after it waits."""
    run.release(name)
    while name not in {call.rank for call in run.waiting}:
        pass


hangs, schedules = {}, {}
for order in ("abba", "abab"):
    run = held()
    for name in order[:2]:
        answered(run, name)
    for name in order[2:]:
        run.release(name)
    hangs[order], schedules[order] = run.hang, run.schedule
    print(order, run.hang, sep=": ")
    run.end()
print(my_guess_of_the_order.against(sum(map(bool, hangs.values()))) if my_guess_of_the_order else "")

# %% [markdown]
# a, a, b, b ends: a has given both locks back before b takes one. The other two hang: a has A and waits for B; b has B
# and waits for A. The trace shows that both calls of `take` have not returned. Which lock each of them waits for
# stands in no message: only the server knows it.

# %% tags=["check"]
for order, sentence in hangs.items():
    assert [(passed.rank, passed.op) for passed in schedules[order]] == [(name, "rpc take") for name in order]
    assert "a waits for server in rpc_sync take()" in sentence
    assert "b waits for server in rpc_sync take()" in sentence

# %% [markdown]
# ## The order is a test
#
# `run.schedule` is what you let through. A run that is held by it goes the same way again, so a deadlock that comes
# once in three weeks comes each time: in a test you would assert that it does not.

# %%
stuck = schedules["abab"]
again = held(stuck)
while len(again.schedule) < len(stuck) or not again.hang:
    assert again.under_way
assert not again.waiting
print(again.hang)
assert "in rpc_sync take()" in again.hang
again.end()

# %% [markdown]
# The cure is one order for all: a worker that wants both takes A first. Then no schedule can close the cycle.


# %%
def cured():
    if rpc.get_worker_info().name != "server":
        work("A", "B")
    return "done"


run = Cluster(["server", "a", "b"], rpc=True, hold=True).run(cured)
answered(run, "a")
run.release("b")  # has to wait for A, which a holds
run.release("a", 3)
print(run.free().join(60).results)
assert set(run.results.values()) == {"done"}

# %% [markdown]
# ## Exercises
#
# 1. Three workers, three locks, each takes its own and its neighbour's. Find the shortest order that hangs. How many of
#    the orders of six calls do?
# 2. `hold=lambda call: call.rank == "b"` holds one worker only. Can you lead into the deadlock with it?
# 3. Two groups, and two ranks that call an all-reduce in each of them, in a different order: does it hang in every
#    order or in some? Hold it and see.
