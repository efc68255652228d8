# ---
# jupyter:
#   dlearn:
#     ids: [MP1, MP3, MP6, MP7, Q13]
#     minutes: 0.8
#     needs: [mpi]
#     peak_mb: 800
# ---

# %% [markdown]
# # MPI: the messages of a program, and a server without a handshake
#
# **Goals.** You will be able to record a Python MPI program; find the eager limit; say which program hangs above it;
# say what a handshake protects, and which server over MPI needs none.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb),
# [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb). **Takes** about 45 minutes.
#
# MPI programs send from rank to rank, as torch does. **How do you see what they send? Does a `Send` of MPI return when
# a `send` of torch would? And must a server listen to one worker at a time?** The ranks here belong to a real MPI job,
# started from a cell by `backend="mpi"` (`pip install mpi4py mpich`; nothing is compiled). The programs use mpi4py.
#
# ## Which sender does a wildcard take?
#
# Rank 0 receives from `ANY_SOURCE` with `ANY_TAG`, so the program does not say which message it receives. When a
# message has arrived, MPI's `Status` names its source and tag, and the trace records them. Look at the end of each
# arrow. From which rank does the message come, with which tag, and how large is it? (Objects are pickled.)

# %%
import inspect
import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, messages, operations, play
from dlearn.lessons import handshake, sgd
from dlearn.lessons.handshake import BYE, GRAD, HELLO, PARAMS, READY, mixed


def report():
    from mpi4py import MPI

    comm, status = MPI.COMM_WORLD, MPI.Status()
    if comm.rank > 0:
        comm.send({"rank": comm.rank}, dest=0, tag=10)  # an object: mpi4py pickles it
        comm.Send(bytearray(1000 * comm.rank), dest=0, tag=20)  # a buffer, as it is
        return None
    came = []
    for _ in range(comm.size - 1):
        comm.recv(source=MPI.ANY_SOURCE, tag=10, status=status)
        first = status.Get_source(), status.Get_tag()
        comm.Recv(bytearray(5000), source=first[0], tag=MPI.ANY_TAG, status=status)
        came += [first, (status.Get_source(), status.Get_tag())]
    return came


run = first = Cluster(3, backend="mpi", init=False).run(report)
print("rank 0 has seen (source, tag):", *run.results[0])
axes = draw.sequence(run.trace)

# %% [markdown]
# Which worker's message arrives first may differ from run to run. MPI promises that the messages of one worker arrive
# in the order in which they were sent.
#
# ## What does "blocking" wait for?
#
# On gloo a `send` returns when the receiver has taken the data, however small they are. MPI promises less: `Send`
# returns when the buffer may be used *again*. **Predict first:** rank 1 receives late. Which `Send` of rank 0 waits for
# it: that of 1,000 B, that of 1,000,000 B, both or neither?

# %%
my_guess = lessons.predict("mpi.which send waits", None, choices=("1,000 B", "1,000,000 B", "both", "neither"))


def late_receiver(sizes, late):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for size in sizes:
        data = bytearray(size)
        comm.Barrier()
        if comm.rank == 0:
            comm.Send(data, dest=1)
        else:
            time.sleep(late)
            comm.Recv(data, source=0)


run = Cluster(2, backend="mpi", init=False).run(late_receiver, [1_000, 1_000_000], 0.1)
small, large = run.trace.where(op="send").events
small_recv, large_recv = run.trace.where(op="recv").events
for name, call in (("1,000 B", small), ("1,000,000 B", large)):
    print(f"Send of {name} returned after {(call.end_ns - call.start_ns) / 1e6:.2f} ms")
axes = draw.timeline(run.trace.where(kind="p2p"))

# %% tags=["Q13", "MP1", "check"]
assert small.end_ns < small_recv.start_ns  # done before its receive was called
assert large.end_ns > large_recv.start_ns  # it waited for the receiver

observed = messages(first.trace)
assert {message.how for message in observed} == {"observed"}
sizes = [(m.src, m.dst, m.payload_bytes) for m in observed if "object" not in m.what]
assert sorted(sizes) == [(1, 0, 1000), (2, 0, 2000)]
# MPI's status and the trace's receives have the same sources and tags, in the same order.
receives = first.trace.where(op="recv", rank=0).events
assert [(call.peer, call.tag) for call in receives] == first.results[0]
assert all(call.tensors[0].payload_bytes == 1000 * call.peer for call in receives[1::2])
my_guess and my_guess.against("1,000,000 B")

