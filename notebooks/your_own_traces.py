# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.2
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # Files that you have already: who broke the job of last night?
#
# **Goals.** You will be able to have torch keep the last calls of a job, and to read what it leaves; tell a rank that
# holds the others up from the ranks that wait for it; take waiting and transfer apart in a profiler's files; read the
# rings of a job out of NCCL's log, and hold a benchmark's busbw against the bytes that go over them; say what such
# files cannot know.
#
# **Before this:** [museum_of_hangs](museum_of_hangs.ipynb). **Takes** about 30 minutes.
#
# A job of 16 ranks hung. Nobody had recorded it. But torch's Flight Recorder was switched on, and when a collective
# timed out each rank wrote down its calls that had not ended: a real job, Megatron on NCCL, with tensor, expert and
# pipeline parallelism, in which some GPUs were broken on purpose (its files and licence: `dlearn/lessons/data/dumps`).

# %%
import os
import tempfile
import time
from collections import Counter
from importlib.resources import files
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from dlearn import Cluster, Trace, analysis, draw, explain, lessons, operations

DUMPS = Path(str(files("dlearn.lessons"))) / "data" / "dumps"
trace = Trace.load(DUMPS / "megatron-16ranks-gpu_error_1st.tar.gz")
waiting = Counter(event.rank for event in trace.events)
print(f"{len(operations(trace))} operations in {len({one.group for one in operations(trace)})} groups have not ended")
print("calls that have not ended, rank by rank:", [waiting[rank] for rank in trace.ranks])

# %% [markdown]
# ## The obvious rule
#
# A collective hangs because a member has not called it. So: which rank is missing most often, in operations that
# others wait in? **Predict first:** will that rule name the broken ones?

# %%
absent = Counter(
    rank
    for one in operations(trace)
    if not one.is_message
    for rank in set(one.group.members) - {end.rank for end in one.ends}
)
print("missing most often:", absent.most_common(4))

# %% [markdown]
# Ranks 15 and 13 are missing most, in operations in which 14 and 12 wait; and 14 is missing in none. But 15 and 13 are
# innocent: they have called them and have come out of them, and a dump that is written at a timeout holds only what
# has *not* ended. Not to be in a dump is no verdict.
#
# But each dump also says how far its rank came in each group: the number of the last call that it made, and of the last
# that ended. That is enough for two questions. Who has not made a call that others of the group have made? Who is still
# in a call that others have come out of?

# %%
for root in analysis.roots(trace):
    print(f"rank {root.rank} {root.how}: {root.operation.op} #{root.operation.seq} of {root.operation.group.name}")
draw.timeline(trace)

# %% tags=["check"]
assert {rank for rank, _ in absent.most_common(2)} == {13, 15}
assert absent[14] == 0
assert {root.rank for root in analysis.roots(trace)} == {12, 14}

# %% [markdown]
# Those are the two that were broken. All the others wait: for one of them, or for a rank that does.
#
# ## A rank that says nothing
#
# The second job had two ranks whose Python stood still. **Predict first:** how many calls are in the dumps of those?

# %%
my_calls = lessons.predict("your_own_traces.calls of a frozen rank", None)
frozen = Trace.load(DUMPS / "megatron-16ranks-lock_gil_1st.tar.gz")
calls = Counter(event.rank for event in frozen.events)
silent = [rank for rank in frozen.ranks if not calls[rank]]
print("dumps without any call:", silent)
if my_calls:
    print(my_calls.against(calls[9]))
for sentence in explain(frozen).sentences:
    if sentence.startswith("rank "):
        print(sentence)

# %% tags=["check"]
assert silent == [9, 14]
assert {root.rank for root in analysis.roots(frozen)} == {9, 14}
assert frozen.processes[9].reached["EXPERT_MODEL_PARALLEL_GROUP 72"].called == 45_264

# %% [markdown]
# None: they had ended all calls that they made, and made no more. Their numbers give them away: 45,264 calls in a group
# in which six others have made 45,265.
#
# ## Nothing hangs, it is slow
#
# Another job, 8 GPUs that train a recommender (DLRM): torch's profiler left a file for each rank, and each rank's
# execution trace says what the calls moved. In the first all-to-all a GPU was busy for up to 7.6 ms, with 24,576 B.
# **Predict first:** how much of that is transfer?

# %%
my_transfer = lessons.predict("your_own_traces.transfer in us", None)
slow = Trace.load(DUMPS / "dlrm-8ranks.tar.gz")
first = operations(slow)[0]
last = max(first.ends, key=lambda end: end.start_ns)
transfer_us = (max(end.end_ns for end in first.ends) - last.start_ns) / 1000
longest_us = max(end.end_ns - end.start_ns for end in first.ends) / 1000
print(f"{first.op}: busy for {longest_us:,.0f} us, transfer {transfer_us:,.0f} us; rank {last.rank} came last")
if my_transfer:
    print(my_transfer.against(transfer_us, tolerance=0.5))
draw.timeline(slow)

# %% [markdown]
# Next to none: a kernel of NCCL's begins when its own GPU comes to it, and then waits there for the last one. In the
# first five operations that is rank 7. The network is not slow; ask what rank 7 computes before.
#
# And how much does each rank get, in all of them? (In the fourth, each sends indices to the owners of the tables.)

# %%
sent = analysis.traffic(slow)
to = {rank: sum(size for (_, dst), size in sent.payload_bytes.items() if dst == rank) for rank in slow.ranks}
print("bytes that each rank gets:", to)
draw.traffic(slow)

