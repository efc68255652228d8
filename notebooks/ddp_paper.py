# ---
# jupyter:
#   dlearn:
#     ids: [DD1, DD8, DD9, DD13, DD17]
#     minutes: 2.0
#     needs: []
#     peak_mb: 1000
# ---

# %% [markdown]
# # The paper on DDP, run again
#
# **Goals.** You will be able to test a published claim by a run; tell "confirmed" from "not tested"; name a missing
# control.
#
# **Before this:** [ddp_overlap](ddp_overlap.ipynb), [gradient_accumulation](gradient_accumulation.ipynb).
# **Takes** about 40 minutes.
#
# *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (Li et al., VLDB 2020, [arXiv
# 2006.15704](https://arxiv.org/abs/2006.15704)) explains the design of DistributedDataParallel, with measurements on
# 256 GPUs. How much of it can you see on a laptop? This lesson is a reference and belongs to none of the three paths:
# run the claims that you need.
#
# It has eighteen claims. Other lessons test thirteen of them: [ddp_step_by_step](ddp_step_by_step.ipynb) buckets, their
# rebuilding, the constructor and the mean (DD3, DD10, DD14); [ddp_overlap](ddp_overlap.ipynb) when gradients are ready,
# and how they overlap with computing (DD2, DD4); [museum_of_hangs](museum_of_hangs.ipynb) another order, and a gradient
# that is left out (DD5); [gradient_accumulation](gradient_accumulation.ipynb) `no_sync` (DD6);
# [ring_all_reduce](ring_all_reduce.ipynb) what each rank sends if there are more (DD7); [ddp_hooks](ddp_hooks.ipynb)
# dropped layers, interface, options and hooks (DD11, DD15, DD16, DD18); [compression](compression.ipynb) compressed
# gradients (DD12). Here are the others. Each is tested on real ranks, and its verdict is **computed** from the run:
#
# - **confirmed**: every check holds.
# - **partly tested**: all checks that could run hold, but some could not run; the reason is given. That confirms
#   nothing, because the missing part may be the claim itself.
# - **not confirmed here**: a check does not hold. That is a statement about this machine and this run.
# - **cannot be tested here**; the reason is given.
#
# Checks of bytes, counts and orders are exact. A check of times has at least ten samples, and holds only if the whole
# 95 % interval of the median is on the claim's side (the sign test). This machine has two cores. With more than two
# ranks, ranks take turns, and latency depends on that.

# %%
import random
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import cycle, pairwise
from math import comb
from statistics import median, mode
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, operations, span
from dlearn.analysis import breakdown, traffic
from dlearn.lessons import charts, digits, models
from dlearn.network.namespace import refusal


class Check(NamedTuple):
    """What must be so, the figures that decide it, and if it holds: None, where it cannot be tested here."""

    says: str
    seen: str
    holds: bool | None


def verdict_of(checks):
    tested = [check.holds for check in checks if check.holds is not None]
    if not tested:
        return "cannot be tested here"
    if not all(tested):
        return "not confirmed here"
    return "confirmed" if len(tested) == len(checks) else "partly tested"


verdicts = {}


# %%
FEWEST, ROUNDS, CONFIDENCE = 10, 12, 0.95


def interval(values):
    """An interval with the true median, with a probability of at least 95 % (Conover, section 3.2: the sign test)."""
    assert len(values) >= FEWEST
    n, k = len(values), 0
    while sum(comb(n, heads) for heads in range(k + 2)) / 2**n <= (1 - CONFIDENCE) / 2:
        k += 1  # so many samples are left out at each end
    return sorted(values)[k], sorted(values)[-1 - k]


def figures(values, unit, scale=1.0):
    low, middle, high = (scale * each for each in (interval(values)[0], median(values), interval(values)[1]))
    return f"{middle:.2f} {unit} (95%: {low:.2f} to {high:.2f}, n = {len(values)})"


def ratios(above, below):
    """Of pairs that were measured in turn, so that slowdowns cancel."""
    return [a / b for a, b in zip(above, below, strict=True)]


