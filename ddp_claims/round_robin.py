"""DD9: the buckets go to several process groups in turn (the paper's figure 12)."""

from collections import Counter
from functools import partial
from itertools import count as count_up

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_claims import seen
from ddp_claims.comm_hooks import round_robin
from ddp_claims.figures import dots
from ddp_claims.samples import no_network, ranks_on_cores, ratios
from ddp_claims.training import Step, linear_layers, seconds_in_turn, sgd_step, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, span
from dlearn.analysis import traffic

RANKS = 2
COUNTS = (1, 3)
"""Groups; the paper takes 1, 3 and 5."""
STEPS = 14
NETWORK = "1 Gbit/s, 10 ms"
"""What one group cannot fill: gloo sends a part, and waits until it is asked for the next one."""
LAYERS, WIDTH = 7, 256
"""Linear layers of 263 kB, each in a bucket of its own."""
BUCKET_MB = 0.2


def train(counts: tuple[int, ...], rounds: int) -> tuple[dict[int, list[float]], bool]:
    """Return seconds of each step by number of groups, and whether all weights are equal."""
    examples = torch.randn(64, WIDTH)
    build = partial(linear_layers, LAYERS, WIDTH)
    made = {count: under_ddp(build, bucket_cap_mb=BUCKET_MB) for count in counts}
    for count, model in made.items():
        model.register_comm_hook(None, round_robin([dist.new_group() for _ in range(count)]))
    steps = {count: numbered_steps(model, examples, count) for count, model in made.items()}
    seconds = seconds_in_turn(steps, rounds=rounds)
    first, *others = [[*model.parameters()] for model in made.values()]
    equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return seconds, equal


def numbered_steps(model: nn.Module, examples: Tensor, count: int) -> Step:
    """Return a function that makes a step of training, in a span of its number."""
    numbers = count_up()
    step = sgd_step(model, lambda: model(examples).square().mean().backward(), lr=0.1)

    def spanned() -> None:
        with span(f"step {next(numbers)}, {count} groups"):
            step()

    return spanned


@paper_claim(
    "DD9",
    "round-robin process groups",
    paper="section 5.4, figure 12",
    says="Several process groups that take turns make a step faster, where one cannot use the whole link"
    " (there by up to 33 %: BERT, NCCL, 16 GPUs).",
    runs="a communication hook over 1 and 3 gloo groups, as torch no longer has groups that take turns",
)
def in_turn() -> Result:
    """Test one group against several: times unrecorded, then bytes and groups recorded."""
    network = None if no_network() else NETWORK
    where = f"over {NETWORK}" if network else "on the loopback interface"
    seconds, equal = Cluster(RANKS, record=False, network=network).run(train, COUNTS, STEPS - 2).results[0]
    run = Cluster(RANKS).run(train, COUNTS, 2)
    steps = {count: run.trace.within(f"step 3, {count} groups") for count in COUNTS}
    used = {count: Counter(each.group for each in seen.reductions(trace)) for count, trace in steps.items()}
    sent = {count: traffic(trace).total_bytes for count, trace in steps.items()}
    one, several = COUNTS
    faster = ratios(seconds[one], seconds[several])
    buckets = sum(used[one].values())
    shares = sorted(used[several].values(), reverse=True)
    checks = (
        Check(
            f"{several} groups send as many bytes as {one}, and lead to the same weights, bit by bit",
            f"{sent[several]:,} and {sent[one]:,} B in a step; weights {'equal' if equal else 'differ'}",
            sent[several] == sent[one] > 0 and equal,
        ),
        Check(
            f"each group gets its turn: of {buckets} buckets, no group has two more than another",
            f"{', '.join(map(str, shares))} all-reduces",
            len(shares) == several and sum(shares) == buckets and shares[0] - shares[-1] <= 1,
        ),
        Check(
            f"a step with {several} groups is faster, {where}",
            f"with {one} group it takes {faster.text('times')} as long",
            faster.interval[0] > 1,
        ),
    )
    picture = dots(
        {f"{count} group{'s' * (count > 1)}": [1e3 * each for each in seconds[count]] for count in COUNTS},
        title=f"With {one} group a step takes {faster.with_interval} times as long as with {several}, {where}",
        y="ms a step",
        between=[f"{faster.with_interval} times"],
        notes=[f"{LAYERS} buckets of {sent[one] // LAYERS // RANKS:,} B a step; both send the same bytes."],
    )
    told = f"{ranks_on_cores(RANKS)}, gloo, {where}, {LAYERS} layers of width {WIDTH}, {faster.n} pairs of steps"
    return Result(checks, picture, told)
