# ---
# jupyter:
#   dlearn:
#     ids: [DD5, Q4]
#     minutes: 2.2
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # A museum of hangs
#
# **Goals.** You will be able to read which rank waits for which; tell hangs from silent errors; repair uneven batches.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 40 minutes.
#
# A faulty distributed program often gives no error: it hangs. After half an hour a timeout ends it, with a message
# about "recv" that names no rank and no line. Here are twenty faulty programs. Some hang, some die, and some do worse:
# they return a wrong number without an error. Each gets a diagnosis in one sentence: **which rank waits for which, in
# which call, and what did the other rank never do?** ("failed: ..." is no fault of yours.)
#
# ## A layer that one rank leaves out
#
# A model of three layers trains under DDP (`DistributedDataParallel`), which averages the gradients of all ranks in
# *buckets*. In its third step rank 1 does not use layer `b`. (A dropout of layers or a branch that depends on the data
# has this effect.) **Predict first:** which rank hangs?
#
# In the picture, look at the right end of the lanes. Hatched bars with a red end are calls that never ended.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, Trace, analysis, draw, explain, lessons, operations

my_rank = lessons.predict("museum.which rank hangs", None, choices=("rank 0", "rank 1", "both"))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, use_b):
        h = self.a(x).relu()
        h = self.b(h) if use_b else h
        return self.c(h)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.0158)  # a bucket for each layer, 16,640 B
    for step in range(3):
        leave_out = dist.get_rank() == 1 and step == 2
        model(torch.randn(8, 64), not leave_out).sum().backward()


run = Cluster(2, hang_after=1).run(train, timeout=3, check=False)
print(run.error)
waiting = [f"rank {rank}" for hang in analysis.hangs(run.trace) for rank in hang.waiting]
if my_rank:
    print(my_rank.against("both" if len({*waiting}) == 2 else waiting[0]))
axes = draw.timeline(run.trace.where(kind="collective", op="all_reduce"))

# %% tags=["DD5", "check"]
assert "rank 0 waits for rank 1 in all_reduce #11 (bucket 1: b.bias, b.weight; In[" in run.error.what
assert "]:27)" in run.error.what  # the line of `train` that calls backward
assert "rank 1 never produced the gradients of b.bias, b.weight in backward pass 3" in run.error.what
assert "it has returned from its function" in run.error.what
assert "nothing has happened for 1 s: rank 0 waits for rank 1 in all_reduce #11" in run.output[0]

# %% [markdown]
# The first line was printed after one second without progress, *while the job hung* (`hang_after=1`). Two seconds later
# the time was up (`timeout=3`). The ranks were ended, and `run.error` has the same sentence.
#
# Rank 1 is *done*: its backward pass returned, and so did its function. DDP waits only for all-reduces that it has
# started. Without the gradients of `b`, rank 1 never started the all-reduce of that bucket. So the rank that made no
# mistake is the one that hangs. (If there were one more step, rank 1 would raise an error in its next forward pass.)
#
# ## How does dlearn know?
#
# Each rank records when a gradient becomes ready, when a call *begins*, and when it *ends*. So you can analyse the
# trace later, on another machine, without torch. Here are the gradients of the last backward pass, and the last
# sentences of the explanation:

# %%
last = {}
for rank in (0, 1):
    ready = run.trace.where(kind="gradient", rank=rank).events
    last[rank] = [event.parameter for event in ready if event.backward == ready[-1].backward]
    print(f"rank {rank}:", *last[rank])

story = explain(Trace.load(run.folder / "trace")).sentences
print(*story[-2:], sep="\n")

# %% tags=["check"]
assert {"a.weight", "b.weight", "c.weight"} < set(last[0])
assert {"a.weight", "c.weight"} < set(last[1])
assert not any(name.startswith("b.") for name in last[1])
assert story[-1].removesuffix(".") in run.error.what

# %% [markdown]
# To get this sentence for a job of your own, use `dlearn run --hang-after 60 train.py`, or `with
# dlearn.record("traces/mine", hang_after=60):`.
#
# ## Wrong order
#
# The paper on DDP warns that ranks must reduce in the same order; otherwise the result is wrong, or the job hangs. In
# [quickstart](quickstart.ipynb), two calls of equal shape were swapped on one rank and gave wrong sums without an
# error. Here rank 1 computes two branches the other way round, so its gradients become *ready* in another order.
# **Think first:** is that wrong, too?


# %%
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if dist.get_rank() == 0:
            left, right = self.left(x), self.right(x)
        else:
            right, left = self.right(x), self.left(x)
        return left + right