def judge(id, paper, *checks, exact):
    """Compute and print a claim's verdict. Its first checks, so many as are exact, must hold on every machine."""
    verdicts[id] = verdict_of(checks)
    print(f"{id}: {verdicts[id]}. The paper: {paper}")
    for check in checks:
        print(f"- {check.says}: {verdict_of([check])}. {check.seen}")
    assert all(check.holds for check in checks[:exact])
    sampled = ("n = ", "resamples", "doublings", "seeds")
    assert all(check.holds is None or any(word in check.seen for word in sampled) for check in checks[exact:])


# %% tags=["check"]
yes, no, unknown = (Check("it is so", "seen", holds) for holds in (True, False, None))
assert [verdict_of(checks) for checks in ([yes], [yes, unknown])] == ["confirmed", "partly tested"]
assert {verdict_of(checks) for checks in ([yes, no], [no, unknown])} == {"not confirmed here"}
assert {verdict_of(checks) for checks in ([unknown, unknown], [])} == {"cannot be tested here"}


# %%
def seconds_in_turn(steps, rounds, warm_up=2):
    """Seconds of each step, one of each in a round: what slows one slows all of them.

    The warm-up opens connections; step 0 of DDP has one bucket, and step 1 builds the others.
    """
    taken = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            with span(f"round {number} of {name}"):
                step()
            if number >= warm_up:
                taken[name].append(time.perf_counter() - start)
    return taken


def under_ddp(build, seed=0, **options):
    torch.manual_seed(seed)
    return DistributedDataParallel(build(), **options)


def linear_layers(count, width):
    return nn.Sequential(*[each for _ in range(count) for each in (nn.Linear(width, width), nn.ReLU())])


def sgd_step(model, examples):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(examples).square().mean().backward()
        optimizer.step()

    return step


def network(rate):
    """A chosen network, or the loopback interface where none can be had."""
    return None if refusal() else rate


# %% [markdown]
# ## Why buckets?
#
# What does an element cost in a small message, and in a large one?

# %% tags=["DD1"]
ELEMENTS, MOST = 1 << 20, 64
SIZES = [1 << power for power in range(8, 21)]  # elements of one all-reduce


def rounds_of_all_sizes():
    """Reduce up to 1 Mi elements in each round, in at most 64 all-reduces of a size, launched at once."""

    def reduce_all(pieces):
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()

    data = torch.ones(ELEMENTS)
    steps = {size: partial(reduce_all, data[: MOST * size].split(size)) for size in SIZES}
    return seconds_in_turn(steps, ROUNDS, warm_up=1)


