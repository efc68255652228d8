"""DD7: more ranks: how many bytes each of them sends, and what a step takes."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from matplotlib.axes import Axes
from torch import nn

from ddp_claims import seen
from ddp_claims.samples import Samples, ranks_on_cores
from ddp_claims.training import backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, span
from dlearn.analysis import reconcile
from dlearn.cluster.run import Run
from dlearn.lessons import charts, models
from dlearn.shown import count_text

RANKS = (1, 2, 4, 8)
WARM_UP = 2
"""Steps until the buckets are rebuilt."""
TIMED = 10
BATCH_SIZE = 8
EVEN, UNEVEN = "even", "ConvNet"
MIB = 1 << 20


def even() -> nn.Module:
    """Make a model of 5,200 parameters in one bucket, which 8 ranks can cut evenly."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {EVEN: even, UNEVEN: models.ConvNet}


def train() -> list[float]:
    """Train a step of each model in a span; return ms of more steps of the last one."""
    batch = first_digits(BATCH_SIZE)
    taken: list[float] = []
    for name, build in MODELS.items():
        model = under_ddp(build, bucket_cap_mb=models.SMALL_BUCKETS if name == UNEVEN else 25)
        for step in range(WARM_UP + 1):
            with span(name) if step == WARM_UP else nullcontext():
                backward(model, batch)
    for _ in range(TIMED):
        start = time.perf_counter()
        backward(model, batch)
        taken.append((time.perf_counter() - start) * 1000)
    return taken


def ring_bytes(elements: int, ranks: int, rank: int) -> int:
    """Return the bytes that this rank sends in gloo's ring of so many float32.

    The data is cut into n chunks of equal length but for the last ones; in each of the two rounds a rank sends all
    chunks but one: its own at first, then the one of its left neighbour.
    """
    if ranks == 1:
        return 0
    segments = max(2 * ranks, -(-4 * elements // MIB))
    per_chunk = -(-segments // ranks)
    chunk = -(-elements // (per_chunk * ranks)) * per_chunk
    lengths = [min(max(elements - chunk * place, 0), chunk) for place in range(ranks)]
    return 4 * (2 * elements - lengths[rank] - lengths[(rank - 1) % ranks])


@paper_claim(
    "DD7",
    "scalability",
    paper="section 5.3, figure 9",
    says="DDP scales nearly linearly. (Our reason for it: what each rank sends hardly grows with their number.)",
    runs=f"two models on {', '.join(map(str, RANKS))} ranks, a step of each and {TIMED} more",
)
def scale_out() -> Result:
    """Test the same two models on 1, 2, 4 and 8 ranks: bytes of one step, times of ten."""
    runs = {ranks: Cluster(ranks).run(train) for ranks in RANKS}
    last = {(ranks, name): run.trace.within(name) for ranks, run in runs.items() for name in MODELS}
    sent = {(ranks, name): seen.sent_bytes(part, ranks) for (ranks, name), part in last.items()}
    buckets = [bucket.bytes // 4 for bucket in seen.buckets(last[RANKS[-1], UNEVEN])]
    size = seen.parameter_bytes(even())
    taken = [f"{count_text(ranks, 'rank')} {Samples(tuple(run.results[0])).text('ms')}" for ranks, run in runs.items()]
    checks = (
        Check(
            f"of {size:,} B that all ranks can cut evenly, each rank sends 2(n-1)/n",
            "; ".join(f"n = {ranks}: {sent[ranks, EVEN][0]:,} B" for ranks in RANKS),
            all(sent[ranks, EVEN] == [2 * (ranks - 1) * size // ranks] * ranks for ranks in RANKS),
        ),
        Check(
            f"of ConvNet's buckets ({', '.join(f'{4 * each:,}' for each in buckets)} B) each sends what is left of two"
            " rounds of a ring, without the chunks that it need not send",
            "; ".join(f"n = {ranks}: {spread_text(sent[ranks, UNEVEN])}" for ranks in RANKS),
            4 * sum(buckets) == seen.parameter_bytes(models.ConvNet())
            and all(
                sent[ranks, UNEVEN] == [sum(ring_bytes(each, ranks, rank) for each in buckets) for rank in range(ranks)]
                for ranks in RANKS
            ),
        ),
        counted_by_the_kernel([run for ranks, run in runs.items() if ranks > 1]),
        Check(
            "a step takes little longer, where each rank has a machine of its own",
            f"needs machines; on one, of ConvNet: {'; '.join(taken)}",
            None,
        ),
    )
    return Result(checks, picture(sent, size), f"ConvNet's steps without the optimizer's; {ranks_on_cores(RANKS[-1])}")


def spread_text(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least:,} B" if least == most else f"{least:,} to {most:,} B"


def counted_by_the_kernel(runs: Sequence[Run]) -> Check:
    """Compare gloo's schedule, a claim, with the kernel's socket counters."""
    says = "in each whole run the kernel counted as many bytes as the schedule says"
    found = [reconcile(run.trace) for run in runs]
    unknown = next((each.not_measured for each in found if each.not_measured), "")
    if unknown:
        return Check(says, unknown, None)
    told = [
        f"{len(run.results)} ranks: {each.whole.measured_bytes:,} B, residue {each.whole.residue_bytes} B"
        if each.whole.measured_bytes is not None
        else f"{len(run.results)} ranks: {each.whole.note}"
        for run, each in zip(runs, found, strict=True)
    ]
    return Check(says, "; ".join(told), all(each.exact for each in found))


def picture(sent: dict[tuple[int, str], list[int]], size: int) -> Axes:
    sizes = {EVEN: size, UNEVEN: seen.parameter_bytes(models.ConvNet())}
    means = {name: [sum(sent[n, name]) / n / sizes[name] for n in RANKS] for name in MODELS}
    ns = [n / 4 for n in range(4, 4 * RANKS[-1] + 1)]
    told = {EVEN: "a model that all can cut evenly", UNEVEN: UNEVEN}
    series = {f"{told[name]}, {sizes[name]:,} B": charts.Series(RANKS, means[name], between="") for name in MODELS}
    series["a ring's law: 2(n-1)/n"] = charts.Series(ns, [2 * (n - 1) / n for n in ns], derived=True)
    times = [means[UNEVEN][place] for place in (1, -1)]
    ax = charts.lines(
        series,
        title=f"A rank sends its model {times[0]:.2f} times a step on {RANKS[1]} ranks, {times[1]:.2f} times on"
        f" {RANKS[-1]}: never twice",
        x="ranks",
        y="sent by a rank, times its model",
        ticks=[(n, str(n)) for n in RANKS],
        log="x",
        notes=["Means over the ranks; the messages are derived from gloo's ring."],
    )
    ax.lines[0].set_markersize(10)  # The other one lies on it.
    ax.set_ylim(0, 2.1)
    return ax