def gradients_in_another_order():
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.0158)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


ordered = Cluster(2).run(gradients_in_another_order)
for rank in (0, 1):
    ready = ordered.trace.where(kind="gradient", rank=rank).events[-4:]
    sent = ordered.trace.where(kind="collective", op="all_reduce", rank=rank).events[-2:]
    print(f"rank {rank}: ready:", *(each.parameter for each in ready), "| sent:", *(each.seq for each in sent))

# %% [markdown]
# No. The gradients became ready in different orders, but DDP *launches* its buckets in the order of their numbers,
# which is the same on all ranks. A bucket that is full too early waits for its turn.

# %% tags=["DD5", "check"]
first, second = (ordered.trace.where(kind="gradient", rank=rank).events[-4:] for rank in (0, 1))
reduced = [each.bucket.index for each in operations(ordered.trace) if each.bucket is not None]

assert [each.parameter for each in first] != [each.parameter for each in second]
assert reduced[-2:] == [0, 1]
assert ordered.results[0] == ordered.results[1]
assert ordered.error is None

# %% [markdown]
# ## Two buckets, and threads
#
# PowerSGD is a *communication hook* of DDP that compresses the gradients of each bucket. Its callbacks send again when
# the first result has arrived. With one bucket that works on gloo. With two there is a race: the callbacks of one
# bucket run on gloo's own threads, while the training thread starts the other bucket. So the order of *launching* can
# differ from rank to rank, although this code has no mistake:

# %%
from dlearn.lessons import museum

powersgd = museum.visit(museum.exhibit("powersgd_with_two_buckets"))
print(powersgd.exhibit.source)
print(powersgd.sentence)

# %% tags=["check"]
assert powersgd.exhibit.expects(powersgd.sentence)
assert "with different sizes" in powersgd.sentence or "all ranks called it" in powersgd.sentence
threads = {event.thread for event in powersgd.run.trace.where(op="all_reduce").events}
assert "" in threads  # the training thread,
assert len(threads) > 1  # and gloo's

# %% [markdown]
# This is the failure that the paper warns of, and current torch still has it. The race can end in two ways, and the
# sentence shows which one it was:
#
# - **Another order.** "The ranks called it with different sizes", one of them *for bucket 0*, the other *for bucket 1*:
#   two different buckets were matched. If both send data, gloo may abort (SIGABRT).
# - **No thread left.** "All ranks called it, and it does not end", and it was called *on thread Dummy-1* or *Dummy-2*:
#   these are gloo's threads. Each waits, in a callback, for an all-reduce that itself needs one of gloo's threads.
#
# ## Calls that call back
#
# With RPC each worker has a few threads (eight here) that run the calls of other workers. A function that calls back
# and waits for the result occupies its thread until then. **Predict first:** two workers call each other, deeper and
# deeper. How many calls are open when the job hangs?

# %%
import inspect

from dlearn.lessons import hangs

my_calls = lessons.predict("museum.open calls", None)
cycle = museum.visit(museum.exhibit("rpc_cycle"))
pending = [each for each in cycle.run.trace.rpc.exchanges if each.call is not None and each.call.pending]
print(inspect.getsource(hangs.ping_pong))
print(cycle.sentence)
my_calls and my_calls.against(len(pending))

# %% tags=["check"]
assert cycle.exhibit.expects(cycle.sentence)
assert len(pending) == 1 + 8 + 8  # rank 0's own, and one of each thread of both workers

# %% [markdown]
# Seventeen calls are open: one from the program, and one from each of the eight threads of both workers. The last call
# has arrived, but no thread is free to run it.
#
# ## All of them
#
# Each program runs for three seconds at most (all: one minute). In brackets: seconds from the start of the call that
# could not end to the diagnosis. A program that dies at once is diagnosed when the run has ended.

# %%
visits = []
for exhibit in museum.EXHIBITS:
    visited = museum.visit(exhibit)
    visits.append(visited)
    after = f" [after {visited.seconds:.1f} s]" if visited.seconds is not None else ""
    print(f"{exhibit.name}: {exhibit.what}{after}\n   {visited.sentence}\n")

# %% tags=["DD5", "check"]
assert len(visits) == 20
for visited in visits:
    assert visited.exhibit.expects(visited.sentence), visited.files
    if visited.hung:
        assert visited.sentence in visited.live, visited.live  # reported while it hung,
        assert visited.sentence in visited.error, visited.error  # in the error at the end, and from the files: the same