# %% [markdown]
# MPI sent the small message at once, *eagerly*: it keeps the bytes until they are received. The large one waited
# (*rendezvous*), as gloo's always does.
#
# ## Where is the limit?
#
# If a `Send` returned while the receiver still slept, it was eager. (If it did not return, a busy machine may be the
# reason, so each size has up to three tries.) Halving the interval 20 times finds the limit to the byte.


# %%
def is_eager(ranks, size):
    """Say whether a Send of that size returned before its receive was posted, by the trace's own times."""
    for _ in range(3):
        trace = ranks.run(late_receiver, [size], 0.02).trace
        [send], [recv] = trace.where(op="send").events, trace.where(op="recv").events
        if send.end_ns < recv.start_ns:
            return True
    return False


with Cluster(2, backend="mpi", init=False) as ranks:
    eager, waits = 1, 1 << 20
    assert is_eager(ranks, eager)
    assert not is_eager(ranks, waits)
    while waits - eager > 1:
        middle = (eager + waits) // 2
        if is_eager(ranks, middle):
            eager = middle
        else:
            waits = middle
print(f"On this machine a Send of {eager:,} B is eager; one of {waits:,} B waits for its receiver.")

# %% [markdown]
# That number depends on this MPI (MPICH from pip), its settings and the link between these two ranks. A program must
# not rely on it, as the next section shows.
#
# ## Both send first
#
# Two ranks swap their data, and both call `Send` first. **Predict first:** at which size does this program hang: at the
# limit, one byte above it, at both or at neither? The cure is `Sendrecv`, which does both at once, or `Isend`, which
# returns a request at once; after `Wait` you may use the buffer again.

# %%
my_hang = lessons.predict("mpi.both send first", None, choices=("at the limit", "above it", "both", "neither"))


def swap(size, well):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    other = 1 - comm.rank
    if well:
        comm.Sendrecv(mine, other, recvbuf=yours, source=other)
        sending = comm.Isend(mine, dest=other)
    else:
        comm.Send(mine, dest=other)
    comm.Recv(yours, source=other)
    if well:
        sending.Wait()


below = Cluster(2, backend="mpi", init=False).run(swap, eager, False, timeout=20)
print(f"{eager:,} B: {len(messages(below.trace))} messages")
above = Cluster(2, backend="mpi", init=False).run(swap, waits, False, timeout=3, check=False)
print(f"{waits:,} B: {above.error.what}")
run = Cluster(2, backend="mpi", init=False).run(swap, 1_000_000, True)
axes = draw.timeline(run.trace)

# %% [markdown]
# With one byte more, a program that has worked for years hangs. It was always wrong, because MPI never promised to
# buffer the message. (`Ssend` never buffers: a program that works with `Ssend` works at every size.) In the picture of
# the cures, the bar of an `Isend` goes from its call to the end of its `Wait`, and contains the receive.

# %% tags=["check"]
assert len(messages(below.trace)) == 2
assert above.results == {}
assert "rank 0 and rank 1 wait for each other: rank 0 in send" in above.error.what
sent = [(m.src, m.dst, m.payload_bytes) for m in messages(run.trace)]
assert Counter(sent) == {(0, 1, 1_000_000): 2, (1, 0, 1_000_000): 2}
for rank in (0, 1):
    blocking, begun = run.trace.where(op="send", rank=rank).events
    received = run.trace.where(op="recv", rank=rank).events[1]
    assert (blocking.ended_by, begun.ended_by) == ("return", "wait")
    assert begun.start_ns < received.start_ns < received.end_ns < begun.end_ns
my_hang and my_hang.against("above it")

# %% [markdown]
# ## PyTorch over MPI
#
# Of MPI's collectives the trace shows what each rank passes in and gets back, but no messages: MPI's library chooses an
# algorithm by size and number of ranks, and does not report it.
#
# `init_process_group("mpi")` asks you to build PyTorch from source. But a process group can be written in Python, over
# mpi4py. `backend="mpi"` has one, so DDP and the functions of
# [synchronous_or_asynchronous](synchronous_or_asynchronous.ipynb) run over MPI. The results are those of gloo, except
# for the last bits, because MPI adds in a different order.


# %%
def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)))
    torch.manual_seed(1 + dist.get_rank())  # other data on each rank
    model(torch.randn(8, 20)).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def apart(a, b):
    return (a - b).abs().max().item()