# %% tags=["check"]
assert transfer_us < 30 < 7_000 < longest_us
assert first.ends[0].inputs[0].payload_bytes == 24_576
assert [max(one.ends, key=lambda end: end.start_ns).rank for one in operations(slow)][:5] == [7] * 5
assert max(to, key=to.get) == 3

# %% [markdown]
# ## Which way did the bytes go?
#
# Neither a dump nor a profiler's file says which messages an all-reduce of NCCL's consists of. But NCCL has said it,
# when the job began: with `NCCL_DEBUG=INFO` each rank logs whom it is connected to, over what, and in which ring. This
# is the log of 16 GPUs on two hosts, all ranks mixed in one file, in which one of NVIDIA's benchmarks (nccl-tests) ran.
# **Predict first:** how many of the 16 ranks send to the other host?

# %%
logged = Trace.load(DUMPS / "nccl-2.9.9-16gpus.log.gz")
wiring = analysis.topology(logged)
crossing = {pair for ring in wiring.rings for pair in wiring.crossings(ring)}
print("rank -> rank, from host to host:", sorted(crossing))
wiring

# %% [markdown]
# The odd ones, all eight: each ring leaves a host by one rank and comes back by another. There are four different
# rings, so that all four network cards of a host have work; each goes over each host's GPUs in another order.

# %%
draw.topology(logged)

# %% tags=["check"]
assert [len(ring.channels) for ring in wiring.rings] == [2] * 4
assert {src for src, _ in crossing} == set(range(1, 16, 2))

# %% [markdown]
# ## What does "busbw" mean?
#
# The benchmark's table says: an all-reduce of 1 GiB took 47,392 us, that is an *algorithm bandwidth* of 22.66 GB/s and
# a *bus bandwidth* of 42.48 GB/s. No wire is named. **Predict first:** how many bytes went from one host to the other?

# %%
my_bytes = lessons.predict("your_own_traces.bytes from host to host", None)
GIB = 1 << 30
sent = wiring.sent("all_reduce", GIB)  # if it ran on these rings: the log of this version does not say
there, back = (sum(sent[pair] for pair in crossing if pair[0] // 8 == host) for host in (0, 1))  # 8 ranks each
print(f"{there:,} B there and {back:,} B back; in 47,392 us that is {there / 47_392e3:.2f} GB/s each way")
my_bytes and my_bytes.against(there, tolerance=0.01)

# %% tags=["check"]
assert there == back == 2 * 15 * GIB // 16
assert round(there / 47_392e3, 2) == 42.48

# %% [markdown]
# 1.875 GiB each way: the busbw is what goes out of a host, over all its cards together. So it can be compared with
# what the hardware can do: four cards of 100 Gbit/s are 50 GB/s. That is why people quote busbw, and why a ring over
# more ranks does not need more of it: 2 (n-1)/n hardly grows.
#
# The log does not say which algorithm ran (`NCCL_DEBUG_SUBSYS=INIT,TUNING` would). That the number fits speaks for the
# rings, at this size. Where NCCL chose a tree, or lets a switch add up (NVLS), dlearn draws no ring.

# %% [markdown]
# ## A dump of your own
#
# gloo fills the same buffer. Here rank 1 forgets the last all-reduce, each rank then writes its dump, and dlearn
# records the same run. **Predict first:** what has our record that the dump has not?

# %%
FOLDER = Path(tempfile.mkdtemp())


def forget_one():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # read with the first call of a process
    dist.init_process_group("gloo")
    me = dist.get_rank()
    dist.all_reduce(torch.ones(1000))
    dist.all_gather([torch.empty(5) for _ in range(3)], torch.ones(5))
    if me != 1:
        dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.5)  # A thread of gloo notes the end of the all_gather a moment after it.
    (FOLDER / f"rank_{me}").write_bytes(_dump_fr_trace())


run = Cluster(3, init=False).run(forget_one)
dumped = Trace.load(FOLDER)
for each in (dumped, run.trace):
    print([(one.op, one.seq, one.missing) for one in operations(each)])
print("not measured in a dump:", analysis.reconcile(dumped).not_measured)
explain(dumped)

# %% [markdown]
# The calls are the same, with the same bytes. What the dump cannot know: how long a call took (torch's own watchdog
# looks for that with NCCL only), what went over the wire (no counters: residue not measured), and what was called
# before the last calls that fit into the buffer.

# %% tags=["check"]
sizes = [[[end.inputs for end in one.ends] for one in operations(each)] for each in (dumped, run.trace)]
assert [sorted(map(str, one)) for one in sizes[0]] == [sorted(map(str, one)) for one in sizes[1]]
assert [one.missing for one in operations(dumped)] == [(), (), (1,)]
assert analysis.reconcile(dumped).whole.measured_bytes is None
assert all(event.end_ns is None for event in dumped.events)

# %% [markdown]
# How to switch it on in your own job, with `torchrun` or `sbatch`: `docs/from-your-cluster.md`. Then `dlearn explain
# dumps/` in a terminal says the same as here.
#
# ## Exercises
#
# 1. Unpack the dumps of the first job, delete rank 14's, and load the rest. Who is named now, and what is said of rank
#    14? Why would it be wrong to call it guilty?
# 2. Take the lines of one rank out of NCCL's log, and all that begin as "Channel 00/08 :" does, and load it.
#    Why is there no ring now, and why would it be wrong to close it over the gap?
# 3. Torch's own analyser expects every member of a group in a send or a receive. Which ranks would it suspect in the
#    first job, and why are they innocent?
