# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.2
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # Files that you already have: which rank broke last night's job?
#
# **Goals.** You will be able to let torch dump the last calls of a job, and read the dumps; tell the rank that blocks a
# job from the ranks that wait for it; separate waiting from transfer in profiler files; read a job's rings from NCCL's
# log, and compare a benchmark's busbw with the bytes that cross them; say what such files cannot show.
#
# **Before this:** [museum_of_hangs](museum_of_hangs.ipynb). **Takes** about 30 minutes.
#
# A job of 16 ranks hung, and dlearn had not recorded it. But torch's Flight Recorder was on, and when a collective
# timed out, each rank wrote a dump of the calls that had not ended. It was a real job, Megatron on NCCL, with tensor,
# expert and pipeline parallelism, in which some GPUs were broken on purpose (its files and licence:
# `dlearn/lessons/data/dumps`).

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
# A collective hangs because a member has not called it. So the obvious rule is to look for the rank that is missing
# most often from operations in which others wait. Does this rule find the broken ranks?

# %%
absent = Counter(
    rank
    for one in operations(trace)
    if not one.is_message
    for rank in set(one.group.members) - {end.rank for end in one.ends}
)
print("missing most often:", absent.most_common(4))

# %% [markdown]
# Ranks 15 and 13 are missing most often, in operations in which 14 and 12 wait; 14 is missing in none. But 15 and 13
# are innocent: they have called these operations and returned from them. A dump that is written at a timeout contains
# only calls that have *not* ended. So a call that is missing from a dump proves nothing.
#
# Each dump also says how far its rank got in each group: the number of the last call that it made, and of the last call
# that ended. This answers two questions. Which rank has not made a call that others of the group have made? Which rank
# is still in a call from which others have returned?

# %%
for root in analysis.roots(trace):
    print(f"rank {root.rank} {root.how}: {root.operation.op} #{root.operation.seq} of {root.operation.group.name}")
draw.timeline(trace)

# %% tags=["check"]
assert {rank for rank, _ in absent.most_common(2)} == {13, 15}
assert absent[14] == 0
assert {root.rank for root in analysis.roots(trace)} == {12, 14}

# %% [markdown]
# These are the two ranks that were broken. All others wait for one of them, or for a rank that waits for one.
#
# ## A rank without a pending call
#
# In the second job, Python was frozen on two ranks. **Predict first:** how many calls are in the dump of such a rank?

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
# None: all their calls had ended, and they made no new ones. Their numbers show it: 45,264 calls in a group in which
# six other ranks made 45,265.
#
# ## A job that is slow
#
# In another job, 8 GPUs trained a recommender (DLRM). Torch's profiler wrote a file for each rank, and each rank's
# execution trace says how many bytes the calls moved. In the first all-to-all a GPU was busy for up to 7.6 ms, with
# 24,576 B. **Predict first:** how many us of that are transfer?

# %%
my_transfer = lessons.predict("your_own_traces.transfer in us", None)
slow = Trace.load(DUMPS / "dlrm-8ranks.tar.gz")
first = operations(slow)[0]
last = max(first.ends, key=lambda end: end.start_ns)
transfer_us = (max(end.end_ns for end in first.ends) - last.start_ns) / 1000
longest_us = max(end.end_ns - end.start_ns for end in first.ends) / 1000
print(f"{first.op}: busy for {longest_us:,.0f} us, transfer {transfer_us:,.0f} us; rank {last.rank} arrived last")
if my_transfer:
    print(my_transfer.against(transfer_us, tolerance=0.5))
draw.timeline(slow)

# %% [markdown]
# Almost none. An NCCL kernel starts when its own GPU reaches it, and then waits for the last GPU. In the first five
# operations the last is rank 7. So the network is not slow; find out what rank 7 computes before the call.
#
# How many bytes does each rank receive in all of them? (In the fourth, each rank sends indices to the owners of the
# tables.)

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
# ## Which path did the bytes take?
#
# Neither a dump nor a profiler file says of which messages an NCCL all-reduce consists. But with `NCCL_DEBUG=INFO` each
# rank logs at the start of the job to which ranks it is connected, how, and in which ring. Here is the log of one of
# NVIDIA's benchmarks (nccl-tests) with 16 GPUs on two hosts, in one file. How many ranks send to the other host?