STEPS, WORKERS, NAMES = 20, 2, ["server", "worker1", "worker2"]
FAMILY = {
    "all-reduce": (sgd.all_reduced, (), sgd.alone(STEPS, 3)),
    "server with a bare list": (sgd.gathered, (sgd.BareList,), sgd.alone(STEPS, WORKERS)),
}
far = {}
with Cluster(NAMES, backend="mpi") as mpi, Cluster(NAMES) as gloo:
    ddp_over_mpi, ddp_over_gloo = mpi.run(train), gloo.run(train)
    far["DDP's gradients"] = apart(ddp_over_mpi.results["server"], ddp_over_gloo.results["server"])
    for name, (job, args, on_one_device) in FAMILY.items():
        on_mpi, on_gloo = (cluster.run(job, STEPS, *args).results["server"].numbers for cluster in (mpi, gloo))
        far[name] = max(apart(on_mpi, on_gloo), apart(on_mpi, on_one_device))
print(*(f"{name}: MPI is at most {by:.0e} away" for name, by in far.items()), sep="\n")

# %% tags=["MP3", "MP7", "check"]
assert not dist.is_mpi_available()
assert max(far.values()) < 1e-6
assert {each.group.backend for each in operations(ddp_over_mpi.trace)} == {"mpi4py"}
ddp = [each.trace.where(op="all_reduce", rank=0).events[0] for each in (ddp_over_mpi, ddp_over_gloo)]
assert [sum(tensor.payload_bytes for tensor in each.inputs) for each in ddp] == [4 * 785] * 2  # 20*30 + 30 + 30*5 + 5

# %% [markdown]
# ## The handshake
#
# A classic server over MPI takes gradients from `ANY_SOURCE`, layer by layer. Before a worker may send, it sends HELLO
# and waits for the server's READY, so the server listens to one worker at a time. Below are both sides. **Predict
# first:** a gradient has three layers. How many messages does one update take, from the first HELLO to the last layer?

# %%
my_messages = lessons.predict("mpi.messages of an update", None)
print(inspect.getsource(handshake.with_handshake))
print(inspect.getsource(handshake.serve_one_at_a_time))

TAGS = {HELLO: "HELLO", READY: "READY", PARAMS: "PARAMS", BYE: "BYE"} | {
    GRAD + layer: f"GRAD, layer {layer}" for layer in range(3)
}
UPDATES = 10 * WORKERS
with Cluster(NAMES, backend="mpi") as mpi:
    run, one_each = (mpi.run(handshake.with_handshake, each, timeout=60) for each in (10, 1))
tags = Counter(each.tag for each in run.trace.where(op="send").events)
print(f"{UPDATES} updates:", *(f"{name} {tags[tag]}" for tag, name in TAGS.items()), sep="\n    ")
if my_messages:
    print(my_messages.against((tags.total() - tags[BYE]) / UPDATES))
play.player(one_each.trace, tags=TAGS)

# %% [markdown]
# Each update takes two HELLOs and two READYs: one pair to get the parameters, and one to deliver the gradient. The
# player shows one update of each worker (arrow keys). Which worker sends HELLO while the server listens to the other?


# %% tags=["check"]
layers = {GRAD + layer: UPDATES for layer in range(3)}
assert tags == {HELLO: 2 * UPDATES, READY: 2 * UPDATES, PARAMS: UPDATES, BYE: WORKERS, **layers}


def as_the_server_saw(run):
    """(worker, to the server?, tag) of each message, in the order of the server's own calls."""
    ends = [(message, next(end for end in message.operation.ends if end.rank == 0)) for message in messages(run.trace)]
    ends.sort(key=lambda pair: pair[1].start_ns if pair[0].src == 0 else pair[1].end_ns)
    return [(max(message.src, message.dst), message.dst == 0, end.tag) for message, end in ends]


def alone_with_the_server(seen):
    """Behind each READY come the parameters, or three layers in order, of that worker only."""
    readies = [(place, worker) for place, (worker, _, tag) in enumerate(seen) if tag == READY]
    for place, worker in readies:
        params = seen[place + 1] == (worker, False, PARAMS)
        gradient = seen[place + 1 : place + 4] == [(worker, True, GRAD + layer) for layer in range(3)]
        yield params or gradient


for each in (run, one_each):
    assert all(alone_with_the_server(as_the_server_saw(each)))

# %% [markdown]
# ## Without the handshake
#
# Now the server takes every layer from any worker, and the workers send without asking. To cause the error in every
# run, worker 1 sends its first layer early and the others late, and worker 2 does the opposite. Each side records a
# checksum of every layer.