# %% [markdown]
# ## What bare torch says
#
# Now the same functions run without dlearn, with a timeout of one second. Then they run again with
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`, torch's own way to find such mistakes (all: one minute). The table quotes the last
# line of each rank. **Predict first:** in how many of the twenty does DETAIL find the mistake (besides the killed
# rank)?

# %%
my_found = lessons.predict("museum.found by DETAIL", None)
table = museum.table(visits)
rows = {row.visit.exhibit.name: row for row in table.rows}
found = [name for name, row in rows.items() if "mismatch between" in row.detail or "failed to pass" in row.detail]
if my_found:
    print(my_found.against(len({*found} - {"dead_rank"})))
table

# %% [markdown]
# Without DETAIL no message of a hang names a rank, a call or a line. With DETAIL, torch compares the ranks' calls
# before each collective, and names the rank that is late. It finds the mistake in five of the twenty, besides the rank
# that was killed. It does not find swapped calls of equal shape, a sum that is summed again, or mistakes in sends and
# receives. With torch 2.13, DDP on gloo ends with a segmentation fault under DETAIL.

# %% tags=["DD5", "check"]
for row in table.rows:
    if row.visit.exhibit.ends == "hangs" and "SIG" not in row.torch:  # PowerSGD may abort
        messages = [line.partition(": ")[2] for line in row.torch.splitlines()]
        assert not any("rank " in message or "#" in message or ".py" in message for message in messages)
assert "Timed out waiting 1000ms" in rows["skipped_all_reduce"].torch
assert "Ranks 1 failed to pass monitoredBarrier" in rows["skipped_all_reduce"].detail
assert {*found} - {"dead_rank"} == {
    "skipped_all_reduce",
    "all_reduce_against_broadcast",
    "swapped_of_different_shape",
    "different_dtype",
    "rank_asleep",
}
assert "mismatch between collectives" in rows["swapped_of_different_shape"].detail
assert "(11.0, 11.0)" in rows["swapped_of_equal_shape"].detail  # wrong, and not noticed
assert "18.0" in rows["double_all_reduce"].detail  # 6 would be right

# %% [markdown]
# ## Exercises
#
# Rank 0 has three batches, rank 1 has two. **Which rank is stuck?** Run the cell and read the sentence. Then change
# `uneven` in the marked lines, so that both ranks train and return, and run the cell again.


# %% tags=["Q4", "exercise"]
def uneven():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    batches = 3 if dist.get_rank() == 0 else 2  # the data: stays as it is
    for _ in range(batches):  # change this line, or put yours around the loop
        model(torch.randn(4, 8)).sum().backward()


def passes(run):
    """Count each rank's backward passes by its gradients; "hangs" if a rank waits for ever."""
    ready = [run.trace.where(kind="gradient", rank=rank).events for rank in (0, 1)]
    return "hangs" if run.error else [len({each.backward for each in events}) for events in ready]


run = Cluster(2).run(uneven, timeout=3, check=False)
print(run.error or "both ranks have returned")
lessons.answer("museum_of_hangs.uneven", passes(run))


# %% tags=["Q4", "answer"]
def repaired():
    model = DistributedDataParallel(nn.Linear(8, 1))
    with model.join():
        for _ in range(3 - dist.get_rank()):
            model(torch.randn(4, 8)).sum().backward()


assert "rank 0 waits for rank 1" in run.error.what
assert "rank 1 never began backward pass 3" in run.error.what
assert lessons.answer("museum_of_hangs.uneven", passes(Cluster(2).run(repaired))).right
assert not lessons.answer("museum_of_hangs.uneven", passes(Cluster(2).run(dist.get_rank))).right  # trains nothing

# %% [markdown]
# Five jobs of three ranks hang. Your name decides how. Run the cell and read the pictures: a hatched bar waits, and a
# dashed box is a call that its rank never made. Then name in `my_answers` for each job a rank that waits, a rank that
# it waits for, and the call in which it waits: `(0, 2, "all_reduce")` instead of the first `None`, if in job 1 rank 0
# waits for rank 2 in an all-reduce. When all five are right, you read what dlearn says of them.

# %% tags=["exercise"]
from dlearn.course import five_hangs

NAME = ""  # your name
my_answers = [None, None, None, None, None]  # one for each job: (rank that waits, for which rank, call)
for number, trace in enumerate(five_hangs(NAME), start=1):
    axes = draw.timeline(trace)
    axes.set_title(f"Job {number}", loc="left")  # instead of the finding
lessons.check("five_hangs", my_answers, student=NAME)

# %% [markdown]
# Next: [send_and_receive](send_and_receive.ipynb), with which the path of a day goes on.