# %%
logged = Trace.load(DUMPS / "nccl-2.9.9-16gpus.log.gz")
wiring = analysis.topology(logged)
crossing = {pair for ring in wiring.rings for pair in wiring.crossings(ring)}
print("rank -> rank, from host to host:", sorted(crossing))
print(wiring)
draw.topology(logged)

# %% [markdown]
# All eight odd ranks. Each ring leaves a host at one rank and comes back at another. There are four different rings, so
# that all four network cards of a host are used; each ring visits a host's GPUs in a different order.

# %% tags=["check"]
assert [len(ring.channels) for ring in wiring.rings] == [2] * 4
assert {src for src, _ in crossing} == set(range(1, 16, 2))

# %% [markdown]
# ## What does "busbw" mean?
#
# The benchmark reports that an all-reduce of 1 GiB took 47,392 us, an *algorithm bandwidth* of 22.66 GB/s and a *bus
# bandwidth* of 42.48 GB/s. Of which link? **Predict first:** how many bytes went from one host to the other?

# %%
my_bytes = lessons.predict("your_own_traces.bytes from host to host", None)
GIB = 1 << 30
sent = wiring.sent("all_reduce", GIB)  # assuming these rings: the log of this version does not say
there, back = (sum(sent[pair] for pair in crossing if pair[0] // 8 == host) for host in (0, 1))  # 8 ranks each
print(f"{there:,} B there and {back:,} B back; in 47,392 us that is {there / 47_392e3:.2f} GB/s each way")
my_bytes and my_bytes.against(there, tolerance=0.01)

# %% tags=["check"]
assert there == back == 2 * 15 * GIB // 16
assert round(there / 47_392e3, 2) == 42.48

# %% [markdown]
# 1.875 GiB in each direction. So the busbw is what leaves a host over all its network cards together, and you can
# compare it with the hardware: four cards of 100 Gbit/s give 50 GB/s. (The log does not say which algorithm ran;
# `NCCL_DEBUG_SUBSYS=INIT,TUNING` would. The matching number suggests the rings, at this size. If NCCL chooses a tree,
# or lets a switch add (NVLS), dlearn draws no ring.)
#
# ## A dump of your own
#
# gloo fills the same buffer. Here rank 1 leaves out the last all-reduce, then each rank writes its dump, and dlearn
# records the same run. What is in dlearn's trace but not in the dump?

# %%
FOLDER = Path(tempfile.mkdtemp())


def forget_one():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # read in the first call of a process
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
# The calls are the same, with the same bytes. The dump does not say how long a call took (torch's watchdog measures
# that only with NCCL), what crossed the wire (it has no counters), or what was called before the buffer's first call.

# %% tags=["check"]
sizes = [[[end.inputs for end in one.ends] for one in operations(each)] for each in (dumped, run.trace)]
assert [sorted(map(str, one)) for one in sizes[0]] == [sorted(map(str, one)) for one in sizes[1]]
assert [one.missing for one in operations(dumped)] == [(), (), (1,)]
assert analysis.reconcile(dumped).whole.measured_bytes is None
assert all(event.end_ns is None for event in dumped.events)

# %% [markdown]
# `docs/from-your-cluster.md` says how to switch the Flight Recorder on in your own job, with `torchrun` or `sbatch`.
# Then run `dlearn explain dumps/` in a terminal to get the same report as here.
#
# ## Exercises
#
# 1. Unpack the dumps of the first job, delete rank 14's, and load the rest. Which rank is named now, and what does the
#    report say about rank 14? Why would it be wrong to call it guilty?
# 2. Remove the lines of one rank from NCCL's log, and all lines like "Channel 00/08 :", and load it. Why is there no
#    ring now, and why would it be wrong to close it over the gap?
# 3. Torch's own analyser expects every member of a group to take part in a send or a receive. Which ranks would it
#    suspect in the first job, and why are they innocent?