# %% tags=["MP6"]
with Cluster(NAMES, backend="mpi") as mpi:
    careless, safe = mpi.run(handshake.interleaved), mpi.run(handshake.interleaved, handshake.from_one)
    by_itself = [mpi.run(handshake.without_handshake, 30, handshake.from_one, 1, timeout=60) for _ in range(4)]


def all_mixed(run):
    """Find the updates whose layers belong to different gradients."""
    sent = [row for name in NAMES[1:] for row in run.results[name].sent]
    return mixed(run.results["server"].taken, sent)


for number, taken in enumerate(careless.results["server"].taken, start=1):
    print(f"update {number}: layers of", ", ".join(NAMES[worker] for worker in taken.workers))
print(inspect.getsource(handshake.from_one))

# %% [markdown]
# Both updates mix two gradients, without an error, because each layer has its own tag and the right size. Without our
# delays that happens rarely, or in no run, and the loss does not show it. `from_one` is a third way that never mixes:
# it takes the first layer from any worker, and the others from *that* worker. An update takes four messages instead of
# eight. This works because MPI (and gloo) keep the messages of each sender apart, and in order. The handshake has one
# advantage: no worker sends a layer before the server is ready to receive it, so no messages pile up.

# %% tags=["MP6", "check"]
assert all_mixed(careless) == [0, 1]
assert [each.workers for each in careless.results["server"].taken] == [(1, 2, 2), (2, 1, 1)]
for run in (safe, *by_itself):
    assert all_mixed(run) == []
for run in by_itself:
    sends = Counter(each.tag for each in run.trace.where(op="send").events)
    assert sends == {PARAMS: 60, **{GRAD + layer: 60 for layer in range(3)}}

# %% [markdown]
# Start a program of your own with `mpiexec -n 3 python -m mpi4py program.py`. Import and use `MPI` inside `with
# dlearn.record("traces/mpi"):`. Then `Trace.load("traces/mpi")` works anywhere, without MPI.
#
# ## Exercises
#
# 1. Three ranks pass a message of `waits` bytes round: each calls `Send` to the right, then `Recv` from the left. All
#    wait in a circle. Change the order of *one* rank, so that the program works at every size, without `Isend` and
#    `Sendrecv`. Run the cell to test it.
# 2. Ten workers make 5 updates each, of four layers. How many messages are there with the handshake (including BYE),
#    and how many in the third way (without BYE)?


# %% tags=["exercise"]
def pass_round(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Send(mine, dest=right)
    comm.Recv(yours, source=left)


def first_calls(run):
    """Return each rank's first call if the run ends, else how it hangs."""
    calls = [run.trace.where(kind="p2p", rank=rank).events[:1] for rank in range(3)]
    return run.error.what if run.error else [call.op for each in calls for call in each]


run = Cluster(3, backend="mpi", init=False).run(pass_round, waits, timeout=4, check=False)
print(run.error.what if run.error else messages(run.trace))
lessons.answer("mpi.pass_round", first_calls(run))


# %% tags=["answer"]
def rank_0_receives_first(size):
    from mpi4py import MPI

    comm, mine, yours = MPI.COMM_WORLD, bytearray(size), bytearray(size)
    send = partial(comm.Send, mine, dest=(comm.rank + 1) % comm.size)
    receive = partial(comm.Recv, yours, source=(comm.rank - 1) % comm.size)
    for act in (send, receive) if comm.rank else (receive, send):
        act()


cured = Cluster(3, backend="mpi", init=False).run(rank_0_receives_first, waits, timeout=20)
assert "wait in a circle" in run.error.what
assert {(m.src, m.dst) for m in messages(cured.trace)} == {(0, 1), (1, 2), (2, 0)}
assert lessons.answer("mpi.pass_round", first_calls(cured)).right

# %% tags=["exercise"]
my_count = {"with the handshake": None, "the third way": None}
lessons.answer("mpi.ten_workers", my_count)

# %% tags=["answer"]
parts = tags[HELLO] + tags[READY] + tags[PARAMS]  # of this run's 20 updates
handshakes, more = 50 * (parts + 4 * tags[GRAD]) // UPDATES, 50 * (tags[PARAMS] + 4 * tags[GRAD]) // UPDATES
right = {"with the handshake": handshakes + 10, "the third way": more}
assert lessons.answer("mpi.ten_workers", right).right
