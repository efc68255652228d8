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
# **Goals.** You will be able to hold a running job and let its calls through one by one; say whether a program hangs in
# every order of its calls, or only in some; cause a deadlock on purpose, and make its order a test.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb), [parameter_server](parameter_server.ipynb). **Takes**
# about 20 minutes.
#
# A job that hangs shows nothing. Here you control it: with `hold=True` each call waits at a gate before torch runs it,
# and continues when you release it. Meanwhile nothing times out.
#
# ## In every order
#
# Both ranks send first. **Predict first:** you let rank 0's send through, then rank 1's. How many calls wait at the
# gate?

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
run.hang

# %%
draw.timeline(run.trace)

# %% [markdown]
# None. Both ranks are inside torch's `send`, which ends when the other side receives, and neither rank gets there. No
# call has timed out, and none has to: the trace already shows the cycle.

# %% tags=["check"]
assert at_the_gate == 0
assert run.hang
assert str(run.hang).startswith("rank 0 and rank 1 wait for each other")

# %% [markdown]
# No order helps, because the first call of both ranks is a send. The program has to change: one of the ranks must
# receive first. Then it ends in every order. Here are two orders:

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
# Such a program passes its tests and hangs weeks later. A server has two locks, A and B. Worker a takes A and then B,
# worker b takes B and then A. **Predict first:** how many of these three orders hang: a, a, b, b; a, b, a, b; a, b, b,
# a?

# %%
my_guess_of_the_order = lessons.predict("deadlock_by_hand.orders that hang", None)
LOCKS = {}  # of the server: A and B


def take(lock):
    LOCKS.setdefault(lock, threading.Lock()).acquire()


def give_back(lock):
    LOCKS[lock].release()


def work(first, second):
    """Take both locks in this order, do some work, and release both."""
    rpc.rpc_sync("server", take, (first,))
    rpc.rpc_sync("server", take, (second,))
    rpc.rpc_sync("server", give_back, (second,))
    rpc.rpc_sync("server", give_back, (first,))


def worker():
    """Run the role of this worker, by its name."""
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
    """Let the next call of this worker through, and wait until its following call is at the gate."""
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
# The order a, a, b, b ends, because a has released both locks before b takes one. The other two hang: a has A and waits
# for B, and b has B and waits for A. The trace shows two calls of `take` that have not returned. No message says for
# which lock they wait; only the server knows that.

# %% tags=["check"]
for order, hang in hangs.items():
    assert [(passed.rank, passed.op) for passed in schedules[order]] == [(name, "rpc take") for name in order]
    assert "a waits for server in rpc_sync take()" in str(hang)
    assert "b waits for server in rpc_sync take()" in str(hang)

# %% [markdown]
# ## The order is a test
#
# `run.schedule` is the order in which you released the calls. A run that is held by this schedule repeats that order.
# So a deadlock that happens once in three weeks now happens every time. In a test you would assert that it does not.

# %%
stuck = schedules["abab"]
again = held(stuck)
while len(again.schedule) < len(stuck) or not again.hang:
    assert again.under_way
assert not again.waiting
print(again.hang)
assert "in rpc_sync take()" in str(again.hang)
again.end()

# %% [markdown]
# The cure is one order for all workers: those that need both locks take A first. Then no schedule can close the cycle.


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
# 1. There are three workers and three locks; each worker takes its own lock and then its neighbour's. Find the shortest
#    order that hangs. How many of the orders of six calls hang?
# 2. `hold=lambda call: call.rank == "b"` holds only worker b. Can you still cause the deadlock?
# 3. Two ranks call an all-reduce in each of two groups, one rank in the opposite order. Does this program hang in every
#    order of the calls, or only in some? Hold it and see.