seconds = Cluster(2, record=False).run(rounds_of_all_sizes).results[0]
trace = Cluster(2).run(rounds_of_all_sizes).trace.where(op="all_reduce")
counts = Counter(each.given_bytes // 4 for each in operations(trace))
elements = {size: size * count // (ROUNDS + 1) for size, count in counts.items()}
ns = {size: [1e9 * each / elements[size] for each in seconds[size]] for size in SIZES}
middles = {size: median(each) for size, each in ns.items()}
knee = next(size for size in SIZES if middles[size] <= 1.5 * min(middles.values()))
cheaper = [middles[b] < middles[a] for a, b in pairwise(SIZES) if b <= knee]
slower = ratios(ns[SIZES[0]], ns[knee])

axes = charts.lines(
    {"all-reduce": charts.Series([4 * size for size in SIZES], [*middles.values()], [*map(interval, ns.values())])},
    title=f"An element costs {median(slower):.0f} times as much in messages of 1 kB as in those of {4 * knee:,} B",
    x="bytes of one all-reduce",
    y="ns an element",
    log="xy",
    mark=(4 * knee, "knee: within 1.5 times the best"),
    notes=[f"Medians of {ROUNDS} rounds; vertical lines: their 95% intervals."],
)

# %% tags=["DD1"]
sent = [traffic(trace).bytes_from(rank=rank) for rank in (0, 1)]
judge(
    "DD1",
    "small collectives are slow per byte, larger ones are faster (section 2.2, figures 2a and 2b).",
    Check(
        f"a round sends {MOST} all-reduces of each size, but at most {4 * ELEMENTS:,} B",
        f"{4 * sum(elements.values()):,} B in a round of all sizes",
        elements == {size: min(MOST * size, ELEMENTS) for size in SIZES}
        and sent == [4 * (ROUNDS + 1) * sum(elements.values())] * 2,
    ),
    Check("the smallest are slower per element than the knee", figures(slower, "times"), interval(slower)[0] > 1),
    Check(
        "up to the knee, each doubling of the message makes an element cheaper",
        f"in {sum(cheaper)} of {len(cheaper)} doublings",
        all(cheaper),
    ),
    exact=1,
)

# %% [markdown]
# Every all-reduce has a fixed cost (calls, headers, wake-ups), so gradients should travel together, in buckets.
#
# ## Where the time goes

# %% tags=["DD8"]
MODELS = {"ConvNet": models.ConvNet, "MLP": models.MLP, "Transformer": models.Transformer}
BACKWARD = ("backward", "transfer", "waiting")


def train(name):
    """Train a few steps in ordinary PyTorch."""
    images, labels = (part[:64] for part in digits.shard(dist.get_rank(), dist.get_world_size()))
    model = under_ddp(MODELS[name], bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(ROUNDS + 2):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def is_whole(step):
    """The parts come in their order and make up the step; only backward sends."""
    order = dict.fromkeys(row.work for row in step.rows if row.work != "between")
    sends = {row.work for row in step.rows if row.sent is not None and step.number >= 2}
    covered_ns = step.length_ns("forward", *BACKWARD, "optimizer", "between")
    return [*order] == ["forward", "backward", "optimizer"] and sends <= {"backward"} and covered_ns == step.total_ns


def shares(step):
    """Return % of the step: backward with its communication, and the next longest part."""
    others = max(step.length_ns("forward"), step.length_ns("optimizer"))
    return [100 * ns / step.total_ns for ns in (step.length_ns(*BACKWARD), others)]


whole, parts = [], {}
for name in MODELS:
    steps = breakdown(Cluster(2).run(train, name).trace).items
    whole += map(is_whole, steps)
    parts[name] = [*zip(*[shares(step) for step in steps if step.number >= 2 and step.observed], strict=True)]

# %% tags=["DD8"]
pair = ("backward, with its communication", "the next longest part")
low, high = (pick(median(backward) for backward, _ in parts.values()) for pick in (min, max))
axes = charts.bars(
    list(MODELS),
    [charts.Part(name, [median(each) for each in values]) for name, *values in zip(pair, *parts.values(), strict=True)],
    title=f"The backward pass, with its communication, takes {low:.0f}% to {high:.0f}% of a step",
    y="% of a step",
    text="{:.0f}%".format,
    notes=["Medians. The next longest part is the forward pass or the optimizer."],
)
times = {name: ratios(*each) for name, each in parts.items()}
judge(
    "DD8",
    "the backward pass takes longest, because the communication happens in it (section 5.1, figure 6).",
    Check(
        "forward, backward and optimizer follow without a gap; with the final buckets only backward sends",
        f"{sum(whole)} of {len(whole)} steps",
        whole == [True] * 3 * (ROUNDS + 2) * 2,
    ),
    *[
        Check(f"{name}: backward is the longest part", figures(each, "times the next"), interval(each)[0] > 1)
        for name, each in times.items()
    ],
    exact=1,
)

# %% [markdown]
# If one process group cannot use the whole link, why not use several in turn? Torch no longer has such round-robin
# groups, but a communication hook can do the same: it sends each bucket through the next group. gloo sends a large
# tensor in parts, and waits for the other side between them. Over 1 Gbit/s and 10 ms that is slow. Are three groups
# faster?


# %% tags=["DD9"]
def round_robin(groups):
    """All ranks have the same buckets in the same order, so they take the groups in the same order, too."""
    turns = cycle(groups)

    def hook(_, bucket):
        group = next(turns)
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return hook


def with_groups(counts, rounds):
    """Return seconds of each step by number of groups, and if all weights are equal."""
    examples, made, steps = torch.randn(64, 256), {}, {}
    for count in counts:
        made[count] = under_ddp(partial(linear_layers, 7, 256), bucket_cap_mb=0.2)  # a bucket for each layer
        made[count].register_comm_hook(None, round_robin([dist.new_group() for _ in range(count)]))
        steps[count] = sgd_step(made[count], examples)
    seconds = seconds_in_turn(steps, rounds)
    first, *others = [nn.utils.parameters_to_vector(model.parameters()) for model in made.values()]
    return seconds, all(torch.equal(first, other) for other in others)


link = network("1 Gbit/s, 10 ms")
seconds, equal = Cluster(2, record=False, network=link).run(with_groups, (1, 3), ROUNDS).results[0]
run = Cluster(2).run(with_groups, (1, 3), 2)

# %% tags=["DD9"]
steps = {count: run.trace.within(f"round 3 of {count}") for count in (1, 3)}
used = {count: Counter(each.group for each in operations(step) if each.bucket) for count, step in steps.items()}
sent = {count: traffic(step).total_bytes for count, step in steps.items()}
turns, faster = sorted(used[3].values()), ratios(seconds[1], seconds[3])
axes = charts.bars(
    ["one group", "three groups that take turns"],
    [charts.Part("a step", [1e3 * median(each) for each in seconds.values()])],
    title=f"With one group a step takes {median(faster):.2f} times as long as with three, over {link or 'loopback'}",
    y="ms a step",
    text="{:.0f} ms".format,
    notes=[f"7 buckets of {sent[1] // 7 // 2:,} B a step; medians of {ROUNDS} steps."],
)
judge(
    "DD9",
    "several process groups that take turns make a step faster, where one cannot use the whole link (section 5.4,"
    " figure 12).",
    Check(
        "three groups send as many bytes as one, and lead to the same weights, bit by bit",
        f"{sent[3]:,} and {sent[1]:,} B in a step; weights equal: {equal}",
        sent[3] == sent[1] > 0 and equal,
    ),
    Check("each group gets its turn", f"{turns} of 7 buckets", turns == [2, 2, 3] and sum(used[1].values()) == 7),
    Check(
        f"three groups are faster, over {link or 'loopback'}",
        f"with one {figures(faster, 'times')} as long",
        interval(faster)[0] > 1,
    ),
    exact=2,
)

# %% [markdown]
# ## Less frequent synchronisation
#
# What does less frequent synchronisation cost, not in bytes, but in the loss? The paper also gives a reason: more
# gradients add up before a step, so the step is longer. Which run could show that the longer step is *not* the reason?


# %% tags=["DD13"]
class Setting(NamedTuple):
    """Images in a rank's batch, learning rate of SGD, and iterations, the same for every n."""

    batch: int
    learning_rate: float
    iterations: int


EVERY, SEEDS = (1, 2, 4, 8), (0, 1, 2)
SMALL, LARGE = Setting(8, 0.02, 800), Setting(256, 0.06, 240)  # Every n divides the iterations.
CONTROL = LARGE._replace(learning_rate=8 * LARGE.learning_rate)  # steps as long as with n = 8, in every iteration


def train_every(setting, n, seed):
    """All-reduce and step after n iterations; return the loss over all training images at the end."""
    rank = dist.get_rank()
    images, labels = digits.shard(rank, dist.get_world_size())
    model = under_ddp(models.MLP, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    drawn = torch.Generator().manual_seed(10 * seed + rank)
    for iteration in range(1, setting.iterations + 1):
        batch = torch.randint(len(images), (setting.batch,), generator=drawn)
        synchronised = iteration % n == 0
        with nullcontext() if synchronised else model.no_sync():
            cross_entropy(model(images[batch]), labels[batch]).backward()
        if synchronised:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        images, labels = (part[: digits.TRAINING_IMAGES] for part in digits.load())
        return cross_entropy(model.module(images), labels).item()


def train_all():
    tried = [(SMALL, n) for n in EVERY] + [(LARGE, n) for n in EVERY] + [(CONTROL, 1)]
    return {each: [train_every(*each, seed) for seed in SEEDS] for each in tried}


# %% tags=["DD13"]
ends = Cluster(2, record=False).run(train_all).results[0]
few = SMALL._replace(iterations=80)
traces = {n: Cluster(2).run(train_every, few, n, seed=0).trace for n in EVERY}
sent = {n: sum(each.bucket is not None for each in operations(trace)) for n, trace in traces.items()}
steps = {n: len(trace.where(phase="optimizer", rank=0).events) for n, trace in traces.items()}


# %% tags=["DD13"]
def higher(changed, plain):
    """How much higher each seed ends than without the change."""
    return [a - b for a, b in zip(changed, plain, strict=True)]


def hurts(changed, plain):
    """Every seed ends higher, by more than the seeds differ without the change."""
    return min(higher(changed, plain)) > max(plain) - min(plain)


def keeps(changed, plain):
    """No seed ends higher by as much as the seeds differ without the change."""
    return max(higher(changed, plain)) < max(plain) - min(plain)


def seen(changed, plain):
    (a, b), (c, d) = ((min(each), max(each)) for each in (changed, plain))
    return f"the seeds end at {a:.3f} to {b:.3f}, with n = 1 at {c:.3f} to {d:.3f}"


axes = charts.lines(
    {
        f"batch {each.batch}, lr {each.learning_rate}": charts.Series(
            EVERY, [median(ends[each, n]) for n in EVERY], [(min(ends[each, n]), max(ends[each, n])) for n in EVERY]
        )
        for each in (LARGE, SMALL)
    },
    title="A step after 8 iterations ends with {:.2f} times the loss for batches of 256, {:.2f} for 8".format(
        *(median(ends[each, 8]) / median(ends[each, 1]) for each in (LARGE, SMALL))
    ),
    x="n: a step after so many iterations",
    y="loss at the end",
    ticks=[(n, str(n)) for n in EVERY],
    log="x",
    notes=["Medians of three seeds; vertical lines: from the best to the worst. The same images for every n."],
)

# %% tags=["DD13"]
rare, often, control = ends[LARGE, 8], ends[LARGE, 1], ends[CONTROL, 1]
judge(
    "DD13",
    "skipping synchronisation hardly hurts convergence with a small batch and learning rate; with large ones it does,"
    " because more gradients add up before a step (section 5.3, figure 11).",
    Check(
        "of 80 iterations every n-th sends the gradients and steps",
        "; ".join(f"n = {n}: {sent[n]} all-reduces, {steps[n]} steps" for n in EVERY),
        sent == steps == {n: 80 // n for n in EVERY},
    ),
    Check("batch 256: n = 8 hurts, by more than the seeds differ", seen(rare, often), hurts(rare, often)),
    Check("batch 8: n = 8 hardly hurts", seen(ends[SMALL, 8], ends[SMALL, 1]), keeps(ends[SMALL, 8], ends[SMALL, 1])),
    Check("the long step is the reason: n = 1 with 8 times lr hurts, too", seen(control, often), hurts(control, often)),
    exact=1,
)

# %% tags=["check"]
assert keeps([0.11, 0.15, 0.10], [0.10, 0.12, 0.14])  # at worst higher by 0.03; the seeds differ by 0.04
assert not keeps([0.11, 0.17, 0.10], [0.10, 0.12, 0.14])  # one seed by 0.05
assert not hurts([0.11, 0.17, 0.20], [0.10, 0.12, 0.14])  # one seed by 0.01 only
assert hurts([0.15, 0.17, 0.19], [0.10, 0.12, 0.14])  # each by 0.05

# %% [markdown]
# ## Three rules
#
# The paper ends with advice. Here are eight linear layers of three widths, 133 kB, 1.2 MB and 8.4 MB of gradients, with
# 1, 2, 4 or 8 layers in a bucket, over 400 Mbit/s: there the gradients take longer than the backward pass. (How sure is
# the best size? The bootstrap draws the rounds again, with replacement, and counts how often a size wins: Efron, 1979.)


# %% tags=["DD17"]
WIDTHS, LAYERS, IN_BUCKET, MANY, RESAMPLES = (64, 192, 512), 8, (1, 2, 4, 8), 32, 1000


def layer_bytes(width):
    return 4 * (width * width + width)


def of_buckets(width):
    examples, steps = torch.randn(256, width), {}
    for count in IN_BUCKET:
        # A bucket is closed when it reaches its cap, so that a byte less is enough.
        cap = (count * layer_bytes(width) - 1) / 2**20
        steps[count] = sgd_step(under_ddp(partial(linear_layers, LAYERS, width), bucket_cap_mb=cap), examples)
    return seconds_in_turn(steps, MANY)


def bucket_sizes():
    return {width: of_buckets(width) for width in WIDTHS}


def best_sizes(width, seconds):
    """Return the bytes of the bucket with the shortest median step, in each resample."""
    draw, best = random.Random(0), []
    for _ in range(RESAMPLES):
        rounds = draw.choices(range(MANY), k=MANY)
        fastest = min(seconds, key=lambda count: median(map(seconds[count].__getitem__, rounds)))
        best.append(fastest * layer_bytes(width))
    return best


def all_reduces(device="cpu"):
    """Return the seconds of each all-reduce of 1 MiB."""
    data = torch.ones(2**18, device=device)

    def all_reduce():
        dist.all_reduce(data)
        if data.is_cuda:
            torch.cuda.synchronize()

    return seconds_in_turn({device: all_reduce}, MANY)[device]


# %% tags=["DD17"]
link = network("400 Mbit/s")
found = Cluster(2, record=False, network=link).run(bucket_sizes).results[0]
best = {width: best_sizes(width, seconds) for width, seconds in found.items()}
recorded = Cluster(2).run(bucket_sizes).trace
series = {}
for width, seconds in found.items():
    fastest = min(map(median, seconds.values()))
    spreads = [[end / fastest for end in interval(each)] for each in seconds.values()]
    name = f"model {LAYERS * layer_bytes(width):,} B: best {mode(best[width]):,} B"
    sizes = [count * layer_bytes(width) for count in IN_BUCKET]
    series[name] = charts.Series(sizes, [median(each) / fastest for each in seconds.values()], spreads)
growth = layer_bytes(WIDTHS[-1]) / layer_bytes(WIDTHS[0])
axes = charts.lines(
    series,
    title=f"The model grows {growth:.1f} times, its best bucket {mode(best[WIDTHS[-1]]) / mode(best[WIDTHS[0]]):.1f}",
    x="bytes of a bucket",
    y="a step, times the fastest",
    log="x",
    notes=[f"Over {link or 'loopback'}. Medians of {MANY} steps; vertical lines: their 95% intervals."],
)


def faster(says, first, second):
    """Compare all-reduces of 1 MiB on two clusters."""
    near, far = (Cluster(2, record=False, **how).run(all_reduces, device).results[0] for how, device in (first, second))
    seen = f"{figures(near, 'ms', 1e3)} against {figures(far, 'ms', 1e3)} for 1 MiB"
    return Check(says, seen, interval(near)[1] < interval(far)[0])


# %% tags=["DD17"]
built = Counter(each.bucket.bytes for each in operations(recorded) if each.bucket and each.bucket.built == "rebuilt")
per_round = {n * layer_bytes(width): LAYERS // n for width in WIDTHS for n in IN_BUCKET}
grown = ratios(best[WIDTHS[-1]], best[WIDTHS[0]])
share = sum(each < growth for each in grown) / RESAMPLES
nccl, inside = (
    "NCCL's all-reduce is faster than gloo's",
    "an all-reduce within a machine is faster than over 100 Mbit/s",
)
gpus = torch.cuda.device_count()
judge(
    "DD17",
    "NCCL beats gloo; the best bucket grows slower than the model; stay within one machine (sections 5.3 and 6.1).",
    Check(
        "with each bucket size a step sends all of a model's layers",
        f"{len(built)} sizes in {MANY + 1} rounds",
        built == {size: (MANY + 1) * count for size, count in per_round.items()},
    ),
    Check(nccl, f"needs two GPUs, here are {gpus}", None)
    if gpus < 2
    else faster(nccl, ({"backend": "nccl"}, "cuda"), ({"backend": "gloo"}, "cpu")),
    Check(
        f"the model grows {growth:.1f} times, its best bucket less, over {link or 'loopback'}",
        f"it grows {median(grown):.1f} times, less than the model in {share:.0%} of resamples",
        share >= CONFIDENCE,
    ),
    Check(inside, refusal(), None) if refusal() else faster(inside, ({}, "cpu"), ({"network": "100 Mbit/s"}, "cpu")),
    exact=1,
)

# %% [markdown]
# ## All verdicts

# %%
print(*(f"{id:5} {verdict}" for id, verdict in verdicts.items()), sep="\n")
assert [*verdicts] == ["DD1", "DD8", "DD9", "DD13", "DD17"]

# %% [markdown]
# ## Exercises
#
# 1. DD1's knee depends on the machine. Make its largest message larger. Do elements become cheaper?
# 2. Choose a claim that is *not confirmed here*. Which machine would test it fairly, and what would you change in the
#    run?
