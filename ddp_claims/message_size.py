"""DD1: the same elements, sent in few large all-reduces or in many small ones (the paper's figure 2a and b)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_claims import seen
from ddp_claims.samples import Samples, ranks_on_cores, ratios
from ddp_claims.training import seconds_in_turn
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, operations
from dlearn.lessons import charts
from dlearn.shown import size_text

RANKS = 2
ELEMENTS = 1 << 20
"""Sent in each round, 4 MiB of float32, but in no more than `MOST_PIECES`; the paper sends 60 million."""
MOST_PIECES = 64
SIZES = tuple(1 << power for power in range(8, 21))
"""Elements in one all-reduce."""
ROUNDS = 12
KNEE = 1.5
"""The knee is the smallest message whose time per element is within this factor of the best."""


def rounds() -> dict[int, list[float]]:
    """Return the seconds of each round for each size, all-reduced in pieces of that size, on a rank."""
    data = torch.ones(ELEMENTS)
    pieces = {size: torch.split(data[: MOST_PIECES * size], size) for size in SIZES}
    steps = {size: partial(reduce_all, some) for size, some in pieces.items()}
    return seconds_in_turn(steps, rounds=ROUNDS, warm_up=1)


def reduce_all(pieces: Sequence[Tensor]) -> None:
    """All-reduce these pieces, launched at once."""
    for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
        assert work is not None
        work.wait()


@paper_claim(
    "DD1",
    "small collectives are slow per byte",
    paper="section 2.2, figures 2a and 2b",
    says="Small collectives are slow per byte, larger ones are faster.",
    runs=f"all-reduces of {SIZES[0]:,} to {SIZES[-1]:,} float32, up to {MOST_PIECES} launched at once",
)
def small_messages() -> Result:
    """Test the time per element of each size; find the smallest size near the best."""
    seconds = Cluster(RANKS, record=False).run(rounds).results[0]
    trace = Cluster(RANKS).run(rounds).trace.where(op="all_reduce")
    counts = Counter(each.given_bytes // 4 for each in operations(trace))
    elements = {size: size * count // (ROUNDS + 1) for size, count in counts.items()}
    measured = {size: [1e9 * each / elements[size] for each in seconds[size]] for size in SIZES}
    taken = {size: Samples(tuple(measured[size])) for size in SIZES}
    best = min(taken.values(), key=lambda each: each.median).median
    knee = next(size for size in SIZES if taken[size].median <= KNEE * best)
    small, large = SIZES[0], knee
    slower = ratios(measured[small], measured[large])
    steps = [taken[b].median < taken[a].median for a, b in pairwise(SIZES) if b <= knee]
    checks = (
        Check(
            f"a round sends {MOST_PIECES} all-reduces of each size, but at most {size_text(4 * ELEMENTS)}",
            "; ".join(f"{size_text(4 * size)}: {size_text(4 * all_)}" for size, all_ in elements.items()),
            elements == {size: min(MOST_PIECES * size, ELEMENTS) for size in SIZES}
            and seen.sent_bytes(trace, RANKS) == [4 * (ROUNDS + 1) * sum(elements.values())] * RANKS,
        ),
        Check(
            f"all-reduces of {size_text(small * 4)} take longer per element than those of {size_text(large * 4)}",
            slower.text("times", digits=0) + f" as long: {taken[small].text('ns')} against {taken[large].text('ns')}",
            slower.interval[0] > 1,
        ),
        Check(
            "up to the knee, each doubling of the message makes an element cheaper",
            f"in {sum(steps)} of {len(steps)} doublings up to {size_text(large * 4)}",
            sum(steps) == len(steps),
        ),
    )
    medians = [taken[size].median for size in SIZES]
    middle_halves = [taken[size].middle_half for size in SIZES]
    picture = charts.lines(
        {"all-reduce": charts.Series([size * 4 for size in SIZES], medians, middle_halves)},
        title=f"An element costs {slower.median:.0f} times as much in messages of {size_text(small * 4)} as in those of"
        f" {size_text(large * 4)}",
        x="bytes of one all-reduce",
        y="ns per element",
        ticks=[(size * 4, size_text(size * 4)) for size in SIZES[::2]],
        log="xy",
        notes=["Vertical lines: the middle half of the rounds."],
        mark=(large * 4, f"knee: {size_text(large * 4)}"),
    )
    return Result(checks, picture, f"{ranks_on_cores(RANKS)}, gloo, {ROUNDS} rounds of all sizes in turn")
